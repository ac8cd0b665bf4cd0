# SPDX-License-Identifier: MIT
"""Arrays in a GPU's memory, without a GPU: a backend that stands for CUDA, and arrays that stand for torch's and cupy's.

Shown here: which device and stream a call takes, whose memory its results and workspace are, when it waits, what it copies, and
what it refuses. Numbers and real streams are test_cuda.py's. The backend is found by LD_LIBRARY_PATH, which is read when a
process starts, so each test runs in one of its own.
"""
import os
import shutil
import subprocess
import sys

import pytest

import vjp

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(FOLDER))

BEGIN = """
import ctypes, mmap, os, sys, types
import numpy as np
import vjp
from fake_arrays import WithCapsule, WithTable
fake = ctypes.CDLL("libvjp-cuda.so")
fake.fake_log.restype = ctypes.c_char_p
def log():
    text = fake.fake_log().decode().splitlines()
    fake.fake_clear()
    return text
def refused(kind, sentence, call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except kind as error:
        assert sentence in str(error), str(error)
        return
    raise AssertionError(sentence)
x = np.arange(12, dtype=np.float32).reshape(3, 4)
"""


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or not compiler:
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("backend")
    subprocess.run([compiler, "-shared", "-fPIC", "-I", os.path.join(SOURCE, "include"), "-o", folder / "libvjp-cuda.so",
                    os.path.join(FOLDER, "fake_cuda.c")], check=True)
    return folder


