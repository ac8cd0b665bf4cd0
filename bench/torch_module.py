#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A Llama with and without vjp.torch.patch(), forward and backward, and the modules that patch() replaces one by one. Prints
docs/python.md's tables. All are timed in turn, and the shortest run of each counts, so that other processes matter little.

    PYTHONPATH=build/python python3 bench/torch_module.py [--device cuda] [--quick] [--seconds N]

On a GPU a part is a captured graph that is replayed, so the time is that of its kernels, whoever launches them; where the package
liger_kernel is installed, its kernels are a column. The model is timed as it runs, with all of Python.
"""
import argparse
import time

import torch
from torch import nn

import vjp.torch as vt

SIZES = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64}
BATCH, TIME = 2, 256
REPLAYS = 10
# The layers of Llama 3 8B, for a GPU.
SIZES_CUDA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 128}
TIME_CUDA = 4096
TINY = {**SIZES, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 4}


def clock(call):
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_a_row(call):
    """A run is several calls, timed by the GPU: for calls that no graph can hold because they wait for it."""
    def run():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / REPLAYS
    return run


def captured(call):
    """The call as a graph, whose replays are timed."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        call()
    return in_a_row(graph.replay)


def shortest(calls, seconds, way=lambda call: lambda: clock(call)):
    """{name: seconds of the shortest run}, all called in turn until the time is up."""
    best = {name: float("inf") for name in calls}
    for call in calls.values():
        call()  # compiles
        call()
    runs = {name: way(call) for name, call in calls.items()}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or max(best.values()) == float("inf"):
        for name, run in runs.items():
            best[name] = min(best[name], run())
    return best


def forward_backward(function, *inputs):
    dy = []

    def run():
        for t in inputs:
            t.grad = None
        result = function(*inputs)
        results = result if isinstance(result, (tuple, list)) else [getattr(result, "loss", result)]
        if not dy:  # gradients as a layer above would give, not the expanded ones of a sum
            dy.extend(torch.ones_like(y, memory_format=torch.contiguous_format) for y in results)
        torch.autograd.backward(results, dy)
    return run


def model_rows(sizes, batch, length, seconds, device):
    from transformers import LlamaConfig, LlamaForCausalLM
    ids = torch.randint(0, sizes["vocab_size"], (batch, length), device=device)
    for dtype in (torch.float32, torch.bfloat16):
        models = []
        for patched in (False, True):
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device, dtype)
            if patched:
                vt.patch(model)
            models.append(model)
        for compiled in (False, True):
            torch._dynamo.reset()
            calls = {}
            for name, model in zip(("torch", "vjp"), models):
                function = torch.compile(model) if compiled else model
                run = forward_backward(lambda f=function: f(input_ids=ids, labels=ids))
                calls[name] = lambda run=run, model=model: (model.zero_grad(), run())
            yield f"Llama, {'compiled' if compiled else 'eager'}", dtype, shortest(calls, seconds)


def liger():
    """The functions of the package liger_kernel, or None."""
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    return functional


def module_rows(sizes, batch, length, seconds, device):
    """torch's side is compiled, which is the faster of its two."""
    other = liger() if device == "cuda" else None
    hidden, inner, heads, kv, dim = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        options = {"dtype": dtype, "device": device, "requires_grad": True}
        x = torch.randn(batch, length, hidden, **options)
        gate, up = (torch.randn(batch, length, inner, **options) for _ in range(2))
        q = torch.randn(batch, length, heads, dim, **options)
        k, v = (torch.randn(batch, length, kv, dim, **options) for _ in range(2))
        weight = torch.ones(hidden, **options)
        logits = torch.randn(batch * length, sizes["vocab_size"], **options)
        target = torch.randint(0, sizes["vocab_size"], (batch * length,), device=device)
        angle = torch.rand(length, dim // 2, device=device)
        cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)

        def rms_norm(x, weight):
            h = x.float()
            return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        def rope(q, k):
            c, s = torch.cat([cosine, cosine], -1)[:, None], torch.cat([sine, sine], -1)[:, None]
            return [t * c + torch.cat([-t[..., dim // 2:], t[..., :dim // 2]], -1) * s for t in (q, k)]

        def attention(q, k, v):
            return nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)

        pairs = {
            "RMSNorm": (rms_norm, lambda x, w: vt.rms_norm(x, w), (x, weight)),
            "rope": (rope, lambda q, k: vt.rope_pair(q, k, cosine, sine), (q, k)),
            "SwiGLU": (lambda gate, up: nn.functional.silu(gate) * up, vt.swiglu, (gate, up)),
            "attention": (attention, vt.attention, (q, k, v)),
            "cross-entropy": (lambda logits: nn.functional.cross_entropy(logits.float(), target), lambda logits: vt.cross_entropy(logits, target), (logits,)),
        }
        ligers = {}
        if other:
            wide = [torch.cat([t, t], -1)[None] for t in (cosine, sine)]
            ligers = {
                "RMSNorm": lambda x, w: other.liger_rms_norm(x, w, 1e-6),
                "rope": lambda q, k: [t.transpose(1, 2) for t in other.liger_rope(q.transpose(1, 2), k.transpose(1, 2), *wide)],
                "SwiGLU": other.liger_swiglu,
                "cross-entropy": lambda logits: other.liger_cross_entropy(logits, target),
            }
        for name, (theirs, ours, inputs) in pairs.items():
            torch._dynamo.reset()
            calls = {"torch": forward_backward(torch.compile(theirs), *inputs)}
            if name in ligers:  # it computes in place
                calls["Liger"] = forward_backward(ligers[name], *(t.detach().clone().requires_grad_() for t in inputs))
            calls["vjp"] = forward_backward(ours, *inputs)
            way = in_a_row if name == "cross-entropy" else captured  # Liger's counts targets on the host
            yield name, dtype, shortest(calls, seconds, *[way] if device == "cuda" else [])


def table(rows, names):
    print("| | dtype |" + "".join(f" {name} |" for name in names) + "".join(f" {name} / vjp |" for name in names[:-1]))
    print("|---|---|" + "---:|" * (2 * len(names) - 1))
    for name, dtype, best in rows:
        cells = [f"{best[n] * 1e3:.4g}" if n in best else "" for n in names] + [f"{best[n] / best['vjp']:.2f}" if n in best else "" for n in names[:-1]]
        print(f"| {name} | {str(dtype)[6:]} | " + " | ".join(cells) + " |", flush=True)
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: that it runs")
    parser.add_argument("--seconds", type=float, default=10, help="for each row")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    cuda = options.device == "cuda"
    sizes, length = (SIZES_CUDA, TIME_CUDA) if cuda else (SIZES, TIME)
    sizes, length, seconds = (TINY, 8, 0) if options.quick else (sizes, length, options.seconds)
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads, kernels in {vt.KERNELS}"
    print(f"{where}, torch {torch.__version__}; milliseconds of a forward and backward pass\n")
    table(model_rows(sizes, BATCH, length, seconds, options.device), ["torch", "vjp"])
    table(module_rows(sizes, BATCH, length, seconds, options.device), ["torch", "Liger", "vjp"] if cuda and liger() else ["torch", "vjp"])


if __name__ == "__main__":
    main()
