#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes small models of each family, and what they compute, with torch and transformers.

    python3 families.py         writes families/<name>/ beside this script

A folder is what save_pretrained() writes (config.json and weights, in one file or several), and expected.safetensors:
tokens, their logits and loss, the gradient of the loss by each parameter ("grad.<name>"), and the losses of 20 steps of
AdamW on these tokens. All of it is computed in f64 from the stored weights (but for the angles of rotations, which
transformers computes in f32) and stored in f32. tests/test_families.c compares vjp with the
folders in the repository; tests/test_families.py compares it with models made on the spot.
"""
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

SIZES = dict(
    vocab_size=40, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
TWO_ROTATIONS = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=4.0), sliding_attention=dict(rope_type="default", rope_theta=1e4),
)  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# name: (model_type, settings, dtype of the stored weights, largest file)
FAMILIES = {
    "llama2": ("llama", dict(num_key_value_heads=4, rms_norm_eps=1e-5), "float32", None),
    "llama3": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True, eos_token_id=[2, 3]), "bfloat16", None),
    "llama-linear": (
        "llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0), attention_bias=True, mlp_bias=True),
        "float16", None,
    ),
    "mistral": ("mistral", dict(sliding_window=5, head_dim=8), "float32", "9KB"),
    "mistral-full": ("mistral", dict(sliding_window=None), "bfloat16", None),
    "qwen2": (
        "qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True), "bfloat16", "6KB",
    ),
    "qwen3": (
        "qwen3", dict(head_dim=10, use_sliding_window=True, sliding_window=3, layer_types=ALTERNATING), "float32", None,
    ),
    # transformers leaves out the gradient of the token for padding.
    "gemma3": (
        "gemma3_text", dict(
            head_dim=10, query_pre_attn_scalar=7, sliding_window=4, layer_types=ALTERNATING, rope_parameters=TWO_ROTATIONS,
            attention_bias=True, pad_token_id=None,
        ), "float32", None,
    ),
    "gemma3-plain": ("gemma3_text", dict(head_dim=6, sliding_window=5, pad_token_id=None), "bfloat16", None),
}  # fmt: skip

BATCH, CONTEXT, STEPS = 3, 21, 20
RATE, DECAY, MAX_NORM, BETAS, EPS = 1e-2, 0.1, 0.5, (0.9, 0.95), 1e-8


# As in the package, but for its .float(), which rounds what is computed in f64.
Gemma3RMSNorm.forward = lambda self, x: self._norm(x) * (1.0 + self.weight)


def make(name, folder, seed=7):
    """Saves a model with random weights; none is 0 or 1, so that each of them is seen in the results."""
    kind, settings, dtype, shard = FAMILIES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config)
    centre = -0.2 if kind == "gemma3_text" else 0.8  # Gemma adds 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (centre if "norm" in name else 0))
    model.to(getattr(torch, dtype)).save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))


def load(folder):
    """In f64. Loaded from the file: casting a model to 16 bits rounds the angles of its rotations, which no file keeps."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.double().eval()


def compute(model, rows):
    logits = model(rows[:, :-1]).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def step(model, rows, moments, number):
    """One step of AdamW, written out; returns the loss before it."""
    model.zero_grad()
    loss = compute(model, rows)[1]
    loss.backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in parameters.values())).item()
    scale = min(1.0, MAX_NORM / norm)
    with torch.no_grad():
        for name, p in parameters.items():
            m, v = moments.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
            g = p.grad * scale
            m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            if p.ndim > 1:
                p.mul_(1 - RATE * DECAY)
            p.sub_(RATE * (m / (1 - BETAS[0] ** number)) / ((v / (1 - BETAS[1] ** number)).sqrt() + EPS))
    return loss.item()


def random_rows(seed, vocabulary, batch=BATCH, context=CONTEXT):
    return torch.randint(vocabulary, (batch, context + 1), generator=torch.Generator().manual_seed(seed))


def expect(folder):
    model = load(folder)
    rows = random_rows(11, model.config.vocab_size)
    logits, loss = compute(model, rows)
    loss.backward()
    tensors = {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()}
    tensors.update(tokens=rows.to(torch.int32), logits=logits.detach().clone(), loss=loss.detach())
    moments = {}
    tensors["losses"] = torch.tensor([step(model, rows, moments, number) for number in range(1, STEPS + 1)])
    tensors = {name: t.to(torch.float32) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(tensors, os.path.join(folder, "expected.safetensors"))


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parent / "families"
    for name in sys.argv[1:] or FAMILIES:
        make(name, here / name)
        (here / name / "generation_config.json").unlink(missing_ok=True)
        expect(here / name)
        print(name, sum(file.stat().st_size for file in (here / name).iterdir()), "bytes")
