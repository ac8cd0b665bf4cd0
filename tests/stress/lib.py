# SPDX-License-Identifier: MIT
"""Shared by the parts of tests/stress: the arguments, running a program, counting, and the last line."""
import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

SKIPPED = 77
PROGRAMS = ("vjp", "proof", "faults_program")  # what a sentence begins with
PROGRAM_SECONDS = 30  # no program here takes a second: one that is slower than this hangs


class Part:
    """One part: `with Part(NAME) as part:` reads the arguments and makes part.work, a folder that is removed at the
    end; leaving prints the counts and exits with 1 if anything failed."""

    def __init__(self, name, about, case_help=None):
        self.name, self.counts, self.failures, self.lock = name, {}, 0, threading.RLock()
        parser = argparse.ArgumentParser(prog="tests/stress/" + name, description=about)
        parser.add_argument("--seconds", type=int, default=10)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--build", default="build")
        if case_help:
            parser.add_argument("--case", help=case_help)
        given = parser.parse_args()
        self.seconds, self.seed, self.case = given.seconds, given.seed, getattr(given, "case", None)
        self.build = os.path.abspath(given.build)
        self.vjp = os.path.join(self.build, "vjp")
        if not os.access(self.vjp, os.X_OK):
            parser.error(f"there is no {self.vjp}; build it first")
        cache = read(self.build, "CMakeCache.txt") or b""
        self.sanitized = re.search(rb"^VJP_SANITIZE:STRING=.", cache, re.M) is not None
        for variable in ("VJP_ISA", "VJP_GEMM", "VJP_THREADS"):
            os.environ.pop(variable, None)
        # Memory instead of a disk, where there is some: the parts write many small files and sync each of them.
        self.work = tempfile.mkdtemp(prefix=f"vjp-{self.name}-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)

    def __enter__(self):
        self.deadline = time.monotonic() + self.seconds
        return self

    def __exit__(self, kind, value, trace):
        shutil.rmtree(self.work, ignore_errors=True)
        if kind:
            return
        counts = "".join(f"{count} {what}, " for what, count in self.counts.items())
        print(f"{self.name}: {counts}{self.failures} failed")
        sys.exit(self.failures > 0)

    def skip(self, sentence):
        shutil.rmtree(self.work, ignore_errors=True)
        print(f"{self.name}: skipped: {sentence}")
        sys.exit(SKIPPED)

    def path(self, *names):
        return os.path.join(self.work, *names)

    def count(self, what, by=1):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + by

    def fail(self, case, sentence, said=""):
        """`case` is what --case takes; None: the whole part is repeated."""
        repeat = f"--case {case}" if case else f"--seconds {self.seconds}"
        with self.lock:
            self.failures += 1
            print(f"FAILED: {self.name}: {f'{case}: ' if case else ''}{sentence}")
            for line in said.splitlines()[-5:]:
                print("    " + line)
            print(f"    repeat: tests/stress/{self.name} --build {self.build} --seed {self.seed} {repeat}", flush=True)

    def for_each(self, cases, run):
        """Runs run(case, slot) for each case until the time is up, two at once; `slot` is 0 or 1. An exception is an
        error of the test itself and ends it."""
        cases = iter([self.case] if self.case else cases)

        def work(slot):
            while time.monotonic() < self.deadline or self.case:
                with self.lock:
                    case = next(cases, None)
                if case is None:
                    return
                try:
                    run(case, slot)
                except BaseException:
                    self.deadline = 0  # for the other one, too
                    raise

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, slot) for slot in range(1 if self.case else 2)]:
                done.result()


class Result:
    """How a program ended: status (negative: by a signal; None: it hung), out and err."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err.decode("utf-8", "replace")

    def crash(self):
        """What no failure and no file may do to a program, as a sentence; None if it ended in order."""
        if self.status is None:
            return f"it had not ended after {PROGRAM_SECONDS} s"
        if self.status < 0:
            return f"it was ended by signal {-self.status}"
        if "Sanitizer" in self.err or "runtime error:" in self.err:
            return "a sanitizer found something"
        if self.status > 0 and not self.sentence():
            return f"it exited with {self.status} and no sentence"
        return None

    def sentence(self):
        """The last line of standard error, if it is a program's name, a colon and a reason; or the line of the table of
        `vjp check` that says what failed."""
        rows = [row for row in self.out.decode("utf-8", "replace").splitlines() if "FAILED  " in row and ": " in row]
        if rows and not self.err:
            return rows[0]
        lines = self.err.strip().splitlines()
        program, colon, reason = lines[-1].partition(": ") if lines else ("", "", "")
        return reason if colon and len(reason) > 10 and program.split()[0] in PROGRAMS else None


def execute(arguments, environment=None, seconds=PROGRAM_SECONDS):
    try:
        done = subprocess.run(arguments, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        return Result(None, late.stdout or b"", late.stderr or b"")
    return Result(done.returncode, done.stdout, done.stderr)


def make_text(path):
    with open(path, "w") as file:
        for i in range(60):
            file.write(f"line {i}: the quick brown fox learns to jump over {i * i} dogs\n")


def read(*names):
    """A file's bytes; None if there is no such file."""
    try:
        with open(os.path.join(*names), "rb") as file:
            return file.read()
    except OSError:
        return None
