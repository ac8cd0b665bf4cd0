#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""vjp beside PyTorch on the same memory, in one run: time of each pass of each op, forward and backward.

Both sides get the same tensors, the same threads and the same number of turns. They take turns batch by batch, each
after a pause in which the other's threads fall asleep, and the best time of each counts. Before anything is timed,
vjp's result is compared with PyTorch's, computed in f32 from the same numbers; a pass that differs is reported and not
timed. Where PyTorch's own 16-bit result is off, that is reported too.

What is fair and what is not:
  - PyTorch allocates its results. glibc is set to keep freed memory, so that those allocations cause no page faults.
  - PyTorch's backward is called directly (native_layer_norm_backward, ...), without autograd around it, wherever there
    is such a function. rms_norm has none on the CPU, so its backward is autograd's over F.rms_norm; attention's is
    autograd's over F.scaled_dot_product_attention, whose forward saves its log-sum-exp as vjp's does. rope is not part
    of PyTorch: it is written as model code writes it, in eager mode. cumsum's backward is flip, cumsum, flip, as
    autograd does it. cross_entropy is log_softmax and nll_loss with their own backward functions, as autograd calls
    them; swiglu is silu and a product, in the backward silu's own function and products.
  - Both save what the backward needs (mean and rstd, the argmax, the pre-activation) and both use it. vjp's argmax is
    i32, PyTorch's is always i64.
  - Steps of training change the weights in place on both sides. torch.optim keeps the averages of 16-bit weights in 16
    bits, vjp in f32, which is more to move.

On a GPU (--device cuda) each side's calls are recorded in a CUDA graph and replayed, timed by the GPU's own events, so
neither Python nor launches nor PyTorch's allocator are part of any figure; the calls cycle through several sets of
tensors, so that nothing comes from the cache.

The shapes are those of `vjp bench`: on the CPU large ones grow until the backward moves four times the size of the
last-level cache. The share of the limit is vjp's, and the limit that of `vjp bench`: the minimum bytes over the
bandwidth of a copy; for linear its products at the rate of PyTorch's own matrix product, and the pass between them at
the bandwidth of a copy. Copy and product take turns with the two sides. The copy here is PyTorch's, with ordinary
stores, so shares are higher than those of `vjp bench`; --markdown leaves them out.

    python bench/vs_torch.py [OP ...] [--device cpu|cuda] [--dtype f32|bf16|f16] [--threads N] [--markdown | --json]
                             [--quick] [--small]

