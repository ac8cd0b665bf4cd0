# SPDX-License-Identifier: MIT
"""A function for each op and pass. They are made from the op table when the C module is loaded; _ops.pyi, which
scripts/generate writes from the same table, has their types."""
from vjp import _core

globals().update(_core.functions)
__all__ = list(_core.functions)
