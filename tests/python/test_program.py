# SPDX-License-Identifier: MIT
"""The program that the package contains: check, bench, train, python -m vjp."""
import builtins
import os
import subprocess
import sys
import types

import pytest

import vjp

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


def test_check():
    rows = vjp.check("scale", quick=True)
    assert len(rows) > 10 and all(row["op"] == "scale" and row["ok"] for row in rows)
    assert {row["op"] for row in vjp.check("scale", "cast", quick=True)} == {"scale", "cast"}
    for ops in (["skale"], ["scale", "skale"]):
        with pytest.raises(vjp.Error, match="skale"):
            vjp.check(*ops, quick=True)


def test_bench():
    rows = vjp.bench("clip", quick=True, threads=1)
    assert rows and all(row["op"] == "clip" and row["threads"] == 1 and row["ms"] > 0 for row in rows)
    assert {row["op"] for row in vjp.bench("clip", "scale", quick=True, threads=1)} == {"clip", "scale"}


def test_module_is_the_program():
    done = subprocess.run([sys.executable, "-m", "vjp", "ops", "rope"], capture_output=True, text=True)
    assert done.returncode == 0 and "rotary" in done.stdout
    assert subprocess.run([sys.executable, "-m", "vjp", "nonsense"], capture_output=True).returncode != 0


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_train(text, tmp_path):
    seen = []
    settings = {"steps": 60, "batch": 1, "context": 8}
    whole = vjp.train(text, out=tmp_path / "whole", callback=seen.append, **settings)
    assert [row["step"] for row in whole] == list(range(1, 61)) and seen == list(whole)
    assert os.path.exists(tmp_path / "whole" / "loss.svg") and whole.folder == str(tmp_path / "whole")

    first = vjp.train(text, out=tmp_path / "parts", callback=lambda row: row["step"] < 3, **settings)
    assert 3 <= len(first) < 60  # the signal reaches the program a little later
    second = vjp.train(out=tmp_path / "parts", resume=True)
    assert [row["loss"] for row in [*first, *second]] == [row["loss"] for row in whole]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_learning_rate(schedule, text, tmp_path):
    """vjp.learning_rate() is the trainer's."""
    options = {"schedule": schedule, "lr": 1e-3, "warmup": 3}
    if schedule != "constant":
        options["last_lr"] = 0.2
    if schedule == "wsd":
        options["decay_share"] = 0.5
    run = vjp.train(text, out=tmp_path / "run", steps=12, batch=1, context=8, optimizer="muon", **options)
    assert len(run) == 12 and run[2]["rate"] == pytest.approx(1e-3, rel=1e-6)
    for row in run:
        assert vjp.learning_rate(row["step"], 12, **options) == pytest.approx(row["rate"], rel=1e-6)
    with pytest.raises(ValueError, match="must be one of cosine"):
        vjp.learning_rate(1, 2, 0.1, "step")


def test_train_raises(text, tmp_path):
    with pytest.raises(vjp.Error, match="preset"):
        vjp.train(text, out=tmp_path / "run", preset="gigantic")

    def fail(row):
        raise KeyError("from the callback")

    with pytest.raises(KeyError, match="from the callback"):
        vjp.train(text, out=tmp_path / "run", callback=fail, steps=4, batch=2, context=16)


def test_plot(text, tmp_path):
    class Axes:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            return lambda *a, **k: self.calls.append((name, a))

    metrics = vjp.train(text, out=tmp_path / "run", steps=4, batch=2, context=16, validate_every=2)
    axes = Axes()
    assert metrics.plot(axes) is axes
    plots = [a for name, a in axes.calls if name == "plot"]
    assert plots[0][0] == [1, 2, 3, 4] and plots[2][0] == [2, 4]


def test_bar_in_a_notebook(text, tmp_path, monkeypatch):
    """With a tqdm that notes what it shows; outside a notebook there is none."""
    class Bar:
        made = []

        def __init__(self, total, unit):
            self.total, self.n, self.losses, self.open = total, 0, [], True
            self.made.append(self)

        def update(self, steps):
            self.n += steps

        def set_postfix(self, loss):
            self.losses.append(loss)

        def close(self):
            self.open = False

    class ZMQInteractiveShell:
        pass

    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    options = {"out": tmp_path / "run", "steps": 4, "batch": 2, "context": 16}
    vjp.train(text, **options)
    assert not Bar.made
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    metrics = vjp.train(text, **{**options, "out": tmp_path / "other"}, callback=lambda row: row["step"] < 2)
    bar, = Bar.made
    assert bar.total == 4 and bar.n == metrics[-1]["step"] and bar.losses[0] == f"{metrics[0]['smoothed']:.4f}" and not bar.open
