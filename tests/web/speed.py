#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast training is in a headless Chromium beside the program: the fastest of many small steps, for one thread and two.
Small ones, so that on a machine with other work some are not interrupted.

    tests/web/speed.py WEB BUILD [STEPS]      WEB: made by scripts/web; BUILD: has the program

Prints one line per number of threads and exits 0: timings are no test.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

from browser import ROOT, Site

TEXT = os.path.join(ROOT, "src/train/job/job.c")
SIZES = {"dim": 128, "layers": 1, "heads": 4, "ffn": 256, "context": 64, "batch": 1}


def native(build, threads, steps, folder):
    """Milliseconds of the fastest step."""
    out = os.path.join(folder, f"run-{threads}")
    lines = subprocess.run([os.path.join(build, "vjp"), "train", TEXT, *(word for key, value in SIZES.items() for word in (f"--{key}", str(value))), "--steps", str(steps), "--validate-every",
                            "0", "--threads", str(threads), "--json", "--out", out], check=True, capture_output=True, text=True).stdout
    times = [0] + [json.loads(line)["seconds"] for line in lines.splitlines()]
    return min(b - a for a, b in zip(times, times[1:])) * 1e3


def main():
    web, build = sys.argv[1:3]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 150
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(TEXT, os.path.join(folder, "text.txt"))
        site = Site([web, os.path.join(ROOT, "tests/web"), folder])
        for threads in (1, 2):
            here = native(build, threads, steps, folder)
            sizes = "&".join(f"{key}={value}" for key, value in SIZES.items())
            found = site.run(f"speed.html?threads={threads}&steps={steps}&{sizes}", 300)
            if "error" in found:
                sys.exit(f"speed: {found['error']}")
            here = min(here, native(build, threads, steps, folder + "/again"))  # whichever the other work left alone
            print(f"{found['variant']}, {found['threads']} thread(s): {found['ms']:.1f} ms a step, the program {here:.1f} ms: "
                  f"{here / found['ms']:.2f} of its speed; slowest ops: {found['ops']}", flush=True)


if __name__ == "__main__":
    main()
