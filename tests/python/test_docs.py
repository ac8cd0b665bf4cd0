# SPDX-License-Identifier: MIT
"""Runs the blocks of docs/python.md as one program, the example notebook, and the programs that its tables of costs are from."""
import importlib.util
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_tutorial(tmp_path, monkeypatch):
    page = open(os.path.join(ROOT, "docs/python.md")).read()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
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
