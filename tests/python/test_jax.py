# SPDX-License-Identifier: MIT
"""vjp.jax: the bits and gradients of vjp's own functions, under jit, grad and vmap."""
import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import vjp  # noqa: E402
import vjp.jax as vj  # noqa: E402
from vjp._table import TABLE  # noqa: E402

INDEX = np.array([2, 0, 1, 1, 3], np.int32)
# op: the shapes of its inputs (or values), the options
SAMPLES = {
    "layer_norm": ({"x": (5, 33), "gamma": (33,), "beta": (33,)}, {"eps": 1e-4}),
    "rms_norm": ({"x": (5, 33), "gamma": (33,)}, {}),
    "group_norm": ({"x": (3, 4, 15), "gamma": (4,), "beta": (4,)}, {"groups": 2}),
    "rope": ({"x": (2, 5, 3, 8), "cosine": (6, 4), "sine": (6, 4)}, {}),
    "cumsum": ({"x": (5, 33)}, {"reverse": True}),
    "gather": ({"table": (9, 17), "index": INDEX}, {}),
    "maxpool2d": ({"x": (2, 3, 8, 6)}, {}),
    "linear": ({"a": (9, 31), "b": (31, 17), "bias": (17,), "residual": (9, 17)}, {"activation": "gelu_tanh"}),
    "add": ({"a": (6, 33), "b": (33,)}, {}),
    "mul": ({"a": (6, 33), "b": (33,)}, {}),
    "scale": ({"x": (6, 33)}, {"factor": 0.75}),
    "mean": ({"x": (4, 9, 5)}, {"axis": 1}),
    "dropout": ({"x": (6, 33), "counter": np.array([5, 9], np.int32)}, {"p": 0.25}),
    "cast": ({"x": (4, 9)}, {"dtype": "bfloat16"}),
    "cross_entropy": ({"logits": (5, 7), "target": INDEX}, {"label_smoothing": 0.1}),
    "linear_cross_entropy": ({"x": (5, 16), "weight": (7, 16), "target": INDEX}, {}),
    "swiglu": ({"gate": (6, 33), "up": (6, 33)}, {}),
    "attention": ({"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}, {}),
    "conv2d": ({"x": (2, 3, 9, 8), "weight": (4, 3, 3, 3), "bias": (4,)}, {"stride_h": 2, "padding_w": 1}),
}


def make(op, dtype, seed=1):
    rng = np.random.default_rng(seed)
    shapes, options = SAMPLES[op]
    return {name: rng.standard_normal(what).astype(dtype) if isinstance(what, tuple) else what for name, what in shapes.items()}, options


def first(made):
    return made[0] if isinstance(made, tuple) else made


def test_table_has_every_op():
    assert set(SAMPLES) == set(vj.LINKS)


@pytest.mark.parametrize("dtype, ops", [("f32", list(SAMPLES)), ("bf16", ["layer_norm", "linear", "cast", "cross_entropy"])], ids=str)
def test_bits_and_gradients(dtype, ops):
    """Jitted: the output's bits, and the gradients of all inputs that have one."""
    for op in ops:
        inputs, options = make(op, jnp.bfloat16 if dtype == "bf16" else np.float32)
        expected = np.asarray(first(getattr(vjp, op)(**inputs, **options)))
        function = jax.jit(lambda tensors, op=op, options=options: getattr(vj, op)(**tensors, **options))
        got = np.asarray(function(inputs))
        assert got.dtype == expected.dtype and np.array_equal(got, expected), op

        links = vj.LINKS[op]
        where = [links.inputs[at] for at in links.gradients if at is not None and links.inputs[at] in inputs]
        dy = np.random.default_rng(2).standard_normal(expected.shape).astype(expected.dtype)
        outputs = dict(zip(links.outputs, [np.asarray(t) for t in vjp_outputs(op, inputs, options)]))
        given = {**inputs, **outputs, f"d{links.outputs[links.differentiable[0]]}": dy}
        arrays = tuple(inputs.get(name) for name in links.inputs)
        extra = {**links.options(arrays, options)}
        if op == "cast":
            extra["dtype"] = dtype
        tensors = {slot: given[slot] for slot, _, _ in TABLE[f"{op}_backward"].inputs if slot in given and not (op == "linear" and slot == "bias")}
        like = tuple(np.empty(inputs[name].shape, inputs[name].dtype) for name in where)
        getattr(vjp, f"{op}_backward")(**tensors, **extra, outputs=tuple("d" + name for name in where), out=like)
        floats = {name: inputs[name] for name in where}
        _, pull = jax.vjp(jax.jit(lambda some, op=op, options=options, rest=inputs: getattr(vj, op)(**{**rest, **some}, **options)), floats)
        for name, expected_gradient, gradient in zip(where, like, [pull(dy)[0][name] for name in where]):
            gradient = np.asarray(gradient)
            assert gradient.dtype == expected_gradient.dtype and np.array_equal(gradient, expected_gradient), f"{op}: d{name}"


def vjp_outputs(op, inputs, options):
    made = getattr(vjp, op)(**inputs, **options)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "attention"])  # one for each way that vmap is computed
