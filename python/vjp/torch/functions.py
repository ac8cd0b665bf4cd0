# SPDX-License-Identifier: MIT
"""The ops as differentiable functions of torch tensors: `vjp.torch.layer_norm(x, gamma, beta, eps=1e-5)`.

A function returns the output that gradients come from (y, or the loss; rope_pair two); torch.ops.vjp.* return all outputs.

Three paths with the same bits: torch.compile sees torch.ops.vjp.*, whose gradients are registered with torch; eager code
takes an autograd.Function around the same ops, which costs less for each call; torch.func takes another.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
from torch import Tensor

from vjp._table import Links
from vjp.torch._ops import ROWS, library

# Ops whose products autocast computes in 16 bits, as torch does for its own. The others take a mix of dtypes as it is: their
# sums and statistics are f32 or better whatever the storage type is.
AUTOCAST = ("linear", "linear_cross_entropy", "attention", "conv2d")
PICTURES = ("group_norm", "maxpool2d", "conv2d")  # ops with a layout


class Op(Links):
    """An op of torch with its backward."""

    def __init__(self, name: str):
        super().__init__(name, ROWS)
        self.forward = getattr(torch.ops.vjp, name).default
        self.backward = getattr(torch.ops.vjp, f"{name}_backward").default
        self.several = len(self.outputs) > 1
        self.widens = ROWS[f"{name}_backward"].widens()

    def results(self, outputs: tuple) -> Any:
        """What a function returns of the outputs."""
        return outputs[0] if len(self.differentiable) == 1 else tuple(outputs[i] for i in self.differentiable)

    def save(self, ctx, tensors: tuple, keywords: dict[str, Any], outputs: tuple) -> None:
        ctx.save_for_backward(*self.saved(tensors, keywords, outputs))
        ctx.options = self.options(tensors, keywords)
        ctx.wide = sum(1 << i for i, at in enumerate(self.gradients)
                       if at is not None and self.parameters[i] and tensors[at] is not None and tensors[at].dtype == torch.float32)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in self.differentiable))

    def differentiate(self, ctx, gradients: tuple) -> list[Optional[Tensor]]:
        options = dict(ctx.options)
        given = len(ctx.needs_input_grad)  # torch leaves out last arguments that have their default
        needed = [at is not None and at < given and ctx.needs_input_grad[at] for at in self.gradients]
        if len(needed) > 1:
            options["outputs"] = sum(1 << i for i, need in enumerate(needed) if need)
        if self.widens:
            options["wide"] = ctx.wide
        packed = tuple(None if g is None else g.contiguous() for g in gradients)  # torch's copy uses all threads
        made = self.backward(*self.arguments(packed, ctx.saved_tensors), **options)
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
        return op.results(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():  # create_graph: what is recorded here says that there are no second derivatives
            return None, None, *ctx.op.differentiate(Shifted(ctx), gradients)
        with torch._C._AutoDispatchBelowAutograd():
            return None, None, *ctx.op.differentiate(Shifted(ctx), gradients)


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


OPS = {row.op: Op(row.op) for row in ROWS.values() if row.backward}
for _op in OPS.values():
    register(_op)


def call(op: Op, tensors: tuple, keywords: dict[str, Any]) -> Any:
    place = tensors[0].device.type
    if op.name in AUTOCAST and torch.is_autocast_enabled(place):
        dtype = torch.get_autocast_dtype(place)
        tensors = tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if op.several:
        keywords["outputs"] = op.wanted(tensors, keywords, training)
    if torch.compiler.is_compiling():
        return op.results(as_tuple(op.forward(*tensors, **keywords)))
    if torch._C._are_functorch_transforms_active():
        return op.results(Functional.apply(op, keywords, *tensors))
    if training:
        return Eager.apply(op, keywords, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return op.results(as_tuple(op.forward(*tensors, **keywords)))


def call_picture(op: Op, tensors: tuple, keywords: dict[str, Any]) -> Tensor:
    """Tensors in torch's channels_last format are computed in that layout, and the result has that format."""
    x = tensors[0]
    last = x.dim() == 4 and "layout" not in keywords and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    if not last:
        return call(op, tensors, keywords)
    moved = (x.permute(0, 2, 3, 1), *(t.permute(0, 2, 3, 1) if t is not None and t.dim() == 4 else t for t in tensors[1:]))
    return call(op, moved, {**keywords, "layout": "channels_last"}).permute(0, 3, 1, 2)


def make(op: Op) -> Callable[..., Any]:
    row = ROWS[op.name]
    call_op = call_picture if op.name in PICTURES else call
    optional = row.required()
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
    function.__signature__ = row.signature()  # type: ignore[attr-defined]
    described, returned = op.name.removesuffix("_pair"), " and ".join(op.outputs[i] for i in op.differentiable)
    function.__doc__ = f"vjp's {op.name}, differentiable. `help(vjp.{described})` describes the arguments; this returns {returned} alone."
    return function


globals().update({name: make(op) for name, op in OPS.items()})
__all__ = list(OPS)

if TYPE_CHECKING:
    def __getattr__(name: str) -> Callable[..., Any]: ...  # the functions above
