# SPDX-License-Identifier: MIT
"""How a function is called: outputs, out, accumulate, layouts, dtypes, numbers, errors, signatures."""
import ast
import inspect
import os
import re

import ml_dtypes
import numpy as np
import pytest

import vjp

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
rng = np.random.default_rng(1)


def floats(*shape):
    return rng.standard_normal(shape).astype(np.float32)


# ---- Outputs --------------------------------------------------------------------------------------------


def test_all_outputs_in_order():
    x = floats(4, 8)
    y, mean, rstd = vjp.layer_norm(x)
    assert y.shape == (4, 8) and mean.shape == rstd.shape == (4,)
    assert np.allclose(mean, x.mean(1), atol=1e-6) and np.allclose(rstd, 1 / np.sqrt(x.var(1) + 1e-5), rtol=1e-5)


def test_the_table_names_every_function():
    """What vjp.torch and vjp.jax are made of."""
    from vjp import _core
    table = _core.table()
    assert set(table) == set(vjp.ops())
    kinds = {kind for _, _, inputs, outputs, _ in table.values() for _, kind, *_ in inputs + outputs}
    assert kinds == {"storage", "parameter", "statistic", "index", "argmax", "float", "gradient", "moment"}


def test_outputs_by_name():
    x = floats(4, 8)
    y, mean, rstd = vjp.layer_norm(x)
    assert np.array_equal(vjp.layer_norm(x, outputs="rstd"), rstd)
    swapped = vjp.layer_norm(x, outputs=["rstd", "y"])
    assert isinstance(swapped, tuple) and np.array_equal(swapped[0], rstd) and np.array_equal(swapped[1], y)
    assert isinstance(vjp.layer_norm(x, outputs=("y",)), tuple)


def test_an_output_that_is_not_asked_for_is_not_computed():
    """dweight needs x and dx needs weight: without the other, each is computed alone."""
    dy, x, weight = floats(1, 2, 3, 3), floats(1, 2, 5, 5), floats(2, 2, 3, 3)
    dx, dweight, _ = vjp.conv2d_backward(dy, x, weight)
    assert np.array_equal(vjp.conv2d_backward(dy, weight=weight, height=5, width=5, outputs="dx"), dx)
    assert np.array_equal(vjp.conv2d_backward(dy, x=x, outputs="dweight", out=np.empty_like(weight)), dweight)
    with pytest.raises(vjp.InvalidError, match="weight"):
        vjp.conv2d_backward(dy, x=x, outputs="dx")


@pytest.mark.parametrize("outputs, sentence", [("dx", "'dx' is not an output; there are y, mean, rstd"), ((), "names no output"),
                                               (("y", "y"), "y twice"), (3, "len")])
def test_wrong_outputs(outputs, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        vjp.layer_norm(floats(2, 3), outputs=outputs)


def test_out():
    x = floats(4, 8)
    y, mean, rstd = vjp.layer_norm(x)
    given = np.full_like(x, 7)
    assert vjp.layer_norm(x, outputs="y", out=given) is given and np.array_equal(given, y)
    own = np.empty(4, np.float32)
    result = vjp.layer_norm(x, out=(None, own, None))
    assert result[1] is own and np.array_equal(own, mean) and np.array_equal(result[2], rstd)
    assert vjp.layer_norm(x, outputs="y", out=x) is x and np.array_equal(x, y)  # in place


@pytest.mark.parametrize("out", [np.empty((4, 8), np.float32), (None,), (None,) * 4])
def test_out_must_fit_the_outputs(out):
    with pytest.raises(ValueError, match="tuple of 3"):
        vjp.layer_norm(floats(4, 8), out=out)


def test_accumulate():
    x, dy = floats(4, 8), floats(4, 8)
    dx, dgamma, dbeta = vjp.layer_norm_backward(dy, x)
    total = np.ones(8, np.float32)
    vjp.layer_norm_backward(dy, x, outputs="dgamma", out=total, accumulate=True)
    assert np.allclose(total, 1 + dgamma, atol=1e-6)
    some = (np.ones_like(x), np.ones(8, np.float32), None)
    vjp.layer_norm_backward(dy, x, out=some, accumulate="dgamma")
    assert np.array_equal(some[0], dx) and np.allclose(some[1], 1 + dgamma, atol=1e-6)
    strided = np.ones((8, 2), np.float32)
    vjp.layer_norm_backward(dy, x, outputs="dgamma", out=strided[:, 1], accumulate=("dgamma",))
    assert np.array_equal(strided[:, 1], total) and (strided[:, 0] == 1).all()


def test_accumulate_needs_out():
    x = floats(4, 8)
    for accumulate in (True, "y", ["y"]):
        with pytest.raises(ValueError, match="out= "):
            vjp.layer_norm(x, accumulate=accumulate)
    with pytest.raises(vjp.InvalidError, match="mean cannot accumulate"):
        vjp.layer_norm(x, out=(None, np.zeros(4, np.float32), None), accumulate="mean")


# ---- Layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [lambda a: a.T.copy().T, lambda a: a[::-1].copy()[::-1], lambda a: np.repeat(a, 3, 1)[:, ::3],
                                  lambda a: np.frombuffer(b"." + a.tobytes(), np.uint8)[1:].view(np.float32).reshape(a.shape)],
                         ids=["transposed", "reversed", "every third", "not aligned"])
