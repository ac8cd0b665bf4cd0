#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes the golden files: small cases of every op, computed in float64 by PyTorch and its autograd.

    python3 make.py             writes the .safetensors files beside this script

It needs torch (2.4 or later) and mpmath. Building and testing vjp needs neither: the files are in the repository, and
tests/test_golden.c compares the reference backend with every one.

A file is one case. Its tensors are named "<pass>.<slot>" after the op table, inputs and outputs alike, in F64
(indices and argmax in I64); an absent tensor is NULL in the call. The metadata has "op", "attributes" (as `vjp run`
takes them) and "compare": "norm" (relative L2 error of an output) or "element" (relative error of every element).

Gradients come from autograd, never from the formulas that vjp uses. What torch lacks is written here differently from
src/ref: rope as a multiplication of complex numbers, activations at extreme arguments with mpmath's 1200 digits and a
difference quotient.
"""

import json
import math
import pathlib
import struct

import mpmath
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
torch.set_default_dtype(torch.float64)


def random(*shape, scale=1.0, offset=0.0):
    return torch.randn(shape) * scale + offset


def gradients(output, dy, inputs):
    """The gradient of <output, dy> by each named input that is present."""
    present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    found = torch.autograd.grad(output, list(present.values()), dy)
    return {"d" + name: gradient for name, gradient in zip(present, found)}


def leaf(tensor):
    return None if tensor is None else tensor.detach().clone().requires_grad_(True)


def safetensors(tensors, metadata):
    """The file's bytes, in a fixed order, so that making a case again changes nothing."""
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in sorted(tensors.items()):
        code = {torch.float64: "F64", torch.int64: "I64"}[tensor.dtype]
        values = tensor.flatten().tolist()
        packed = struct.pack(f"<{len(values)}{'d' if code == 'F64' else 'q'}", *values)
        header[name] = dict(dtype=code, shape=list(tensor.shape), data_offsets=[len(data), len(data) + len(packed)])
        data += packed
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(name, op, attributes, forward, backward, compare="norm"):
    tensors = {}
    for label, group in (("forward", forward), ("backward", backward)):
        for slot, tensor in group.items():
            if tensor is not None:
                tensors[f"{label}.{slot}"] = tensor.detach()
    metadata = {"op": op, "attributes": attributes, "compare": compare}
    (HERE / f"{op}_{name}.safetensors").write_bytes(safetensors(tensors, metadata))


# ---- Norms -------------------------------------------------------------------------------------------------


def norm_case(name, op, attributes, evaluate, inner, statistics, x, gamma, beta, saved):
    # dgamma and dbeta exist without gamma and beta too: those are then 1 and 0, and not in the file.
    inputs = dict(x=leaf(x), gamma=leaf(torch.ones(inner) if gamma is None else gamma),
                  beta=leaf(torch.zeros(inner) if beta is None else beta))
    y = evaluate(**inputs)
    dy = random(*y.shape)
    forward = dict(y=y, x=x, gamma=gamma, beta=beta, **statistics)
    backward = dict(dy=dy, x=x, gamma=gamma, **gradients(y, dy, inputs))
    if saved:
        backward.update(statistics)
    write(name, op, attributes, forward, backward)


def layer_norm(name, shape, axes=1, eps=1e-5, gamma=True, beta=True, saved=False, scale=1.0, offset=0.0):
    x = random(*shape, scale=scale, offset=offset)
    inner, dims = shape[len(shape) - axes:], tuple(range(len(shape) - axes, len(shape)))
    variance, mean = torch.var_mean(x, dim=dims, correction=0)
    norm_case(name, "layer_norm", f"axes={axes} eps={eps!r}",
              lambda x, gamma, beta: F.layer_norm(x, inner, gamma, beta, eps), inner,
              dict(mean=mean, rstd=torch.rsqrt(variance + eps)), x, random(*inner) if gamma else None,
              random(*inner) if beta else None, saved)


def rms_norm(name, shape, axes=1, eps=1e-6, gamma=True, beta=True, saved=False, scale=1.0):
    x = random(*shape, scale=scale)
    inner, dims = shape[len(shape) - axes:], tuple(range(len(shape) - axes, len(shape)))

    def evaluate(x, gamma, beta):
        return F.rms_norm(x, inner, gamma, eps) + beta

    rstd = torch.rsqrt(x.square().mean(dim=dims) + eps)
    norm_case(name, "rms_norm", f"axes={axes} eps={eps!r}", evaluate, inner, dict(rstd=rstd), x,
              random(*inner) if gamma else None, random(*inner) if beta else None, saved)


