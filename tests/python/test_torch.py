# SPDX-License-Identifier: MIT
"""Every op and dtype against torch's own functions and autograd in f64.

The inputs are rounded to the dtype first, so what is compared is the error of the computation alone. An output's error is
measured against the largest element of the expected one.
"""
import inspect
import re

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import vjp  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
# By the dtype of the output. 16 bits: one rounding of the result and, in a backward, one of what the forward saved.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def norm(x, axes, gamma, beta, eps, centre):
    mean = x.mean(axes, keepdim=True) if centre else torch.zeros_like(x.mean(axes, keepdim=True))
    rstd = ((x - mean) ** 2).mean(axes, keepdim=True).add(eps).rsqrt()
    return (x - mean) * rstd * gamma + beta, mean.squeeze(axes), rstd.squeeze(axes)


def layer_norm(x, gamma, beta):
    y, mean, rstd = norm(x, -1, gamma, beta, 1e-5, True)
    assert torch.allclose(y, F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5))
    return {"y": y, "mean": mean, "rstd": rstd}


def rms_norm(x, gamma, beta):
    y, _, rstd = norm(x, -1, gamma, beta, 1e-6, False)
    return {"y": y, "rstd": rstd}


def group_norm(x, gamma, beta):
    groups = x.reshape(x.shape[0], 2, -1)
    return {"y": F.group_norm(x, 2, gamma, beta, 1e-5), "mean": groups.mean(-1),
            "rstd": groups.var(-1, unbiased=False).add(1e-5).rsqrt()}


def rope(x, cosine, sine):
    half = x.shape[-1] // 2
    c, s = cosine[:x.shape[-3], None], sine[:x.shape[-3], None]
    a, b = x[..., :half], x[..., half:]
    return {"y": torch.cat([a * c - b * s, b * c + a * s], -1)}


def maxpool2d(x):
    y, argmax = F.max_pool2d(x, 2, return_indices=True)
    return {"y": y, "argmax": argmax}


def linear(a, b, bias, residual):
    pre = a @ b + bias
    return {"y": F.gelu(pre, approximate="tanh") + residual, "pre": pre}


def cross_entropy(logits, target):
    return {"loss": F.cross_entropy(logits, target), "lse": logits.logsumexp(-1)}


def linear_cross_entropy(x, weight, target):
    return cross_entropy(x @ weight.T, target)


def attention(q, k, v):
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    time, keys = scores.shape[-2:]
    scores = scores.masked_fill(torch.arange(keys) > torch.arange(time)[:, None] + keys - time, float("-inf"))
    return {"y": torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v), "lse": scores.logsumexp(-1)}


def adamw(w, m, v, g, lr, step):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return {"w_out": w - 0.01 * (m / (1 - 0.9 ** 3) / ((v / (1 - 0.999 ** 3)).sqrt() + 1e-8) + 0.01 * w), "m_out": m, "v_out": v}


def sgd(w, momentum, g, lr):
    momentum = 0.9 * momentum + g
    return {"w_out": w - 0.01 * momentum, "momentum_out": momentum}


def clip(squares):
    return {"scale": 1.5 / squares.sqrt(), "norm": squares.sqrt()}


