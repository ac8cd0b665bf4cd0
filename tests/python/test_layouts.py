# SPDX-License-Identifier: MIT
"""Random shapes, strides and dtypes, found by hypothesis. An array's layout must not change a bit of the result, and
nothing outside an output's own elements may be written."""
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vjp

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
POISON = 77.0
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def views(draw, shape, dtype):
    """A view of this shape in a larger array that is poisoned, and that array: axes in any order, with steps, reversed, and
    beginning anywhere."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2])) for _ in shape]
    before = [draw(st.integers(0, 2)) for _ in shape]
    base_shape = [before[i] + shape[i] * abs(steps[i]) + draw(st.integers(0, 1)) for i in range(len(shape))]
    base = np.full([base_shape[i] for i in order], POISON).astype(dtype)
    view = base.transpose(np.argsort(order)) if len(shape) else base
    for i, step in enumerate(steps):
        index = [slice(None)] * len(shape)
        index[i] = slice(before[i], before[i] + shape[i] * abs(step), abs(step))
        view = view[tuple(index)]
        if step < 0:
            index[i] = slice(None, None, -1)
            view = view[tuple(index)]
    assert view.shape == tuple(shape)
    return view, base


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=5).map(tuple)


def bits(array):
    return np.ascontiguousarray(array).tobytes()


@quick
@given(st.data(), shapes, st.sampled_from(DTYPES), st.integers(0, 1000))
def test_layout_of_elementwise_ops(data, shape, dtype, seed):
    packed = [np.random.default_rng(seed + i).standard_normal(shape).astype(dtype) for i in range(2)]
    gate, up = (data.draw(views(shape, dtype))[0] for _ in range(2))
    gate[...], up[...] = packed
    expected = vjp.swiglu(*packed)
    assert expected.shape == shape and expected.dtype == dtype
    out, base = data.draw(views(shape, dtype))
    untouched = base.copy()
    assert vjp.swiglu(gate, up, out=out) is out
    assert bits(out) == bits(expected)
    out[...] = POISON
    assert bits(base) == bits(untouched)


@quick
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_layout_of_norms(data, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    packed = [rng.standard_normal(s).astype(dtype) for s in (shape, shape, shape[-1:])]
    strided = []
    for array in packed:
        view, _ = data.draw(views(array.shape, dtype))
        view[...] = array
        strided.append(view)
    expected = vjp.layer_norm_backward(*packed)
    for got, value in zip(vjp.layer_norm_backward(*strided), expected):
        assert bits(got) == bits(value)
    # Adding to a strided output gives the bits of adding to a packed one.
    total = rng.standard_normal(shape[-1:]).astype(dtype)
    out, _ = data.draw(views(shape[-1:], dtype))
    out[...] = total
    vjp.layer_norm_backward(*strided, outputs="dgamma", out=out, accumulate=True)
    vjp.layer_norm_backward(*packed, outputs="dgamma", out=total, accumulate=True)
    assert bits(out) == bits(total)


@quick
@given(st.data(), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_products_against_numpy(data, m, k, n, transpose):
    rng = np.random.default_rng(m * 100 + k * 10 + n)
    a, _ = data.draw(views((m, k), np.float32))
    b, _ = data.draw(views((n, k) if transpose else (k, n), np.float32))
    a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    y = vjp.linear(a, b, transpose_b=transpose, outputs="y")
    exact = a.astype(np.float64) @ (b.T if transpose else b).astype(np.float64)
    assert y.shape == exact.shape and np.abs(y - exact).max() <= 1e-6 * max(1, np.abs(exact).max())


@quick
@given(shapes, st.lists(st.integers(0, 5), max_size=9).map(tuple), st.sampled_from([*DTYPES, np.float64, np.int32, np.int8]))
def test_shapes_that_do_not_fit_are_refused(shape, other, dtype):
    """Any two arrays: a result of the right shape, or an exception with a sentence."""
    a, b = np.ones(shape, np.float32), np.ones(other, dtype)
    try:
        y = vjp.add(a, b)
    except (vjp.Error, TypeError, ValueError) as error:
        assert "add" in str(error)
        assert dtype is not np.float32 or len(other) > 8 or shape[len(shape) - len(other):] != other or len(other) > len(shape)
    else:
        assert dtype is np.float32 and y.shape == shape and (y == 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_array(dtype):
    """q, k and v as slices of one array give the bits of packed copies, and so do gradients into slices of another."""
    rng = np.random.default_rng(5)
    together = rng.standard_normal((2, 5, 8, 6)).astype(dtype)
    slices = together[:, :, :4], together[:, :, 4:6], together[:, :, 6:]
    packed = [np.ascontiguousarray(s) for s in slices]
    y, lse = vjp.attention(*slices)
    for got, value in zip((y, lse), vjp.attention(*packed)):
        assert bits(got) == bits(value)
    gradients = np.full_like(together, 7)
    out = gradients[:, :, :4], gradients[:, :, 4:6], gradients[:, :, 6:]
    vjp.attention_backward(y, *slices, y, lse, out=out)
    for got, value in zip(out, vjp.attention_backward(y, *packed, y, lse)):
        assert bits(got) == bits(value)
    angle = np.zeros((5, 3), dtype)
    vjp.rope(slices[0], angle, angle + 1, out=slices[0])
    assert bits(slices[0]) == bits(vjp.rope(packed[0], angle, angle + 1))
    assert bits(slices[1]) == bits(packed[1])


def test_rows_are_not_copied():
    """Slices whose rows meet are refused, which vjp can see only where it gets their own memory."""
    together = np.ones((5, 4, 6), np.float32)
    angle = np.ones((5, 3), np.float32)
    with pytest.raises(vjp.Error, match="y overlaps x"):
        vjp.rope(together[:, :2], angle, angle, out=together[:, 1:3])
    vjp.rope(together[:, :2], angle, angle, out=together[:, 2:])
    assert (together[:, 2:, :3] == 0).all() and (together[:, 2:, 3:] == 2).all() and (together[:, :2] == 1).all()
    # Other layouts are copied, as before, and so are rows for a device that may not take them.
    transposed = np.ones((4, 5, 6), np.float32).swapaxes(0, 1)
    assert vjp.rope(transposed, angle, angle).shape == (5, 4, 6)
    vjp.rope(together[:, :2], angle, angle, out=together[:, 1:3], device="ref")
    for empty in (together[:, :0], together[:0, :2], together[:1, :2]):
        assert vjp.rope(empty, angle, angle).shape == empty.shape
