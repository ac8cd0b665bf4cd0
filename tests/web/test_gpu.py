#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The module for browsers on WebGPU, in a headless Chromium with its software GPU: calls, memory, the quick checks of
some ops and of one that is broken on purpose, and training steps whose losses stay beside the processor's, with at most
one wait per step.

    tests/web/test_gpu.py WEB [--ops LIST] [--steps N] [--browser firefox]

WEB is the folder of scripts/web. That GPU takes seconds to compile a shader that synchronises its threads, so by default
only ops without such shaders are checked, and nothing is trained. Exits 77 where there is no Chromium, or where its
software GPU cannot run.
"""
import argparse
import os
import sys
import tempfile

from browser import ROOT, Site, find_browser, software_gpu_crashes

TEXT = os.path.join(ROOT, "src/train/trainer/trainer.c")
OPS = "scale"
# Losses of 20 steps in f32 from the same numbers: sums in another order differ in their last bits, of which one is
# 4.8e-7 in a loss near 5, and training makes that grow. Measured: 4.8e-7.
BOUND = 5e-6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("web")
    parser.add_argument("--ops", default=OPS, help="separated by commas")
    parser.add_argument("--steps", type=int, default=0, help="train as many")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--browser", default="chromium", choices=("chromium", "firefox"))
    options = parser.parse_args()
    if not find_browser(options.browser):
        print(f"test_gpu: there is no {options.browser}")
        return 77
    if software_gpu_crashes():
        print("test_gpu: Chromium's software GPU would use SVE instructions, which are switched off on this machine")
        return 77
    wrong = []

    def require(condition, sentence):
        if not condition:
            wrong.append(sentence)

    with tempfile.TemporaryDirectory() as folder:
        with open(TEXT, "rb") as source, open(os.path.join(folder, "text.txt"), "wb") as copy:
            copy.write(source.read())
        site = Site([options.web, os.path.join(ROOT, "tests/web"), folder])
        found = site.run(f"test.html?script=gpu_test.js&ops={options.ops}&steps={options.steps}", options.timeout, gpu=True,
                         name=options.browser)
    if "error" in found:
        print(f"test_gpu: {found['error']}", file=sys.stderr)
        return 1
    rows = 0
    for op in options.ops.split(",") if options.ops else ():
        rows += found[op]["rows"]
        require(found[op]["rows"] > 0 and found[op]["failed"] == 0, f"{op}: {found[op]}")
        require(found[op].get("broken", 1) > 0, f"{op} was broken and nothing failed")
    said = f"{rows} checks of {options.ops}"
    if options.steps:
        cpu, gpu = found["cpu"], found["webgpu"]
        difference = max(abs(one - two) for one, two in zip(cpu["losses"], gpu["losses"]))
        require(len(gpu["losses"]) == options.steps and difference <= BOUND, f"losses differ by {difference}: {cpu['losses']} {gpu['losses']}")
        require("WebGPU" in gpu["summary"], f"it was trained on {gpu['summary']}")
        require(gpu["losses"][-1] < gpu["losses"][0], f"the loss does not fall: {gpu['losses']}")
        require(max(gpu["waits"][2:]) <= 1, f"waits of each step: {gpu['waits']}")
        said += f"; {options.steps} losses within {difference:.1e} of the processor's, waits per step at most {max(gpu['waits'][2:])}"
    for sentence in wrong:
        print(f"test_gpu: {sentence}", file=sys.stderr)
    print(f"{said}; seconds {found['seconds']}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