Needs torch and a built libvjp.so; neither building nor testing vjp needs this script.
"""

import argparse
import ctypes
import datetime
import json
import math
import os
import pathlib
import platform
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("vs_torch.py: there is no torch here; python -m venv .venv && .venv/bin/pip install torch")

aten = torch.ops.aten
ROOT = pathlib.Path(__file__).resolve().parent.parent


# ---- vjp through ctypes: the structs of vjp.h, and calls by the op table ---------------------------------


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_context", ctypes.c_void_p),
        ("instruction_set", ctypes.c_char_p),
        ("matrix_products", ctypes.c_char_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("allocate_context", ctypes.c_void_p),
        ("log", ctypes.c_void_p),
        ("log_context", ctypes.c_void_p),
    ]


class Slot(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("shape", ctypes.c_char_p),
        ("about", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("flags", ctypes.c_uint32),
        ("aliases", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 3),
    ]


class Attribute(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("about", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("offset", ctypes.c_size_t),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("choices", ctypes.POINTER(ctypes.c_char_p)),
        ("reserved", ctypes.c_uint64 * 2),
    ]


class Pass(ctypes.Structure):
    _fields_ = [("slots", ctypes.POINTER(Slot)), ("count", ctypes.c_size_t), ("outputs", ctypes.c_size_t)]


class Op(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("family", ctypes.c_char_p),
        ("about", ctypes.c_char_p),
        ("formula", ctypes.c_char_p),
        ("passes", Pass * 2),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_size_t),
        ("attribute_bytes", ctypes.c_size_t),
        ("reserved", ctypes.c_uint64 * 4),
    ]


class Cost(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_double), ("flops", ctypes.c_double), ("reserved", ctypes.c_double * 2)]


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 4, torch.int64: 5}
PASSES = {"forward": 0, "backward": 1}
ATTRIBUTE_REAL, ATTRIBUTE_CHOICE = 1, 3


def describe(tensor):
    if not tensor.is_contiguous():
        raise ValueError("vjp takes packed tensors")
    made = Tensor(data=tensor.data_ptr(), dtype=DTYPES[tensor.dtype], ndim=tensor.dim())
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        made.shape[axis], made.stride[axis] = size, stride
    return made


class Vjp:
    """One device of the library at `path`."""

    def __init__(self, path, device, threads, stream=None, products=None):
        self.lib = lib = ctypes.CDLL(str(path))
        lib.vjp_op_find.restype = lib.vjp_op_describe.restype = ctypes.c_void_p
        lib.vjp_op_describe.argtypes = [ctypes.c_void_p]
        for name in ("vjp_error", "vjp_device_summary", "vjp_version"):
            getattr(lib, name).restype = ctypes.c_char_p
        self.device = ctypes.c_void_p()
        options = Options(struct_size=ctypes.sizeof(Options), threads=threads, stream=stream, matrix_products=products)
        self.check(lib.vjp_open(device.encode(), ctypes.byref(options), ctypes.byref(self.device)))

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.vjp_error(self.device).decode())

    def close(self):
        self.lib.vjp_close(self.device)

    def summary(self):
        return f"vjp {self.lib.vjp_version().decode()}: {self.lib.vjp_device_summary(self.device).decode()}"

    def prepare(self, op, which, tensors, attributes):
        """A function that runs this call, and its minimum cost. Everything is looked up once, here."""
        handle = ctypes.c_void_p(self.lib.vjp_op_find(op.encode()))
        if not handle:
            raise RuntimeError(f"libvjp.so has no op {op}")
        info = Op.from_address(self.lib.vjp_op_describe(handle))
        slots = info.passes[PASSES[which]]
        names = [slots.slots[i].name.decode() for i in range(slots.count)]
        unknown = set(tensors) - set(names)
        if unknown:
            raise RuntimeError(f"{op}.{which} has no {', '.join(sorted(unknown))}")
        described = [describe(tensors[n]) if tensors.get(n) is not None else None for n in names]
        pointers = (ctypes.POINTER(Tensor) * slots.count)(
            *[ctypes.pointer(d) if d is not None else ctypes.POINTER(Tensor)() for d in described]
        )
        values = ctypes.create_string_buffer(info.attribute_bytes) if info.attribute_bytes else None
        self.lib.vjp_op_defaults(handle, values)
        for i in range(info.attribute_count):
            row = info.attributes[i]
            if row.name.decode() not in attributes:
                continue
            value = attributes[row.name.decode()]
            if row.type == ATTRIBUTE_CHOICE:
                k = 0
                while row.choices[k] != value.encode():
                    k += 1
                value = k
            kind = ctypes.c_double if row.type == ATTRIBUTE_REAL else ctypes.c_int64
            kind.from_buffer(values, row.offset).value = value
        call = (self.device, handle, PASSES[which], pointers, ctypes.c_size_t(slots.count), values)
        need, cost = ctypes.c_size_t(), Cost()
        self.check(self.lib.vjp_workspace_size(*call, ctypes.byref(need)))
        self.check(self.lib.vjp_reserve(self.device, need))
        self.check(self.lib.vjp_min_cost(*call, ctypes.byref(cost)))
        entry, keep = self.lib.vjp_call, (described, values, tensors)

        def run(keep=keep):
            status = entry(*call)
            if status:
                self.check(status)

        return run, cost


# ---- The ops, on both sides ------------------------------------------------------------------------------
#
# A case is a function of a maker of tensors. It returns, for each pass: vjp's tensors by name (outputs empty),
# vjp's attributes, and a function that gives PyTorch's outputs in the order of the names in `outputs`.


class Make:
    """Random tensors, always the same ones, in the memory of the device under test.

    Their numbers are rounded to the dtype under test. With `wide` they are then held as f32: PyTorch's functions on
    those say what the result should be, since some of its 16-bit gradients are summed in 16 bits.
    """

    def __init__(self, dtype, place, wide=False):
        self.rounded, self.dtype, self.place = dtype, torch.float32 if wide else dtype, place
        self.random = torch.Generator(place).manual_seed(1)
        self.sums = torch.float64 if wide else torch.float32  # what a sum of very many is kept in

    def hold(self, values):
        return values.to(self.rounded).to(self.dtype).to(self.place)

    def normal(self, *shape, scale=1.0):
        return self.hold(torch.randn(*shape, generator=self.random, device=self.place) * scale)

    def integers(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.random, device=self.place)

    def skewed(self, high, *shape):
        """Row i as often as 1/(i + 1), as words in text are."""
        u = torch.rand(*shape, generator=self.random, device=self.place, dtype=torch.float64)
        return (torch.pow(high + 1.0, u).long() - 1).clamp(0, high - 1)

    def empty(self, *shape, dtype=None):
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.place)


def statistics(groups):
    """Mean and rstd of each row in f32, as vjp saves them; PyTorch saves them in the storage type."""
    _, mean, rstd = aten.native_layer_norm(groups.float(), [groups.shape[-1]], None, None, 1e-5)
    return {"mean": mean, "rstd": rstd}


def layer_norm(make, rows, dim):
    x, dy, gamma, beta = make.normal(rows, dim), make.normal(rows, dim), make.normal(dim), make.normal(dim)
    _, mean, rstd = aten.native_layer_norm(x, [dim], gamma, beta, 1e-5)
    saved = {name: value.reshape(rows) for name, value in statistics(x).items()}
    f32 = torch.float32
    yield (
        "forward",
        {"y": make.empty(rows, dim), "mean": make.empty(rows, dtype=f32), "rstd": make.empty(rows, dtype=f32)},
        {"x": x, "gamma": gamma, "beta": beta},
        {"eps": 1e-5},
        lambda: aten.native_layer_norm(x, [dim], gamma, beta, 1e-5),
    )
    yield (
        "backward",
        {"dx": make.empty(rows, dim), "dgamma": make.empty(dim), "dbeta": make.empty(dim)},
        {"dy": dy, "x": x, "gamma": gamma, **saved},
        {"eps": 1e-5},
        lambda: aten.native_layer_norm_backward(dy, x, [dim], mean, rstd, gamma, beta, [True, True, True]),
    )


def rms_norm(make, rows, dim):
    x, dy, gamma = make.normal(rows, dim), make.normal(rows, dim), make.normal(dim)
    rstd = (x.double().square().mean(-1) + 1e-6).rsqrt().float()
    yield (
        "forward",
        {"y": make.empty(rows, dim)},
        {"x": x, "gamma": gamma},
        {"eps": 1e-6},
        lambda: (F.rms_norm(x, [dim], gamma, 1e-6),),
    )
    leaf_x, leaf_gamma = x.detach().requires_grad_(), gamma.detach().requires_grad_()
    y = F.rms_norm(leaf_x, [dim], leaf_gamma, 1e-6)
    yield (
        "backward",
        {"dx": make.empty(rows, dim), "dgamma": make.empty(dim)},
        {"dy": dy, "x": x, "gamma": gamma, "rstd": rstd},
        {"eps": 1e-6},
        lambda: torch.autograd.grad(y, (leaf_x, leaf_gamma), dy, retain_graph=True),
    )


def group_norm(make, batch, channels, height, width, groups):
    shape = (batch, channels, height, width)
    x, dy, gamma, beta = make.normal(*shape), make.normal(*shape), make.normal(channels), make.normal(channels)
    sizes = (batch, channels, height * width, groups)
    _, mean, rstd = aten.native_group_norm(x, gamma, beta, *sizes, 1e-5)
    saved = {name: value.reshape(batch, groups) for name, value in statistics(x.reshape(batch * groups, -1)).items()}
    f32 = torch.float32
    yield (
        "forward",
        {
            "y": make.empty(*shape),
            "mean": make.empty(batch, groups, dtype=f32),
            "rstd": make.empty(batch, groups, dtype=f32),
        },
        {"x": x, "gamma": gamma, "beta": beta},
        {"groups": groups, "eps": 1e-5},
        lambda: aten.native_group_norm(x, gamma, beta, *sizes, 1e-5),
    )
    yield (
        "backward",
        {"dx": make.empty(*shape), "dgamma": make.empty(channels), "dbeta": make.empty(channels)},
        {"dy": dy, "x": x, "gamma": gamma, **saved},
        {"groups": groups, "eps": 1e-5},
        lambda: aten.native_group_norm_backward(dy, x, mean, rstd, gamma, *sizes, [True, True, True]),
    )


def rope(make, batch, length, heads, head_dim):
    shape = (batch, length, heads, head_dim)
    x, dy = make.normal(*shape), make.normal(*shape)
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cosine, sine = make.hold(torch.cos(angle)), make.hold(torch.sin(angle))

    def rotate(values, cos, sin):
        first, second = values.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    cos, sin = cosine[:, None, :], sine[:, None, :]
    minus_sin = -sin
    tables = {"cosine": cosine, "sine": sine}
    yield "forward", {"y": make.empty(*shape)}, {"x": x, **tables}, {}, lambda: (rotate(x, cos, sin),)
    yield "backward", {"dx": make.empty(*shape)}, {"dy": dy, **tables}, {}, lambda: (rotate(dy, cos, minus_sin),)


def cumsum(make, rows, length):
    x, dy = make.normal(rows, length), make.normal(rows, length)
    yield "forward", {"y": make.empty(rows, length)}, {"x": x}, {}, lambda: (torch.cumsum(x, -1),)
    yield "backward", {"dx": make.empty(rows, length)}, {"dy": dy}, {}, lambda: (dy.flip(-1).cumsum(-1).flip(-1),)


def gather(make, rows, dim, count, skewed=False):
    index = make.skewed(rows, count) if skewed else make.integers(rows, count)
    table, dy = make.normal(rows, dim), make.normal(count, dim)
    yield (
        "forward",
        {"y": make.empty(count, dim)},
        {"table": table, "index": index},
        {},
        lambda: (F.embedding(index, table),),
    )
    yield (
        "backward",
        {"dtable": make.empty(rows, dim)},
        {"dy": dy, "index": index},
        {},
        lambda: (aten.embedding_dense_backward(dy, index, rows, -1, False),),
    )


def maxpool2d(make, batch, channels, height, width, kernel, stride, padding):
    x = make.normal(batch, channels, height, width)
    window = ([kernel] * 2, [stride] * 2, [padding] * 2, [1, 1], False)
    y, argmax = aten.max_pool2d_with_indices(x, *window)
    dy = make.normal(*y.shape)
    attributes = {f"{name}_{axis}": value for axis in "hw" for name, value in
                  (("kernel", kernel), ("stride", stride), ("padding", padding))}
    yield (
        "forward",
        {"y": make.empty(*y.shape), "argmax": make.empty(*y.shape, dtype=torch.int32)},
        {"x": x},
        attributes,
        lambda: aten.max_pool2d_with_indices(x, *window),
    )
    yield (
        "backward",
        {"dx": make.empty(*x.shape)},
        {"dy": dy, "argmax": argmax.int()},
        attributes,
        lambda: (aten.max_pool2d_with_indices_backward(dy, x, *window, argmax),),
    )


def linear(make, m, k, n):
    a, b, bias = make.normal(m, k), make.normal(k, n, scale=k**-0.5), make.normal(n)
    dy, pre = make.normal(m, n), torch.addmm(bias, a, b)

    def forward():
        made = torch.addmm(bias, a, b)
        return F.gelu(made, approximate="tanh"), made

    def backward():
        dpre = aten.gelu_backward(dy, pre, approximate="tanh")
        return dpre @ b.t(), a.t() @ dpre, dpre.sum(0)

    yield (
        "forward",
        {"y": make.empty(m, n), "pre": make.empty(m, n)},
        {"a": a, "b": b, "bias": bias},
        {"activation": "gelu_tanh"},
        forward,
    )
    yield (
        "backward",
        {"da": make.empty(m, k), "db": make.empty(k, n), "dbias": make.empty(n)},
        {"dy": dy, "a": a, "b": b, "bias": bias, "pre": pre},
        {"activation": "gelu_tanh"},
        backward,
    )


def sum_squares(make, rows, dim):
    x = make.normal(rows, dim)
    yield (
        "forward",
        {"y": make.empty(dtype=torch.float32)},
        {"x": x},
        {},
        lambda: (torch.linalg.vector_norm(x, dtype=make.sums).square(),),
    )


def in_place(make, shape, optimiser, state, scalars, attributes):
    """A step on both sides, each with its own weights and averages, which are changed in place."""
    w, g = make.normal(*shape), make.normal(*shape)
    kept = {"w": w.clone(), **{slot: torch.zeros(shape, device=make.place) for slot in state}}
    parameter = torch.nn.Parameter(w)
    parameter.grad = g
    step = optimiser([parameter])

    def theirs():
        step.step()
        return (parameter.detach(), *(step.state[parameter][key] for key in state.values()))

    outputs = {slot + "_out": tensor for slot, tensor in kept.items()}
    yield "forward", outputs, {**kept, "g": g, **scalars}, attributes, theirs


def adamw(make, rows, dim, how):
    scalars = {"lr": torch.tensor(1e-3, device=make.place), "step": torch.tensor(1, device=make.place)}
    yield from in_place(make, (rows, dim), lambda w: torch.optim.AdamW(w, lr=1e-3, weight_decay=0.01, **{how: True}),
                        {"m": "exp_avg", "v": "exp_avg_sq"}, scalars, {"weight_decay": 0.01})


def sgd(make, rows, dim, how):
    scalars = {"lr": torch.tensor(1e-3, device=make.place)}
    yield from in_place(make, (rows, dim), lambda w: torch.optim.SGD(w, lr=1e-3, momentum=0.9, **{how: True}),
                        {"momentum": "momentum_buffer"}, scalars, {"beta": 0.9})


def cross_entropy(make, rows, classes):
    logits, target = make.normal(rows, classes), make.integers(classes, rows)
    f32, mean, none = torch.float32, 1, -100
    dloss = torch.ones((), dtype=logits.dtype, device=make.place)
    log_softmax = aten._log_softmax(logits, -1, False)
    _, total = aten.nll_loss_forward(log_softmax, target, None, mean, none)

    def forward():
        made = aten._log_softmax(logits, -1, False)
        loss, _ = aten.nll_loss_forward(made, target, None, mean, none)
        return loss, logits[:, 0].float() - made[:, 0].float()

    def backward():
        dmade = aten.nll_loss_backward(dloss, log_softmax, target, None, mean, none, total)
        return (aten._log_softmax_backward_data(dmade, log_softmax, -1, logits.dtype),)

    yield (
        "forward",
        {"loss": make.empty(dtype=f32), "lse": make.empty(rows, dtype=f32)},
        {"logits": logits, "target": target},
        {},
        forward,
    )
    yield (
        "backward",
        {"dlogits": make.empty(rows, classes)},
        {"dloss": dloss.float(), "logits": logits, "target": target, "lse": torch.logsumexp(logits.float(), -1)},
        {},
        backward,
    )


def swiglu(make, rows, dim):
    gate, up, dy = make.normal(rows, dim), make.normal(rows, dim), make.normal(rows, dim)
    yield (
        "forward",
        {"y": make.empty(rows, dim)},
        {"gate": gate, "up": up},
        {},
        lambda: (F.silu(gate) * up,),
    )
    yield (
        "backward",
        {"dgate": make.empty(rows, dim), "dup": make.empty(rows, dim)},
        {"dy": dy, "gate": gate, "up": up},
        {},
        lambda: (aten.silu_backward(dy * up, gate), dy * F.silu(gate)),
    )


def conv2d(make, batch, channels, side, outs, kernel, padding, layout="channels_first"):
    last = layout == "channels_last"

    def picture(*shape, scale=1.0):
        made = make.normal(*shape, scale=scale)
        return made.contiguous(memory_format=torch.channels_last) if last else made

    def stored(*tensors):
        """As vjp takes them: the axes in the order of the memory."""
        return [t.permute(0, 2, 3, 1) if last and t.dim() == 4 else t for t in tensors]

    def empty(like):
        return make.empty(*stored(like)[0].shape)

    def exact(tensor):
        return tensor.to(make.sums) if make.sums == torch.float64 else tensor

    x, dy = picture(batch, channels, side, side), picture(batch, outs, side, side)
    weight = picture(outs, channels, kernel, kernel, scale=(channels * kernel * kernel) ** -0.5)
    bias = make.normal(outs)
    attributes = {"padding_h": padding, "padding_w": padding, "layout": layout}
    window = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], 1)
    stored_x, stored_dy, stored_weight = stored(x, dy, weight)
    yield (
        "forward",
        {"y": empty(dy)},
        {"x": stored_x, "weight": stored_weight, "bias": bias},
        attributes,
        lambda: stored(F.conv2d(exact(x), exact(weight), exact(bias), padding=padding)),
    )
    yield (
        "backward",
        {"dx": empty(x), "dweight": empty(weight), "dbias": make.empty(outs)},
        {"dy": stored_dy, "x": stored_x, "weight": stored_weight},
        attributes,
        lambda: stored(*aten.convolution_backward(exact(dy), exact(x), exact(weight), [outs], *window, [True] * 3)),
    )


def add(make, rows, dim, broadcast=False):
    a, b, dy = make.normal(rows, dim), make.normal(*((dim,) if broadcast else (rows, dim))), make.normal(rows, dim)
    yield "forward", {"y": make.empty(rows, dim)}, {"a": a, "b": b}, {}, lambda: (torch.add(a, b),)
    yield (
        "backward",
        {"da": make.empty(rows, dim), "db": make.empty(*b.shape)},
        {"dy": dy},
        {},
        lambda: (dy.clone(), dy.sum(0) if broadcast else dy.clone()),
    )


def mul(make, rows, dim, broadcast=False):
    a, b, dy = make.normal(rows, dim), make.normal(*((dim,) if broadcast else (rows, dim))), make.normal(rows, dim)
    yield "forward", {"y": make.empty(rows, dim)}, {"a": a, "b": b}, {}, lambda: (torch.mul(a, b),)
    yield (
        "backward",
        {"da": make.empty(rows, dim), "db": make.empty(*b.shape)},
        {"dy": dy, "a": a, "b": b},
        {},
        lambda: (dy * b, (dy * a).sum(0) if broadcast else dy * a),
    )


def scale(make, rows, dim):
    x, dy = make.normal(rows, dim), make.normal(rows, dim)
    attributes = {"factor": 0.125}
    yield "forward", {"y": make.empty(rows, dim)}, {"x": x}, attributes, lambda: (x * 0.125,)
    yield "backward", {"dx": make.empty(rows, dim)}, {"dy": dy}, attributes, lambda: (dy * 0.125,)


def mean(make, rows, dim, axis):
    x, dy = make.normal(rows, dim), make.normal(rows if axis else dim)
    attributes = {"axis": axis}
    yield "forward", {"y": make.empty(*dy.shape)}, {"x": x}, attributes, lambda: (x.mean(axis),)
    yield (
        "backward",
        {"dx": make.empty(rows, dim)},
        {"dy": dy},
        attributes,
        lambda: ((dy / x.shape[axis]).unsqueeze(axis).expand(rows, dim).contiguous(),),
    )


def dropout(make, rows, dim):
    """At p = 0 both give x, which is what can be compared; the words are drawn and compared all the same."""
    x, dy, counter = make.normal(rows, dim), make.normal(rows, dim), make.integers(1 << 20, 2)
    mask = torch.ones(rows, dim, dtype=torch.bool, device=x.device)
    attributes = {"p": 0.0}
    yield (
        "forward",
        {"y": make.empty(rows, dim)},
        {"x": x, "counter": counter},
        attributes,
        lambda: (torch.empty_like(x).bernoulli_(1.0).mul_(x),),
    )
    yield (
        "backward",
        {"dx": make.empty(rows, dim)},
        {"dy": dy, "counter": counter},
        attributes,
        lambda: (aten.native_dropout_backward(dy, mask, 1.0),),
    )


def cast(make, rows, dim):
    """To bf16; from 16 bits to f32."""
    x = make.normal(rows, dim)
    other = torch.bfloat16 if make.rounded == torch.float32 else torch.float32
    dy = make.normal(rows, dim)
    yield "forward", {"y": make.empty(rows, dim, dtype=other)}, {"x": x}, {}, lambda: (x.to(other),)
    yield "backward", {"dx": make.empty(rows, dim, dtype=other)}, {"dy": dy}, {}, lambda: (dy.to(other),)


def attention(make, batch, time, heads, kv_heads, dim):
    q, dy = make.normal(batch, time, heads, dim), make.normal(batch, time, heads, dim)
    k, v = make.normal(batch, time, kv_heads, dim), make.normal(batch, time, kv_heads, dim)
    grouped = heads != kv_heads

    def attend(q, k, v):  # PyTorch expects the heads before the time: views, which cost nothing
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                           enable_gqa=grouped)
        return y.transpose(1, 2)

    wide = [t.float() for t in (q, k.repeat_interleave(heads // kv_heads, 2))]
    scores = torch.einsum("bthd,bshd->bhts", *wide) * dim**-0.5
    scores.masked_fill_(torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    del scores, wide
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    y = attend(*leaves)
    f32 = torch.float32
    yield (
        "forward",
        {"y": make.empty(*q.shape), "lse": make.empty(*lse.shape, dtype=f32)},
        {"q": q, "k": k, "v": v},
        {},
        lambda: (attend(q, k, v), lse),
    )
    yield (
        "backward",
        {"dq": make.empty(*q.shape), "dk": make.empty(*k.shape), "dv": make.empty(*v.shape)},
        {"dy": dy, "q": q, "k": k, "v": v, "y": y.detach().contiguous(), "lse": lse},
        {},
        lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
    )


# The shapes of `vjp bench`: (op, arguments of its function above, how the table names them). GROWS is the size that
# grows until the backward moves enough.
GROWS = object()
LARGE = [
    (layer_norm, (GROWS, 768), "[{}, 768]"),
    (rms_norm, (GROWS, 4096), "[{}, 4096]"),
    (group_norm, (GROWS, 320, 32, 32, 32), "[{}, 320, 32, 32], 32 groups"),
    (rope, (GROWS, 128, 32, 128), "[{}, 128, 32, 128]"),
    (cumsum, (GROWS, 4096), "[{}, 4096]"),
    (gather, (50257, 768, GROWS), "[50257, 768] at [{}]"),
    (maxpool2d, (GROWS, 64, 112, 112, 3, 2, 1), "[{}, 64, 112, 112], 3x3 by 2"),
    (linear, (1024, 1024, 4096), "[1024, 1024] [1024, 4096] gelu"),
    (sum_squares, (GROWS, 1024), "[{}, 1024]"),
    (adamw, (GROWS, 1024, "fused"), "[{}, 1024] beside fused"),
    (adamw, (GROWS, 1024, "foreach"), "[{}, 1024] beside foreach"),
    (sgd, (GROWS, 1024, "fused"), "[{}, 1024] beside fused"),
    (sgd, (GROWS, 1024, "foreach"), "[{}, 1024] beside foreach"),
    (cross_entropy, (GROWS, 32000), "[{}, 32000]"),
    (cross_entropy, (GROWS, 256), "[{}, 256]"),
    (swiglu, (GROWS, 4096), "[{}, 4096]"),
    (conv2d, (32, 64, 56, 64, 3, 1), "[32, 64, 56, 56], 3x3"),
    (add, (GROWS, 768), "[{}, 768] of one shape"),
    (add, (GROWS, 768, True), "[{}, 768] + [768]"),
    (mul, (GROWS, 768), "[{}, 768] of one shape"),
    (mul, (GROWS, 768, True), "[{}, 768] * [768]"),
    (scale, (GROWS, 768), "[{}, 768]"),
    (mean, (GROWS, 4096, 1), "[{}, 4096], last axis"),
    (mean, (GROWS, 768, 0), "[{}, 768], first axis"),
    (dropout, (GROWS, 768), "[{}, 768]"),
    (cast, (GROWS, 768), "[{}, 768]"),
    (attention, (8, 256, 8, 4, 64), "[8, 256, 8 of 4, 64]"),
    (attention, (1, 2048, 16, 4, 64), "[1, 2048, 16 of 4, 64]"),
]
CARD = [
    (layer_norm, (16384, 4096), "[16384, 4096]"),
    (layer_norm, (8192, 8192), "[8192, 8192]"),
    (layer_norm, (16384, 1024), "[16384, 1024]"),
    (layer_norm, (65536, 256), "[65536, 256]"),
    (rms_norm, (16384, 4096), "[16384, 4096]"),
    (rms_norm, (8192, 8192), "[8192, 8192]"),
    (rms_norm, (16384, 1024), "[16384, 1024]"),
    (rms_norm, (65536, 256), "[65536, 256]"),
    (group_norm, (32, 320, 64, 64, 32), "[32, 320, 64, 64], 32 groups"),
    (rope, (8, 2048, 32, 128), "[8, 2048, 32, 128]"),
    (cumsum, (16384, 4096), "[16384, 4096]"),
    (gather, (50304, 1024, 16384, True), "[50304, 1024] at [16384], skewed"),
    (maxpool2d, (32, 64, 112, 112, 3, 2, 1), "[32, 64, 112, 112], 3x3 by 2"),
    (maxpool2d, (32, 64, 112, 112, 2, 2, 0), "[32, 64, 112, 112], 2x2 by 2"),
    (linear, (16384, 1024, 4096), "[16384, 1024] [1024, 4096] gelu"),
    (linear, (8192, 4096, 4096), "[8192, 4096] [4096, 4096] gelu"),
    (attention, (8, 1024, 16, 16, 64), "[8, 1024, 16, 64]"),
    (attention, (4, 4096, 16, 4, 64), "[4, 4096, 16 of 4, 64]"),
    (conv2d, (64, 64, 56, 64, 3, 1), "[64, 64, 56, 56], 3x3"),
    (conv2d, (64, 64, 56, 64, 3, 1, "channels_last"), "[64, 56, 56, 64], 3x3"),
    (conv2d, (64, 256, 28, 256, 3, 1), "[64, 256, 28, 28], 3x3"),
    (conv2d, (64, 256, 28, 256, 3, 1, "channels_last"), "[64, 28, 28, 256], 3x3"),
    (conv2d, (64, 256, 56, 64, 1, 0), "[64, 256, 56, 56], 1x1"),
    (conv2d, (64, 256, 56, 64, 1, 0, "channels_last"), "[64, 56, 56, 256], 1x1"),
]
SMALL = [
    (layer_norm, (1, 64), "[1, 64]"),
    (rms_norm, (1, 64), "[1, 64]"),
    (group_norm, (1, 32, 4, 4, 8), "[1, 32, 4, 4], 8 groups"),
    (rope, (1, 1, 1, 64), "[1, 1, 1, 64]"),
    (cumsum, (1, 64), "[1, 64]"),
    (gather, (64, 64, 1), "[64, 64] at [1]"),
    (maxpool2d, (1, 1, 8, 8, 2, 2, 0), "[1, 1, 8, 8], 2x2 by 2"),
    (linear, (1, 64, 64), "[1, 64] [64, 64] gelu"),
    (sum_squares, (1, 64), "[1, 64]"),
    (adamw, (1, 64, "fused"), "[1, 64] beside fused"),
    (sgd, (1, 64, "fused"), "[1, 64] beside fused"),
    (cross_entropy, (1, 64), "[1, 64]"),
    (swiglu, (1, 64), "[1, 64]"),
    (conv2d, (1, 4, 8, 8, 3, 1), "[1, 4, 8, 8], 3x3"),
    (add, (1, 64), "[1, 64]"),
    (mul, (1, 64), "[1, 64]"),
    (scale, (1, 64), "[1, 64]"),
    (mean, (1, 64, 1), "[1, 64]"),
    (dropout, (1, 64), "[1, 64]"),
    (cast, (1, 64), "[1, 64]"),
    (attention, (1, 1, 1, 1, 64), "[1, 1, 1, 64]"),
]


def cache_bytes():
    """Of the last-level cache; 32 MiB where the machine does not say."""
    sizes = [0]
    for level in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = level.read_text(encoding="utf-8").strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
    return max(sizes) or 32 << 20


def target_bytes(place, quick):
    """What a backward (on a GPU: the copy) should move: as `vjp bench` has it."""
    if place == "cuda":
        return 32 * torch.cuda.get_device_properties(0).L2_cache_size
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(cache_bytes() * (0.5 if quick else 4), free * 0.2)


def sized(vjp, case, sizes, text, dtype, place, target):
    """The sizes with GROWS replaced. Bytes grow linearly: two points give the size that reaches the target."""
    if GROWS not in sizes:
        return sizes, text

    def with_count(count):
        return tuple(count if size is GROWS else size for size in sizes)

    def min_bytes(count):
        *_, (which, outputs, inputs, attributes, _) = case(Make(dtype, place), *with_count(count))
        return vjp.prepare(case.__name__, which, {**outputs, **inputs}, attributes)[1].bytes

    one = min_bytes(1)
    count = max(1, 1 + math.ceil((target - one) / (min_bytes(2) - one)))
    return with_count(count), text.format(count)


# ---- Comparing and timing --------------------------------------------------------------------------------

TOLERANCE = {"f32": 2e-5, "tf32": 2e-3, "bf16": 1e-2, "f16": 2e-3}
PAUSE_S = 0.02  # longer than the threads of both sides spin before they sleep


def difference(ours, theirs):
    """Relative L2 difference; for indices the share that differs."""
    theirs = theirs.reshape(ours.shape)
    if not ours.dtype.is_floating_point:
        return (ours != theirs).double().mean().item()
    error = (ours.double() - theirs.double()).norm().item()
    return error / max(theirs.double().norm().item(), 1e-300)


class CpuClock:
    """Times calls on the host."""

    stream = None

    def time(self, run, repeats):
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats

    def forget(self):
        pass


class CudaClock:
    """Times what a call puts on the stream: recorded once in a CUDA graph, replayed between two events."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.recorded = {}

    def record(self, run):
        if run not in self.recorded:
            with torch.cuda.stream(self.stream):
                run()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                run()
            self.recorded[run] = graph
        return self.recorded[run]

    def time(self, run, repeats):
        graph = self.record(run)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / repeats

    def forget(self):
        self.recorded.clear()


