# SPDX-License-Identifier: MIT
"""torch.ops.vjp.*: every op and pass as an op of torch, with schemas from vjp's op table.

A schema has the tensors of the pass, then keywords: the op's attributes, `dtype` where the op leaves it open (cast), `outputs`
where there are several (bit i: compute output i; one that is not computed is an empty tensor), and `wide` for the backward
passes of parameters (bit i: gradient i is f32 although the activations have 16 bits).

The kernels for the CPU are C functions (python/src/torch.c) where torch has the C functions that they need, from 2.10 on, and
otherwise Python functions over vjp._core, as those for CUDA always are. Both give the same bits. Fake kernels compute shapes alone,
for torch.compile.

Beside vjp's own ops there is rope_pair, rope of queries and keys: two calls, which are one launch on CUDA.
"""
from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Callable

import torch
from torch import Tensor

from vjp import _core
from vjp._table import TABLE, Pass


SIZES = ("rows", "height", "width")  # attributes that are a tensor's sizes, and so may be symbolic

_rope = TABLE["rope"]
# The passes of two calls as one: the first two inputs and the outputs are one of each call, the other inputs are shared.
PAIRS = {
    "rope_pair": Pass("rope_pair", False, [("q", "storage", False), ("k", "storage", False), *_rope.inputs[1:]],
                      [("q_out", "storage"), ("k_out", "storage")], _rope.attributes),
    "rope_pair_backward": Pass("rope_pair", True, [("dq_out", "storage", False), ("dk_out", "storage", False), *_rope.inputs[1:]],
                               [("dq", "storage"), ("dk", "storage")], _rope.attributes),
}
ROWS = {**TABLE, **PAIRS}


def schema(name: str) -> str:
    """The schema of a function: `swiglu(Tensor gate, Tensor up) -> Tensor`."""
    row = ROWS[name]
    tensors = [f"Tensor{'?' if optional else ''} {slot}{'=None' if i >= row.required() else ''}"
               for i, (slot, _, optional) in enumerate(row.inputs)]
    keywords = []
    for attribute, kind, default, _ in row.attributes:
        kind = "SymInt" if attribute in SIZES else kind
        keywords.append(f"{kind} {attribute}={default!r}".replace("'", '"'))
    if row.open_dtype():
        keywords.append("ScalarType dtype")
    if len(row.outputs) > 1:
        keywords.append("int outputs=-1")
    if row.widens():
        keywords.append("int wide=0")
    results = ", ".join("Tensor" for _ in row.outputs)
    return f"{name}({', '.join(tensors + (['*'] if keywords else []) + keywords)}) -> " + (f"({results})" if len(row.outputs) > 1 else results)


# ---- Shapes -----------------------------------------------------------------------------------------------------------

def window(size, kernel, stride, padding, dilation, ceil_mode=False):
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:  # a window that would begin past the edge
        count -= 1
    return count


def plane(shape, layout):
    """(batch, channels, height, width) of a picture's shape in this layout, and the function that goes back."""
    if layout == "channels_last":
        return (shape[0], shape[3], shape[1], shape[2]), lambda n, c, h, w: (n, h, w, c)
    return tuple(shape), lambda n, c, h, w: (n, c, h, w)


def pooled(x, a):
    (n, c, h, w), back = plane(x, a["layout"])
    return back(n, c,
                window(h, a["kernel_h"], a["stride_h"] or a["kernel_h"], a["padding_h"], a["dilation_h"], a["ceil_mode"]),
                window(w, a["kernel_w"], a["stride_w"] or a["kernel_w"], a["padding_w"], a["dilation_w"], a["ceil_mode"]))


def convolved(x, weight, a):
    (n, _, h, w), back = plane(x, a["layout"])
    (o, _, kernel_h, kernel_w), _ = plane(weight, a["layout"])
    return back(n, o, window(h, kernel_h, a["stride_h"], a["padding_h"], a["dilation_h"]),
                window(w, kernel_w, a["stride_w"], a["padding_w"], a["dilation_w"]))


def unpooled(dy, a):
    (n, c, _, _), back = plane(dy, a["layout"])
    return back(n, c, a["height"], a["width"])


def averaged(x, a):
    axis = a["axis"] % max(len(x), 1)
    return x[:axis] + (x[axis + a["axes"]:] if a["axes"] else ())


def product(shapes, a):
    return shapes["a"][:-1] + (shapes["b"][-2 if a["transpose_b"] else -1],)


def gathered(table, index, a):
    axis = a["axis"] % len(table)
    return table[:axis] + index + table[axis + 1:]


