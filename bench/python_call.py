#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a call from Python costs: layer_norm on 1 x 64, f32, one thread. Prints docs/python.md's table. The shortest of many
short runs is taken, so that other processes matter little.

    PYTHONPATH=build/python python3 bench/python_call.py [--quick]
"""
import sys
import timeit

import numpy as np

import vjp

RUNS, CALLS = (5, 200) if "--quick" in sys.argv else (4000, 200)


def microseconds(call, names):
    """Of a call as text, so that no function around it is timed."""
    return min(timeit.repeat(call, globals=names, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def rows():
    """(what, the call, the names in it)"""
    x, gamma, beta = np.ones((1, 64), np.float32), np.ones(64, np.float32), np.zeros(64, np.float32)
    arrays = {"x": x, "gamma": gamma, "beta": beta, "y": np.empty_like(x)}
    given, new = 'vjp.layer_norm(x, gamma, beta, outputs="y", out=y)', 'vjp.layer_norm(x, gamma, beta, outputs="y")'
    yield "NumPy, `out` given", given, {"vjp": vjp, **arrays}
    yield "NumPy, a new array", new, {"vjp": vjp, **arrays}
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    yield "torch, `out` given", given, {"vjp": vjp, **tensors}
    yield "torch, a new tensor", new, {"vjp": vjp, **tensors}
    yield "torch's own `layer_norm`", "layer_norm(x, (64,), gamma, beta)", {"layer_norm": torch.nn.functional.layer_norm, **tensors}


def main():
    vjp.set_threads(1)
    print("| arrays | microseconds |\n|---|---:|")
    for name, call, names in rows():
        print(f"| {name} | {microseconds(call, names):.2f} |", flush=True)


if __name__ == "__main__":
    main()
