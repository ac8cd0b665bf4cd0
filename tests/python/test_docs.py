# SPDX-License-Identifier: MIT
"""Runs the README's block, the blocks of docs/python.md as one program, the example notebook, and the programs that the
tables of costs are from."""
import importlib.util
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", open(os.path.join(ROOT, page)).read(), re.M | re.S)


def test_readme(capsys):
    """It prints what the C program above it prints."""
    [block] = blocks_of("README.md")
    exec(compile(block, "README.md", "exec"), {})
    printed = [f"{float(number):7.4f}" for number in re.findall(r"-?\d+\.\d+", capsys.readouterr().out)]
    told = re.findall(r"dx = (.{7}) (.{7}) (.{7})$", open(os.path.join(ROOT, "README.md")).read(), re.M)
    assert len(told) == 2 and printed == [*told[0], *told[1]]


def test_tutorial(tmp_path, monkeypatch):
    blocks = blocks_of("docs/python.md")
    assert len(blocks) >= 6
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(blocks, 1):
        needs = re.match(r"import (torch|jax)\n", block)
        if needs and not importlib.util.find_spec(needs[1]):
            continue
        exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "book").is_dir()


def test_notebook():
    done = subprocess.run([sys.executable, os.path.join(ROOT, "examples/08_notebook.py")], capture_output=True, text=True)
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stderr


def test_cost():
    """The table's program runs. Its bound is far above what is measured: machines that test are busy."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, "bench/python_call.py"), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = [float(cell) for cell in re.findall(r"\| (\d+\.\d+) \|", done.stdout)]
    assert times and times[0] < 50


def test_cost_in_torch():
    if not importlib.util.find_spec("torch"):
        pytest.skip("there is no torch")
    done = subprocess.run([sys.executable, os.path.join(ROOT, "bench/torch_call.py"), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\n| ") == 4, done.stdout + done.stderr


def test_picture():
    """The picture shows the tables of the page."""
    with open(os.path.join(ROOT, "docs/python-speed.svg"), encoding="utf-8") as file:
        picture = file.read()
    done = subprocess.run([sys.executable, os.path.join(ROOT, "bench/module_plot.py"), os.path.join(ROOT, "docs/python.md")], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == picture, done.stderr or "make it again: bench/module_plot.py docs/python.md >docs/python-speed.svg"