def scattered(dy, index, a):
    """The table's shape; a negative axis counts from the end of the table, which has one axis where dy has the index's."""
    axis = a["axis"] % (len(dy) - len(index) + 1)
    return dy[:axis] + (a["rows"],) + dy[axis + len(index):]


def trailing(dy, a):
    return dy if a["b_axes"] < 0 else dy[len(dy) - a["b_axes"]:]


# The shapes of the outputs by the shapes of the inputs, s, and the attributes, a; an absent input has no shape.
FORWARD: dict[str, Callable[[dict, dict], list]] = {
    "layer_norm": lambda s, a: [s["x"]] + 2 * [s["x"][:len(s["x"]) - a["axes"]]],
    "rms_norm": lambda s, a: [s["x"], s["x"][:len(s["x"]) - a["axes"]]],
    "group_norm": lambda s, a: [s["x"]] + 2 * [(s["x"][0], a["groups"])],
    "gather": lambda s, a: [gathered(s["table"], s["index"], a)],
    "maxpool2d": lambda s, a: 2 * [pooled(s["x"], a)],
    "linear": lambda s, a: 2 * [product(s, a)],
    "mean": lambda s, a: [averaged(s["x"], a)],
    "sum_squares": lambda s, a: [()],
    "clip": lambda s, a: [(), ()],
    "adamw": lambda s, a: 3 * [s["w"]],
    "sgd": lambda s, a: 2 * [s["w"]],
    "cross_entropy": lambda s, a: [(), s["logits"][:-1]],
    "linear_cross_entropy": lambda s, a: [(), s["x"][:-1]],
    "attention": lambda s, a: [s["q"], (s["q"][0], s["q"][2], s["q"][1])],
    "conv2d": lambda s, a: [convolved(s["x"], s["weight"], a)],
    "rope_pair": lambda s, a: [s["q"], s["k"]],
}

# Those gradients whose tensor is not among the inputs of the backward.
BACKWARD: dict[str, Callable[[dict, dict], Any]] = {
    "layer_norm.dgamma": lambda s, a: s["x"][len(s["x"]) - a["axes"]:],
    "layer_norm.dbeta": lambda s, a: s["x"][len(s["x"]) - a["axes"]:],
    "rms_norm.dgamma": lambda s, a: s["x"][len(s["x"]) - a["axes"]:],
    "rms_norm.dbeta": lambda s, a: s["x"][len(s["x"]) - a["axes"]:],
    "group_norm.dgamma": lambda s, a: s["x"][-1:] if a["layout"] == "channels_last" else s["x"][1:2],
    "group_norm.dbeta": lambda s, a: s["x"][-1:] if a["layout"] == "channels_last" else s["x"][1:2],
    "gather.dtable": lambda s, a: scattered(s["dy"], s["index"], a),
    "maxpool2d.dx": lambda s, a: unpooled(s["dy"], a),
    "linear.dbias": lambda s, a: s["dy"][-1:],
    "add.db": lambda s, a: trailing(s["dy"], a),
    "mul.db": lambda s, a: trailing(s["dy"], a),
    "conv2d.dbias": lambda s, a: s["dy"][-1:] if a["layout"] == "channels_last" else s["dy"][1:2],
    "linear_cross_entropy.loss": lambda s, a: (),
    "linear_cross_entropy.lse": lambda s, a: s["x"][:-1],
    "rope_pair.dq": lambda s, a: s["dq_out"],
    "rope_pair.dk": lambda s, a: s["dk_out"],
}


def shapes_of(row: Pass, shapes: dict, attributes: dict) -> list:
    if not row.backward:
        made = FORWARD.get(row.op)
        return made(shapes, attributes) if made else [shapes[row.inputs[0][0]]]
    result = []
    for name, _ in row.outputs:
        special = BACKWARD.get(f"{row.op}.{name}")
        same = shapes.get(name[1:])
        if row.op == "linear_cross_entropy" and name in ("loss", "lse") or same is None and special:
            result.append(special(shapes, attributes))  # type: ignore[misc]
        else:
            result.append(shapes["dy"] if same is None else same)
    return result


def storage_of(row: Pass, tensors: dict[str, Tensor]) -> torch.dtype:
    for name, kind, _ in row.inputs:
        if kind == "storage" and name in tensors:
            return tensors[name].dtype
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def new_outputs(name: str, tensors: dict[str, Tensor], attributes: dict[str, Any]) -> list[Tensor]:
    """Tensors for the results, uninitialised: the whole fake kernel, and the memory of the Python kernels."""
    row = ROWS[name]
    storage = storage_of(row, tensors)
    exact = torch.float64 if storage == torch.float64 else torch.float32
    wide = attributes.get("wide", 0)
    like = next(iter(tensors.values()))
    shapes = shapes_of(row, {key: tuple(t.shape) for key, t in tensors.items()}, attributes)
    result = []
    for i, ((slot, kind), shape) in enumerate(zip(row.outputs, shapes)):
        before = tensors.get(slot.removesuffix("_out"))  # a moment keeps its dtype
        dtype = {"moment": exact if before is None else before.dtype, "storage": storage, "parameter": exact if wide >> i & 1 else storage, "statistic": exact,
                 "argmax": torch.int64, "float": attributes.get("dtype")}[kind]
        wanted = attributes.get("outputs", -1) >> i & 1
        result.append(like.new_empty(shape if wanted else (0,), dtype=dtype))
    return result