def test_strided_inputs(view):
    x, gamma = floats(6, 9), floats(9)
    seen = view(x)
    assert np.array_equal(seen, x)
    for got, expected in zip(vjp.layer_norm(seen, gamma), vjp.layer_norm(x, gamma)):
        assert np.array_equal(got, expected)


def test_field_of_a_record_array():
    """Its strides are no multiple of its elements' size."""
    records = np.zeros(5, [("a", "<f4"), ("b", "u1")])
    records["a"] = np.arange(5)
    assert records["a"].strides == (5,)
    assert np.array_equal(vjp.scale(records["a"], factor=2.0), 2 * np.arange(5, dtype=np.float32))
    vjp.scale(np.ones(5, np.float32), out=records["a"])
    assert (records["a"] == 1).all() and (records["b"] == 0).all()


def test_broadcast_inputs():
    row = floats(9)
    assert np.array_equal(vjp.scale(np.broadcast_to(row, (4, 9)), factor=3.0), vjp.scale(np.tile(row, (4, 1)), factor=3.0))
    with pytest.raises(MemoryError):  # a copy of 2^60 bytes
        vjp.scale(np.broadcast_to(np.float32(1), (1 << 29, 1 << 29)))


def test_strided_output():
    x, base = floats(4, 8), np.full((8, 8), 5, np.float32)
    out = base[::2].T
    assert vjp.scale(x.T, factor=2.0, out=out) is out
    assert np.array_equal(base[::2], 2 * x) and (base[1::2] == 5).all()


def test_output_that_repeats_elements():
    for out in (np.lib.stride_tricks.as_strided(np.zeros(9, np.float32), (4, 4), (4, 4)),
                np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (4, 4), (0, 4))):
        with pytest.raises(ValueError, match="share memory"):
            vjp.scale(floats(4, 4), out=out)


def test_overlap_is_refused_and_changes_nothing():
    base = floats(9)
    before = base.copy()
    with pytest.raises(vjp.InvalidError, match="overlaps"):
        vjp.scale(base[:8], out=base[1:])
    assert np.array_equal(base, before)


def test_read_only_output():
    out = np.zeros(3, np.float32)
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError), match="read-only"):
        vjp.scale(floats(3), out=out)
    assert (out == 0).all()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty(shape):
    assert vjp.scale(np.empty(shape, np.float32), factor=2.0).shape == shape
    assert vjp.sum_squares(np.empty(shape, np.float32)) == 0


def test_large_call_grows_the_workspace():
    """6 million indices are sorted in more workspace than a device has at first."""
    count = 6_000_000
    dtable = vjp.gather_backward(np.ones((count, 1), np.float32), np.zeros(count, np.int32), rows=2)
    assert np.array_equal(dtable, [[count], [0]])


