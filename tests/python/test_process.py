# SPDX-License-Identifier: MIT
"""Threads, forks, the end of the interpreter, and memory that must not grow."""
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import vjp


def wide(rows=512):
    """Large enough for every thread of the pool to have tasks."""
    return np.random.default_rng(3).standard_normal((rows, 1024)).astype(np.float32)


def test_threads():
    """Many Python threads at once: the bits of one thread, whatever devices they get."""
    x = wide()
    expected = [vjp.layer_norm(x + i) for i in range(8)]
    wrong = []

    def work(i):
        for _ in range(5):
            for got, value in zip(vjp.layer_norm(x + i), expected[i]):
                if not np.array_equal(got, value):
                    wrong.append(i)
            try:
                vjp.linear(np.empty((2, 3 + i), np.float32), x)
                wrong.append(i)
            except vjp.Error as error:  # the sentence is the thread's own
                if f"a is [2, {3 + i}]" not in str(error):
                    wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_gil_is_released():
    """Another thread runs Python code while a kernel runs: the reference, which takes a tenth of a second here."""
    a, b = np.ones((64, 512), np.float32), np.ones((512, 512), np.float32)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    vjp.linear(a, b, outputs="y", device="ref")
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(begin + 0.005 < t < end - 0.005 for t in ticks) >= 5, (end - begin, len(ticks))


def in_child(queue, x, expected):
    got = vjp.layer_norm(x)
    queue.put(all(np.array_equal(a, b) for a, b in zip(got, expected)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_children(method):
    """A child made while the pool's threads sleep has none of them, and must not wait for them."""
    x = wide()
    expected = vjp.layer_norm(x)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue, x, expected))
    child.start()
    assert queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_while_another_thread_is_in_a_kernel():
    x = wide(4096)
    expected = vjp.layer_norm(x, outputs="y")
    stop = threading.Event()

    def work():
        while not stop.is_set():
            vjp.layer_norm(x)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(vjp.layer_norm(x, outputs="y"), expected) else 1)
            deadline = time.time() + 60
            while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.time() < deadline:
                time.sleep(0.005)
            if done[0] == 0:
                os.kill(child, 9)
                os.waitpid(child, 0)
            assert done[0] == child and os.waitstatus_to_exitcode(done[1]) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "os.kill(os.getpid(), 15)", "threading.Thread(target=loop, daemon=True).start(); time.sleep(0.05)",
                                    "g = vjp.Graph(); p = g.compile(g.scale(g.input('x', 'f32', (3,)))); keep.append(p)"])
def test_exit(ending):
    """The interpreter ends while devices are open, and while a thread is inside a kernel."""
    script = f"""
import os, sys, threading, time
import numpy as np
import vjp
keep = []
x = np.ones((4096, 1024), np.float32)
def loop():
    while True:
        vjp.layer_norm(x)
vjp.layer_norm(x)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == (-15 if "kill" in ending else 0), done.stderr
    assert not done.stderr


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def leak_calls():
    x, gamma, half = np.ones((2, 64), np.float32), np.ones(64, np.float32), np.ones((2, 64), ml_dtypes.bfloat16)
    out, strided = np.empty_like(x), np.ones((64, 2), np.float32).T
    yield lambda: vjp.layer_norm(x, gamma)
    yield lambda: vjp.layer_norm(x, gamma, outputs="y", out=out)
    yield lambda: vjp.layer_norm(half, gamma, outputs=("y", "rstd"))
    yield lambda: vjp.layer_norm(strided, gamma, outputs="y", out=out)

    def refused():
        with pytest.raises(ValueError):
            vjp.layer_norm(x, out)
        with pytest.raises(TypeError):
            vjp.layer_norm(x, eps="text")
        with pytest.raises(ValueError):
            vjp.layer_norm(x, outputs="z")

    yield refused
    try:
        import torch
    except ImportError:
        return
    tensor = torch.ones(2, 64)
    yield lambda: vjp.layer_norm(tensor, torch.ones(64))

    class Old:  # through capsules
        def __dlpack__(self, **keywords):
            return tensor.__dlpack__(**keywords)

    Old.__module__ = "torch"
    yield lambda: vjp.layer_norm(Old(), outputs="y")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_flat():
    """10^5 calls, and 10^4 of each other kind. A leak of one 256-byte array for each call would be 25 MB. A leak grows every time,
    while other libraries' threads may allocate something once: of three measurements the smallest counts."""
    for i, call in enumerate(leak_calls()):
        count = 100000 if i == 0 else 10000
        for _ in range(1000):
            call()
        grown = []
        while len(grown) < 3 and (not grown or min(grown) >= 16 * count):
            before = resident()
            for _ in range(count):
                call()
            grown.append(resident() - before)
        assert min(grown) < 16 * count, f"call {i} grew by {grown} bytes in {count} calls"


def test_references_are_given_back():
    x, out = np.ones((2, 64), np.float32), np.empty((2, 64), np.float32)
    name = "rstd"
    before = [sys.getrefcount(o) for o in (x, out, name, np.dtype(np.float32), None)]
    for _ in range(1000):
        vjp.layer_norm(x, outputs="y", out=out)
        vjp.layer_norm(x, outputs=name)
        with pytest.raises(ValueError):
            vjp.layer_norm(x, outputs=("y", name), out=(out,))
    after = [sys.getrefcount(o) for o in (x, out, name, np.dtype(np.float32), None)]
    assert all(abs(a - b) < 100 for a, b in zip(before, after)), (before, after)


def test_set_threads():
    x = wide()
    y = vjp.layer_norm(x, outputs="y")
    try:
        for threads in (1, 3):
            vjp.set_threads(threads)
            assert f"{threads} thread" in vjp._core.summary("cpu")
            assert np.array_equal(vjp.layer_norm(x, outputs="y"), y)
        with pytest.raises(ValueError, match="1 to 1024"):
            vjp.set_threads(-1)
    finally:
        vjp.set_threads(0)