CLOCKS = {"cpu": CpuClock, "cuda": CudaClock}


def best_of(clock, sides, seconds):
    """Best time of each of `sides`, which take turns. A turn: a pause, a call to wake the threads, a few timed ones."""
    repeats = [max(1, min(1000, int(0.002 / clock.time(run, 1)))) for run in sides]
    best = [float("inf")] * len(sides)
    end, turn = time.perf_counter() + seconds * len(sides), 0
    while turn < 3 or time.perf_counter() < end:
        turn += 1
        for i, run in enumerate(sides):
            if clock.stream is None:
                time.sleep(PAUSE_S)
            clock.time(run, 1)
            for _ in range(3):
                best[i] = min(best[i], clock.time(run, repeats[i]))
    return best


def in_turn(runs):
    """One function that calls all of them: one set of tensors after the other."""
    if len(runs) == 1:
        return runs[0]

    def run():
        for each in runs:
            each()

    return run


class Yardstick:
    """A copy and a matrix product, which alternate with what is measured."""

    def __init__(self, place, dtype, copied_bytes):
        self.sides = (8192, 4096, 4096) if place == "cuda" else (1024, 1024, 4096)  # less does not fill a GPU
        elements = int(copied_bytes / 8)
        self.source, self.target = torch.ones(elements, device=place), torch.empty(elements, device=place)
        m, k, n = self.sides
        self.a, self.b = torch.randn(m, k, device=place).to(dtype), torch.randn(k, n, device=place).to(dtype)
        self.c = torch.empty(m, n, device=place, dtype=dtype)

    def copy(self):
        self.target.copy_(self.source)

    def product(self):
        torch.mm(self.a, self.b, out=self.c)

    def bandwidth(self, seconds):
        return 8.0 * self.source.numel() / seconds

    def rate(self, seconds):
        return 2.0 * self.sides[0] * self.sides[1] * self.sides[2] / seconds


