#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains the same model with each setting of precision, and compares the losses with those of f32.

    bench/precision.py --vjp build/vjp --steps 300                                  # tiny, on the CPU, some minutes
    bench/precision.py --steps 1000 --svg docs/precision.svg -- --device cuda --preset 124M

What follows -- is passed to every `vjp train`. The runs differ in their settings alone: the same seed gives them the same
first weights and the same batches. How far losses may be apart without meaning anything is shown by runs in f32: two with
a rate that is 0.1 % higher or lower, on the same batches, and one with another seed. Prints a table in Markdown; --svg draws the smoothed losses with `vjp runs`. Runs that --out already has are
resumed, or read where they are complete, so that an interrupted comparison continues. Needs only the standard library.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

RUNS = [
    ("f32", []),
    ("f32, rate + 0.1 %", 1.001),
    ("f32, rate - 0.1 %", 0.999),
    ("f32, another seed", ["--seed", "2"]),
    ("bf16", ["--dtype", "bf16"]),
    ("bf16, residual f32", ["--dtype", "bf16", "--residual", "f32"]),
    ("bf16, moments bf16", ["--dtype", "bf16", "--moments", "bf16"]),
    ("bf16, gradients bf16", ["--dtype", "bf16", "--gradients", "bf16"]),
    ("bf16, both bf16", ["--dtype", "bf16", "--moments", "bf16", "--gradients", "bf16"]),
    ("f16, scaled loss", ["--dtype", "f16"]),
]


def folder_of(name):
    return name.replace(", ", "-").replace(" + ", "-up-").replace(" - ", "-down-").replace(" %", "").replace(" ", "-")


def other_rate(options, factor):
    rate = float(options[options.index("--lr") + 1]) if "--lr" in options else 3e-3
    return ["--lr", repr(factor * rate)]


def train(vjp, out, options, steps):
    if os.path.exists(os.path.join(out, "loss.svg")) and len(rows_of(out)) == steps:
        return
    command = [vjp, "train", "--resume", "--out", out] if os.path.exists(os.path.join(out, "latest")) else None
    if not command:
        command = [vjp, "train", *options, "--out", out]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"precision: {' '.join(command)} failed: {done.stderr.strip()}")


def rows_of(out):
    with open(os.path.join(out, "metrics.jsonl")) as lines:
        return [json.loads(line) for line in lines]


def apart(rows, base, last):
    """The mean and the largest difference of the losses of the last steps, smoothed over them."""
    pairs = [(a["smoothed"], b["smoothed"]) for a, b in zip(rows[-last:], base[-last:])]
    return sum(a - b for a, b in pairs) / len(pairs), max(abs(a - b) for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vjp", default="build/vjp")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--svg", help="the picture to write")
    parser.add_argument("--out", help="keep the runs in this folder")
    parser.add_argument("--only", help="names of runs, separated by semicolons; f32 is always among them")
    parser.add_argument("rest", nargs="*", help="after --: the text, and options for every run")
    a = parser.parse_args()
    out = a.out or tempfile.mkdtemp(prefix="precision-")
    wanted = set(a.only.split(";")) | {"f32"} if a.only else {name for name, _ in RUNS}
    unknown = wanted - {name for name, _ in RUNS}
    if unknown:
        sys.exit(f"precision: there is no run {'; '.join(sorted(unknown))}")
    last = max(1, a.steps // 4)
    print(f"{a.steps} steps, {' '.join(a.rest) or 'tiny'}; differences to f32 over the last {last} steps\n")
    print("| setting | loss | validation | mean difference | largest | skipped |\n|---|---:|---:|---:|---:|---:|")
    base, folders = None, []
    for name, options in RUNS:
        if name not in wanted:
            continue
        folder = os.path.join(out, folder_of(name))
        if isinstance(options, float):
            options = other_rate(a.rest, options)
        train(a.vjp, folder, [*a.rest, "--steps", str(a.steps), "--validate-every", str(a.steps), *options], a.steps)
        rows = rows_of(folder)
        base = base or rows
        folders.append(folder_of(name))
        mean, largest = apart(rows, base, last)
        validation = next((f"{r['validation']:.4f}" for r in reversed(rows) if "validation" in r), "")
        skipped = sum(r.get("skipped", False) for r in rows)
        print(f"| {name} | {rows[-1]['smoothed']:.4f} | {validation} | {mean:+.4f} | {largest:.4f} | {skipped} |", flush=True)
    if a.svg:
        done = subprocess.run([os.path.abspath(a.vjp), "runs", *folders, "--svg", os.path.abspath(a.svg)], cwd=out,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"precision: the picture failed: {done.stderr.strip()}")


main()
