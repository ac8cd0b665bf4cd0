#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""vjp beside PyTorch eager, training the same Llama on the same bytes on the CPU: losses, time of a step, peak memory.

Each side runs in its own process with the same number of threads. vjp saves its first weights (`vjp train --stop-at
0`), a Hugging Face folder; PyTorch loads them. Both see the same batches, which follow from the seed, the number of the
batch and the row (Philox4x32-10, as in src/train/data/text.c), both take AdamW's steps with the same schedule, decay of
matrices only and clipping to 1. So the losses must be the same curve: where they differ by more than --tolerance at any
step, nothing else counts and the exit status is 1. How far PyTorch's own variants are apart is printed beside it: where
the rate is so high that single gradients are long (`vjp train`'s 3e-3 with the tiny preset: norm 18 at step 71), runs
that round differently diverge at those steps, PyTorch's own variants included. Hence --lr 6e-4, usual for small models.

What is measured:
  - the time of a step, from the batch's bytes to the updated weights and the loss as a number on the host; the median
    after 5 steps of warm-up. vjp's is what `vjp train --json` reports, PyTorch's is measured around the same work.
  - peak memory: what the kernel reports when the process has ended (ru_maxrss), interpreter and libraries included.
    What PyTorch takes after its import, before there is a model, is reported beside it. vjp's peak includes the
    checkpoint that it saves at the end; PyTorch saves none.

What PyTorch runs is plain eager model code: F.embedding, F.rms_norm, rotary pairs by halves as transformers writes
them, F.scaled_dot_product_attention, F.silu, F.linear, F.cross_entropy. Wherever there is a choice PyTorch gets the
better one: attention with enable_gqa or with repeated heads, whichever is faster here; AdamW fused or foreach; glibc as
it is or keeping freed memory (fewer page faults). Each of the four variants runs in its own process; the fastest counts
for time, the lowest peak for memory. With --rounds R the sides take turns R times and each one's best median counts.

    python bench/train_vs_torch.py [--preset tiny|small|...] [--batch B] [--context T] [--steps N] [--threads N]
                                   [--lr R] [--vjp build/vjp] [--rounds R] [--markdown | --json] [--profile]

Needs torch and a built vjp; neither building nor testing vjp needs this script.
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_UP = 5
VARIANTS = ["fused", "foreach", "fused+keep", "foreach+keep"]
PROFILED_STEPS = 3


# ---- PyTorch's side, in a separate process -------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10: four words from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def window(seed, part, row, trained, context):
    """Where a row of a batch begins in the text."""
    words = philox((part & 0xFFFFFFFF, part >> 32, row, 0x74657874), (seed & 0xFFFFFFFF, seed >> 32))
    return (words[0] << 32 | words[1]) % (trained - context)


def resident(key):
    """Bytes of this process: VmRSS, now, or VmHWM, the peak so far."""
    for line in open("/proc/self/status", encoding="ascii"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def keep_freed_memory():
    """Sets glibc to neither map nor return large blocks, so that newly allocated results cause no page faults."""
    libc = ctypes.CDLL(None)
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


def load_weights(torch, path):
    """A safetensors file of F32 tensors, one at a time: no second copy of the whole is ever held."""
    weights = {}
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "F32":
                sys.exit(f"train_vs_torch.py: {path}: {name} is {about['dtype']}; it must be F32")
            first, last = about["data_offsets"]
            file.seek(begin + first)
            data = bytearray(file.read(last - first))
            tensor = torch.frombuffer(data, dtype=torch.float32).reshape(about["shape"])
            weights[name] = tensor.clone().requires_grad_()
    return weights


class Llama:
    def __init__(self, torch, config, weights, context, repeat):
        self.torch, self.F = torch, torch.nn.functional
        self.config, self.weights, self.repeat = config, weights, repeat
        self.dim = config["head_dim"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        rates = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * rates[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        self.cosine, self.sine = angles.cos().float(), angles.sin().float()

    def rotate(self, x):
        half = self.dim // 2
        turned = self.torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cosine + turned * self.sine

    def heads(self, x, name):
        batch, context, _ = x.shape
        return self.F.linear(x, self.weights[name]).view(batch, context, -1, self.dim).transpose(1, 2)

    def attend(self, x, prefix):
        q = self.rotate(self.heads(x, prefix + "q_proj.weight"))
        k = self.rotate(self.heads(x, prefix + "k_proj.weight"))
        v = self.heads(x, prefix + "v_proj.weight")
        y = attention(self.torch, q, k, v, self.repeat)
        batch, _, context, _ = q.shape
        y = y.transpose(1, 2).reshape(batch, context, -1)
        return self.F.linear(y, self.weights[prefix + "o_proj.weight"])

    def norm(self, x, name):
        weight = self.weights[name]
        return self.F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def loss(self, tokens, targets):
        F, w = self.F, self.weights
        x = F.embedding(tokens, w["model.embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self.attend(self.norm(x, at + "input_layernorm.weight"), at + "self_attn.")
            y = self.norm(x, at + "post_attention_layernorm.weight")
            inner = F.silu(F.linear(y, w[at + "mlp.gate_proj.weight"])) * F.linear(y, w[at + "mlp.up_proj.weight"])
            x = x + F.linear(inner, w[at + "mlp.down_proj.weight"])
        x = self.norm(x, "model.norm.weight")
        logits = F.linear(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def attention(torch, q, k, v, repeat):
    if repeat:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=not repeat and q.shape[1] != k.shape[1]
    )


def probe(torch, task):
    """Whether attention is faster with its heads repeated than with enable_gqa, forward and backward."""
    config = task["config"]
    shape = (task["batch"], config["num_attention_heads"], task["context"], config["head_dim"])
    kv = (shape[0], config["num_key_value_heads"], *shape[2:])
    best = {}
    for repeat in (False, True):
        q, k, v = (torch.randn(s, requires_grad=True) for s in (shape, kv, kv))
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            attention(torch, q, k, v, repeat).sum().backward()
            times.append(time.perf_counter() - begin)
        best[repeat] = min(times)
    return best[True] < best[False]


def rate_of(s, step):
    if step <= s["warmup"]:
        return s["rate"] * step / s["warmup"]
    done = (step - s["warmup"]) / max(1, s["steps"] - s["warmup"])
    return s["rate"] * (s["last_rate"] + (1 - s["last_rate"]) * 0.5 * (1 + math.cos(math.pi * min(done, 1))))


def make_optimizer(torch, weights, s, variant):
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": s["weight_decay"]},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    which = {"fused": True} if variant.startswith("fused") else {"foreach": True}
    return torch.optim.AdamW(groups, lr=0.0, betas=(s["beta1"], s["beta2"]), eps=s["eps"], **which)


def torch_steps(torch, task):
    """Trains; yields loss, norm and seconds of each step."""
    s, batch, context = task["settings"], task["batch"], task["context"]
    text = torch.frombuffer(bytearray(pathlib.Path(task["data"]).read_bytes()), dtype=torch.uint8)
    trained = len(text) - len(text) // 20
    windows = [[window(s["seed"], part, row, trained, context) for row in range(batch)] for part in range(s["steps"])]
    weights = load_weights(torch, task["weights"])
    model = Llama(torch, task["config"], weights, context, task["repeat"])
    weights = list(weights.values())
    optimizer = make_optimizer(torch, weights, s, task["variant"])
    for step in range(1, s["steps"] + 1):
        begin = time.perf_counter()
        rows = torch.stack([text[at : at + context + 1] for at in windows[step - 1]]).long()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(s, step)
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, s["max_norm"])
        optimizer.step()
        yield loss.item(), norm.item(), time.perf_counter() - begin


def torch_side(task):
    """Prints one JSON object, or the profile's table."""
    if task["variant"].endswith("+keep"):
        keep_freed_memory()
    try:
        import torch
    except ImportError:
        sys.exit("train_vs_torch.py: there is no torch here; python -m venv .venv && .venv/bin/pip install torch")
    torch.set_num_threads(task["threads"])
    result = {"torch": torch.__version__, "imported": resident("VmRSS")}
    if task["variant"] == "probe":
        print(json.dumps({**result, "repeat": probe(torch, task)}))
        return 0
    if task["profile"]:
        task["settings"]["steps"] = WARM_UP + PROFILED_STEPS
    recorder = contextlib.nullcontext()
    rows = []
    for row in torch_steps(torch, task):
        rows.append(row)
        if task["profile"] and len(rows) == WARM_UP:
            recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            recorder.__enter__()
    if task["profile"]:
        recorder.__exit__(None, None, None)
        print(recorder.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        return 0
    losses, norms, seconds = zip(*rows)
    print(json.dumps({**result, "loss": losses, "norm": norms, "seconds": seconds, "peak": resident("VmHWM")}))
    return 0


# ---- Running both ----------------------------------------------------------------------------------------


def run_process(command):
    """What it printed, and its peak memory."""
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    with process.stdout:
        out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"train_vs_torch.py: {' '.join(map(str, command[:3]))} ... ended with status {process.returncode}")
    return out, usage.ru_maxrss * 1024


def torch_process(task):
    command = [sys.executable, __file__, "--torch-side", json.dumps(task)]
    if task["profile"] and task["variant"] != "probe":
        print(run_process(command)[0])
        return None
    out, peak = run_process(command)
    result = json.loads(out)
    result["peak"] = max(peak, result.get("peak", 0))
    return result


def vjp_command(args, data, out):
    context = ["--context", args.context] if args.context else []
    return [
        args.vjp, "train", data, "--preset", args.preset, "--steps", args.steps, "--batch", args.batch, *context,
        "--threads", args.threads, "--seed", args.seed, "--lr", args.lr, "--validate-every", 0, "--save-every", 0,
        "--out", out, "--json",
    ]  # fmt: skip


def vjp_process(args, data, out):
    text, peak = run_process(vjp_command(args, data, out))
    rows = [json.loads(line) for line in text.splitlines()]
    ends = [0.0] + [row["seconds"] for row in rows]
    return {
        "loss": [row["loss"] for row in rows],
        "norm": [row["norm"] for row in rows],
        "seconds": [after - before for before, after in zip(ends, ends[1:])],
        "peak": peak,
    }


def median_step(seconds):
    return statistics.median(seconds[min(WARM_UP, len(seconds) - 1) :])


def better(old, new):
    """Of two runs of one side: the shorter time and the lower memory."""
    new["median"] = median_step(new["seconds"])
    if old is None:
        return new
    kept = old if old["median"] <= new["median"] else new
    return {**kept, "peak": min(old["peak"], new["peak"])}


def gather_text(folder, path):
    """vjp's own sources as one file, the default."""
    names = sorted(p for p in folder.rglob("*") if p.suffix in (".c", ".h"))
    path.write_bytes(b"".join(p.read_bytes() for p in names))
    return path


def first_weights(args, data, scratch):
    out = scratch / "first"
    run_process(vjp_command(args, data, out) + ["--stop-at", 0])
    folder = out / "checkpoint-00000000"
    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "trainer.json").read_text())
    return config, settings, folder / "model.safetensors"


def compare(args, scratch):
    data = args.data.resolve() if args.data else gather_text(ROOT / "src", scratch / "text")
    config, settings, weights = first_weights(args, data, scratch)
    task = {
        "config": config, "settings": settings, "weights": str(weights), "data": str(data),
        "batch": settings["batch"], "context": settings["context"], "threads": args.threads,
        "variant": "probe", "profile": args.profile, "repeat": False,
    }  # fmt: skip
    found = torch_process(task)
    task["repeat"] = found["repeat"]
    if args.profile:
        torch_process({**task, "variant": args.variants[0]})
        return None
    vjp, torch = None, dict.fromkeys(args.variants)
    for turn in range(args.rounds):
        vjp = better(vjp, vjp_process(args, data, scratch / f"run-{turn}"))
        for variant in args.variants:
            torch[variant] = better(torch[variant], torch_process({**task, "variant": variant}))
    return {"vjp": vjp, "variants": torch, "torch": found["torch"], "imported": found["imported"],
            "attention": "heads repeated" if found["repeat"] else "enable_gqa", "settings": settings}


# ---- Reporting -------------------------------------------------------------------------------------------


def difference(a, b):
    """The largest of any step, and which; NaN counts as larger than all."""
    found = [(math.inf if math.isnan(x - y) else abs(x - y), step + 1) for step, (x, y) in enumerate(zip(a, b))]
    return max(found)


def machine():
    try:
        for line in open("/proc/cpuinfo", encoding="utf-8"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def summarise(args, both):
    vjp, variants = both["vjp"], both["variants"]
    fastest = min(variants, key=lambda name: variants[name]["median"])
    leanest = min(variants, key=lambda name: variants[name]["peak"])
    apart, at = max(difference(vjp["loss"], run["loss"]) for run in variants.values())
    own, _ = max(difference(variants[fastest]["loss"], run["loss"]) for run in variants.values())
    tokens = both["settings"]["batch"] * both["settings"]["context"]
    torch_median, torch_peak = variants[fastest]["median"], variants[leanest]["peak"]
    return {
        "preset": args.preset, "batch": both["settings"]["batch"], "context": both["settings"]["context"],
        "steps": args.steps, "threads": args.threads, "rounds": args.rounds, "machine": machine(),
        "torch": both["torch"], "date": str(datetime.date.today()),
        "first_loss": vjp["loss"][0], "last_loss": vjp["loss"][-1], "torch_last_loss": variants[fastest]["loss"][-1],
        "max_apart": apart, "at_step": at, "torch_apart": own, "agrees": apart <= args.tolerance,
        "vjp_ms": vjp["median"] * 1e3, "torch_ms": torch_median * 1e3, "speedup": torch_median / vjp["median"],
        "vjp_tokens_per_second": tokens / vjp["median"], "torch_tokens_per_second": tokens / torch_median,
        "vjp_peak_bytes": vjp["peak"], "torch_peak_bytes": torch_peak, "memory_ratio": vjp["peak"] / torch_peak,
        "torch_imported_bytes": both["imported"], "fastest": fastest, "leanest": leanest,
        "attention": both["attention"],
        "variants": {name: {"ms": run["median"] * 1e3, "peak_bytes": run["peak"]} for name, run in variants.items()},
    }  # fmt: skip


def mib(count):
    return f"{count / 2**20:.0f}"


def about(row):
    return (
        f"{row['machine']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}, f32, llama {row['preset']}, "
        f"batch {row['batch']} x {row['context']}, torch {row['torch']}, {row['date']}"
    )


def print_markdown(row):
    print(about(row) + ".\n")
    print("| | vjp | PyTorch eager | ratio |")
    print("|---|---:|---:|---:|")
    print(f"| step, ms (median) | {row['vjp_ms']:.1f} | {row['torch_ms']:.1f} | {row['speedup']:.2f} faster |")
    print(f"| tokens per second | {row['vjp_tokens_per_second']:.0f} | {row['torch_tokens_per_second']:.0f} | |")
    print(
        f"| peak memory, MiB | {mib(row['vjp_peak_bytes'])} | {mib(row['torch_peak_bytes'])} "
        f"({mib(row['torch_imported_bytes'])} after import) | {row['memory_ratio']:.2f} of it |"
    )
    print(
        f"| loss, step 1 to {row['steps']} | {row['first_loss']:.4f} to {row['last_loss']:.4f} | to "
        f"{row['torch_last_loss']:.4f} | at most {row['max_apart']:.1e} apart |"
    )


def print_text(row):
    print(about(row) + "\n")
    print(f"{'':<22} {'step ms':>9} {'tokens/s':>10} {'peak MiB':>9}")
    print(f"{'vjp':<22} {row['vjp_ms']:9.2f} {row['vjp_tokens_per_second']:10.0f} {mib(row['vjp_peak_bytes']):>9}")
    tokens = row["batch"] * row["context"]
    for name, run in row["variants"].items():
        print(f"{'torch ' + name:<22} {run['ms']:9.2f} {tokens / run['ms'] * 1e3:10.0f} {mib(run['peak_bytes']):>9}")
    print(f"\ntorch: attention with {row['attention']}; {mib(row['torch_imported_bytes'])} MiB after import, no model")
    print(f"vjp is {row['speedup']:.2f} times as fast as torch {row['fastest']}")
    print(f"vjp's peak is {row['memory_ratio']:.2f} of torch {row['leanest']}'s")
    verdict = "agree" if row["agrees"] else "DO NOT AGREE"
    print(
        f"losses {verdict}: {row['first_loss']:.4f} to {row['last_loss']:.4f} in {row['steps']} steps, at most "
        f"{row['max_apart']:.2e} apart, at step {row['at_step']}; torch's variants {row['torch_apart']:.2e}"
    )


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--torch-side":
        return torch_side(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small", help="tiny, small (default), medium or large")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, help="default: the preset's")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=6e-4, help="the maximum learning rate; default 6e-4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both; default: all cores")
    parser.add_argument("--rounds", type=int, default=1, help="turns of both sides; the best median of each counts")
    parser.add_argument("--vjp", default=ROOT / "build" / "vjp", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, help="a text file; default: vjp's own sources")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the losses; default 1e-3")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=VARIANTS, help=",".join(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="only PyTorch's own table of a few steps, by op")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="one object")
    args = parser.parse_args()
    for name in args.variants:
        if name not in VARIANTS:
            parser.error(f"there is no variant {name}; there are {', '.join(VARIANTS)}")
    if args.steps < 1 or args.rounds < 1:
        parser.error("--steps and --rounds must be 1 or more")
    if not args.vjp.exists():
        sys.exit(f"train_vs_torch.py: there is no {args.vjp}; build it (make) or name it with --vjp")
    with tempfile.TemporaryDirectory() as scratch:
        both = compare(args, pathlib.Path(scratch))
    if both is None:
        return 0
    row = summarise(args, both)
    if args.json:
        print(json.dumps(row))
    elif args.markdown:
        print_markdown(row)
    else:
        print_text(row)
    if not row["agrees"]:
        print(
            f"train_vs_torch.py: the losses differ by {row['max_apart']:.2e} at step {row['at_step']}; the limit is "
            f"{args.tolerance:.0e}",
            file=sys.stderr,
        )
    return 0 if row["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