def bound(name: str, arguments: tuple, keywords: dict) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that are present, and all attributes, by name."""
    row = ROWS[name]
    tensors = {slot[0]: value for slot, value in zip(row.inputs, arguments) if value is not None}
    attributes = {attribute: default for attribute, _, default, _ in row.attributes} | keywords
    if name == "linear_backward" and attributes.get("outputs", -1) == -1:  # as call.c has it
        left_out = "dresidual" if "gate" in tensors else "dgate"
        attributes["outputs"] = sum(1 << i for i, (slot, _) in enumerate(row.outputs) if slot != left_out)
    return tensors, attributes


def fake_kernel(name: str) -> Callable:
    def fake(*arguments, **keywords):
        made = new_outputs(name, *bound(name, arguments, keywords))
        return made[0] if len(made) == 1 else tuple(made)
    return fake


def python_kernel(name: str) -> Callable:
    """The kernel over vjp._core, which runs where the tensors are; on CUDA it is enqueued on torch's current stream."""
    row, run = ROWS[name], run_pair if name in PAIRS else run_one

    def kernel(*arguments, **keywords):
        tensors, attributes = bound(name, arguments, keywords)
        made = new_outputs(name, tensors, attributes)
        exact = made[0].device.type == "cpu" and torch.float64 in (storage_of(row, tensors), made[0].dtype)
        wanted = [i for i in range(len(made)) if attributes.get("outputs", -1) >> i & 1]
        options = {attribute: attributes[attribute] for attribute, _, _, _ in row.attributes}
        if wanted:
            run(name, {key: t.detach() for key, t in tensors.items()}, {**options, "device": "ref" if exact else None}, wanted, made)
        return made[0] if len(made) == 1 else tuple(made)
    return kernel


def run_one(name: str, tensors: dict[str, Tensor], options: dict[str, Any], wanted: list[int], made: list[Tensor]) -> None:
    _core.functions[name](**tensors, **options, outputs=tuple(TABLE[name].outputs[i][0] for i in wanted), out=tuple(made[i] for i in wanted))


def run_pair(name: str, tensors: dict[str, Tensor], options: dict[str, Any], wanted: list[int], made: list[Tensor]) -> None:
    own, single = [slot for slot, _, _ in PAIRS[name].inputs[:2]], name.replace("_pair", "")
    shared = {key: t for key, t in tensors.items() if key not in own}
    first = TABLE[single].inputs[0][0]
    _core.call_many(single, [{first: tensors[own[i]], **shared, **options, "out": made[i]} for i in wanted])


def pair_of_kernels(name: str) -> Callable:
    """The kernel of a pair on the CPU as two calls of the op, whose kernels in C start faster than those in Python."""
    single = getattr(torch.ops.vjp, name.replace("_pair", "")).default

    def kernel(first, second, *shared, outputs=-1, **keywords):
        return tuple(single(t, *shared, **keywords) if outputs >> i & 1 else t.new_empty(0) for i, t in enumerate((first, second)))
    return kernel


# ---- Registering ------------------------------------------------------------------------------------------------------

def c_functions() -> dict[str, int]:
    """The addresses of torch's C functions, of those that this torch has."""
    library = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    try:
        loaded = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", library))
    except OSError:
        return {}
    return {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in _core.torch_symbols() if hasattr(loaded, name)}


library = torch.library.Library("vjp", "DEF")
for _name in ROWS:
    library.define(schema(_name), tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_name, python_kernel(_name), "CUDA")
    torch.library.register_fake(f"vjp::{_name}", fake_kernel(_name), lib=library)

KERNELS = "Python"
if os.environ.get("VJP_TORCH_KERNELS") != "python" and _core.torch_register(c_functions()):
    KERNELS = "C"
    # A child has none of the threads that torch's pool had, and waiting for them would never end.
    os.register_at_fork(after_in_child=_core.torch_forget_pool)
for _name in PAIRS if KERNELS == "C" else ROWS:
    library.impl(_name, pair_of_kernels(_name) if KERNELS == "C" else python_kernel(_name), "CPU")
