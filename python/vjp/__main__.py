# SPDX-License-Identifier: MIT
"""python -m vjp: the program vjp."""
from vjp.program import main

main()
