# SPDX-License-Identifier: MIT
"""Graphs and programs: against the functions themselves, and what is refused."""
import threading
import time

import numpy as np
import pytest

import vjp

rng = np.random.default_rng(2)


def floats(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def small():
    g = vjp.Graph()
    x, t = g.input("x", "f32", (6, 5)), g.input("t", "i32", (6,))
    w, gamma = g.parameter("w", "f32", (3, 5)), g.parameter("gamma", np.float32, (5,))
    normed = g.rms_norm(x, gamma)
    loss = g.cross_entropy(g.linear(normed, w, transpose_b=True), t)
    return g, x, t, w, gamma, loss


def test_gradients_are_those_of_the_functions():
    g, x, t, w, gamma, loss = small()
    p = g.compile([loss, *g.grad(loss, [w, gamma])])
    values = {"x": floats(6, 5), "t": np.int32([0, 1, 2, 2, 1, 0])}
    p[w], p["gamma"] = floats(3, 5), floats(5)
    got_loss, dw, dgamma = p.run(**values)
    normed, rstd = vjp.rms_norm(values["x"], p[gamma])
    logits = vjp.linear(normed, p[w], transpose_b=True, outputs="y")
    expected, lse = vjp.cross_entropy(logits, values["t"])
    dlogits = vjp.cross_entropy_backward(1.0, logits, values["t"], lse)
    dnormed, dweight = vjp.linear_backward(dlogits, normed, p[w], transpose_b=True, outputs=("da", "db"))
    assert got_loss == expected and np.array_equal(dw, dweight)
    assert np.array_equal(dgamma, vjp.rms_norm_backward(dnormed, values["x"], p[gamma], rstd, outputs="dgamma"))


@pytest.mark.parametrize("optimizer, options", [("adamw", {"beta2": 0.95}), ("sgd", {"beta": 0.8, "nesterov": True}),
                                                ("muon", {"momentum": 0.9, "weight_decay": 0.0, "adamw": {"beta2": 0.95}})])
def test_training_lowers_the_loss(optimizer, options, tmp_path):
    g, x, t, w, gamma, loss = small()
    training = g.minimize(loss, optimizer=optimizer, max_norm=1.0, **options)
    p = training.compile(seed=4)
    p[gamma] = np.ones(5, np.float32)
    data = {"x": floats(6, 5), "t": np.int32([0, 1, 2, 2, 1, 0])}
    losses = [p.step(0.05, **data) for _ in range(40)]
    assert losses[-1] < losses[0] / 2 and p.steps == 40 and p[training.norm] > 0
    p.save(tmp_path / "a.safetensors")
    weights = p[w]
    p.step(0.05)
    after = p[w]
    assert not np.array_equal(after, weights)
    p.load(tmp_path / "a.safetensors")
    assert np.array_equal(p[w], weights)
    p.steps = 40
    p.step(0.05)
    assert np.array_equal(p[w], after)  # the moments were loaded too
    with pytest.raises(vjp.FileError, match="none.safetensors"):
        p.load(tmp_path / "none.safetensors")


def test_muon():
    """A step of the matrix is nearly orthogonal; what uses_muon() rejects is trained by AdamW."""
    data = {"x": floats(6, 5), "t": np.int32([0, 1, 2, 2, 1, 0])}
    start, seen, made = floats(3, 5), [], {}
    for name, choose in (("all", None), ("none", lambda name, shape: seen.append((name, shape))), ("adamw", None)):
        g, x, t, w, gamma, loss = small()
        options = {} if name == "adamw" else {"optimizer": "muon", "uses_muon": choose, "adamw": {"weight_decay": 0.25}}
        options["weight_decay"] = 0.25
        p = g.minimize(loss, **options).compile()
        p[w], p[gamma] = start, np.ones(5, np.float32)
        p.step(0.01, **data)
        made[name] = p[w], p[gamma]
    assert set(seen) == {("w", (3, 5))}  # vectors are not asked about
    assert all(np.array_equal(a, b) for a, b in zip(made["none"], made["adamw"]))
    step = ((1 - 0.01 * 0.25) * start - made["all"][0]) / (0.01 * 0.2 * np.sqrt(5))
    values = np.linalg.svd(step.astype(np.float64), compute_uv=False)
    assert values.shape == (3,) and (0.5 < values[:2]).all() and (values < 1.3).all(), values
    assert np.array_equal(made["all"][1], made["adamw"][1])


@pytest.mark.parametrize("options, error, sentence", [
    ({"optimizer": "lion"}, ValueError, "must be adamw, sgd or muon"),
    ({"optimizer": "muon", "beta1": 0.9}, TypeError, "Muon has no option 'beta1'"),
    ({"optimizer": "muon", "scale": "large"}, ValueError, "must be adamw or shape"),
    ({"optimizer": "muon", "momentum": "much"}, TypeError, "real number|float"),
    ({"optimizer": "muon", "iterations": 0}, vjp.InvalidError, "iterations"),
    ({"optimizer": "muon", "uses_muon": lambda name, shape: 1 / 0}, ZeroDivisionError, "zero"),
    ({"adamw": {}}, TypeError, "for optimizer="),
])
def test_wrong_optimisers(options, error, sentence):
    *_, loss = small()
    with pytest.raises(error, match=sentence):
        loss.graph.minimize(loss, **options)


def test_a_mistake_is_raised_where_it_is_made():
    g = vjp.Graph()
    a, b = g.input("a", "f32", (4, 6)), g.input("b", "f32", (7, 5))
    with pytest.raises(vjp.InvalidError, match=r"layers.0.linear: .*K is 6 in one and 7 in the other"):
        with g.scope("layers.0"):
            g.linear(a, b)


@pytest.mark.parametrize("build, error", [
    (lambda g, x: g.layer_norm(x, eps="small"), TypeError),
    (lambda g, x: g.layer_norm(x, epsilon=1), TypeError),
    (lambda g, x: g.layer_norm(np.ones(3)), TypeError),
    (lambda g, x: g.layer_norm(x, x=x), TypeError),
    (lambda g, x: g.call("tanh", x), ValueError),
    (lambda g, x: g.input("y", "i8", (3,)), TypeError),
    (lambda g, x: g.input("y", "f32", (1,) * 9), ValueError),
    (lambda g, x: g.grad(g.mean(x, axes=0), [x], into=[]), ValueError),
    (lambda g, x: g.minimize(g.mean(x, axes=0), optimizer="adam"), ValueError),
    (lambda g, x: g.compile(x, device="gpu"), vjp.NoDeviceError),
    (lambda g, x: vjp.Graph().layer_norm(x), TypeError),
])
def test_wrong_calls(build, error):
    g = vjp.Graph()
    with pytest.raises(error):
        build(g, g.input("x", "f32", (2, 3)))


def test_values():
    g = vjp.Graph()
    x = g.input("x", "bf16", (2, 6))
    y = g.cast(x, dtype="f32").reshape(3, -1)
    assert (y.shape, y.dtype, x.name) == ((3, 4), "f32", "x") and "bf16 [2, 6]" in repr(x)
    two = g.constant("two", np.full((3, 4), 2, np.float32)[:, ::-1])
    z = 3.0 * (y * two + y)
    rstd = g.layer_norm(z).output("rstd")
    assert rstd.shape == (3,) and g.find("two").number == two.number and g.find("three") is None
    assert "layer_norm" in g.text() and g.dot().startswith("digraph")
    p = g.compile([z])
    import ml_dtypes
    p[x] = np.ones((2, 6), ml_dtypes.bfloat16)
    assert (p.run()[0] == 9).all() and p[x].dtype == ml_dtypes.bfloat16 and p.report()["calls"] == 4
    with pytest.raises(ValueError, match=r"the array is f32 \(2, 6\); the value is bf16 \(2, 6\)"):
        p[x] = np.ones((2, 6), np.float32)
    with pytest.raises(KeyError):
        p["none"]
    other = vjp.Graph().input("x", "bf16", (2, 6))
    with pytest.raises(ValueError, match="another graph"):
        p[other]
    with pytest.raises(ValueError, match="another graph"):
        p[other] = np.ones((2, 6), ml_dtypes.bfloat16)


def test_recomputing_gives_the_same_bits():
    def gradients(recompute):
        g = vjp.Graph()
        x, w = g.input("x", "f32", (8, 16)), g.parameter("w", "f32", (16, 16))
        y = x
        for _ in range(3):
            if recompute:
                with g.recompute():
                    y = g.linear(y, w, activation="gelu_erf")
            else:
                y = g.linear(y, w, activation="gelu_erf")
        loss = g.mean(y, axes=0)
        p = g.compile(g.grad(loss, [w]))
        p.init(7)
        return p.run(x=np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16))[0], p.report()["calls"]

    (kept, calls), (again, more) = gradients(False), gradients(True)
    assert np.array_equal(kept, again) and more > calls


