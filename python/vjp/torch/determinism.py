# SPDX-License-Identifier: MIT
"""deterministic_report(model, batch): which modules of a model give other bits when a step is repeated.

One forward and backward pass is run several times: twice with the threads that torch has, then with other numbers of threads.
Each module's outputs and the gradients of its own parameters are compared bit by bit with the first run's. A module whose
inputs already differ is not to blame for outputs that do: only modules whose inputs had the same bits, and modules whose
parameters' gradients differ although the gradient that came in did not, are reported as the cause.
"""
from __future__ import annotations

import hashlib
import warnings
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

REMEDIES = {"LayerNorm": "vjp.torch.LayerNorm", "GroupNorm": "vjp.torch.GroupNorm", "RMSNorm": "vjp.torch.RMSNorm", "Linear": "vjp.torch.Linear",
            "CrossEntropyLoss": "vjp.torch.CrossEntropyLoss", "MLP": "vjp.torch.patch(model, linear=True)",
            "Attention": "vjp.torch.patch(model, linear=True)"}


class Difference(NamedTuple):
    module: str
    kind: str
    what: str  # "output", "gradient of its input" or "gradient of <parameter>"
    when: str  # "a second run" or "N threads"
    remedy: str


class DeterminismReport:
    """The modules that give other bits; str() is a table, and the report is true where there are none."""

    def __init__(self, differences: list[Difference], runs: list[str], modules: int, anywhere: dict[str, int]):
        self.differences, self.runs, self.modules, self.anywhere = differences, runs, modules, anywhere

    def __bool__(self) -> bool:
        return not self.differences and not any(self.anywhere.values())

    def __str__(self) -> str:
        head = f"{self.modules} modules, compared with the first run: {', '.join(self.runs)}"
        if self:
            return f"{head}\nevery output and gradient has the same bits"
        lines = [("module", "class", "other bits in", "with", "remedy")] + [tuple(d) for d in self.differences]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
        totals = "\n".join(f"{count} gradients of parameters differ with {run}" for run, count in self.anywhere.items() if count)
        return f"{head}\n{table}" + (f"\n{totals}" if totals else "")


def digest(value: Any) -> Optional[bytes]:
    """The bits of all tensors in a value; None where there are none."""
    found = hashlib.blake2b(digest_size=16)
    tensors = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            data = item.detach().cpu().contiguous()
            found.update(repr((data.dtype, tuple(data.shape))).encode())
            found.update(data.reshape(-1).view(torch.uint8).numpy().data)
            tensors += 1
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found.digest() if tensors else None


def record(model: nn.Module, step: Callable[[], Tensor]) -> dict[tuple[str, str], Optional[bytes]]:
    """The bits of one step: {(module, what): digest}."""
    bits: dict[tuple[str, str], Optional[bytes]] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def forward(_, arguments, keywords, output):
            bits[name, "input"] = digest((arguments, keywords))
            bits[name, "output"] = digest(output)

        def backward(_, into, out):
            bits[name, "gradient of its input"] = digest(into)
            bits[name, "gradient of its output"] = digest(out)

        handles.append(module.register_forward_hook(forward, with_kwargs=True))
        if not any(module.children()):
            handles.append(module.register_full_backward_hook(backward))

    for name, module in model.named_modules():
        watch(name, module)
    model.zero_grad(set_to_none=True)
    try:
        with warnings.catch_warnings():  # an embedding has no input that a gradient goes to, which is fine here
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            loss = step()
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    bits["", "loss"] = digest(loss)
    for name, module in model.named_modules():
        for parameter, value in module.named_parameters(recurse=False):
            bits[name, f"gradient of {parameter}"] = digest(value.grad)
    model.zero_grad(set_to_none=True)
    return bits


def causes(model: nn.Module, first: dict, other: dict, when: str) -> list[Difference]:
    found = []

    def differs(name: str, what: str) -> bool:
        return first.get((name, what)) != other.get((name, what))

    for name, module in model.named_modules():
        if any(module.children()) and any(differs(child, "output") for child, _ in model.named_modules() if child.startswith(name) and child != name):
            continue  # a part of it is reported
        guilty = []
        if differs(name, "output") and not differs(name, "input"):
            guilty.append("output")
        if not differs(name, "gradient of its output") and (name, "gradient of its output") in first:
            guilty += [what for key, what in first if key == name and what.startswith("gradient of ") and what != "gradient of its output"
                       and differs(name, what)]
        kind = type(module).__name__
        remedy = next((remedy for end, remedy in REMEDIES.items() if kind.endswith(end)), "none: vjp has no such module")
        found += [Difference(name or "(model)", kind, what, when, remedy) for what in guilty]
    return found


def deterministic_report(model: nn.Module, batch: Any, loss: Optional[Callable[[nn.Module, Any], Tensor]] = None,
                         threads: Optional[list[int]] = None) -> DeterminismReport:
    """Runs a step several times and compares bits.

    `batch` is what the model takes: a dict of keywords, a tuple of arguments, or one tensor. `loss(model, batch)` gives the scalar;
    without it, the result's `.loss`, the result itself where it is a scalar, or its mean square. The random state is the same for
    each run, and the gradients are cleared at the end; nothing else changes."""
    def step() -> Tensor:
        torch.manual_seed(0)
        if loss is not None:
            return loss(model, batch)
        result = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
        value = getattr(result, "loss", None)
        value = result if value is None else value
        value = value[0] if isinstance(value, tuple) else value
        return value if value.dim() == 0 else value.float().square().mean()

    before = torch.get_num_threads()
    counts = threads if threads is not None else [n for n in (1, 2, 3, 4) if n != before]
    state = torch.get_rng_state()
    runs: list[str] = []
    found: list[Difference] = []
    anywhere: dict[str, int] = {}
    try:
        first = record(model, step)
        for when, count in [("a second run", before)] + [(f"{n} thread{'s' * (n > 1)}", n) for n in counts]:
            torch.set_num_threads(count)
            other = record(model, step)
            runs.append(when)
            known = {(d.module, d.what) for d in found}
            found += [d for d in causes(model, first, other, when) if (d.module, d.what) not in known]
            anywhere[when] = sum(first[key] != other[key] for key in first if key[1].startswith("gradient of ") and "its" not in key[1])
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(state)
    return DeterminismReport(found, runs, sum(1 for _ in model.modules()), anywhere)
