#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""vjp beside PyTorch, eager and compiled, training the same Llama on the same bytes: losses, time of a step, memory.

Each side runs in its own process, on the CPU with the same number of threads. vjp saves its first weights (`vjp train
--stop-at 0`), a Hugging Face folder; PyTorch loads them. Both see the same batches, which follow from the seed, the
number of the batch and the row (Philox4x32-10, as in src/train/data/text.c), both take AdamW's steps with the same
schedule, decay of matrices only and clipping to 1. So the losses must be the same curve: where they differ by more than
--tolerance at any step, nothing else counts and the exit status is 1. How far PyTorch's own variants are apart is
printed beside it: where the rate is so high that single gradients are long (`vjp train`'s 3e-3 with the tiny preset:
norm 18 at step 71; 6e-4 with 1.1B: norms up to 350), runs that round differently diverge at those steps, PyTorch's own
variants included. With 6e-4 and 124M PyTorch's losses in bf16 are up to 0.29 from its own in f32, within 24 steps.
Hence the rates: 6e-4, and 2e-4 from 124M on.

With --dtype bf16 vjp trains with --gradients bf16 unless --vjp-option says otherwise: PyTorch's autocast, too, rounds
the gradients of weights to bf16, where the products with bf16 weights leave them.

What is measured:
  - the time of a step, from the batch's bytes to the updated weights; the median after a warm-up (5 steps; 15 of a
    compiled model). vjp's is what `vjp train --json` reports. On the CPU PyTorch's is measured around the same work,
    with the loss as a number; on CUDA by events between steps, with all batches on the card beforehand and the losses
    read at the end, so that PyTorch never waits for the host.
  - memory on the CPU: the peak that the kernel reports when the process has ended (ru_maxrss), interpreter and
    libraries included. What PyTorch takes after its import, before there is a model, is reported beside it. vjp's peak
    includes the checkpoint that it saves at the end; PyTorch saves none.
  - memory on CUDA: what each side allocates on the card, without the driver's own: torch.cuda.max_memory_allocated(),
    and for vjp what `vjp bench train` took from the card's free memory.

What PyTorch runs is plain model code: F.embedding, F.rms_norm, rotary pairs by halves as transformers writes them,
F.scaled_dot_product_attention, F.silu, F.linear, F.cross_entropy; with --dtype bf16 under autocast with f32 parameters.
Wherever there is a choice PyTorch gets the better one: attention with enable_gqa or with repeated heads, whichever is
faster here; torch.compile beside eager; on the CPU AdamW fused or foreach, and glibc as it is or keeping freed memory
(fewer page faults). Each variant runs in its own process; the fastest counts for time, the lowest peak for memory. With
--rounds R the sides take turns R times and each one's best median counts.

    python bench/train_vs_torch.py [--device cpu|cuda] [--dtype f32|bf16] [--preset tiny|...|124M|...] [--batch B]
                                   [--context T] [--steps N] [--threads N] [--lr R] [--vjp build/vjp] [--rounds R]
                                   [--vjp-option="--residual f32"] [--markdown | --json] [--profile]

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
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_UP = 5
COMPILED_WARM_UP = 15
VARIANTS = {"cpu": ["fused", "foreach", "fused+keep", "foreach+keep", "compile"], "cuda": ["eager", "compile"]}
TOLERANCE = {"f32": 1e-3, "bf16": 5e-2}
RATE, RATE_OF_LARGE = 6e-4, dict.fromkeys(("124M", "350M", "1.1B", "7B"), 2e-4)
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


def load_weights(torch, path, device):
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
            weights[name] = tensor.clone().to(device).requires_grad_()
    return weights


