# SPDX-License-Identifier: MIT
"""The op table as Python data, and what connects an op with its backward, for the packages that differentiate: vjp.torch and
vjp.jax. Which tensors a backward needs, and which gradients it gives, comes from the names in the table: "dx" is the gradient
of "x"."""
from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Optional

from vjp import _core


class Pass(NamedTuple):
    """One pass of an op."""
    op: str
    backward: bool
    inputs: list[tuple[str, str, bool]]  # name, kind, optional
    outputs: list[tuple[str, str]]  # name, kind
    attributes: list[tuple[str, str, Any, Optional[list[str]]]]  # name, type, default, choices

    def open_dtype(self) -> bool:
        return self.outputs[0][1] == "float"

    def widens(self) -> bool:
        """Whether a gradient may be f32 although the activations have 16 bits."""
        return self.backward and any(kind == "parameter" for _, kind in self.outputs)

    def required(self) -> int:
        """How many inputs come before those that may be left out."""
        count = len(self.inputs)
        while count and self.inputs[count - 1][2]:
            count -= 1
        return count

    def signature(self, **more: Any) -> inspect.Signature:
        """Of a Python function of this pass; `more` are further keywords and their defaults."""
        required, keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(slot, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=required if i < self.required() else None)
                      for i, (slot, _, _) in enumerate(self.inputs)]
        parameters += [inspect.Parameter(name, keyword, default=default) for name, _, default, _ in self.attributes]
        if self.open_dtype():
            parameters.append(inspect.Parameter("dtype", keyword))
        return inspect.Signature(parameters + [inspect.Parameter(name, keyword, default=default) for name, default in more.items()])


TABLE = {name: Pass(op, bool(number), *rest) for name, (op, number, *rest) in _core.table().items()}


def given(tensors: tuple, i: int) -> Any:
    """A tensor of a call; torch leaves out last arguments that have their default."""
    return tensors[i] if i < len(tensors) else None


class Links:
    """An op's forward and backward: where the tensors of the backward come from and where its gradients belong."""

    def __init__(self, name: str, table: dict[str, Pass] = TABLE):
        forward, backward = table[name], table[f"{name}_backward"]
        self.name = name
        self.inputs = [slot for slot, _, _ in forward.inputs]
        self.outputs = [slot for slot, _ in forward.outputs]
        # For each tensor of the backward: the gradient of an output, or an input or output that is saved.
        self.sources: list[tuple[str, int]] = []
        for slot, _, _ in backward.inputs:
            if slot[0] == "d" and slot[1:] in self.outputs:
                self.sources.append(("gradient", self.outputs.index(slot[1:])))
            elif slot in self.inputs:
                self.sources.append(("input", self.inputs.index(slot)))
            else:
                self.sources.append(("output", self.outputs.index(slot)))
        if name == "maxpool2d":  # argmax, height and width are enough
            self.sources[1] = ("absent", 0)
        self.differentiable = [i for kind, i in self.sources if kind == "gradient"]
        # For each gradient that the backward gives: the input that it belongs to; None: it is none.
        self.gradients = [self.inputs.index(slot[1:]) if slot[0] == "d" and slot[1:] in self.inputs else None for slot, _ in backward.outputs]
        self.parameters = [kind == "parameter" for _, kind in backward.outputs]
        self.all = sum(1 << i for kind, i in self.sources if kind == "output") | sum(1 << i for i in self.differentiable)

    def needs_pre(self, tensors: tuple, keywords: dict[str, Any]) -> bool:
        """Of linear: without activation and gate, the backward needs neither `pre`, which is y, nor the bias to compute it again."""
        return self.name != "linear" or keywords.get("activation", "none") != "none" or given(tensors, self.inputs.index("gate")) is not None

    def wanted(self, tensors: tuple, keywords: dict[str, Any], training: bool) -> int:
        """The outputs to compute, as bits: those that the backward reads only when there will be one."""
        if not training:
            return sum(1 << i for i in self.differentiable)
        return self.all if self.needs_pre(tensors, keywords) else 1

    def options(self, tensors: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords of the backward: the forward's, and sizes that only the forward's tensors tell."""
        made = {key: value for key, value in keywords.items() if key not in ("outputs", "dtype")}
        if self.name in ("add", "mul"):
            made["b_axes"] = tensors[1].ndim
        elif self.name == "gather":
            made["rows"] = tensors[0].shape[made.get("axis", 0)]
        elif self.name == "maxpool2d":
            first = 1 if made.get("layout") == "channels_last" else 2
            made["height"], made["width"] = tensors[0].shape[first], tensors[0].shape[first + 1]
        elif self.name == "cast":
            made["dtype"] = tensors[0].dtype
        return made

    def saved(self, tensors: tuple, keywords: dict[str, Any], outputs: tuple) -> list:
        """What the backward needs besides gradients, in its order; None for what is absent or not needed."""
        computed, kept = keywords.get("outputs", -1), []
        for kind, i in self.sources:
            if kind == "input":
                kept.append(None if self.name == "linear" and self.inputs[i] == "bias" else given(tensors, i))
            elif kind == "output":
                kept.append(outputs[i] if computed >> i & 1 and self.needs_pre(tensors, keywords) else None)
        return kept

    def arguments(self, gradients: tuple, saved: list) -> list:
        """The tensors of the backward."""
        rest = iter(saved)
        return [gradients[i] if kind == "gradient" else None if kind == "absent" else next(rest) for kind, i in self.sources]