CASES = {
    "devices": """
assert [d.name for d in vjp.devices() if d.name.startswith("cuda")] == ["cuda:0", "cuda:1"]
""",
    "results are of the caller's kind, on its GPU and stream": """
for gpu, stream, expected in ((0, 0, 1), (1, 0, 1), (0, 0x50, 0x50)):
    WithTable.stream = stream
    y = vjp.scale(WithTable(x, gpu), factor=3.0)
    assert type(y) is WithTable and y.gpu == gpu and np.array_equal(y.array, 3 * x)
    line = [l for l in log() if l.startswith("scale")][0]
    assert f"stream {expected:#x} " in line, line
assert not WithTable.alive
""",
    "nothing waits, and the workspace is the caller's library's": """
vjp.scale(WithTable(x))
log()
seen = []
own = WithTable.__dict__["alive"]
class Watch(dict):
    def __setitem__(self, key, value):
        seen.append(value[1].ctypes.data)
        super().__setitem__(key, value)
WithTable.alive = Watch()
vjp.scale(WithTable(x), factor=2.0)
lines = log()
assert len(seen) == 2 and not any(l.startswith(("wait", "alloc", "open", "upload")) for l in lines), lines
assert f"workspace {seen[1]:#x}" in lines[0], (lines, seen)
assert not WithTable.alive
""",
    "a device belongs to one stream": """
def device():
    vjp.scale(WithTable(x))
    return [l.split()[2] for l in log() if l.startswith("scale")][0]
WithTable.stream = 0x50
first = device()
assert device() == first
WithTable.stream = 0x60
other = device()
assert other != first and device() == other
WithTable.stream = 0x50
assert device() == first
""",
    "a spare device is open before a graph is captured": """
sys.modules["library"] = types.ModuleType("library")
capturing = [False]
sys.modules["library"].cuda = types.SimpleNamespace(is_current_stream_capturing=lambda: capturing[0])
WithTable.__module__ = "library.tensor"
vjp.scale(WithTable(x))
assert sum(l.startswith("open") for l in log()) == 2
capturing[0] = True
WithTable.stream = 0x70
vjp.scale(WithTable(x))
assert not any(l.startswith(("open", "alloc", "wait")) for l in log())
capturing[0] = False
WithTable.stream = 0x80
vjp.scale(WithTable(x))
assert sum(l.startswith("open") for l in log()) == 2
""",
    "the thread's current GPU stays": """
sys.modules["library"] = types.ModuleType("library")
current, chosen = [0], []
sys.modules["library"].cuda = types.SimpleNamespace(is_current_stream_capturing=lambda: False, current_device=lambda: current[0],
                                                    set_device=chosen.append)
WithTable.__module__ = "library.tensor"
vjp.scale(WithTable(x))
assert chosen == []
vjp.scale(WithTable(x, 1))
assert chosen == [0]
refused(vjp.DeviceError, "seven is refused", vjp.scale, WithTable(x, 1), factor=7.0)
assert chosen == [0, 0]
""",
    "out and accumulate": """
out = WithTable(np.ones((3, 4)))
assert vjp.scale(WithTable(x), factor=2.0, out=out, accumulate=True) is out and np.array_equal(out.array, 2 * x + 1)
t = WithTable(x.copy())
assert vjp.scale(t, factor=2.0, out=t) is t and np.array_equal(t.array, 2 * x)
""",
    "layouts": """
for kind in (WithTable, WithCapsule):
    copies = kind.packed_copies
    y = vjp.scale(kind(x.T), factor=2.0)
    assert np.array_equal(y.array, 2 * x.T) and kind.packed_copies == copies + 1
    row = np.ones(4, np.float32)
    assert np.array_equal(vjp.scale(kind(np.broadcast_to(row, (3, 4))), factor=2.0).array, np.full((3, 4), 2))
    base = np.full((8, 3), 5, np.float32)
    out = kind(base[::2])
    out.array = base[::2].T
    assert vjp.scale(kind(x), factor=2.0, out=out) is out
    assert np.array_equal(base[::2], 2 * x.T) and (base[1::2] == 5).all()
    shared = kind(x)
    shared.array = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3, 4), (0, 4))
    refused(ValueError, "share memory", vjp.scale, kind(x), out=shared)
    assert vjp.scale(kind(np.empty((0, 4)))).array.shape == (0, 4)
assert not WithTable.alive
""",
    "numbers": """
assert np.array_equal(vjp.mul(WithTable(x), 2.5).array, 2.5 * x)
assert "upload 4" in log()
assert np.array_equal(vjp.mul(WithCapsule(x), 2.5).array, 2.5 * x) and not WithTable.alive
""",
    "several calls are one launch": """
from vjp import _core
a, b = WithTable(x), WithTable(x + 1)
y = _core.call_many("mul", [{"a": t, "b": b} for t in (a, b, a)])
assert [type(t) for t in y] == 3 * [WithTable] and [t.array.tolist() for t in y] == [(t.array * b.array).tolist() for t in (a, b, a)]
assert log().count("mul of 3") == 1
out = WithTable(np.zeros((3, 4)))
y = _core.call_many("mul", [{"a": a, "b": b}, {"a": out, "b": b, "out": out}])
assert y[1] is out and "mul of 2" in log() and not out.array.any()
y = _core.call_many("mul", [{"a": a, "b": b, "out": out}, {"a": out, "b": b}])  # the second reads what the first writes
assert not any("of" in l for l in log()) and np.array_equal(y[1].array, x * (x + 1) * (x + 1))
y = _core.call_many("mul", [{"a": t, "b": b} for t in 20 * [a]])
assert [l for l in log() if "of" in l] == ["mul of 16", "mul of 4"] and all(np.array_equal(t.array, x * (x + 1)) for t in y)
y = _core.call_many("scale", [{"x": t, "factor": 3.0} for t in (a, b)])  # both need the workspace
assert not any("of" in l for l in log()) and all(np.array_equal(t.array, 3 * s.array) for t, s in zip(y, (a, b)))
y = _core.call_many("scale", [{"x": WithCapsule(x + i), "factor": 3.0} for i in range(2)])
assert all(np.array_equal(t.array, 3 * (x + i)) for i, t in enumerate(y))
assert _core.call_many("mul", []) == []
refused(ValueError, "calls 0 and 1 differ in where their arrays are", _core.call_many, "mul", [{"a": a, "b": b}, {"a": WithTable(x, 1), "b": WithTable(x, 1)}])
refused(ValueError, "calls 0 and 1 differ in their attributes", _core.call_many, "scale", [{"x": a, "factor": 2.0}, {"x": a, "factor": 3.0}])
refused(TypeError, "mul() needs the argument 'b'", _core.call_many, "mul", [{"a": a, "b": b}, {"a": a}])
refused(TypeError, "unexpected argument 'c'", _core.call_many, "mul", [{"a": a, "b": b, "c": b}])
refused(TypeError, "must be a dict", _core.call_many, "mul", [a])
refused(ValueError, "no function nothing", _core.call_many, "nothing", [])
refused(TypeError, "a list of dicts", _core.call_many, "mul", {})
before = out.array.copy()
refused(vjp.InvalidError, "mul.forward: b has", _core.call_many, "mul", [{"a": a, "b": b, "out": out}, {"a": a, "b": WithTable(np.ones(3))}])
assert np.array_equal(out.array, before)
assert not WithTable.alive
""",
    "capsules": """
y = vjp.scale(WithCapsule(x, 1), factor=3.0)
assert type(y) is WithCapsule and y.gpu == 1 and np.array_equal(y.array, 3 * x)
assert set(WithCapsule.asked) == {1}
lines = log()
at = [i for i, l in enumerate(lines) if l.startswith("scale")][0]
assert "stream 0x1 " in lines[at] and lines[at + 1] == "wait stream 0x1", lines
assert lines.count("alloc") - lines.count("free") == 1, lines  # the device's workspace
out = WithCapsule(np.zeros((3, 4)))
assert vjp.scale(WithCapsule(x), out=out) is out and np.array_equal(out.array, x)
""",
    "a buffer for the host that is refused, as cupy's": """
class WithBuffer(WithCapsule, mmap.mmap):
    def __new__(cls, *_):
        closed = super().__new__(cls, -1, 4096)
        mmap.mmap.close(closed)
        return closed
refused(ValueError, "closed", memoryview, WithBuffer(x))
assert np.array_equal(vjp.scale(WithBuffer(x), factor=3.0).array, 3 * x)
""",
    "the current stream of cupy": """
cupy = types.ModuleType("cupy")
cupy.cuda = types.ModuleType("cupy.cuda")
cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0x90)
sys.modules["cupy"], sys.modules["cupy.cuda"] = cupy, cupy.cuda
WithCapsule.__module__ = "cupy"
vjp.scale(WithCapsule(x))
assert set(WithCapsule.asked) == {0x90}
assert any("stream 0x90 " in l for l in log())
""",
    "two libraries in one call": """
WithTable.stream = 0x50
y = vjp.mul(WithTable(x), WithCapsule(x))
assert type(y) is WithTable and np.array_equal(y.array, x * x) and "wait stream 0x1" in log()
""",
    "what is refused": """
refused(ValueError, "mul: a is in the memory of cuda:0 and b in that of the host", vjp.mul, WithTable(x), x)
refused(ValueError, "is in the memory of cuda:1 and a in that of cuda:0", vjp.mul, WithTable(x), WithTable(x), out=WithTable(x, 1))
refused(ValueError, "the arrays are in the memory of cuda:0, and device is 'ref'", vjp.scale, WithTable(x), device="ref")
refused(vjp.UnsupportedError, "no kernel for f32", vjp.layer_norm, WithTable(x))
refused(vjp.DeviceError, "seven is refused", vjp.scale, WithTable(x), factor=7.0)
refused(vjp.InvalidError, "expected [3, 4]", vjp.scale, WithTable(x), out=WithTable(x.T.copy()))
vjp.scale(WithTable(x), device="cuda:0"), vjp.scale(WithTable(x), device="cuda"), vjp.scale(WithTable(x, 1), device="cuda:1")
g = vjp.Graph()
refused(ValueError, "must be in host memory", g.constant, "k", WithTable(x))
program = g.compile(g.scale(g.input("x", "f32", (3, 4))))
def write():
    program["x"] = WithTable(x)
refused(ValueError, "must be in host memory", write)
assert not WithTable.alive
""",
    "memory stays flat": """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
big = np.ones(4096, np.float32)
for call in (lambda: vjp.scale(WithTable(big)), lambda: vjp.scale(WithCapsule(big)), lambda: vjp.scale(WithTable(big[::2])),
             lambda: refused(vjp.DeviceError, "seven", vjp.scale, WithTable(big), factor=7.0), lambda: vjp.mul(WithTable(big), 2.0)):
    for i in range(3000):
        if i == 1000:
            before = resident()
        call()
        fake.fake_clear()
    assert resident() - before < 4 << 20, resident() - before  # a leak would be 32 MB
""",
    "synchronize": """
vjp.scale(WithTable(x))
log()
vjp.synchronize("cuda:0")
assert "wait stream 0x1" in log()
""",
}


def run(code, **variables):
    path = os.pathsep.join([FOLDER, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path, **variables})


@pytest.mark.parametrize("case", CASES)
def test_gpu_arrays(backend, case):
    done = run(BEGIN + CASES[case], LD_LIBRARY_PATH=str(backend))
    assert done.returncode == 0, done.stderr


def test_without_the_backend():
    if any(device.name.startswith("cuda") for device in vjp.devices()):
        pytest.skip("there is a GPU")
    done = run("from fake_arrays import WithTable\nimport vjp\ntry:\n vjp.scale(WithTable([1.0]))\nexcept vjp.NoDeviceError as error:\n"
               " assert 'cuda:0' in str(error), error\nelse:\n raise AssertionError('not refused')")
    assert done.returncode == 0, done.stderr
