#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Our checkpoints against the transformers package, both ways.

    tests/test_transformers.py BUILD_FOLDER

A folder that we write is loaded by AutoModelForCausalLM without a missing, unexpected or differing weight, and computes;
folders that LlamaForCausalLM saves (in one file, in several, tied, bf16) are read by us to the same numbers. What `vjp
train` writes has the same logits and the same loss there as here, and what transformers saves trains here from the
loss that it has there. Exit status 77 where torch or transformers is not installed.
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
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VJP_THREADS"] = "1"  # so small a model is slower with more on a machine that has other work
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VJP, LOGITS = (os.path.join(sys.argv[1], name) for name in ("vjp", "logits_probe"))
PROBE = os.path.join(sys.argv[1], "checkpoint_probe")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def probe(*arguments):
    done = subprocess.run([PROBE, *arguments], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout) if done.stdout else None


def rope_theta(config):
    parameters = getattr(config, "rope_parameters", None)
    return parameters["rope_theta"] if parameters else config.rope_theta


def by_rule(index, shape):
    """Element i of weight `index`, as checkpoint_probe.c writes it."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((index * 31 + i * 7) % 101 - 50).to(torch.float32) / 64).reshape(shape)


def ours_there(folder, dtype, tied):
    probe("write", folder, dtype, "tied" if tied else "untied")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        os.path.join(folder, "latest"), torch_dtype="auto", output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    assert type(loaded) is LlamaForCausalLM
    config = loaded.config
    assert rope_theta(config) == 50000 and config.rms_norm_eps == 1e-5 and config.head_dim == 16, config
    assert config.num_key_value_heads == 2 and config.bos_token_id is None and config.eos_token_id is None, config
    assert bool(config.tie_word_embeddings) == tied
    names = list(probe("read", folder)["weights"])
    weights = loaded.state_dict()
    assert set(weights) == set(names) | {"lm_head.weight"}, set(weights) ^ set(names)
    for index, name in enumerate(names):
        assert weights[name].dtype == DTYPES[dtype], (name, weights[name].dtype)
        assert torch.equal(weights[name].float(), by_rule(index, weights[name].shape)), name
    if tied:
        assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    with torch.no_grad():
        logits = loaded(torch.arange(64)[None] * 3).logits
    assert logits.shape == (1, 64, 256) and torch.isfinite(logits.float()).all()


def theirs_here(folder, dtype, tied, shard):
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, rms_norm_eps=3e-6,
    )
    model = LlamaForCausalLM(config).to(DTYPES[dtype])
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    read = probe("read", folder)
    assert read["dtype"] == dtype and read["norm_eps"] == 3e-6 and read["rope_theta"] == 10000, read
    assert (read["files"] > 1) == bool(shard), read["files"]
    weights = model.state_dict()
    if tied:
        del weights["lm_head.weight"]
    assert set(weights) == set(read["weights"]) and len(weights) == read["tensors"]
    for name, (kind, total) in read["weights"].items():
        assert kind == TYPES[weights[name].dtype], (name, kind)
        expected = weights[name].double().sum().item()
        assert abs(total - expected) < 1e-9 * max(1, weights[name].numel()), (name, total, expected)


def train(data, out, *arguments):
    """Runs vjp train; the loss of each step."""
    command = [VJP, "train", data, "--out", out, "--json", "--warmup", "0", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()]


def loss_there(model, rows):
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def same_logits(scratch, folder, context):
    """A folder of vjp train's, computed by both sides on random rows."""
    path = os.path.join(folder, "latest")
    model, info = AutoModelForCausalLM.from_pretrained(path, torch_dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert model.dtype == torch.float32, model.dtype  # as training has them, whatever they began as
    rows = torch.randint(256, (3, context + 1), generator=torch.Generator().manual_seed(7))
    tokens, out = os.path.join(scratch, "tokens"), os.path.join(scratch, "logits.safetensors")
    rows.to(torch.int32).numpy().tofile(tokens)
    subprocess.run([LOGITS, folder, tokens, "3", str(context), out], check=True)
    ours = load_file(out)
    logits, loss = loss_there(model, rows)
    error = ((ours["logits"] - logits).norm() / logits.norm()).item()
    assert error < 1e-5, (folder, error)
    assert logits.std() > 0.1, "the logits are all alike: that proves little"
    assert abs(ours["loss"].item() - loss) < 1e-5 * loss, (folder, ours["loss"].item(), loss)


def trained_there(scratch):
    text = os.path.join(scratch, "text")
    with open(text, "w") as file:
        file.writelines(f"line {i}: the quick brown fox jumps over {i * i} dogs\n" for i in range(200))
    folder = os.path.join(scratch, "trained")
    small = ["--preset", "tiny", "--batch", "4", "--context", "48", "--validate-every", "0"]
    losses = train(text, folder, "--steps", "25", *small)
    assert losses[-1] < losses[0] - 1, losses
    same_logits(scratch, folder, 48)


def tuned_here(scratch, dtype, tied):
    """The text has one window of the context's length only, so that both sides know what the batch is."""
    context = 32
    words = b"a text with one window and no mor"
    assert len(words) == context + 1
    text = os.path.join(scratch, "window")
    with open(text, "wb") as file:
        file.write(words + b"e")  # a twentieth, one byte, is for validation
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, rms_norm_eps=3e-6,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(DTYPES[dtype])
    folder = os.path.join(scratch, f"begun-{dtype}-{tied}")
    model.save_pretrained(folder)
    # Loaded again: casting a model to bf16 rounds the angles of its rotations, too, which no file keeps.
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    expected = loss_there(model, torch.tensor([list(words)] * 2))[1]
    out = os.path.join(scratch, f"tuned-{dtype}-{tied}")
    losses = train(text, out, "--from", folder, "--batch", "2", "--context", str(context), "--steps", "20", "--lr", "3e-3")
    assert abs(losses[0] - expected) < 1e-4, (losses[0], expected)
    assert losses[-1] < 0.7 * losses[0], losses
    same_logits(scratch, out, 64)


with tempfile.TemporaryDirectory() as scratch:
    trained_there(scratch)
    for tied in (False, True):
        for dtype in DTYPES:
            tuned_here(scratch, dtype, tied)
    for tied in (False, True):
        for dtype in DTYPES:
            ours_there(os.path.join(scratch, f"ours-{dtype}-{tied}"), dtype, tied)
            for shard in (None, "20KB"):
                theirs_here(os.path.join(scratch, f"theirs-{dtype}-{tied}-{shard}"), dtype, tied, shard)
print("checkpoints: read by transformers and from it, with the same logits and losses")