def between_bytes(which, outputs, inputs):
    """linear: what the pass between its products moves: the forward's pre; the backward's dy, pre and dpre."""
    if which == "forward":
        return outputs["y"].numel() * outputs["y"].element_size()
    return 3 * inputs["dy"].numel() * inputs["dy"].element_size()


def measure_pass(args, clock, yardstick, vjp, op, text, sets, right):
    """One row of the table; None where vjp has no kernel. `sets`: the pass over several sets of tensors; `right`: what
    each output of the first should be."""
    which, outputs, inputs, attributes, torch_run = sets[0]
    try:
        prepared = [vjp.prepare(op, which, {**one[1], **one[2]}, attributes) for one in sets]
        cost = prepared[0][1]
        prepared[0][0]()
        if clock.stream:
            clock.stream.synchronize()
    except RuntimeError as problem:
        print(f"vs_torch.py: {problem}", file=sys.stderr)
        return None
    errors = {name: difference(outputs[name], right[name]) for name in outputs}
    theirs = {name: difference(value, right[name]) for name, value in zip(outputs, torch_run())}
    worst = max(errors, key=errors.get)
    row = {"op": op, "pass": which, "shape": text, "dtype": args.dtype, "difference": errors[worst],
           "torch_difference": max(theirs.values())}
    if not errors[worst] <= TOLERANCE[args.products]:
        print(f"vs_torch.py: {op}.{which}: {worst} is off by {errors[worst]:.1e}: not timed", file=sys.stderr)
        return {**row, "agrees": False}
    for name, off in theirs.items():
        if not off <= TOLERANCE[args.products]:
            print(f"vs_torch.py: {op}.{which}: PyTorch's {name} is off by {off:.1e}, vjp's by {errors[name]:.1e}",
                  file=sys.stderr)
    sides = [in_turn([run for run, _ in prepared]), in_turn([one[-1] for one in sets]), yardstick.copy]
    sides += [yardstick.product] if cost.flops else []
    seconds = best_of(clock, sides, args.seconds)
    clock.forget()
    seconds[0] /= len(sets)
    seconds[1] /= len(sets)
    bandwidth = yardstick.bandwidth(seconds[2])
    limit = cost.bytes / bandwidth
    row["copy_gbps"] = bandwidth / 1e9
    if cost.flops:
        row["product_gflops"] = yardstick.rate(seconds[3]) / 1e9
        limit = cost.flops / yardstick.rate(seconds[3])
        if op == "linear":
            limit += between_bytes(which, outputs, inputs) / bandwidth
    return {
        **row,
        "agrees": True,
        "vjp_ms": seconds[0] * 1e3,
        "torch_ms": seconds[1] * 1e3,
        "speedup": seconds[1] / seconds[0],
        "limit_ms": limit * 1e3,
        "of_limit": limit / seconds[0],
    }