# op: the reference, the shapes of its inputs (or values), the options, the options of the backward
CASES = {
    "layer_norm": (layer_norm, {"x": (7, 65), "gamma": (65,), "beta": (65,)}, {}, {}),
    "rms_norm": (rms_norm, {"x": (7, 65), "gamma": (65,), "beta": (65,)}, {}, {}),
    "group_norm": (group_norm, {"x": (3, 4, 15), "gamma": (4,), "beta": (4,)}, {"groups": 2}, {}),
    "rope": (rope, {"x": (2, 5, 3, 8), "cosine": (6, 4), "sine": (6, 4)}, {}, {}),
    "cumsum": (lambda x: {"y": x.cumsum(-1)}, {"x": (5, 33)}, {}, {}),
    "gather": (lambda table, index: {"y": table[index]}, {"table": (9, 17), "index": torch.tensor([8, 0, 3, 3, 1])}, {}, {"rows": 9}),
    "maxpool2d": (maxpool2d, {"x": (2, 3, 8, 6)}, {}, {}),
    "linear": (linear, {"a": (9, 31), "b": (31, 17), "bias": (17,), "residual": (9, 17)}, {"activation": "gelu_tanh"}, {}),
    "add": (lambda a, b: {"y": a + b}, {"a": (6, 33), "b": (33,)}, {}, {"b_axes": 1}),
    "mul": (lambda a, b: {"y": a * b}, {"a": (6, 33), "b": (33,)}, {}, {}),
    "scale": (lambda x: {"y": 0.75 * x}, {"x": (6, 33)}, {"factor": 0.75}, {}),
    "mean": (lambda x: {"y": x.mean(1)}, {"x": (4, 9, 5)}, {"axis": 1}, {}),
    "cast": (lambda x: {"y": x * 1}, {"x": (4, 9)}, {"dtype": "f32"}, {}),
    "sum_squares": (lambda x: {"y": (x * x).sum()}, {"x": (13, 9)}, {}, {}),
    "clip": (clip, {"squares": torch.tensor(7.0)}, {"max_norm": 1.5}, {}),
    "adamw": (adamw, {"w": (5, 7), "m": (5, 7), "v": (5, 7), "g": (5, 7), "lr": 0.01, "step": 3}, {}, {}),
    "sgd": (sgd, {"w": (5, 7), "momentum": (5, 7), "g": (5, 7), "lr": 0.01}, {}, {}),
    "cross_entropy": (cross_entropy, {"logits": (9, 33), "target": torch.tensor([0, 5, -100, 32, 1, 1, 2, -100, 9])}, {}, {}),
    "linear_cross_entropy": (linear_cross_entropy, {"x": (9, 17), "weight": (33, 17),
                                                    "target": torch.tensor([0, 5, -100, 32, 1, 1, 2, -100, 9])}, {}, {}),
    "swiglu": (lambda gate, up: {"y": F.silu(gate) * up}, {"gate": (6, 33), "up": (6, 33)}, {}, {}),
    "attention": (attention, {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}, {}, {}),
    "conv2d": (lambda x, weight, bias: {"y": F.conv2d(x, weight, bias, stride=(2, 2), padding=(1, 1))},
               {"x": (2, 3, 9, 8), "weight": (4, 3, 3, 3), "bias": (4,)},
               {"stride_h": 2, "stride_w": 2, "padding_h": 1, "padding_w": 1}, {}),
}
STATISTICS = {"m", "v", "momentum", "squares"}  # inputs that are f32 where the op's dtype has 16 bits


def test_table_has_every_op():
    assert {name for name in vjp.ops() if not name.endswith("_backward")} == {*CASES, "dropout"}


def make_inputs(shapes, dtype, seed=1):
    torch.manual_seed(seed)
    made = {}
    for name, what in shapes.items():
        if isinstance(what, tuple):
            value = torch.randn(what, dtype=torch.float64)
            value = value.abs() if name == "v" and "w" in shapes else value
            kind = torch.float32 if name in STATISTICS and dtype.itemsize == 2 else dtype
            if name == "v" and "w" not in shapes:
                kind = dtype
            made[name] = value.to(kind)
        elif torch.is_tensor(what) and what.is_floating_point():
            made[name] = what.to(torch.float64 if dtype == torch.float64 else torch.float32)
        else:
            made[name] = what
    return made


def in_double(value):
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def compare(op, name, got, expected, storage=None):
    """storage: the dtype whose bound counts; None: that of the output."""
    assert torch.is_tensor(got) and got.shape == expected.shape, f"{op}: {name} has shape {got.shape}, expected {expected.shape}"
    if not got.is_floating_point():
        assert torch.equal(got, expected), f"{op}: {name}"
        return
    error = ((got.double() - expected).abs().max() / expected.abs().max()).item()
    assert error <= BOUNDS[storage or got.dtype], f"{op}: {name} in {got.dtype} is off by {error:.2e}"


