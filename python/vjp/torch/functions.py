# SPDX-License-Identifier: MIT
"""The ops as differentiable functions of torch tensors: `vjp.torch.layer_norm(x, gamma, beta, eps=1e-5)`.

A function returns the output that gradients come from (y, or the loss); torch.ops.vjp.* return all outputs. Which tensors a
backward needs, and which gradients it gives, comes from the names in the op table: "dx" is the gradient of "x".

Three paths with the same bits: torch.compile sees torch.ops.vjp.*, whose gradients are registered with torch; eager code
takes an autograd.Function around the same ops, which costs less for each call; torch.func takes another.
"""
from __future__ import annotations

import inspect
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from vjp.torch._ops import TABLE, library

# Ops whose products autocast computes in 16 bits, as torch does for its own. The others take a mix of dtypes as it is: their
# sums and statistics are f32 or better whatever the storage type is.
AUTOCAST = ("linear", "linear_cross_entropy", "attention", "conv2d")
PICTURES = ("group_norm", "maxpool2d", "conv2d")  # ops with a layout


class Op:
    """An op with its backward, and what connects the two."""

    def __init__(self, name: str):
        forward, backward = TABLE[name], TABLE[f"{name}_backward"]
        self.name = name
        self.forward = getattr(torch.ops.vjp, name).default
        self.backward = getattr(torch.ops.vjp, f"{name}_backward").default
        self.inputs = [slot for slot, _, _ in forward.inputs]
        self.outputs = [slot for slot, _ in forward.outputs]
        self.keywords = {attribute: default for attribute, _, default, _ in forward.attributes}
        self.several = len(forward.outputs) > 1
        self.widens = backward.widens()
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
        # For each gradient that the backward gives: the input that it belongs to; None: no gradient.
        self.gradients = [self.inputs.index(slot[1:]) if slot[1:] in self.inputs and slot[0] == "d" else None for slot, _ in backward.outputs]
        self.parameters = [kind == "parameter" for _, kind in backward.outputs]
        self.all = sum(1 << i for kind, i in self.sources if kind == "output") | sum(1 << i for i in self.differentiable)

    def wanted(self, keywords: dict[str, Any], training: bool) -> int:
        """The outputs to compute, as bits: those that the backward reads only when there will be one."""
        if not training:
            return sum(1 << i for i in self.differentiable)
        if self.name == "linear" and keywords.get("activation", "none") == "none":  # `pre` is y
            return 1
        return self.all

    def options(self, tensors: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords of the backward: the forward's, and sizes that only the forward's tensors tell."""
        made = {key: value for key, value in keywords.items() if key not in ("outputs", "dtype")}
        if self.name in ("add", "mul"):
            made["b_axes"] = tensors[1].dim()
        elif self.name == "gather":
            made["rows"] = tensors[0].shape[made.get("axis", 0)]
        elif self.name == "maxpool2d":
            first = 1 if made.get("layout") == "channels_last" else 2
            made["height"], made["width"] = tensors[0].shape[first], tensors[0].shape[first + 1]
        elif self.name == "cast":
            made["dtype"] = tensors[0].dtype
        return made

    def save(self, ctx, tensors: tuple, keywords: dict[str, Any], outputs: tuple) -> None:
        computed = keywords.get("outputs", -1)
        kept: list[Optional[Tensor]] = []
        for kind, i in self.sources:
            if kind == "input":
                unused = self.name == "linear" and self.inputs[i] == "bias"  # needed only to compute `pre` again
                kept.append(None if unused else tensors[i])
            elif kind == "output":
                kept.append(outputs[i] if computed >> i & 1 and (self.name != "linear" or keywords.get("activation", "none") != "none") else None)
        ctx.save_for_backward(*kept)
        ctx.options = self.options(tensors, keywords)
        ctx.wide = sum(1 << i for i, at in enumerate(self.gradients)
                       if at is not None and self.parameters[i] and tensors[at] is not None and tensors[at].dtype == torch.float32)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in self.differentiable))

    def differentiate(self, ctx, gradients: tuple) -> list[Optional[Tensor]]:
        saved = iter(ctx.saved_tensors)
        arguments = [gradients[i] if kind == "gradient" else None if kind == "absent" else next(saved) for kind, i in self.sources]
        options = dict(ctx.options)
        given = len(ctx.needs_input_grad)  # torch leaves out last arguments that have their default
        needed = [at is not None and at < given and ctx.needs_input_grad[at] for at in self.gradients]
        if len(needed) > 1:
            options["outputs"] = sum(1 << i for i, need in enumerate(needed) if need)
        if self.widens:
            options["wide"] = ctx.wide
        made = self.backward(*arguments, **options)
        made = made if isinstance(made, tuple) else (made,)
        result: list[Optional[Tensor]] = [None] * given
        for at, need, gradient in zip(self.gradients, needed, made):
            if need:
                result[at] = gradient  # type: ignore[index]
        return result


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Shifted:
    """A context as Op.differentiate() reads it: without the two arguments that are not tensors."""

    def __init__(self, ctx):
        self.saved_tensors, self.options, self.wide, self.needs_input_grad = ctx.saved_tensors, ctx.options, ctx.wide, ctx.needs_input_grad[2:]


class Eager(torch.autograd.Function):
    """The eager path. The op's own autograd is skipped, since this is it."""

    @staticmethod
    def forward(ctx, op: Op, keywords: dict[str, Any], *tensors):
        ctx.op = op
        with torch._C._AutoDispatchBelowAutograd():
            outputs = as_tuple(op.forward(*tensors, **keywords))
        op.save(ctx, tensors, keywords, outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph: what is recorded here says that there are no second derivatives
            return None, None, *ctx.op.differentiate(Shifted(ctx), (gradient,))
        with torch._C._AutoDispatchBelowAutograd():
            return None, None, *ctx.op.differentiate(Shifted(ctx), (gradient,))


class Functional(torch.autograd.Function):
    """The path of torch.func (vjp, grad, vmap), which needs the forward and what it saves apart."""
    generate_vmap_rule = True

    @staticmethod
    def forward(op: Op, keywords: dict[str, Any], *tensors):
        return as_tuple(op.forward(*tensors, **keywords))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op, keywords, *tensors = inputs
        ctx.op.save(ctx, tuple(tensors), keywords, output)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *ctx.op.differentiate(Shifted(ctx), gradients)


def register(op: Op) -> None:
    """The gradients of torch.ops.vjp.<op>, for torch.compile and direct calls."""
    def setup(ctx, inputs, output, keyword_only_inputs=None):
        op.save(ctx, tuple(inputs), keyword_only_inputs or {}, as_tuple(output))

    def backward(ctx, *gradients):
        return tuple(op.differentiate(ctx, gradients))

    def refuse(ctx, *gradients):
        raise RuntimeError(f"vjp.torch: {op.name} can be differentiated once: vjp has first derivatives only. "
                           "A second derivative (create_graph=True, torch.func.hessian) needs torch's own op")

    torch.library.register_autograd(f"vjp::{op.name}", backward, setup_context=setup, lib=library)
    torch.library.register_autograd(f"vjp::{op.name}_backward", refuse, lib=library)


OPS = {row.op: Op(row.op) for row in TABLE.values() if row.backward}
for _op in OPS.values():
    register(_op)


def call(op: Op, tensors: tuple, keywords: dict[str, Any]) -> Tensor:
    if op.name in AUTOCAST and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        tensors = tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if op.several:
        keywords["outputs"] = op.wanted(keywords, training)
    if torch.compiler.is_compiling():
        return as_tuple(op.forward(*tensors, **keywords))[0]
    if torch._C._are_functorch_transforms_active():
        return Functional.apply(op, keywords, *tensors)[0]
    if training:
        return Eager.apply(op, keywords, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return as_tuple(op.forward(*tensors, **keywords))[0]


def call_picture(op: Op, tensors: tuple, keywords: dict[str, Any]) -> Tensor:
    """Tensors in torch's channels_last format are computed in that layout, and the result has that format."""
    x = tensors[0]
    last = x.dim() == 4 and "layout" not in keywords and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    if not last:
        return call(op, tensors, keywords)
    moved = (x.permute(0, 2, 3, 1), *(t.permute(0, 2, 3, 1) if t is not None and t.dim() == 4 else t for t in tensors[1:]))
    return call(op, moved, {**keywords, "layout": "channels_last"}).permute(0, 3, 1, 2)


def make(op: Op) -> Callable[..., Tensor]:
    row = TABLE[op.name]
    call_op = call_picture if op.name in PICTURES else call
    optional = next((i for i in range(len(row.inputs)) if all(slot[2] for slot in row.inputs[i:])), len(row.inputs))
    parameters = [inspect.Parameter(slot, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=inspect.Parameter.empty if i < optional else None)
                  for i, (slot, _, _) in enumerate(row.inputs)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, _, default, _ in row.attributes]
    if row.open_dtype():
        parameters.append(inspect.Parameter("dtype", inspect.Parameter.KEYWORD_ONLY))
    names = op.inputs
    count = len(names)

    def function(*tensors, **keywords):
        if len(tensors) < count:  # by name, or left out
            tensors = tensors + tuple(keywords.pop(name, None) for name in names[len(tensors):])
        if len(tensors) > count or any(t is None for t in tensors[:optional]):
            function.__signature__.bind(*tensors, **keywords)  # says what is wrong, as Python does
            raise TypeError(f"{op.name}() needs {', '.join(names[:optional])}")
        return call_op(op, tensors, keywords)

    function.__name__ = function.__qualname__ = op.name
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__doc__ = f"vjp's {op.name}, differentiable. `help(vjp.{op.name})` describes the arguments; this returns {op.outputs[0]} alone."
    return function


globals().update({name: make(op) for name, op in OPS.items()})
__all__ = list(OPS)
