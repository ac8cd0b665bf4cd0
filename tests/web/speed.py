#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast training is in a browser beside the program: the fastest of many small steps, with one thread, with two, and on
WebGPU, in one run. Small ones, so that on a machine with other work some are not interrupted.

    tests/web/speed.py WEB BUILD [--large] [--steps N] [--own]      WEB: made by scripts/web; BUILD: has the program

In a headless Chromium, whose GPU is software; with --own in your browser, at the address that is printed. Prints one
line per device and exits 0: timings are no test.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

from browser import ROOT, Site, software_gpu_crashes

TEXT = os.path.join(ROOT, "src/train/job/job.c")
SMALL = {"dim": 128, "layers": 1, "heads": 4, "ffn": 256, "context": 64, "batch": 1}
LARGE = {"dim": 256, "layers": 2, "heads": 4, "ffn": 512, "context": 128, "batch": 4}


def native(build, sizes, threads, steps, folder):
    """Milliseconds of the fastest step."""
    out = os.path.join(folder, f"run-{threads}")
    lines = subprocess.run([os.path.join(build, "vjp"), "train", TEXT, *(word for key, value in sizes.items() for word in (f"--{key}", str(value))), "--steps", str(steps), "--validate-every",
                            "0", "--threads", str(threads), "--json", "--out", out], check=True, capture_output=True, text=True).stdout
    times = [0] + [json.loads(line)["seconds"] for line in lines.splitlines()]
    return min(b - a for a, b in zip(times, times[1:])) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("web")
    parser.add_argument("build")
    parser.add_argument("--large", action="store_true", help="a model whose steps take a tenth of a second")
    parser.add_argument("--steps", type=int, help="150; with --large 15")
    parser.add_argument("--own", action="store_true", help="in a browser that you open")
    options = parser.parse_args()
    sizes = LARGE if options.large else SMALL
    options.steps = options.steps or (15 if options.large else 150)
    devices = "1,2" if software_gpu_crashes() and not options.own else "1,2,webgpu"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(TEXT, os.path.join(folder, "text.txt"))
        site = Site([options.web, os.path.join(ROOT, "tests/web"), folder])
        page = f"speed.html?devices={devices}&steps={options.steps}&" + "&".join(f"{key}={value}" for key, value in sizes.items())
        here = {threads: native(options.build, sizes, threads, options.steps, folder) for threads in (1, 2)}
        if options.own:
            print(f"open http://127.0.0.1:{site.server.server_port}/{page}", flush=True)
            found = site.results.get()
        else:
            found = site.run(page, 600, gpu="webgpu" in devices)
        if "error" in found:
            sys.exit(f"speed: {found['error']}")
        for threads in here:  # whichever the other work left alone
            here[threads] = min(here[threads], native(options.build, sizes, threads, options.steps, folder + "/again"))
    for row in found["rows"]:
        if "without" in row:
            print(f"{row['device']}: {row['without']}")
            continue
        beside = f"{row['waits']} waits per step"
        if row["device"] != "webgpu":
            program = here[int(row["device"])]
            beside = f"the program {program:.1f} ms: {program / row['ms']:.2f} of its speed"
        print(f"{row['summary']}, {row['variant']}, {row['threads']} thread(s): {row['ms']:.1f} ms a step, {row['perSecond']:.1f} per second; "
              f"{beside}; slowest ops: {row['ops']}")


if __name__ == "__main__":
    main()