def test_dlpack_read_only():
    class Array:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

    fixed = np.zeros(3, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="scale: y is read-only"):
        vjp.scale(floats(3), out=Array(fixed))
    own = np.zeros(3, np.float32)
    vjp.scale(np.ones(3, np.float32), out=Array(own))
    assert (own == 1).all() and (fixed == 0).all()


# ---- Dtypes and numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_dtypes(dtype):
    x = floats(4, 8).astype(dtype)
    y, mean, _ = vjp.layer_norm(x, np.ones(8, dtype), device="ref")
    assert type(y) is np.ndarray and y.dtype == dtype and mean.dtype == (np.float64 if dtype is np.float64 else np.float32)
    out = np.empty((8, 4), dtype).T
    assert np.array_equal(vjp.layer_norm(x, np.ones(8, dtype), device="ref", outputs="y", out=out), y)


def test_gradients_have_the_dtype_of_their_parameter():
    x, dy = floats(4, 8).astype(ml_dtypes.bfloat16), floats(4, 8).astype(ml_dtypes.bfloat16)
    dx, dgamma, dbeta = vjp.layer_norm_backward(dy, x, np.ones(8, np.float32))
    assert dx.dtype == ml_dtypes.bfloat16 and dgamma.dtype == np.float32
    assert vjp.layer_norm_backward(dy, x, outputs="dgamma", out=np.empty(8, np.float32)).dtype == np.float32