def group_norm(name, shape, groups, last=False, eps=1e-5, affine=True, saved=False, offset=0.0):
    x = random(*shape, offset=offset)
    channels = shape[-1] if last else shape[1]
    first = (lambda t: t.movedim(-1, 1)) if last else (lambda t: t)
    back = (lambda t: t.movedim(1, -1)) if last else (lambda t: t)
    variance, mean = torch.var_mean(first(x).reshape(shape[0], groups, -1), dim=2, correction=0)
    layout = "channels_last" if last else "channels_first"
    norm_case(name, "group_norm", f"groups={groups} layout={layout} eps={eps!r}",
              lambda x, gamma, beta: back(F.group_norm(first(x), groups, gamma, beta, eps)), (channels,),
              dict(mean=mean, rstd=torch.rsqrt(variance + eps)), x, random(channels) if affine else None,
              random(channels) if affine else None, saved)


# ---- rope, cumsum, gather ----------------------------------------------------------------------------------


def rope(name, shape, n_rot=0, pairing="half", rows=None, positions=None):
    time, head_dim = shape[-3], shape[-1]
    rotated = n_rot or head_dim
    rows = rows or time
    angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
    table = torch.polar(torch.ones_like(angles), angles)
    index = torch.arange(time) if positions is None else torch.tensor(positions)
    x = leaf(random(*shape))
    turn = table[index].unsqueeze(-2)  # [..., T, 1, n_rot/2]: the same for all heads
    head, rest = x[..., :rotated], x[..., rotated:]
    if pairing == "half":
        z = torch.complex(head[..., :rotated // 2], head[..., rotated // 2:]) * turn
        y = torch.cat([z.real, z.imag, rest], dim=-1)
    else:
        z = torch.complex(head[..., 0::2], head[..., 1::2]) * turn
        y = torch.cat([torch.view_as_real(z).flatten(-2), rest], dim=-1)
    dy = random(*shape)
    tables = dict(cosine=table.real, sine=table.imag, positions=None if positions is None else index)
    write(name, "rope", f"n_rot={n_rot} pairing={pairing}", dict(y=y, x=x, **tables),
          dict(dy=dy, **tables, **gradients(y, dy, dict(x=x))))


def cumsum(name, shape, axis, exclusive=False, reverse=False):
    x = leaf(random(*shape))
    ordered = x.flip(axis) if reverse else x
    if exclusive:  # a zero in front, and the last element left out
        kept = ordered.narrow(axis, 0, ordered.shape[axis] - 1)
        ordered = torch.cat([torch.zeros_like(ordered.narrow(axis, 0, 1)), kept], dim=axis)
    sums = torch.cumsum(ordered, axis)
    y = sums.flip(axis) if reverse else sums
    dy = random(*shape)
    attributes = f"axis={axis} exclusive={str(exclusive).lower()} reverse={str(reverse).lower()}"
    write(name, "cumsum", attributes, dict(y=y, x=x), dict(dy=dy, **gradients(y, dy, dict(x=x))))


def gather(name, shape, index, axis=0):
    table, index = leaf(random(*shape)), torch.tensor(index)
    place = axis % len(shape)
    y = table.index_select(axis, index.flatten()).reshape(*shape[:place], *index.shape, *shape[place + 1:])
    dy = random(*y.shape)
    write(name, "gather", f"axis={axis}", dict(y=y, table=table, index=index),
          dict(dy=dy, index=index, **gradients(y, dy, dict(table=table))))


# ---- maxpool2d ---------------------------------------------------------------------------------------------


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def maxpool2d(name, x, kernel=2, stride=None, padding=0, dilation=1, ceil=False, last=False, saved=False):
    """x is NCHW here; the file has it as `last` says."""
    kernel, padding, dilation = pair(kernel), pair(padding), pair(dilation)
    stride = pair(kernel if stride is None else stride)
    x = leaf(x)
    y, argmax = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)
    dy = random(*y.shape)
    dx = gradients(y, dy, dict(x=x))["dx"]
    lay = (lambda t: t.permute(0, 2, 3, 1)) if last else (lambda t: t)
    words = dict(kernel_h=kernel[0], kernel_w=kernel[1], stride_h=stride[0], stride_w=stride[1], padding_h=padding[0],
                 padding_w=padding[1], dilation_h=dilation[0], dilation_w=dilation[1], ceil_mode=str(ceil).lower(),
                 layout="channels_last" if last else "channels_first")
    backward = dict(dy=lay(dy), dx=lay(dx), **(dict(argmax=lay(argmax)) if saved else dict(x=lay(x))))
    write(name, "maxpool2d", " ".join(f"{k}={v}" for k, v in words.items()),
          dict(y=lay(y), argmax=lay(argmax), x=lay(x)), backward)


# ---- linear ------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def linear(name, a, b, activation="none", transpose=False, bias=True, saved=False, integers=False):
    """`a` and `b` are the shapes as vjp sees them."""
    n = b[-2] if transpose else b[-1]
    draw = (lambda *shape: torch.randint(-2, 3, shape).double()) if integers else random
    a, b, bias = leaf(draw(*a)), leaf(draw(*b)), leaf(draw(n)) if bias else None
    pre = torch.matmul(a, b.transpose(-1, -2) if transpose else b)
    if bias is not None:
        pre = pre + bias
    y = ACTIVATIONS[activation](pre)
    dy = random(*y.shape)
    inputs = dict(a=a, b=b, bias=bias)
    write(name, "linear", f"activation={activation} transpose_b={str(transpose).lower()}",
          dict(y=y, pre=pre, **inputs),
          dict(dy=dy, pre=pre if saved else None, **inputs, **gradients(y, dy, inputs)))


EXACT = {
    "relu": lambda x: x if x > 0 else mpmath.mpf(0),
    "gelu_tanh": lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "gelu_erf": lambda x: x * mpmath.ncdf(x),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "tanh": mpmath.tanh,
}
POINTS = [1e-300, 1e-9, 0.1, 0.7, 1.5, 3.0, 5.0, 9.0, 10.0, 15.0]
LIMITS = {"relu": (0, 1), "gelu_tanh": (0, 1), "gelu_erf": (0, 1), "silu": (0, 1), "sigmoid": (0, 0), "tanh": (0, 0)}


def extreme(activation, saved):
    """act and act' at single points: a is a column of points, b is 1, so da is act' itself."""
    points = [0.0] + [sign * p for p in POINTS for sign in (1, -1)]
    f = EXACT[activation]
    values, slopes = [], []
    with mpmath.workdps(1200):  # 1 + tanh loses 100 digits far from 0, the difference quotient 400 more
        step = mpmath.mpf("1e-400")
        for point in points:
            x = mpmath.mpf(point)
            values.append(float(f(x)))
            slopes.append(float((f(x + step) - f(x - step)) / (2 * step)))
    if activation == "relu":
        slopes[0] = 0.0  # at 0, where it has no derivative, by definition
    # Far from 0 the derivative equals its limit to more digits than a double has; the value is the line x or the limit.
    for far in (1e3, 1e30, 1e150, 1e300, float("inf")):
        below, above = LIMITS[activation]
        points += [far, -far]
        slopes += [float(above), float(below)]
        values += {"sigmoid": [1.0, 0.0], "tanh": [1.0, -1.0]}.get(activation, [far, 0.0])
    points, values, slopes = points + [float("nan")], values + [float("nan")], slopes + [float("nan")]
    column = lambda list_of: torch.tensor(list_of).reshape(-1, 1)
    a, one = column(points), torch.ones(1, 1)
    write(f"extreme_{activation}", "linear", f"activation={activation}", dict(y=column(values), a=a, b=one),
          dict(da=column(slopes), dy=torch.ones_like(a), a=a, b=one, pre=a if saved else None), compare="element")


def linear_nan():
    """A NaN in one row's pre: only that row's da is touched, and zero_nan turns it to 0."""
    pre = random(3, 2)
    pre[1, 0] = float("nan")
    b, a, dy = random(4, 2), random(3, 4), random(3, 2)
    slope = torch.where(pre.isnan(), torch.zeros(()), torch.cosh(pre).reciprocal() ** 2)
    write("zero_nan", "linear", "activation=tanh zero_nan=true", dict(y=torch.tanh(a @ b), a=a, b=b),
          dict(dy=dy, a=a, b=b, pre=pre, da=(dy * slope) @ b.T, db=a.T @ (dy * slope), dbias=(dy * slope).sum(0)))


# ---- Steps of training: torch.optim in float64 -------------------------------------------------------------


def sum_squares(name, x):
    write(name, "sum_squares", "", dict(x=x, y=torch.linalg.vector_norm(x.double()) ** 2), {})


def clip(name, squares, max_norm=1.0):
    """Without the 1e-6 that torch adds to the norm: a clamp of max_norm / norm."""
    squares = torch.tensor(squares)
    norm = squares.sqrt()
    scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones(())
    write(name, "clip", f"max_norm={max_norm!r}", dict(squares=squares, norm=norm, scale=scale), {})


def run(name, op, attributes, optimiser, state, shape, steps=4, max_norm=0.0, numbered=False):
    """Several steps of one optimiser, one file per step: each starts from the state that the last one left."""
    w = torch.nn.Parameter(random(*shape))
    step_of = optimiser([w])
    for k in range(1, steps + 1):
        inputs = {slot: step_of.state[w].get(key) if step_of.state[w] else None for slot, key in state.items()}
        inputs = {slot: torch.zeros_like(w) if t is None else t.clone() for slot, t in inputs.items()}
        g, lr = random(*shape, scale=3.0 / k), 0.5 / k
        scale = min(1.0, max_norm / torch.nn.utils.get_total_norm([g]).item()) if max_norm else None
        before = w.detach().clone()
        w.grad = g * scale if scale else g.clone()
        step_of.param_groups[0]["lr"] = lr
        step_of.step()
        outputs = {slot + "_out": step_of.state[w][key] for slot, key in state.items()}
        forward = dict(w=before, w_out=w.detach().clone(), g=g, lr=torch.tensor(lr), **inputs, **outputs)
        if scale:
            forward["scale"] = torch.tensor(scale)
        if numbered:
            forward["step"] = torch.tensor(k)
        write(f"{name}_{k}", op, attributes, {slot: t.clone() for slot, t in forward.items()}, {})


def adamw(name, shape, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, **how):
    run(name, "adamw", f"beta1={beta1!r} beta2={beta2!r} eps={eps!r} weight_decay={weight_decay!r}",
        lambda w: torch.optim.AdamW(w, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay),
        dict(m="exp_avg", v="exp_avg_sq"), shape, numbered=True, **how)


def sgd(name, shape, beta=0.9, weight_decay=0.0, nesterov=False, **how):
    run(name, "sgd", f"beta={beta!r} weight_decay={weight_decay!r} nesterov={str(nesterov).lower()}",
        lambda w: torch.optim.SGD(w, momentum=beta, weight_decay=weight_decay, nesterov=nesterov),
        dict(momentum="momentum_buffer"), shape, **how)
# ---- cross_entropy, swiglu ---------------------------------------------------------------------------------


def cross_entropy(name, logits, target, ignore=-100, reduction="mean", smoothing=0.0, saved=False):
    logits, target = leaf(logits), torch.tensor(target)
    classes = logits.shape[-1]
    loss = F.cross_entropy(logits.reshape(-1, classes), target.reshape(-1), ignore_index=ignore, reduction=reduction,
                           label_smoothing=smoothing)
    lse, dloss = torch.logsumexp(logits, -1), random()
    write(name, "cross_entropy", f"ignore_index={ignore} reduction={reduction} label_smoothing={smoothing!r}",
          dict(loss=loss, lse=lse, logits=logits, target=target),
          dict(dloss=dloss, logits=logits, target=target, lse=lse if saved else None,
               **gradients(loss, dloss, dict(logits=logits))))


def linear_cross_entropy(name, x, weight, target, ignore=-100, reduction="mean", smoothing=0.0):
    x, weight, target = leaf(x), leaf(weight), torch.tensor(target)
    logits = F.linear(x, weight)
    loss = F.cross_entropy(logits.reshape(-1, weight.shape[0]), target.reshape(-1), ignore_index=ignore,
                           reduction=reduction, label_smoothing=smoothing)
    lse, dloss = torch.logsumexp(logits, -1), random()
    write(name, "linear_cross_entropy", f"ignore_index={ignore} reduction={reduction} label_smoothing={smoothing!r}",
          dict(loss=loss, lse=lse, x=x, weight=weight, target=target),
          dict(loss=loss, lse=lse, dloss=dloss, x=x, weight=weight, target=target,
               **gradients(loss, dloss, dict(x=x, weight=weight))))


def nothing_counts(name, shape, reduction):
    """Every row ignored: PyTorch's mean is 0 / 0; by definition the loss here is 0, and so is the gradient."""
    logits = random(*shape)
    target = torch.full(shape[:-1], -100)
    write(name, "cross_entropy", f"reduction={reduction}",
          dict(loss=torch.zeros(()), lse=torch.logsumexp(logits, -1), logits=logits, target=target),
          dict(dloss=random(), logits=logits, target=target, dlogits=torch.zeros(shape)))


def swiglu(name, shape, scale=1.0):
    gate, up = leaf(random(*shape, scale=scale)), leaf(random(*shape))
    y = F.silu(gate) * up
    dy = random(*shape)
    write(name, "swiglu", "", dict(y=y, gate=gate, up=up),
          dict(dy=dy, gate=gate, up=up, **gradients(y, dy, dict(gate=gate, up=up))))
# ---- conv2d ------------------------------------------------------------------------------------------------


def conv2d(name, x, weight, stride=1, padding=0, dilation=1, groups=1, bias=True, last=False):
    """`x` and `weight` are shapes with the channels first; the file has the tensors as `last` says."""
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    x, weight, bias = leaf(random(*x)), leaf(random(*weight)), leaf(random(weight[0])) if bias else None
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    dy = random(*y.shape)
    made = gradients(y, dy, dict(x=x, weight=weight, bias=bias))
    lay = (lambda t: t.permute(0, 2, 3, 1)) if last else (lambda t: t)
    words = dict(stride_h=stride[0], stride_w=stride[1], padding_h=padding[0], padding_w=padding[1],
                 dilation_h=dilation[0], dilation_w=dilation[1], groups=groups,
                 layout="channels_last" if last else "channels_first")
    backward = dict(dy=lay(dy), x=lay(x), weight=lay(weight), dx=lay(made["dx"]), dweight=lay(made["dweight"]))
    # dbias exists without bias too: the sum of dy.
    backward["dbias"] = made["dbias"] if bias is not None else dy.sum((0, 2, 3))
    write(name, "conv2d", " ".join(f"{k}={v}" for k, v in words.items()),
          dict(y=lay(y), x=lay(x), weight=lay(weight), bias=bias), backward)
# ---- add, mul, scale, mean, cast, dropout -------------------------------------------------------------------


def broadcast(op, name, a, b):
    a, b = leaf(random(*a)), leaf(random(*b))
    y = a + b if op == "add" else a * b
    dy = random(*y.shape)
    inputs = dict(a=a, b=b)
    write(name, op, f"b_axes={b.dim()}", dict(y=y, **inputs),
          dict(dy=dy, **gradients(y, dy, inputs), **(inputs if op == "mul" else {})))


def scale(name, shape, factor):
    x = leaf(random(*shape))
    y = torch.mul(x, factor)
    dy = random(*shape)
    write(name, "scale", f"factor={factor!r}", dict(y=y, x=x), dict(dy=dy, **gradients(y, dy, dict(x=x))))


def mean(name, shape, axis, axes, shaped=False):
    x = leaf(random(*shape))
    first = axis % len(shape)
    y = torch.mean(x, dim=tuple(range(first, first + axes if axes else len(shape))))
    dy = random(*y.shape)
    write(name, "mean", f"axis={axis} axes={axes}", dict(y=y, x=x),
          dict(dy=dy, x=x if shaped else None, **gradients(y, dy, dict(x=x))))


def cast(name, x):
    x = leaf(x)
    y = x.to(torch.float64)
    dy = random(*x.shape)
    write(name, "cast", "", dict(y=y, x=x), dict(dy=dy, dx=dy))


def philox(counter, key):
    """Philox4x32-10 on Python's integers: four words from four and two."""
    for _ in range(10):
        first, third = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [third >> 32 ^ counter[1] ^ key[0], third & 0xFFFFFFFF, first >> 32 ^ counter[3] ^ key[1],
                   first & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def dropout(name, shape, p, seed, step, stream):
    halves = lambda value: [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
    key = philox(halves(step) + halves(stream), halves(seed))
    count = math.prod(shape)
    words = [philox(halves(i // 4) + key[2:], key[:2])[i % 4] for i in range(count)]
    kept = torch.tensor([word >= p * 2.0**32 for word in words]).reshape(shape)
    x = leaf(random(*shape))
    y = torch.where(kept, x / (1 - p), torch.zeros(()))
    dy, counter = random(*shape), torch.tensor([seed, step])
    write(name, "dropout", f"p={p!r} stream={stream}", dict(y=y, x=x, counter=counter),
          dict(dy=dy, counter=counter, **gradients(y, dy, dict(x=x))))
# ---- attention ---------------------------------------------------------------------------------------------


def attention(name, q, k, causal=True, scale=0.0, saved=False, size=1.0, starts=None):
    """q and k are [batch, time, heads, dim], as vjp has them; torch expects the heads before the time. starts: the input first."""
    tensors = dict(q=leaf(random(*q, scale=size)), k=leaf(random(*k)), v=leaf(random(*k)))
    first = {slot: tensor.transpose(1, 2) for slot, tensor in tensors.items()}
    seen = torch.ones(q[1], k[1], dtype=torch.bool).tril(k[1] - q[1]) if causal else None
    starts = {} if starts is None else dict(first=torch.tensor(starts))
    if starts:
        seen = seen & (torch.arange(k[1]) >= starts["first"][..., None])[:, None]
    y = F.scaled_dot_product_attention(first["q"], first["k"], first["v"], attn_mask=seen, scale=scale or None,
                                       enable_gqa=True).transpose(1, 2)
    keys = first["k"].repeat_interleave(q[2] // k[2], 1)
    scores = first["q"] @ keys.transpose(2, 3) * (scale or q[3] ** -0.5)
    lse = (scores if seen is None else scores.masked_fill(~seen, -float("inf"))).logsumexp(-1)
    dy = random(*y.shape)
    write(name, "attention", f"causal={str(causal).lower()} scale={scale!r}", dict(y=y, lse=lse, **tensors, **starts),
          dict(dy=dy, **tensors, **starts, **gradients(y, dy, tensors), **(dict(y=y, lse=lse) if saved else {})))


def attention_cases():
    torch.manual_seed(20240608)
    attention("causal", (2, 5, 2, 3), (2, 5, 2, 3), saved=True)
    attention("full", (1, 4, 2, 5), (1, 4, 2, 5), causal=False)
    attention("grouped", (2, 4, 6, 4), (2, 4, 2, 4), saved=True)
    attention("grouped_full", (1, 3, 4, 2), (1, 6, 1, 2), causal=False, scale=0.3, saved=True)
    attention("more_keys", (2, 3, 4, 4), (2, 7, 2, 4))
    attention("fewer_keys", (1, 6, 2, 3), (1, 2, 2, 3), causal=False, saved=True)
    attention("one_query", (1, 1, 4, 8), (1, 9, 2, 8), saved=True)
    attention("one_key", (1, 1, 1, 1), (1, 1, 1, 1))
    attention("large_scores", (1, 6, 2, 4), (1, 6, 1, 4), size=300.0)
    attention("first", (2, 6, 4, 3), (2, 8, 2, 3), saved=True, starts=[[0, 0, 4, 4, 4, 7], [2, 3, 3, 3, 6, 6]])


# ---- The cases ---------------------------------------------------------------------------------------------


def main():
    torch.manual_seed(20240607)
    for old in HERE.glob("*.safetensors"):
        old.unlink()

    layer_norm("plain", (5, 7))
    layer_norm("axes2", (3, 2, 5), axes=2, saved=True)
    layer_norm("bare", (2, 3, 9), gamma=False, beta=False)
    layer_norm("gamma_only", (4, 6), eps=0.1, beta=False, saved=True)
    layer_norm("beta_only", (4, 6), gamma=False)
    layer_norm("offset", (2, 33), offset=1000.0)
    layer_norm("one_row", (8,))
    layer_norm("axes2_whole", (3, 4), axes=2)

    rms_norm("plain", (5, 7))
    rms_norm("axes2", (3, 2, 5), axes=2, saved=True)
    rms_norm("bare", (3, 9), gamma=False, beta=False)
    rms_norm("small", (4, 6), beta=False, scale=0.01, saved=True)
    rms_norm("tiny", (2, 5), scale=1e-20, eps=1e-12)
    rms_norm("huge", (3, 5), scale=1e20)
    rms_norm("no_eps", (3, 5), eps=0.0)

    group_norm("first", (2, 4, 3, 3), 2)
    group_norm("last", (2, 3, 3, 4), 2, last=True)
    group_norm("one_group", (2, 3, 5), 1, saved=True)
    group_norm("each_channel", (2, 4, 6), 4, eps=0.01)
    group_norm("no_plane", (3, 8), 2, saved=True)
    group_norm("volume_last", (1, 2, 2, 2, 6), 3, last=True, saved=True)
    group_norm("bare", (2, 4, 5), 2, affine=False)
    group_norm("offset_last", (2, 7, 4), 2, last=True, offset=1000.0)

    rope("half", (2, 4, 2, 6))
    rope("interleaved", (2, 4, 2, 6), pairing="interleaved")
    rope("half_partial", (1, 3, 2, 7), n_rot=4)
    rope("interleaved_partial", (1, 3, 2, 7), n_rot=4, pairing="interleaved")
    rope("positions", (2, 3, 1, 4), rows=9, positions=[8, 0, 5])
    rope("positions_each", (2, 3, 2, 4), rows=7, positions=[[6, 5, 4], [0, 0, 2]], pairing="interleaved")
    rope("rank3", (5, 2, 4), rows=8)

    for reverse in (False, True):
        for exclusive in (False, True):
            mode = ("exclusive" if exclusive else "inclusive") + ("_reverse" if reverse else "")
            cumsum(mode, (2, 5, 3), 1, exclusive, reverse)
    cumsum("axis0", (6, 3), 0, reverse=True)
    cumsum("last_axis", (3, 7), -1, exclusive=True)
    cumsum("line", (9,), 0)

    gather("rows", (6, 4), [5, 0, 3])
    gather("repeats", (5, 3), [2, 2, 4, 2, 0, 4])
    gather("index2d", (5, 3), [[1, 4, 1], [0, 2, 1]])
    gather("axis1", (2, 4, 3), [3, 3, 0], axis=1)
    gather("last_axis", (3, 5), [[4, 1], [1, 0]], axis=-1)
    gather("one", (4, 3), 2)

    maxpool2d("plain", random(2, 2, 4, 6))
    maxpool2d("overlap", random(1, 2, 5, 5), kernel=3, stride=1, saved=True)
    maxpool2d("padding", random(1, 2, 5, 6), kernel=3, stride=2, padding=1)
    maxpool2d("negative_padding", -random(1, 1, 4, 4).abs() - 1, kernel=3, stride=2, padding=1)
    maxpool2d("dilation", random(1, 2, 7, 7), kernel=2, stride=1, dilation=(3, 2))
    maxpool2d("ceil", random(1, 2, 6, 7), kernel=3, stride=2, ceil=True, saved=True)
    maxpool2d("ceil_padding", random(1, 1, 6, 5), kernel=2, stride=3, padding=1, ceil=True)
    maxpool2d("uneven", random(1, 2, 6, 8), kernel=(3, 2), stride=(1, 3), padding=(1, 0))
    maxpool2d("last", random(2, 3, 4, 5), last=True, kernel=(2, 3), stride=1)
    maxpool2d("last_all", random(1, 3, 7, 8), last=True, kernel=3, stride=2, padding=1, dilation=(1, 2), ceil=True,
              saved=True)
    maxpool2d("ties", torch.randint(0, 2, (1, 2, 6, 6)).double(), kernel=3, stride=1)
    maxpool2d("ties_last", torch.randint(0, 2, (1, 2, 6, 6)).double(), kernel=3, stride=2, padding=1, last=True)
    odd = random(1, 1, 6, 6)
    odd[0, 0, :2, :2] = -float("inf")
    odd[0, 0, 3, 4] = float("nan")
    odd[0, 0, 4, 0] = float("inf")
    maxpool2d("nan_and_inf", odd)

    for number, activation in enumerate(ACTIVATIONS):
        linear(activation, (4, 5), (5, 3), activation, saved=number % 2 == 0)
    linear("relu_at_zero", (5, 3), (3, 4), "relu", integers=True)
    linear("no_bias", (3, 4), (4, 2), "silu", bias=False)
    linear("transposed", (4, 5), (3, 5), "gelu_erf", transpose=True, saved=True)
    linear("shared", (2, 3, 4), (4, 5), "gelu_tanh")
    linear("shared_transposed", (2, 2, 2, 3), (4, 3), "tanh", transpose=True)
    linear("batched", (2, 3, 4), (2, 4, 5), "sigmoid", saved=True)
    linear("batched_transposed", (2, 1, 3, 4), (2, 1, 2, 4), "gelu_erf", transpose=True)
    linear("empty_k", (3, 0), (0, 2), "silu")
    for number, activation in enumerate(EXACT):
        extreme(activation, saved=number % 2 == 1)
    linear_nan()

    torch.manual_seed(20240608)
    sum_squares("plain", random(5, 7))
    sum_squares("scalar", random(1)[0])
    sum_squares("far", torch.tensor([1e100, -2e-100, 3e100]))
    clip("long", 25.0, 2.0)
    clip("short", 2.25, 2.0)
    clip("any", 25.0, 0.0)
    clip("zero", 0.0)
    clip("nan", float("nan"))
    clip("infinite", float("inf"))
    adamw("run", (5, 7), max_norm=4.0, weight_decay=0.1)
    adamw("plain", (9,), weight_decay=0.0)
    adamw("other", (2, 3), beta1=0.5, beta2=0.9, eps=0.1, weight_decay=0.5)
    sgd("run", (5, 7), max_norm=4.0, weight_decay=0.1, nesterov=True)
    sgd("plain", (9,))
    sgd("decay", (2, 3), beta=0.5, weight_decay=0.5)
    torch.manual_seed(20261115)
    cross_entropy("plain", random(5, 7), [3, 0, 6, 2, 2])
    cross_entropy("saved", random(5, 7), [3, 0, 6, 2, 2], saved=True)
    cross_entropy("sum", random(2, 3, 4), [[1, 0, 3], [2, 2, 1]], reduction="sum", saved=True)
    cross_entropy("ignored", random(6, 5), [4, -100, 1, -100, 0, 2])
    cross_entropy("ignored_class", random(6, 5), [4, 0, 1, 0, 0, 2], ignore=0, reduction="sum", saved=True)
    cross_entropy("smooth", random(5, 7), [3, -1, 6, 2, 0], ignore=-1, smoothing=0.1)
    cross_entropy("smooth_all", random(5, 7), [3, 1, 6, 2, 0], smoothing=1.0, saved=True)
    cross_entropy("one_class", random(4, 1), [0, 0, -100, 0])
    cross_entropy("one_row", random(9), 4)
    cross_entropy("large", random(4, 6, scale=1e4), [0, 5, 2, 2])
    cross_entropy("offset", random(4, 6, offset=1000.0), [0, 5, 2, 2], smoothing=0.2)
    masked = random(4, 6)
    masked[:, 2:4] = -float("inf")
    cross_entropy("masked", masked, [0, 5, 1, 4])
    nothing_counts("all_ignored", (3, 4), "mean")
    nothing_counts("all_ignored_sum", (2, 2, 4), "sum")
    swiglu("plain", (3, 5))
    swiglu("wide", (4, 9), scale=30.0)
    swiglu("rank0", ())
    for last in (False, True):
        end = "_last" if last else ""
        conv2d("plain" + end, (2, 3, 5, 6), (4, 3, 3, 3), last=last)
        conv2d("no_bias" + end, (1, 2, 4, 5), (3, 2, 2, 3), bias=False, last=last)
        conv2d("padding" + end, (1, 2, 5, 4), (3, 2, 3, 3), padding=(1, 2), last=last)
        conv2d("stride" + end, (2, 2, 7, 8), (3, 2, 3, 2), stride=(2, 3), padding=(1, 0), last=last)
        conv2d("dilation" + end, (1, 2, 8, 7), (2, 2, 3, 2), dilation=(2, 3), padding=(0, 1), last=last)
        conv2d("stride_dilation" + end, (1, 2, 9, 10), (2, 2, 3, 3), stride=(2, 4), dilation=2, padding=3, last=last)
        conv2d("groups" + end, (2, 6, 4, 5), (4, 3, 3, 3), groups=2, padding=1, last=last)
        conv2d("each_channel" + end, (2, 3, 5, 5), (3, 1, 3, 3), groups=3, stride=2, padding=1, last=last)
        conv2d("one_to_one" + end, (2, 4, 3, 3), (5, 4, 1, 1), last=last)
    for op in ("add", "mul"):
        broadcast(op, "same", (3, 5), (3, 5))
        broadcast(op, "rows", (4, 3, 5), (5,))
        broadcast(op, "axes2", (4, 3, 5), (3, 5))
        broadcast(op, "scalar", (4, 3), ())

    scale("plain", (3, 5), 0.37)
    scale("negative", (7,), -2.5)

    mean("first", (5, 3), 0, 1)
    mean("last", (3, 7), -1, 1, shaped=True)
    mean("middle", (2, 3, 4, 5), 1, 2)
    mean("all", (3, 4), 0, 0)

    dropout("plain", (5, 13), 0.25, 1234, 0, 0)
    dropout("small", (33,), 0.5, 77, 3, 1)
    dropout("numbers", (9, 4), 0.1, 16777216, -5, -1)

    cast("plain", random(3, 5))
    cast("odd", torch.tensor([0.0, 1 / 3, -1e-3, 65504.0, float("inf"), float("nan")]))
    attention_cases()

    torch.manual_seed(20261116)
    linear_cross_entropy("plain", random(5, 4), random(7, 4), [3, 0, 6, 2, 2])
    linear_cross_entropy("sum", random(2, 3, 5), random(4, 5), [[1, 0, 3], [2, 2, 1]], reduction="sum")
    linear_cross_entropy("ignored", random(6, 3), random(5, 3), [4, -100, 1, -100, 0, 2])
    linear_cross_entropy("ignored_class", random(6, 3), random(5, 3), [4, 0, 1, 0, 0, 2], ignore=0, reduction="sum")
    linear_cross_entropy("smooth", random(5, 2), random(7, 2), [3, -1, 6, 2, 0], ignore=-1, smoothing=0.1)
    linear_cross_entropy("one_class", random(4, 3), random(1, 3), [0, 0, -100, 0])
    linear_cross_entropy("one_row", random(3), random(9, 3), 4)


if __name__ == "__main__":
    main()
