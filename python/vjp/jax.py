# SPDX-License-Identifier: MIT
"""vjp for jax: the ops as functions under jit, grad and vmap, on the CPU.

    loss, grads = jax.value_and_grad(lambda g: vjp.jax.layer_norm(x, g).sum())(gamma)

A function returns the output that gradients come from (y, or the loss); with `outputs=True` all of them. XLA calls the kernels
directly; they run on vjp's own threads. The backward passes are vjp's, so there are no second derivatives and no forward mode.
vmap merges the new axis into the op's own leading axes where the op has them, and otherwise calls the op once per element.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from vjp import _core
from vjp._table import TABLE, Links

TARGET = "vjp"
jax.ffi.register_ffi_target(TARGET, _core.jax_handler(), platform="cpu")

# Functions that take a new leading axis as it is, with the inputs that must all have it; no other input may.
LEADING = {
    "layer_norm": ("x",), "rms_norm": ("x",), "rope": ("x",), "rope_backward": ("dy",), "swiglu": ("gate", "up"),
    "swiglu_backward": ("dy", "gate", "up"), "scale": ("x",), "scale_backward": ("dy",), "cast": ("x",), "cast_backward": ("dy",),
    "linear": ("a", "residual", "gate"), "add": ("a",), "mul": ("a",),
}
# Functions whose first axis is a batch that the new axis can be merged into.
BATCHED = {"attention": ("q", "k", "v"), "attention_backward": ("dy", "q", "k", "v", "y", "lse"), "group_norm": ("x",), "maxpool2d": ("x",),
           "maxpool2d_backward": ("dy", "argmax"), "conv2d": ("x",)}
AXIS_FROM_END = {"cumsum": ("x",), "cumsum_backward": ("dy",)}  # as LEADING where the axis is negative


def output_dtype(dtype: str) -> Any:
    return jnp.int32 if dtype == "int64" and not jax.config.read("jax_enable_x64") else jnp.dtype(dtype)


def launch(name: str, keywords: dict[str, Any], wanted: int, like: dict[int, Any], tensors: tuple) -> tuple:
    """Calls the kernel. `like` gives the dtypes of outputs that have the one of another tensor."""
    described = tuple(None if t is None else (jnp.dtype(t.dtype).name, tuple(t.shape)) for t in tensors)
    words, outputs = _core.jax_prepare(name, described, keywords, wanted)
    results = [jax.ShapeDtypeStruct(shape, like.get(i, output_dtype(dtype))) for i, (dtype, shape) in enumerate(outputs) if wanted >> i & 1]
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    made = iter(call(*(t for t in tensors if t is not None), call=np.array(words, np.int64)))
    return tuple(next(made) if wanted >> i & 1 else None for i in range(len(outputs)))


def batches(name: str, keywords: dict[str, Any], batched: dict[str, bool]) -> str:
    """How a new leading axis of these inputs is computed: "leading", "merged" or "sequential"."""
    axis = AXIS_FROM_END.get(name) if keywords.get("axis", -1) < 0 else None
    for table, answer in ((LEADING, "leading"), (BATCHED, "merged"), ({name: axis} if axis else {}, "leading")):
        inputs = table.get(name)
        if inputs and all(has == (slot in inputs) for slot, has in batched.items()):
            return answer
    return "sequential"


def compute(name: str, keywords: dict[str, Any], wanted: int, like: dict[int, Any], tensors: tuple) -> tuple:
    """launch(), with a rule for vmap."""
    present = [slot for (slot, _, _), t in zip(TABLE[name].inputs, tensors) if t is not None]

    def plain(*given):
        rest = iter(given)
        return launch(name, keywords, wanted, like, tuple(None if t is None else next(rest) for t in tensors))

    call = jax.custom_batching.custom_vmap(plain)

    @call.def_vmap
    def rule(size, batched, *given):
        how = batches(name, keywords, dict(zip(present, batched)))
        if how == "sequential":
            moved = [t if has else jnp.broadcast_to(t, (size, *t.shape)) for t, has in zip(given, batched)]
            made = jax.lax.map(lambda one: plain(*one), tuple(moved))
        elif how == "leading":
            rest = iter(given)
            made = compute(name, keywords, wanted, like, tuple(None if t is None else next(rest) for t in tensors))
        else:
            rest = iter([t.reshape(-1, *t.shape[2:]) if has else t for t, has in zip(given, batched)])
            made = compute(name, keywords, wanted, like, tuple(None if t is None else next(rest) for t in tensors))
            made = tuple(None if t is None else t.reshape(size, -1, *t.shape[1:]) for t in made)
        return made, tuple(None if t is None else True for t in made)

    return call(*(t for t in tensors if t is not None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable(op: str, keywords: tuple, tensors: tuple) -> tuple:
    options = dict(keywords)
    return forward(LINKS[op], options, -1 if options.pop("outputs") else LINKS[op].wanted(tensors, options, False), tensors)


def forward(links: Links, options: dict[str, Any], wanted: int, tensors: tuple) -> tuple:
    dtype = {0: jnp.dtype(options.pop("dtype"))} if "dtype" in options else {}
    return compute(links.name, options, wanted & (1 << len(links.outputs)) - 1, dtype, tensors)


def save(op: str, keywords: tuple, tensors: tuple):
    links, options = LINKS[op], dict(keywords)
    everything = options.pop("outputs")
    wanted = links.wanted(tensors, options, True)
    made = forward(links, dict(options), -1 if everything else wanted, tensors)
    kept = links.saved(tensors, {**options, "outputs": wanted}, made)
    result = made if everything else tuple(t if i in links.differentiable else None for i, t in enumerate(made))
    return result, (kept, tensors)


def differentiate(op: str, keywords: tuple, saved: tuple, gradients: tuple) -> tuple:
    links = LINKS[op]
    kept, tensors = saved
    options = {key: value for key, value in links.options(tensors, dict(keywords)).items() if key != "dtype"}
    wanted = sum(1 << i for i, at in enumerate(links.gradients) if at is not None and tensors[at] is not None)
    like = {i: tensors[at].dtype for i, at in enumerate(links.gradients)
            if at is not None and tensors[at] is not None and (links.parameters[i] or op == "cast")}
    made = compute(f"{op}_backward", options, wanted, like, tuple(links.arguments(gradients, kept)))
    result: list = [None] * len(tensors)
    for at, gradient in zip(links.gradients, made):
        if at is not None:
            result[at] = gradient
    return (tuple(result),)


differentiable.defvjp(save, differentiate)
LINKS = {row.op: Links(row.op) for row in TABLE.values() if row.backward}


def make(op: str) -> Callable:
    row, links = TABLE[op], LINKS[op]
    signature = row.signature(outputs=False)

    def function(*tensors, **keywords):
        bound = signature.bind(*tensors, **keywords).arguments
        given = tuple(None if bound.get(slot) is None else jnp.asarray(bound[slot]) for slot in links.inputs)
        options = {key: value for key, value in bound.items() if key not in links.inputs}
        if "dtype" in options:
            options["dtype"] = jnp.dtype(options["dtype"]).name
        everything = bool(options.pop("outputs", False))
        made = differentiable(op, (*sorted(options.items()), ("outputs", everything)), given)
        return made if everything and len(made) > 1 else made[links.differentiable[0]]

    function.__name__ = function.__qualname__ = op
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = f"vjp's {op}, differentiable. `help(vjp.{op})` describes the arguments; this returns {links.outputs[0]} alone unless outputs=True."
    return function


globals().update({name: make(name) for name in LINKS})
__all__ = list(LINKS)

if TYPE_CHECKING:
    def __getattr__(name: str) -> Callable: ...  # the functions above
