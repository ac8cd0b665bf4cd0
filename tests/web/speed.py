#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast training is in a browser beside the program: the fastest of many small steps, with one thread, with two, and on
WebGPU, in one run. Small ones, and the program and the browser in turns, so that on a machine with other work some are not
interrupted.

    tests/web/speed.py WEB BUILD [--large] [--isa SET] [--browser NAME] [--rounds N] [--steps N] [--own]
                                                                    WEB: made by scripts/web; BUILD: has the program

In a headless Chromium, whose GPU is software, or Firefox, without its GPU; with --own in your browser, at the address that is
printed. Prints one line per device and exits 0: timings are no test.
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


def native(build, sizes, threads, steps, folder, isa):
    """Milliseconds of the fastest step."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        lines = subprocess.run([os.path.join(build, "vjp"), "train", TEXT, *(word for key, value in sizes.items() for word in (f"--{key}", str(value))), "--steps", str(steps), "--validate-every",
                                "0", "--threads", str(threads), "--json", "--out", os.path.join(out, "run")], check=True, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **({"VJP_ISA": isa} if isa else {})}).stdout
    times = [0] + [json.loads(line)["seconds"] for line in lines.splitlines()]
    return min(b - a for a, b in zip(times, times[1:])) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("web")
    parser.add_argument("build")
    parser.add_argument("--large", action="store_true", help="a model whose steps take a tenth of a second")
    parser.add_argument("--isa", help="the program's instruction set, for example avx2; the best one by default")
    parser.add_argument("--browser", choices=("chromium", "firefox"), default="chromium")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the program and the browser; WebGPU has one")
    parser.add_argument("--steps", type=int, help="per round: 150; with --large 15")
    parser.add_argument("--own", action="store_true", help="in a browser that you open; one round")
    options = parser.parse_args()
    sizes = LARGE if options.large else SMALL
    options.steps = options.steps or (15 if options.large else 150)
    program, rows = {}, {}

    def show():
        for row in rows.values():
            if "without" in row:
                print(f"{row['device']}: {row['without']}")
                continue
            beside = f"{row['waits']} waits per step"
            if row["device"] != "webgpu":
                ms = program[row["device"]]
                beside = f"the program{' with ' + options.isa if options.isa else ''} {ms:.1f} ms: {ms / row['ms']:.2f} of its speed"
            print(f"{row['summary']}, {row['variant']}, {row['threads']} thread(s): {row['ms']:.1f} ms a step, {row['perSecond']:.1f} per second; "
                  f"{beside}; slowest ops: {row['ops']}", flush=True)
        rows.clear()

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(TEXT, os.path.join(folder, "text.txt"))
        site = Site([options.web, os.path.join(ROOT, "tests/web"), folder])

        def page(devices):
            path = f"speed.html?devices={devices}&steps={options.steps}&" + "&".join(f"{key}={value}" for key, value in sizes.items())
            if options.own:
                print(f"open http://127.0.0.1:{site.server.server_port}/{path}", flush=True)
                found = site.results.get()
            else:
                found = site.run(path, 600, gpu="webgpu" in devices, name=options.browser)
            if "error" in found:
                sys.exit(f"speed: {found['error']}")
            for row in found["rows"]:
                best = rows.setdefault(row["device"], row)
                if row.get("ms", 0) < best.get("ms", 0):
                    rows[row["device"]] = row

        for _ in range(1 if options.own else options.rounds):
            for threads in ("1", "2"):
                ms = native(options.build, sizes, threads, options.steps, folder, options.isa)
                program[threads] = min(ms, program.get(threads, ms))
            page("1,2,webgpu" if options.own else "1,2")
        show()
        if not options.own and options.browser == "chromium" and not software_gpu_crashes():
            page("webgpu")
            show()


if __name__ == "__main__":
    main()