def test_parameters_in_halves(monkeypatch, tmp_path):
    """Without casts a step computes the same, and parameters are read and written as f32."""
    monkeypatch.setenv("VJP_REWRITES", "-all,+halves")  # on the CPU only where it is asked for
    programs = {}
    for halves in (False, True):
        g = vjp.Graph()
        x, t = g.input("x", "bf16", (64, 48)), g.input("t", "i32", (64,))
        w = g.parameter("w", "f32", (16, 48))
        loss = g.cross_entropy(g.linear(x, g.cast(w, dtype="bf16"), transpose_b=True), t)
        p = g.minimize(loss, weight_decay=0.01).compile(halves=halves)
        p["w"] = weights = rng.standard_normal((16, 48)).astype(np.float32) if not programs else weights
        assert np.array_equal(p["w"], weights)
        programs[halves] = p, g, loss
    (whole, *_), (halved, g, loss) = programs[False], programs[True]
    assert halved.report()["calls"] < whole.report()["calls"]
    data = {"x": vjp.cast(floats(64, 48), dtype="bf16"), "t": np.arange(64, dtype=np.int32) % 16}
    for _ in range(20):
        assert whole.step(0.01, **data) == halved.step(0.01, **data)
        assert np.array_equal(whole["w"], halved["w"])
    halved.save(tmp_path / "a.safetensors")
    whole.load(tmp_path / "a.safetensors")
    assert np.array_equal(whole["w"], halved["w"])
    shared = g.compile(loss, share=halved, halves=True)
    assert shared.run()[0] == halved.step(0.0)


def test_programs_share_memory():
    g = vjp.Graph()
    x = g.parameter("x", "f32", (4,))
    p = g.compile(g.scale(x, factor=2.0))
    q = g.compile(g.scale(x, factor=3.0), share=p)
    p[x] = np.ones(4, np.float32)
    del p  # the memory stays
    assert (q.run()[0] == 3).all()


def test_a_program_belongs_to_one_thread_at_a_time():
    g = vjp.Graph()
    x = g.input("x", "f32", (200, 200))
    y = x
    for _ in range(40):
        y = g.linear(y, x)
    p = g.compile(y, device="ref")  # slow: a tenth of a second for each product
    caught = []

    def run():
        try:
            p.run()
        except vjp.InterruptedRunError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.time() + 20
    while thread.is_alive() and time.time() < deadline:
        try:
            p[x] = np.zeros((200, 200), np.float32)
        except RuntimeError as error:
            assert "another thread" in str(error)
            break
        time.sleep(0.001)
    else:
        raise AssertionError("the program was never busy")
    while thread.is_alive():  # an interrupt between runs does nothing, so one may come too early
        p.interrupt()
        time.sleep(0.01)
    thread.join()
    assert len(caught) == 1
