#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes golden/muon/*.safetensors: three steps of Muon on small matrices, in float64 by numpy.

    python3 muon.py             writes the files
    python3 muon.py --torch     compares the same steps with torch.optim.Muon (torch 2.9 or later), and writes nothing

The matrices are multiplied as the definition says, X X^T on the left for every shape, while vjp multiplies on the
shorter side. torch runs the iterations in bf16, so it agrees to two digits only: enough to show that momentum, decay
and the factors of both agree.
"""

import json
import math
import pathlib
import struct
import sys

import numpy

FOLDER = pathlib.Path(__file__).resolve().parent / "muon"
STEPS = 3
CASES = {  # rows, columns, momentum, nesterov, iterations, scale, weight decay, scale of the gradient (0: absent), rate
    "wide": (5, 12, 0.95, 1, 5, 0, 0.1, 0.5, 0.02),
    "tall": (13, 6, 0.95, 1, 5, 0, 0.1, 0.5, 0.02),
    "square": (8, 8, 0.9, 0, 5, 1, 0.0, 0.0, 0.1),
    "tall_shape": (20, 7, 0.5, 1, 3, 1, 0.3, 0.0, 0.05),
    "column": (9, 1, 0.95, 0, 5, 0, 0.1, 1.0, 0.02),
    "row": (1, 9, 0.0, 1, 1, 1, 0.1, 1.0, 0.02),
}


def orthogonal(x, iterations):
    x = x / max(numpy.linalg.norm(x), 1e-7)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def step(w, momentum, g, case):
    rows, columns, mu, nesterov, iterations, scale, decay, clip, rate = case
    g = g * (clip or 1)
    momentum = mu * momentum + (1 - mu) * g
    u = mu * momentum + (1 - mu) * g if nesterov else momentum
    factor = math.sqrt(max(1, rows / columns)) if scale else 0.2 * math.sqrt(max(rows, columns))
    return w * (1 - rate * decay) - rate * factor * orthogonal(u, iterations), momentum


def write(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in sorted(tensors.items()):
        packed = numpy.ascontiguousarray(tensor, "<f8").tobytes()
        header[name] = dict(dtype="F64", shape=list(tensor.shape), data_offsets=[len(data), len(data) + len(packed)])
        data += packed
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make(name, case):
    """Numbers that f32 holds exactly, so that vjp begins with the same."""
    random = numpy.random.default_rng(sum(map(ord, name)))
    single = lambda: random.standard_normal(case[:2]).astype("f4").astype("f8")
    tensors = {"w": single() * 0.5, "g": numpy.stack([single() for _ in range(STEPS)])}
    w, momentum = tensors["w"], numpy.zeros(case[:2])
    for i in range(STEPS):
        w, momentum = step(w, momentum, tensors["g"][i], case)
        tensors |= {f"w_{i + 1}": w, f"momentum_{i + 1}": momentum}
    return tensors


def compare_with_torch(name, case, tensors):
    import torch

    rows, columns, mu, nesterov, iterations, scale, decay, clip, rate = case
    w = torch.nn.Parameter(torch.tensor(tensors["w"], dtype=torch.float32))
    muon = torch.optim.Muon([w], lr=rate, weight_decay=decay, momentum=mu, nesterov=bool(nesterov), ns_steps=iterations,
                            adjust_lr_fn="original" if scale else "match_rms_adamw")
    worst = 0
    for i in range(STEPS):
        before = w.detach().numpy().astype("f8")
        w.grad = torch.tensor(tensors["g"][i] * (clip or 1), dtype=torch.float32)
        muon.step()
        expected = tensors[f"w_{i + 1}"] - (tensors[f"w_{i}"] if i else tensors["w"])
        got = w.detach().numpy() - before
        worst = max(worst, numpy.linalg.norm(got - expected) / numpy.linalg.norm(expected))
        w.data = torch.tensor(tensors[f"w_{i + 1}"], dtype=torch.float32)
    print(f"{name:12} a step of torch differs by {worst:.2g} of its length")
    return worst < 0.05


def main():
    ok = True
    for name, case in CASES.items():
        tensors = make(name, case)
        if "--torch" in sys.argv[1:]:
            ok = compare_with_torch(name, case, tensors) and ok
            continue
        keys = ("momentum", "nesterov", "iterations", "scale", "weight_decay", "clip", "rate")
        FOLDER.mkdir(exist_ok=True)
        write(FOLDER / f"{name}.safetensors", tensors, {k: repr(v) for k, v in zip(keys, case[2:])})
    sys.exit(0 if ok else 1)


main()