@pytest.mark.parametrize("name", ["bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_cast(name):
    y = vjp.cast(np.float32([1, 2.5, 3.14159]), dtype=name)
    assert y.dtype == ml_dtypes.bfloat16 and np.array_equal(y, np.float32([1, 2.5, 3.14159]).astype(ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="unknown dtype"):
        vjp.cast(y, dtype="int7")


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.complex64, bool, ">f4"])
def test_unknown_dtypes(dtype):
    with pytest.raises(TypeError, match=r"scale: x has the dtype .*must be f32"):
        vjp.scale(np.zeros(3, dtype))


@pytest.mark.parametrize("value", ["text", [1.0, 2.0], object(), b"bytes"])
def test_not_an_array(value):
    with pytest.raises(TypeError, match="scale: x must be an array"):
        vjp.scale(value)


def test_numbers_stand_for_tensors_of_no_axes():
    w, zero = floats(5), np.zeros(5, np.float32)
    expected = vjp.adamw(w, zero, zero, w, np.float32(0.1), np.int64(1).reshape(()))
    for got, value in zip(vjp.adamw(w, zero, zero, w, 0.1, 1), expected):
        assert np.array_equal(got, value)
    assert np.array_equal(vjp.mul(w, 2.0), 2 * w)
    scale, norm = vjp.clip(16.0, max_norm=1.0)
    assert scale == 0.25 and norm == 4 and norm.dtype == np.float32
    with pytest.raises(TypeError, match="must be an array"):
        vjp.scale(2.0)


def test_other_buffers():
    import array
    assert np.array_equal(vjp.scale(array.array("f", [1, 2]), factor=2.0), np.float32([2, 4]))
    assert np.array_equal(vjp.scale(memoryview(floats(2, 2)), factor=0.0), np.zeros((2, 2)))


def test_jax():
    jax = pytest.importorskip("jax")
    for dtype in ("float32", "bfloat16"):
        x = jax.numpy.arange(12, dtype=dtype).reshape(3, 4)
        y = vjp.scale(x, factor=2.0)
        assert isinstance(y, jax.Array) and y.dtype == dtype and (y == 2 * x).all()
    with pytest.raises(BufferError, match="read-only"):
        vjp.scale(x, out=x)


# ---- Arguments and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("call, sentence", [
    (lambda x: vjp.layer_norm(), "needs the argument 'x'"),
    (lambda x: vjp.layer_norm(None), "needs the argument 'x'"),
    (lambda x: vjp.layer_norm(x, x, x, x), "at most 3 positional"),
    (lambda x: vjp.layer_norm(x, x=x), "two values for argument 'x'"),
    (lambda x: vjp.layer_norm(x, epsilon=1), "unexpected argument 'epsilon'"),
    (lambda x: vjp.layer_norm(x, eps="much"), "real number|float"),
    (lambda x: vjp.layer_norm(x, axes=1.5), "integer"),
    (lambda x: vjp.linear(x, x, transpose_b="no"), "transpose_b must be True or False"),
    (lambda x: vjp.layer_norm(x, device=3), "device must be a name, not 3"),
])
def test_wrong_arguments(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call(floats(3, 3))


def test_choices():
    x = floats(3, 3)
    assert (vjp.linear(x, x, activation="relu", outputs="y") >= 0).all()
    with pytest.raises(ValueError, match="activation is 'swish'; it must be one of none, relu, gelu_tanh"):
        vjp.linear(x, x, activation="swish")


def test_exceptions_carry_the_sentence():
    with pytest.raises(vjp.InvalidError) as caught:
        vjp.linear(floats(4, 6), floats(7, 5))
    assert str(caught.value) == "linear.forward: a is [4, 6] and b is [7, 5]: K is 6 in one and 7 in the other"
    assert isinstance(caught.value, vjp.Error) and isinstance(caught.value, ValueError)
    with pytest.raises(vjp.InvalidError, match=r"index.* 9"):
        vjp.gather(floats(3, 4), np.int64([0, 9]))
    with pytest.raises(vjp.NoDeviceError, match='unknown device "gpu"'):
        vjp.scale(floats(3), device="gpu")


def test_a_refused_call_writes_nothing():
    out = np.full((2, 4), 7, np.float32)
    with pytest.raises(vjp.InvalidError):
        vjp.gather(floats(3, 4), np.int64([0, 9]), out=out)
    assert (out == 7).all()


# ---- What describes the functions -----------------------------------------------------------------------


def stub():
    """The signatures of _ops.pyi, without types, by name; those of the first overload."""
    tree = ast.parse(open(os.path.join(SOURCE, "python/vjp/_ops.pyi")).read())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in found:
            a = node.args
            positional = [(arg.arg, None) for arg in a.args[:len(a.args) - len(a.defaults)]]
            positional += [(arg.arg, ast.literal_eval(value)) for arg, value in zip(a.args[len(positional):], a.defaults)]
            found[node.name] = (positional, [(arg.arg, ast.literal_eval(value)) for arg, value in zip(a.kwonlyargs, a.kw_defaults)],
                                len(a.defaults))
    return found


def test_signatures_are_those_of_the_stub():
    written = stub()
    assert list(written) == vjp.ops() and len(written) > 30
    for name, (positional, keywords, defaults) in written.items():
        parameters = inspect.signature(getattr(vjp, name)).parameters.values()
        of = lambda kind: [(p.name, None if p.default is p.empty else p.default) for p in parameters if p.kind is kind]  # noqa: E731
        assert of(inspect.Parameter.POSITIONAL_OR_KEYWORD) == positional, name
        assert of(inspect.Parameter.KEYWORD_ONLY) == keywords, name
        assert sum(p.default is not p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == defaults, name


def test_docstrings():
    assert vjp.layer_norm.__module__ == "vjp" and vjp.layer_norm.__name__ == "layer_norm"
    for name in vjp.ops():
        text = getattr(vjp, name).__doc__
        assert "Returns, in this order:" in text and "accumulate:" in text, name
    assert "none, relu, gelu_tanh" in vjp.linear.__doc__
    # swiglu's backward can give y again.
    x = np.ones(8, np.float32)
    assert re.findall(r"(\w+): .*only where `outputs` names it", vjp.swiglu_backward.__doc__) == ["y"]
    assert len(vjp.swiglu_backward(x, x, x)) == 2 and np.array_equal(vjp.swiglu_backward(x, x, x, outputs="y"), vjp.swiglu(x, x))


def test_one_version():
    header = re.search(r'#define VJP_VERSION +"(.*)"', open(os.path.join(SOURCE, "include/vjp.h")).read()).group(1)
    assert vjp.__version__ == header
    import subprocess
    assert subprocess.run([vjp.program_path(), "--version"], capture_output=True, text=True).stdout.strip() == f"vjp {header}"


def test_devices():
    found = {device.name: device.summary for device in vjp.devices()}
    assert "ref" in found and "thread" in found["cpu"]
