#!/usr/bin/env python3
"""Our checkpoints against the transformers package, both ways.

    tests/test_transformers.py BUILD_FOLDER

A folder that we write is loaded by AutoModelForCausalLM without a missing, unexpected or differing weight, and computes;
folders that LlamaForCausalLM saves (in one file, in several, tied, bf16) are read by us to the same numbers. Exit status
77 where torch or transformers is not installed.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

SKIPPED = 77
for package in ("torch", "transformers"):
    if not importlib.util.find_spec(package):
        print(f"there is no {package} for {sys.executable}")
        sys.exit(SKIPPED)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


with tempfile.TemporaryDirectory() as scratch:
    for tied in (False, True):
        for dtype in DTYPES:
            ours_there(os.path.join(scratch, f"ours-{dtype}-{tied}"), dtype, tied)
            for shard in (None, "20KB"):
                theirs_here(os.path.join(scratch, f"theirs-{dtype}-{tied}-{shard}"), dtype, tied, shard)
print("checkpoints: read by transformers and from it")
