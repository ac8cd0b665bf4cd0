# SPDX-License-Identifier: MIT
"""The program vjp, which the package contains: proofs, timings and training runs as Python calls.

It runs as a process of its own and prints JSON, so a run can be stopped at any moment without harm to this process.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any, Callable, Iterator, Optional, Sequence, Union

from vjp import _core


# A group of its own for the program: Ctrl-C reaches it once, from here.
_OWN_GROUP: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    _OWN_GROUP = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


def program_path() -> str:
    """The path of the program."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "vjp.exe" if sys.platform == "win32" else "vjp")


def main() -> None:
    """Becomes the program, with this process's arguments."""
    path = program_path()
    if sys.platform == "win32":  # there a process cannot become another
        sys.exit(subprocess.run([path, *sys.argv[1:]]).returncode)
    os.execv(path, [path, *sys.argv[1:]])


def _stop(run: subprocess.Popen) -> None:
    """Asks the program to save and stop, as Ctrl-C would."""
    run.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT)


def _options(options: dict[str, Any]) -> list[str]:
    """`last_lr=0.1, recompute=True` as `--last-lr=0.1 --recompute`."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
    return words


def _rows(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)


def _run(command: str, ops: Sequence[str], options: dict[str, Any]) -> tuple[list[dict[str, Any]], int, str]:
    """The program takes one op, or all."""
    rows, status, said = [], 0, ""
    for op in ops or ("",):
        done = subprocess.run([program_path(), command, *op.split(), "--json", *_options(options)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        rows += _rows(iter(done.stdout.splitlines()))
        if done.returncode and not status:
            status, said = done.returncode, done.stderr.strip()
    return rows, status, said


def check(*ops: str, **options: Any) -> list[dict[str, Any]]:
    """Holds the ops (none named: all) against their oracles: `vjp check --json`.

    Options are those of the program: quick=True, device="cpu", dtype="bf16". Returns a row for each output of each case, with its
    error and bound. Raises vjp.Error, which names the first row that failed."""
    rows, status, said = _run("check", ops, options)
    failed = [row for row in rows if row.get("ok") is False]
    if failed:
        raise _core.Error(f"{len(failed)} of {len(rows)} checks failed; the first: {json.dumps(failed[0])}")
    if status:
        raise _core.Error(said or f"vjp check ended with status {status}")
    return rows


def bench(*ops: str, **options: Any) -> list[dict[str, Any]]:
    """Times the ops (none named: all) beside the minimum that the machine allows: `vjp bench --json`.

    Options are those of the program: quick=True, dtype="bf16", threads=2."""
    rows, status, said = _run("bench", ops, options)
    if status:
        raise _core.Error(said or f"vjp bench ended with status {status}")
    return rows


class Metrics(list):
    """The rows of a training run, one dict for each step: step, loss, smoothed, rate, norm, tokens, seconds, and validation where
    it was measured. `folder` has the checkpoints."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    def plot(self, axes: Any = None) -> Any:
        """Draws the loss over the steps with matplotlib, and returns the axes."""
        if axes is None:
            from matplotlib import pyplot  # type: ignore[import-not-found,import-untyped]
            axes = pyplot.subplots()[1]
        steps = [row["step"] for row in self]
        axes.plot(steps, [row["loss"] for row in self], alpha=0.3, label="loss")
        axes.plot(steps, [row["smoothed"] for row in self], label="smoothed")
        validated = [row for row in self if "validation" in row]
        if validated:
            axes.plot([row["step"] for row in validated], [row["validation"] for row in validated], "o", label="validation")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend()
        return axes


def _notebook_bar(steps: Optional[int]) -> Any:
    """A progress bar in a Jupyter notebook where tqdm is installed; None elsewhere."""
    try:
        if get_ipython().__class__.__name__ != "ZMQInteractiveShell":  # type: ignore[name-defined]
            return None
        from tqdm.auto import tqdm  # type: ignore[import-not-found,import-untyped]
    except (NameError, ImportError):
        return None
    return tqdm(total=steps, unit="step")


def train(data: Union[str, os.PathLike, None] = None, *, out: Union[str, os.PathLike] = "vjp-run",
          callback: Optional[Callable[[dict[str, Any]], Any]] = None, **options: Any) -> Metrics:
    """Trains a model: `vjp train DATA --out OUT`, with the program's options as keywords.

        metrics = vjp.train("book.txt", out="book", preset="tiny", steps=100, callback=print)

    `callback` gets a dict after each step; when it returns False, or on Ctrl-C, the run saves a checkpoint and stops, and
    `vjp.train(out="book", resume=True)` continues it bit for bit. Returns the Metrics of the steps that this call took."""
    metrics = Metrics(os.fspath(out))
    words = [program_path(), "train", *([os.fspath(data)] if data is not None else []), "--json", "--out", os.fspath(out)]
    bar = _notebook_bar(options.get("steps", 1200))
    errors = tempfile.TemporaryFile("w+")
    run = subprocess.Popen([*words, *_options(options)], stdout=subprocess.PIPE, stderr=errors, text=True, **_OWN_GROUP)
    assert run.stdout
    stopped, raised = False, None
    while True:
        try:
            for row in _rows(iter(run.stdout.readline, "")):
                if "loss" not in row:
                    continue
                metrics.append(row)
                if bar is not None:
                    bar.update(row["step"] - bar.n)
                    bar.set_postfix(loss=f"{row['smoothed']:.4f}")
                if callback and not stopped and callback(row) is False:
                    stopped = True
                    _stop(run)
            break
        except BaseException as error:  # the run saves, then what happened is raised
            if raised is not None:
                run.kill()
            raised = error
            stopped = True
            _stop(run)
    if bar is not None:
        bar.close()
    run.stdout.close()
    status = run.wait()
    errors.seek(0)
    said = errors.read().strip()
    errors.close()
    if raised is not None:
        raise raised
    if status and not stopped:
        raise _core.Error(said or f"vjp train ended with status {status}")
    return metrics
