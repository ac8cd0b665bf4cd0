#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Every family of golden/families.py against the transformers package, with other weights and sizes than the golden ones.

    tests/test_families.py BUILD_FOLDER

A folder that transformers saves has the same logits, loss and gradients here; 20 steps of `vjp train` from it end at the
weights of 20 steps there; and the folder that `vjp train` writes loads there without a missing or unexpected weight and
gives the same logits. Exit status 77 where torch or transformers is not installed.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

SKIPPED = 77
for package in ("torch", "transformers", "safetensors"):
    if not importlib.util.find_spec(package):
        print(f"there is no {package} for {sys.executable}")
        sys.exit(SKIPPED)
os.environ["VJP_THREADS"] = "1"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden"))
import families
import torch
from safetensors.torch import load_file

VJP, LOGITS = (os.path.join(sys.argv[1], name) for name in ("vjp", "logits_probe"))
CONTEXT = 32
WORDS = b"a text with one window and no mor"  # CONTEXT + 1 bytes: a batch has no other row than this
families.SIZES.update(vocab_size=256, hidden_size=48, intermediate_size=80)


def error_of(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def run_here(scratch, folder, rows):
    tokens, out = os.path.join(scratch, "tokens"), os.path.join(scratch, "out.safetensors")
    rows.to(torch.int32).numpy().tofile(tokens)
    subprocess.run([LOGITS, folder, tokens, str(rows.shape[0]), str(rows.shape[1] - 1), out], check=True)
    return load_file(out)


def same_results(scratch, name, folder, gradients):
    """The largest relative error of the logits and, with `gradients`, of any parameter's gradient."""
    model = families.load(folder)
    rows = families.random_rows(3, 256, batch=3, context=40)
    logits, loss = families.compute(model, rows)
    loss.backward()
    ours = run_here(scratch, folder, rows)
    errors = {"logits": error_of(ours["logits"], logits.detach())}
    assert abs(ours["loss"].item() / loss.item() - 1) < 1e-5, (name, ours["loss"].item(), loss.item())
    parameters = dict(model.named_parameters())
    assert set(ours) - {"logits", "loss"} == {f"grad.{parameter}" for parameter in parameters}
    if gradients:
        errors.update({p: error_of(ours[f"grad.{p}"], value.grad) for p, value in parameters.items()})
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-5, (name, worst, errors[worst])
    return errors[worst]


def same_steps(scratch, name, folder):
    text, out = os.path.join(scratch, "text"), os.path.join(scratch, f"tuned-{name}")
    with open(text, "wb") as file:
        file.write(WORDS + b"e")  # a twentieth, one byte, is for validation
    options = {
        "from": folder, "out": out, "batch": 2, "context": CONTEXT, "steps": families.STEPS, "warmup": 0, "lr": families.RATE,
        "last-lr": 1, "weight-decay": families.DECAY, "clip": families.MAX_NORM,
    }  # fmt: skip
    command = [VJP, "train", text, "--json"] + [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    here = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    model, moments = families.load(folder), {}
    rows = torch.tensor([list(WORDS)] * 2)
    there = [families.step(model, rows, moments, number) for number in range(1, families.STEPS + 1)]
    for number, (a, b) in enumerate(zip(here, there, strict=True), 1):
        assert abs(a - b) < 1e-5 * there[0], (name, number, a, b)
    tuned = os.path.join(out, "latest")
    saved, begun = families.load(tuned).state_dict(), families.load(folder).state_dict()
    worst = max(error_of(saved[key] - begun[key], value - begun[key]) for key, value in model.state_dict().items())
    assert worst < 2e-3, (name, worst)
    return tuned, worst


with tempfile.TemporaryDirectory() as scratch:
    for name in families.FAMILIES:
        folder = os.path.join(scratch, name)
        families.make(name, folder, seed=23)
        results = same_results(scratch, name, folder, True)
        tuned, steps = same_steps(scratch, name, folder)
        back = same_results(scratch, name, tuned, False)
        print(f"{name}: logits and gradients {results:.1e}, {families.STEPS} steps {steps:.1e}, the folder written {back:.1e}")
