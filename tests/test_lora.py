#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Adapters against the packages peft and transformers, for each family of golden/families.py.

    tests/test_lora.py BUILD_FOLDER

Adapters that PEFT saves have the same logits, loss and gradients here. Those that `vjp train --lora` writes load there
before the first step, and 20 steps there end at the adapters of 20 steps here; these give the same logits in PEFT. What
`vjp merge` makes of them loads in transformers without a missing or unexpected weight, and gives the same logits again.
Exit status 77 where one of the packages is not installed.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

SKIPPED = 77
for package in ("torch", "transformers", "safetensors", "peft"):
    if not importlib.util.find_spec(package):
        print(f"there is no {package} for {sys.executable}")
        sys.exit(SKIPPED)
os.environ["VJP_THREADS"] = "1"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden"))
import families
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

VJP, LOGITS = (os.path.join(sys.argv[1], name) for name in ("vjp", "logits_probe"))
CONTEXT = 32
WORDS = b"a text with one window and no mor"  # CONTEXT + 1 bytes: a batch has no other row than this
families.SIZES.update(vocab_size=256, hidden_size=48, intermediate_size=80)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# family: rank, alpha, projections, whether the scale is alpha / sqrt(rank)
CASES = {
    "llama2": (4, 6, ALL, False),
    "llama3": (8, 16, ["q_proj", "v_proj"], False),
    "llama-linear": (3, 5, ["o_proj", "up_proj"], True),
    "mistral": (1, 2, ALL, False),
    "qwen2": (5, 2.5, ["k_proj", "down_proj"], False),
    "qwen3": (2, 8, ["q_proj", "k_proj", "gate_proj"], True),
    "gemma3": (3, 6, [target for target in ALL if target != "gate_proj"], False),
}


def error_of(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def trained(model):
    """The adapters, by their names in a file."""
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def run_here(scratch, folder, rows):
    tokens, out = os.path.join(scratch, "tokens"), os.path.join(scratch, "out.safetensors")
    rows.to(torch.int32).numpy().tofile(tokens)
    subprocess.run([LOGITS, folder, tokens, str(rows.shape[0]), str(rows.shape[1] - 1), out], check=True)
    return load_file(out)


def load_adapters(base, folder):
    return PeftModel.from_pretrained(families.load(base), folder, is_trainable=True).double()


def make_adapters(name, base, folder):
    """Saved by PEFT, with a B that is not zero."""
    rank, alpha, targets, root = CASES[name]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, use_rslora=root, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in trained(model).values():
            p.copy_(torch.randn(p.shape) * 0.2)
    model.save_pretrained(folder)


def same_results(scratch, name, base, folder):
    """The largest relative error of the logits and of any adapter's gradient."""
    model = load_adapters(base, folder)
    rows = families.random_rows(3, 256, batch=3, context=40)
    logits, loss = families.compute(model, rows)
    loss.backward()
    ours = run_here(scratch, folder, rows)
    adapters = trained(model)
    assert set(ours) - {"logits", "loss"} == {f"grad.{key}" for key in adapters}, (name, sorted(ours), sorted(adapters))
    assert abs(ours["loss"].item() / loss.item() - 1) < 1e-5, (name, ours["loss"].item(), loss.item())
    errors = {"logits": error_of(ours["logits"], logits.detach())}
    errors.update({key: error_of(ours[f"grad.{key}"], p.grad) for key, p in adapters.items()})
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-5, (name, worst, errors[worst])
    return errors[worst]


def train(*arguments):
    done = subprocess.run([VJP, "train", *arguments], stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()]


def same_steps(scratch, name, base):
    rank, alpha, targets, _ = CASES[name]
    text, out = os.path.join(scratch, "text"), os.path.join(scratch, f"tuned-{name}")
    with open(text, "wb") as file:
        file.write(WORDS + b"e")  # a twentieth, one byte, is for validation
    options = {
        "from": base, "out": out, "batch": 2, "context": CONTEXT, "steps": families.STEPS, "warmup": 0, "lr": families.RATE,
        "last-lr": 1, "weight-decay": families.DECAY, "clip": families.MAX_NORM, "lora": rank, "lora-alpha": alpha,
        "lora-targets": ",".join(targets), "stop-at": 0,
    }  # fmt: skip
    assert train(text, "--json", *[f"--{key}={value}" for key, value in options.items()]) == []
    model, moments = load_adapters(base, os.path.join(out, "latest")), {}
    begun = {key: p.detach().clone() for key, p in trained(model).items()}
    assert all(bool((p == 0).all()) == ("lora_B" in key) for key, p in begun.items()), name
    here = train("--resume", "--json", f"--out={out}")
    rows = torch.tensor([list(WORDS)] * 2)
    there = [families.step(model, rows, moments, number) for number in range(1, families.STEPS + 1)]
    for number, (a, b) in enumerate(zip(here, there, strict=True), 1):
        assert abs(a - b) < 1e-5 * there[0], (name, number, a, b)
    tuned = os.path.join(out, "latest")
    saved = load_file(os.path.join(tuned, "adapter_model.safetensors"))
    assert set(saved) == set(begun), name
    worst = max(error_of(saved[key] - begun[key], p.detach() - begun[key]) for key, p in trained(model).items())
    assert worst < 2e-3, (name, worst)
    return tuned, worst


def same_merged(scratch, name, base, tuned):
    """What transformers computes with the merged folder, and, without rounding to 16 bits, with the adapters."""
    folder = os.path.join(scratch, f"merged-{name}")
    subprocess.run([VJP, "merge", tuned, "-o", folder, "--json"], stdout=subprocess.DEVNULL, check=True)
    rows = families.random_rows(4, 256, batch=2, context=24)
    with torch.no_grad():
        logits = families.compute(families.load(folder), rows)[0]
        adapted = families.compute(load_adapters(base, tuned), rows)[0]
    worst = error_of(run_here(scratch, folder, rows)["logits"], logits)
    wide = families.FAMILIES[name][2] == "float32"
    between = error_of(logits, adapted)
    assert worst < 1e-5 and between < (1e-5 if wide else 3e-2), (name, worst, between)
    return worst, between


with tempfile.TemporaryDirectory() as scratch:
    for name in CASES:
        base, folder = os.path.join(scratch, name), os.path.join(scratch, f"peft-{name}")
        families.make(name, base, seed=29)
        make_adapters(name, base, folder)
        results = same_results(scratch, name, base, folder)
        tuned, steps = same_steps(scratch, name, base)
        back = same_results(scratch, name, base, tuned)
        merged, between = same_merged(scratch, name, base, tuned)
        print(
            f"{name}: logits and gradients {results:.1e}, {families.STEPS} steps {steps:.1e}, adapters written {back:.1e}, "
            f"merged {merged:.1e}, beside the adapters {between:.1e}"
        )
