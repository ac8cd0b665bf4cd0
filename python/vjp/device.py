# SPDX-License-Identifier: MIT
"""Devices and the list of ops."""
from __future__ import annotations

from typing import NamedTuple

from vjp import _core


class Device(NamedTuple):
    """A device of this machine. `name` is what `device=` takes."""
    name: str
    summary: str


def devices() -> list[Device]:
    """The devices of this machine: "ref", "cpu", and the GPUs whose backends are installed."""
    return [Device(kind if index == 0 and kind in ("ref", "cpu", "webgpu", "metal") else f"{kind}:{index}", line)
            for kind, index, line in _core.devices()]


def ops() -> list[str]:
    """The names of the functions, one for each op and pass."""
    return list(_core.functions)


def set_threads(count: int) -> None:
    """How many threads each call on the CPU uses from now on; 0: the default, VJP_THREADS or one per core.

    The results do not depend on it."""
    _core.set_threads(count)


def synchronize(device: str) -> None:
    """Waits for the calls on a GPU's arrays, `"cuda:0"`, and raises what a kernel found meanwhile: an index outside its table is
    known on the GPU alone, and is left out there."""
    _core.synchronize(device)
