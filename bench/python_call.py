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


def microseconds(call):
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def rows():
    x, gamma, beta = np.ones((1, 64), np.float32), np.ones(64, np.float32), np.zeros(64, np.float32)
    y = np.empty_like(x)
    yield "NumPy, `out` given", lambda: vjp.layer_norm(x, gamma, beta, outputs="y", out=y)
    yield "NumPy, a new array", lambda: vjp.layer_norm(x, gamma, beta, outputs="y")
    try:
        import torch
    except ImportError:
        return
    tx, tgamma, tbeta, ty = (torch.from_numpy(a) for a in (x, gamma, beta, y))
    yield "torch, `out` given", lambda: vjp.layer_norm(tx, tgamma, tbeta, outputs="y", out=ty)
    yield "torch, a new tensor", lambda: vjp.layer_norm(tx, tgamma, tbeta, outputs="y")
    layer_norm = torch.nn.functional.layer_norm
    yield "torch's own `layer_norm`", lambda: layer_norm(tx, (64,), tgamma, tbeta)


def main():
    vjp.set_threads(1)
    print("| arrays | microseconds |\n|---|---:|")
    for name, call in rows():
        print(f"| {name} | {microseconds(call):.2f} |")


if __name__ == "__main__":
    main()