def count_sets(args, sizes_bytes):
    """On a GPU the other sets move eight times the size of its cache between two uses of one, as in `vjp bench`."""
    if args.place == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if sizes_bytes < cache / 4 else min(16, math.ceil(8 * cache / sizes_bytes))


def tensor_bytes(one):
    return sum(t.numel() * t.element_size() for part in one[1:3] for t in part.values())


def allow_tf32(allow):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow


def measure(args, clock, vjp, dtype):
    target = target_bytes(args.place, args.quick)
    yardstick = Yardstick(args.place, dtype, target)
    large = CARD if args.place == "cuda" else LARGE
    for case, sizes, text in large + (SMALL if args.small else []):
        if args.ops and case.__name__ not in args.ops:
            continue
        sizes, text = sized(vjp, case, sizes, text, dtype, args.place, target)
        first = list(case(Make(dtype, args.place), *sizes))
        count = count_sets(args, tensor_bytes(first[-1]))
        made = [first] + [list(case(Make(dtype, args.place), *sizes)) for _ in range(count - 1)]
        for i, wide in enumerate(case(Make(dtype, args.place, wide=True), *sizes)):
            allow_tf32(False)
            right = dict(zip(first[i][1], wide[-1]()))
            allow_tf32(args.tf32)
            del wide
            if args.place == "cuda":
                torch.cuda.synchronize()
            row = measure_pass(args, clock, yardstick, vjp, case.__name__, text, [one[i] for one in made], right)
            if row:
                yield row