def test_vmap(op):
    """Every input batched, then the first alone: the results and gradients are those of single calls."""
    inputs, options = make(op, np.float32)
    other, _ = make(op, np.float32, seed=3)
    links = vj.LINKS[op]
    where = [links.inputs[at] for at in links.gradients if at is not None and links.inputs[at] in inputs]

    def loss(some, rest):
        y = getattr(vj, op)(**{**rest, **some}, **options).astype(jnp.float32)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

    for names in (where, where[:1]):
        rest = {name: value for name, value in inputs.items() if name not in names}
        pair = [{name: source[name] for name in names} for source in (inputs, other)]
        stacked = {name: np.stack([one[name] for one in pair]) for name in names}
        got = jax.vmap(jax.grad(lambda some, rest=rest: loss(some, rest)))(stacked)
        outputs = jax.vmap(lambda some, rest=rest: getattr(vj, op)(**{**rest, **some}, **options))(stacked)
        for i, one in enumerate(pair):
            assert np.array_equal(outputs[i], getattr(vj, op)(**{**rest, **one}, **options)), op
            expected = jax.grad(lambda some, rest=rest: loss(some, rest))(one)
            for name in names:
                assert np.array_equal(got[name][i], expected[name]), f"{op}: d{name}"


def test_vmap_merges_axes():
    """A batch of rows is one call, not a loop."""
    x, gamma = np.ones((3, 4, 8), np.float32), np.ones(8, np.float32)
    text = str(jax.make_jaxpr(jax.vmap(lambda t: vj.rms_norm(t, gamma)))(x))
    assert "ffi_call" in text and "scan" not in text and "while" not in text
    q = np.ones((3, 2, 5, 4, 8), np.float32)
    text = str(jax.make_jaxpr(jax.vmap(lambda t: vj.attention(t, t, t)))(q))
    assert "ffi_call" in text and "scan" not in text and "while" not in text


def test_doubles():
    """In f64 by the reference kernels, where jax has f64."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((4, 9))
        y = vj.layer_norm(x)
        assert y.dtype == np.float64 and np.array_equal(y, vjp.layer_norm(x, device="ref")[0])
        check_grads(lambda t: vj.layer_norm(t), (x,), order=1, modes=["rev"])


def test_all_outputs():
    x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    for got, expected in zip(vj.layer_norm(x, outputs=True), vjp.layer_norm(x)):
        assert np.array_equal(got, expected)


def test_errors():
    with pytest.raises(ValueError, match=r"linear.forward: a is \[4, 6\] and b is \[7, 5\]"):
        vj.linear(np.ones((4, 6), np.float32), np.ones((7, 5), np.float32))
    with pytest.raises(ValueError, match="activation is 'soft'"):
        vj.linear(np.ones((4, 6), np.float32), np.ones((6, 5), np.float32), activation="soft")
    with pytest.raises(TypeError):
        vj.swiglu(np.ones(3, np.float32))
    # An index outside of the table is found when the kernel runs.
    with pytest.raises(Exception, match="gather.forward: index"):
        jax.block_until_ready(vj.gather(np.ones((3, 4), np.float32), np.array([0, 7])))