def against_torch(op, dtype, place="cpu"):
    """Both passes of an op on tensors in this place; torch computes on the CPU."""
    def moved(values):
        return {name: value.to(place) if torch.is_tensor(value) else value for name, value in values.items()}

    reference, shapes, options, backward_options = CASES[op]
    inputs = make_inputs(shapes, DTYPES[dtype])
    device = "ref" if dtype == "f64" else place
    # On a GPU it rounds the logits to 16 bits, as linear does (docs/ops/linear_cross_entropy.md).
    storage = DTYPES[dtype] if op == "linear_cross_entropy" and place != "cpu" else None
    doubles = {name: in_double(value) for name, value in inputs.items()}
    leaves = {name: value.requires_grad_() for name, value in doubles.items() if torch.is_tensor(value) and value.is_floating_point()}
    expected = reference(**doubles)
    made = getattr(vjp, op)(**moved(inputs), **options, device=device, outputs=tuple(expected))
    made = {name: value.cpu() for name, value in zip(expected, made)}
    for name, value in made.items():
        compare(op, name, value, expected[name].detach(), storage)

    backward = getattr(vjp, op + "_backward", None)
    if backward is None:
        return
    first = next(iter(expected))
    dy = torch.randn(expected[first].shape, dtype=torch.float64).to(made[first].dtype)
    needs = [p.name for p in inspect.signature(backward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = moved({"d" + first: dy, **inputs, **made})
    gradients = torch.autograd.grad(expected[first], list(leaves.values()), dy.double(), allow_unused=True)
    wanted = {"d" + name: g for name, g in zip(leaves, gradients) if g is not None}
    outputs = re.findall(r"^    (\w+): ", backward.__doc__.partition("Returns")[2].partition("Tensors")[0], re.M)
    wanted = {name: wanted[name] for name in outputs if name in wanted}
    some = {**options, **backward_options}
    if op == "cast":
        some["dtype"] = "f32"
    got = backward(**{name: given[name] for name in needs if name in given}, **some, device=device, outputs=tuple(wanted))
    assert len(got) == len(wanted) > 0
    for (name, value), result in zip(wanted.items(), got):
        compare(op + "_backward", name, result.cpu(), value, storage)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CASES)
def test_against_torch(op, dtype):
    against_torch(op, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype):
    device = "ref" if dtype == "f64" else "cpu"
    x = torch.rand(100, 77).to(DTYPES[dtype]) + 1
    counter = torch.tensor([5, 9])
    y = vjp.dropout(x, counter, p=0.25, device=device)
    kept = y != 0
    assert 0.72 < kept.double().mean() < 0.78
    compare("dropout", "y", y, kept * x.double() / 0.75)
    dy = torch.rand(100, 77).to(DTYPES[dtype]) + 1
    compare("dropout_backward", "dx", vjp.dropout_backward(dy, counter, p=0.25, device=device), kept * dy.double() / 0.75)
    assert not torch.equal(vjp.dropout(x, torch.tensor([5, 10]), p=0.25, device=device) != 0, kept)


def test_gradient_of_a_sum_is_expanded():
    """y.sum().backward() gives a gradient with strides (0, 0), which must not be read as packed."""
    x, gamma = torch.randn(6, 33), torch.randn(33)
    dy = torch.ones(()).expand(6, 33)
    assert dy.stride() == (0, 0)
    for got, expected in zip(vjp.layer_norm_backward(dy, x, gamma), vjp.layer_norm_backward(dy.contiguous(), x, gamma)):
        assert torch.equal(got, expected)


def test_parameters_and_subclasses_give_plain_tensors():
    w = torch.nn.Parameter(torch.randn(4, 8))
    y = vjp.scale(w, factor=2.0)
    assert type(y) is torch.Tensor and not y.requires_grad and torch.equal(y, 2 * w.detach())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(TypeError, match="scale: x has the dtype torch"):
        vjp.scale(torch.zeros(3, dtype=dtype))


def test_without_the_table_of_c_functions():
    """torch before 2.10, which has only __dlpack__."""
    class Old:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **keywords):
            return self.tensor.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    Old.__module__ = "torch.old"
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 5).to(dtype)
        y = vjp.scale(Old(x), factor=2.0)
        assert type(y) is torch.Tensor and torch.equal(y, 2 * x)