# ---- Printing --------------------------------------------------------------------------------------------


def machine(place):
    if place == "cuda":
        return torch.cuda.get_device_name(0)
    name = platform.processor() or platform.machine()
    try:
        for line in open("/proc/cpuinfo", encoding="utf-8"):
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return name


HEAD = f"{'op':<11} {'pass':<9} {'shape':<34} {'vjp ms':>9} {'torch ms':>9} {'speed-up':>8} {'of limit':>8}"


def print_row(row):
    if not row["agrees"]:
        return
    print(
        f"{row['op']:<11} {row['pass']:<9} {row['shape']:<34} {row['vjp_ms']:9.3f} {row['torch_ms']:9.3f}"
        f" {row['speedup']:8.2f} {row['of_limit']:8.2f}",
        flush=True,
    )


def print_markdown(rows, caption):
    print(caption + "\n")
    print("| op | pass | shape | vjp ms | PyTorch ms | speed-up |")
    print("|---|---|---|---:|---:|---:|")
    for row in rows:
        if row["agrees"]:
            print(
                f"| {row['op']} | {row['pass']} | {row['shape']} | {row['vjp_ms']:.3f} | {row['torch_ms']:.3f} |"
                f" {row['speedup']:.2f} |"
            )


def keep_freed_memory():
    """Sets glibc to neither map nor return large blocks, so that newly allocated results cause no page faults."""
    try:
        libc = ctypes.CDLL(None)
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError):
        print("vs_torch.py: no mallopt() here: PyTorch's results may cost page faults", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(dict.fromkeys(case.__name__ for case, _, _ in LARGE))
    parser.add_argument("ops", nargs="*", metavar="OP", help="all of: " + ", ".join(names))
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"], default="f32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both; default: all cores")
    parser.add_argument("--device", choices=sorted(CLOCKS), default="cpu", dest="place")
    parser.add_argument("--tf32", action="store_true", help="round f32 operands of matrix products to TF32, on both sides")
    parser.add_argument("--library", default=ROOT / "build" / "libvjp.so", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="smaller tensors, less time")
    parser.add_argument("--small", action="store_true", help="also small shapes, where Python is part of every call")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="one object per line")
    args = parser.parse_args()
    for name in args.ops:
        if name not in names:
            parser.error(f"there is no op {name}; there are {', '.join(names)}")
    if not args.library.exists():
        sys.exit(f"vs_torch.py: there is no {args.library}; build it (make) or name it with --library")
    args.seconds = 0.2 if args.quick else 1.0

    if args.place == "cpu":
        keep_freed_memory()
    torch.set_num_threads(args.threads)
    args.products = "tf32" if args.tf32 and args.dtype == "f32" else args.dtype
    allow_tf32(args.tf32)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[args.dtype]
    clock = CLOCKS[args.place]()
    if clock.stream:
        torch.cuda.set_stream(clock.stream)  # autograd runs a backward on its forward's stream: the recorded one
    stream = clock.stream.cuda_stream if clock.stream else None
    vjp = Vjp(args.library, args.place, args.threads, stream, b"tf32" if args.tf32 else None)
    threads = "" if clock.stream else f"{args.threads} thread{'s' if args.threads > 1 else ''}, "
    about = (
        f"{machine(args.place)}, {threads}{args.dtype}, torch {torch.__version__}, {vjp.summary()}, "
        f"{datetime.date.today()}"
    )
    extra = {"device": args.place, "threads": args.threads, "machine": machine(args.place), "torch": torch.__version__,
             "date": str(datetime.date.today())}
    plain = not (args.json or args.markdown)
    if plain:
        print(about + "\n\n" + HEAD)
    rows = []
    for row in measure(args, clock, vjp, dtype):
        rows.append(row)
        if args.json:
            print(json.dumps({**row, **extra}), flush=True)
        elif plain:
            print_row(row)
    limits = f"Copy {max(row.get('copy_gbps', 0) for row in rows):.1f} GB/s" if rows else ""
    if any("product_gflops" in row for row in rows):
        limits += f", matrix product {max(row.get('product_gflops', 0) for row in rows):.0f} GFLOP/s"
    if args.markdown:
        print_markdown(rows, f"{about}.")
    elif plain:
        print("\n" + limits)
    vjp.close()
    return 0 if rows and all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
