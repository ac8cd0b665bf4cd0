#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a call from torch costs: layer_norm on 1 x 64, f32, one thread. Prints docs/python.md's table. The shortest of many short
runs is taken, so that other processes matter little. The kernels in Python are timed by a second process.

    PYTHONPATH=build/python python3 bench/torch_call.py [--quick]
"""
import os
import subprocess
import sys
import timeit

import torch

import vjp.torch as vt

RUNS, CALLS = (3, 20) if "--quick" in sys.argv else (4000, 10)


def microseconds(call):
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def row(name, function):
    """Without gradients, a forward that saves for a backward, and both."""
    x = torch.randn(1, 64, requires_grad=True)
    gamma, beta = torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True)
    dy = torch.ones(1, 64)

    def plain():
        with torch.no_grad():
            function(x, gamma, beta)

    def both():
        torch.autograd.grad(function(x, gamma, beta), (x, gamma, beta), dy)

    times = [microseconds(call) for call in (plain, lambda: function(x, gamma, beta), both)]
    print(f"| {name} | " + " | ".join(f"{t:.1f}" for t in times) + " |", flush=True)


def main():
    torch.set_num_threads(1)
    if vt.KERNELS == "Python":
        row("`vjp.torch.layer_norm`, Python kernels", vt.layer_norm)
        return
    print("| | no gradient | forward that saves | forward and backward |\n|---|---:|---:|---:|")
    layer_norm = torch.nn.functional.layer_norm
    row("torch's own", lambda x, gamma, beta: layer_norm(x, (64,), gamma, beta))
    row("`vjp.torch.layer_norm`, C kernels", vt.layer_norm)
    row("`torch.ops.vjp.layer_norm`, C kernels", lambda x, gamma, beta: torch.ops.vjp.layer_norm(x, gamma, beta)[0])
    subprocess.run([sys.executable, *sys.argv], env={**os.environ, "VJP_TORCH_KERNELS": "python"}, check=True)


if __name__ == "__main__":
    main()
