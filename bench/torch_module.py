#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A Llama with and without vjp.torch.patch(): forward and backward on the CPU, and the modules that patch() replaces one by one.
Prints docs/python.md's tables. Patched and not are timed in turn, and the shortest run of each counts, so that other processes
matter little.

    PYTHONPATH=build/python python3 bench/torch_module.py [--quick] [--seconds N]
"""
import argparse
import time

import torch
from torch import nn

import vjp.torch as vt

SIZES = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64}
BATCH, TIME = 2, 256
TINY = {**SIZES, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 4}


def shortest(calls, seconds):
    """{name: seconds of the shortest run}, all called in turn until the time is up."""
    best = {name: float("inf") for name in calls}
    for call in calls.values():
        call()  # compiles
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or max(best.values()) == float("inf"):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def forward_backward(function, *inputs):
    dy = []

    def run():
        result = function(*inputs)
        y = getattr(result, "loss", result)
        if not dy:  # a gradient as a layer above would give, not the expanded one of a sum
            dy.append(torch.ones_like(y, memory_format=torch.contiguous_format))
        y.backward(dy[0])
    return run


def model_rows(sizes, batch, length, seconds):
    from transformers import LlamaConfig, LlamaForCausalLM
    ids = torch.randint(0, sizes["vocab_size"], (batch, length))
    for dtype in (torch.float32, torch.bfloat16):
        models = []
        for patched in (False, True):
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
            if patched:
                vt.patch(model)
            models.append(model)
        for compiled in (False, True):
            torch._dynamo.reset()
            calls = {}
            for name, model in zip(("torch", "vjp"), models):
                function = torch.compile(model) if compiled else model
                calls[name] = forward_backward(lambda f=function: f(input_ids=ids, labels=ids))
            yield f"Llama, {'compiled' if compiled else 'eager'}", dtype, shortest(calls, seconds)


def module_rows(sizes, batch, length, seconds):
    """torch's side is compiled, which is the faster of its two."""
    hidden, inner, heads, kv, dim = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = torch.randn(batch, length, hidden, dtype=dtype, requires_grad=True)
        gate, up = (torch.randn(batch, length, inner, dtype=dtype, requires_grad=True) for _ in range(2))
        q = torch.randn(batch, length, heads, dim, dtype=dtype, requires_grad=True)
        k, v = (torch.randn(batch, length, kv, dim, dtype=dtype, requires_grad=True) for _ in range(2))
        weight = torch.ones(hidden, dtype=dtype, requires_grad=True)
        logits = torch.randn(batch * length, sizes["vocab_size"], dtype=dtype, requires_grad=True)
        target = torch.randint(0, sizes["vocab_size"], (batch * length,))
        angle = torch.rand(length, dim // 2)
        cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)

        def rms_norm(x, weight):
            h = x.float()
            return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        def rope(q):
            c, s = torch.cat([cosine, cosine], -1)[:, None], torch.cat([sine, sine], -1)[:, None]
            return q * c + torch.cat([-q[..., dim // 2:], q[..., :dim // 2]], -1) * s

        def attention(q, k, v):
            return nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)

        pairs = {
            "RMSNorm": (rms_norm, lambda x, w: vt.rms_norm(x, w), (x, weight)),
            "rope": (rope, lambda q: vt.rope(q, cosine, sine), (q,)),
            "SwiGLU": (lambda gate, up: nn.functional.silu(gate) * up, vt.swiglu, (gate, up)),
            "attention": (attention, vt.attention, (q, k, v)),
            "cross-entropy": (lambda logits: nn.functional.cross_entropy(logits.float(), target), lambda logits: vt.cross_entropy(logits, target), (logits,)),
        }
        for name, (theirs, ours, inputs) in pairs.items():
            torch._dynamo.reset()
            yield name, dtype, shortest({"torch": forward_backward(torch.compile(theirs), *inputs), "vjp": forward_backward(ours, *inputs)}, seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: that it runs")
    parser.add_argument("--seconds", type=float, default=10, help="for each row")
    options = parser.parse_args()
    sizes, length, seconds = (TINY, 8, 0) if options.quick else (SIZES, TIME, options.seconds)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, kernels in {vt.KERNELS}; milliseconds of a forward and backward pass\n")
    for rows in (model_rows, module_rows):
        print("| | dtype | torch | vjp | torch / vjp |\n|---|---|---:|---:|---:|")
        for name, dtype, best in rows(sizes, BATCH, length, seconds):
            print(f"| {name} | {str(dtype)[6:]} | {best['torch'] * 1e3:.2f} | {best['vjp'] * 1e3:.2f} | {best['torch'] / best['vjp']:.2f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