class Llama:
    def __init__(self, torch, config, weights, context, repeat, device, dtype):
        self.torch, self.F = torch, torch.nn.functional
        self.config, self.weights, self.repeat = config, weights, repeat
        self.dim = config["head_dim"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        rates = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * rates[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        self.cosine, self.sine = (table.to(device, dtype) for table in (angles.cos(), angles.sin()))

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


def dtype_of(torch, task):
    return torch.bfloat16 if task["dtype"] == "bf16" else torch.float32


def wait(torch, task):
    if task["device"] == "cuda":
        torch.cuda.synchronize()


def probe(torch, task):
    """Whether attention is faster with its heads repeated than with enable_gqa, forward and backward."""
    config = task["config"]
    shape = (task["batch"], config["num_attention_heads"], task["context"], config["head_dim"])
    kv = (shape[0], config["num_key_value_heads"], *shape[2:])
    best = {}
    for repeat in (False, True):
        q, k, v = (
            torch.randn(s, device=task["device"], dtype=dtype_of(torch, task), requires_grad=True)
            for s in (shape, kv, kv)
        )
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            attention(torch, q, k, v, repeat).sum().backward()
            wait(torch, task)
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
    which = {"foreach": True} if variant.startswith("foreach") else {"fused": True}
    return torch.optim.AdamW(groups, lr=0.0, betas=(s["beta1"], s["beta2"]), eps=s["eps"], **which)


class Clock:
    """Times steps: on the CPU around each, on CUDA by events between them, which are read at the end."""

    def __init__(self, torch, task):
        self.torch, self.cuda, self.marks = torch, task["device"] == "cuda", []
        self.mark()

    def mark(self):
        if self.cuda:
            event = self.torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self):
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.cuda:
            return [after - before for before, after in pairs]
        self.torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def batches(torch, task):
    """A function that gives the tokens of a step, with the target after each; on CUDA all are made beforehand."""
    s, context = task["settings"], task["context"]
    text = torch.frombuffer(bytearray(pathlib.Path(task["data"]).read_bytes()), dtype=torch.uint8)
    trained = len(text) - len(text) // 20

    windows = [[window(s["seed"], part, row, trained, context) for row in range(task["batch"])]
               for part in range(s["steps"])]  # fmt: skip

    def rows(step):
        return torch.stack([text[at : at + context + 1] for at in windows[step - 1]]).long()

    if task["device"] == "cpu":
        return rows
    return {step: rows(step).to("cuda") for step in range(1, s["steps"] + 1)}.__getitem__


def train(torch, task, after_step):
    """Losses, norms and seconds of all steps; after_step(n) is called after each."""
    s = task["settings"]
    device = task["device"]
    weights = load_weights(torch, task["weights"], device)
    model = Llama(torch, task["config"], weights, task["context"], task["repeat"], device, dtype_of(torch, task))
    loss_of = torch.compile(model.loss) if task["variant"] == "compile" else model.loss
    weights = list(weights.values())
    optimizer = make_optimizer(torch, weights, s, task["variant"])
    narrow = torch.autocast(device, dtype=torch.bfloat16, enabled=task["dtype"] == "bf16")
    batch_of = batches(torch, task)
    losses, norms, clock = [], [], Clock(torch, task)
    for step in range(1, s["steps"] + 1):
        rows = batch_of(step)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(s, step)
        optimizer.zero_grad(set_to_none=True)
        with narrow:
            loss = loss_of(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, s["max_norm"])
        optimizer.step()
        losses.append(loss.detach() if device == "cuda" else loss.item())
        norms.append(norm.detach() if device == "cuda" else norm.item())
        clock.mark()
        after_step(step)
    seconds = clock.seconds()
    return [float(loss) for loss in losses], [float(norm) for norm in norms], seconds


def torch_side(task):
    """Prints one JSON object, or the profile's table."""
    if task["variant"].endswith("+keep"):
        keep_freed_memory()
    try:
        import torch
    except ImportError:
        sys.exit("train_vs_torch.py: there is no torch here; python -m venv .venv && .venv/bin/pip install torch")
    torch.set_num_threads(task["threads"])
    if task["device"] == "cuda" and not torch.cuda.is_available():
        sys.exit("train_vs_torch.py: this torch has no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    card = torch.cuda.get_device_name() if task["device"] == "cuda" else None
    result = {"torch": torch.__version__, "imported": resident("VmRSS"), "card": card}
    if task["variant"] == "probe":
        print(json.dumps({**result, "repeat": probe(torch, task)}))
        return 0
    if task["profile"]:
        task["settings"]["steps"] = WARM_UP + PROFILED_STEPS
    recorder = contextlib.ExitStack()
    activity = torch.profiler.ProfilerActivity

    def after_step(step):
        if task["profile"] and step == WARM_UP:
            kinds = [activity.CPU, activity.CUDA] if task["device"] == "cuda" else [activity.CPU]
            result["profile"] = recorder.enter_context(torch.profiler.profile(activities=kinds))

    losses, norms, seconds = train(torch, task, after_step)
    recorder.close()
    if task["profile"]:
        order = "self_cuda_time_total" if task["device"] == "cuda" else "self_cpu_time_total"
        print(result["profile"].key_averages().table(sort_by=order, row_limit=25))
        return 0
    peak = torch.cuda.max_memory_allocated() if task["device"] == "cuda" else resident("VmHWM")
    print(json.dumps({**result, "loss": losses, "norm": norms, "seconds": seconds, "peak": peak}))
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
    if task["device"] == "cpu":
        result["peak"] = max(peak, result.get("peak", 0))
    return result


def model_options(args):
    """What `vjp train` and `vjp bench train` both take."""
    sizes = [("--batch", args.batch), ("--context", args.context), ("--dtype", args.dtype), ("--device", args.device)]
    given = [word for name, value in sizes if value for word in (name, value)]
    return ["--preset", args.preset, *given, *(["--threads", args.threads] if args.device == "cpu" else [])]


def vjp_command(args, data, out):
    return [
        args.vjp, "train", data, *model_options(args), *args.vjp_option, "--steps", args.steps, "--seed", args.seed,
        "--lr", args.lr, "--validate-every", 0, "--save-every", 0,
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


def vjp_card_bytes(args):
    """What a training step allocates on the card, as `vjp bench train` measures it."""
    out, _ = run_process([args.vjp, "bench", "train", *model_options(args), *args.vjp_option, "--steps", 1, "--json"])
    return json.loads(out.splitlines()[-1])["device_bytes"]


def median_step(run, warm_up):
    seconds = run["seconds"]
    return statistics.median(seconds[min(warm_up, len(seconds) - 1) :])


def better(old, new, warm_up=WARM_UP):
    """Of two runs of one side: the shorter time and the lower memory."""
    new["median"] = median_step(new, warm_up)
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
        "variant": "probe", "profile": args.profile, "repeat": False, "device": args.device, "dtype": args.dtype,
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
            warm_up = COMPILED_WARM_UP if variant == "compile" else WARM_UP
            torch[variant] = better(torch[variant], torch_process({**task, "variant": variant}), warm_up)
    if args.device == "cuda":
        vjp["peak"] = vjp_card_bytes(args)
    return {"vjp": vjp, "variants": torch, "torch": found["torch"], "imported": found["imported"],
            "card": found["card"], "settings": settings,
            "attention": "heads repeated" if found["repeat"] else "enable_gqa"}  # fmt: skip


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


def named(run):
    return {"ms": run["median"] * 1e3, "peak_bytes": run["peak"]}


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
        "steps": args.steps, "threads": args.threads, "rounds": args.rounds, "machine": both["card"] or machine(),
        "device": args.device, "dtype": args.dtype, "vjp_options": " ".join(args.vjp_option),
        "torch": both["torch"], "date": str(datetime.date.today()),
        "first_loss": vjp["loss"][0], "last_loss": vjp["loss"][-1], "torch_last_loss": variants[fastest]["loss"][-1],
        "max_apart": apart, "at_step": at, "torch_apart": own, "agrees": apart <= args.tolerance,
        "vjp_ms": vjp["median"] * 1e3, "torch_ms": torch_median * 1e3, "speedup": torch_median / vjp["median"],
        "vjp_tokens_per_second": tokens / vjp["median"], "torch_tokens_per_second": tokens / torch_median,
        "vjp_peak_bytes": vjp["peak"], "torch_peak_bytes": torch_peak, "memory_ratio": vjp["peak"] / torch_peak,
        "torch_imported_bytes": both["imported"], "fastest": fastest, "leanest": leanest,
        "attention": both["attention"],
        "variants": {name: named(run) for name, run in variants.items()},
    }  # fmt: skip


def mib(count):
    return f"{count / 2**20:.0f}"


def about(row):
    threads = f", {row['threads']} thread{'s' if row['threads'] > 1 else ''}" if row["device"] == "cpu" else ""
    options = f" ({row['vjp_options']})" if row["vjp_options"] else ""
    return (
        f"{row['machine']}{threads}, {row['dtype']}, llama {row['preset']}{options}, batch {row['batch']} x "
        f"{row['context']}, torch {row['torch']}, {row['date']}"
    )


def runs(row):
    """Name, milliseconds, tokens per second and bytes of each side."""
    tokens = row["batch"] * row["context"]
    yield "vjp", row["vjp_ms"], row["vjp_tokens_per_second"], row["vjp_peak_bytes"]
    for name, run in row["variants"].items():
        yield "PyTorch " + name, run["ms"], tokens / run["ms"] * 1e3, run["peak_bytes"]


def losses(row):
    return (
        f"losses {row['first_loss']:.4f} to {row['last_loss']:.4f} in {row['steps']} steps, at most "
        f"{row['max_apart']:.2e} apart, at step {row['at_step']}; PyTorch's variants {row['torch_apart']:.2e}"
    )


def print_markdown(row):
    print(about(row) + ".\n")
    print("| | step ms (median) | tokens/s | peak MiB | vjp is faster by | vjp's share of its memory |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, ms, tokens, peak in runs(row):
        beside = f"{ms / row['vjp_ms']:.2f} | {row['vjp_peak_bytes'] / peak:.2f}" if name != "vjp" else "|"
        print(f"| {name} | {ms:.1f} | {tokens:.0f} | {mib(peak)} | {beside} |")
    print("\n" + losses(row).capitalize() + ".")


def print_text(row):
    print(about(row) + "\n")
    print(f"{'':<22} {'step ms':>9} {'tokens/s':>10} {'peak MiB':>9}")
    for name, ms, tokens, peak in runs(row):
        print(f"{name:<22} {ms:9.2f} {tokens:10.0f} {mib(peak):>9}")
    imported = f"; {mib(row['torch_imported_bytes'])} MiB after import, no model" if row["device"] == "cpu" else ""
    print(f"\nPyTorch: attention with {row['attention']}{imported}")
    print(f"vjp is {row['speedup']:.2f} times as fast as PyTorch {row['fastest']}")
    print(f"vjp's peak is {row['memory_ratio']:.2f} of PyTorch {row['leanest']}'s")
    print(("" if row["agrees"] else "NOT THE SAME CURVE: ") + losses(row))


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--torch-side":
        return torch_side(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small", help="as in vjp train; default small")
    parser.add_argument("--device", choices=list(VARIANTS), default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", choices=list(TOLERANCE), help="of products; default: bf16 on cuda, f32 on the cpu")
    parser.add_argument("--batch", type=int, help="default: the preset's")
    parser.add_argument("--context", type=int, help="default: the preset's")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, help="the maximum learning rate; default 6e-4, from 124M on 2e-4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both; default: all cores")
    parser.add_argument("--rounds", type=int, default=1, help="turns of both sides; the best median of each counts")
    parser.add_argument("--vjp", default=ROOT / "build" / "vjp", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, help="a text file; default: vjp's own sources")
    parser.add_argument("--tolerance", type=float, help="of the losses; default 1e-3, with bf16 5e-2")
    parser.add_argument("--vjp-option", type=shlex.split, default=[], help='more for vjp: "--residual f32"')
    parser.add_argument("--variants", type=lambda text: text.split(","), help="default: all of the device's")
    parser.add_argument("--profile", action="store_true", help="only PyTorch's own table of a few steps, by op")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="one object")
    args = parser.parse_args()
    if args.lr is None:
        args.lr = RATE_OF_LARGE.get(args.preset, RATE)
    known = VARIANTS[args.device]
    args.variants = args.variants or known
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "f32")
    args.tolerance = args.tolerance or TOLERANCE[args.dtype]
    if args.dtype == "bf16" and "--gradients" not in args.vjp_option:
        args.vjp_option = ["--gradients", "bf16", *args.vjp_option]
    for name in args.variants:
        if name not in known:
            parser.error(f"there is no variant {name} on {args.device}; there are {', '.join(known)}")
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
