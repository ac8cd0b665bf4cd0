#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The module for browsers on WebGPU, in a headless Chromium with its software GPU: calls, memory, one case of each op in
both passes, which must fail when the op is broken on purpose, and 20 training steps whose losses stay beside the
processor's, with at most one wait per step.

    tests/web/test_gpu.py WEB [--ops all|LIST] [--dtypes f32,bf16,f16] [--quick] [--steps N] [--browser firefox]

WEB is the folder of scripts/web. Nearly all of the time is that GPU's compiling, half a second per shader, several for
one whose threads wait for each other; so by default an op has one case, in f32, and with --quick those of `vjp check
--quick`. Exits 77 where there is no Chromium, or where its software GPU cannot run.
"""
import argparse
import os
import sys
import tempfile

from browser import ROOT, Site, find_browser, software_gpu_crashes

TEXT = os.path.join(ROOT, "src/train/trainer/trainer.c")
# Losses of 20 steps in f32 from the same numbers: sums in another order differ in their last bits, of which one is
# 4.8e-7 in a loss near 5, and training makes that grow. Measured: 4.8e-7.
BOUND = 5e-6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("web")
    parser.add_argument("--ops", default="all", help="separated by commas; all: every op")
    parser.add_argument("--dtypes", default="f32", help="of the ops, separated by commas")
    parser.add_argument("--quick", action="store_true", help="all quick cases of an op and every variant of a call, not one")
    parser.add_argument("--steps", type=int, default=20, help="train as many")
    parser.add_argument("--timeout", type=float, default=600)
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
        found = site.run(f"test.html?script=gpu_test.js&ops={options.ops}&dtypes={options.dtypes}&quick={'1' if options.quick else ''}"
                         f"&steps={options.steps}", options.timeout, gpu=True, name=options.browser)
    if "error" in found:
        print(f"test_gpu: {found['error']}", file=sys.stderr)
        return 1
    results = found["found"]
    proofs = {name: result for name, result in results.items() if name.split(" ")[-1] in options.dtypes.split(",")}
    for name, result in proofs.items():
        require(result["rows"] > 0 and result["failed"] == 0, f"{name}: {result}")
        require(result["broken"] > 0, f"{name} was broken and nothing failed")
    if options.ops == "all":
        require(len(proofs) == found["ops"] * len(options.dtypes.split(",")), f"{len(proofs)} checks of {found['ops']} ops")
    rows, broken = (sum(result[key] for result in proofs.values()) for key in ("rows", "broken"))
    said = f"{options.browser}: {rows} checks of {len(proofs)} ops in {options.dtypes}, {broken} failures when they were broken"
    if options.steps:
        cpu, gpu = results["cpu"], results["webgpu"]
        difference = max(abs(one - two) for one, two in zip(cpu["losses"], gpu["losses"]))
        require(len(gpu["losses"]) == options.steps and difference <= BOUND, f"losses differ by {difference}: {cpu['losses']} {gpu['losses']}")
        require("WebGPU" in gpu["summary"], f"it was trained on {gpu['summary']}")
        require(gpu["losses"][-1] < gpu["losses"][0], f"the loss does not fall: {gpu['losses']}")
        untimed = gpu["waits"][2:-2]
        require(max(untimed) <= 1, f"waits of each step: {gpu['waits']}")
        require("linear backward" in gpu["ops"] and "adamw forward" in gpu["ops"], f"the times of ops are missing: {gpu['ops']}")
        said += f"; {options.steps} losses within {difference:.1e} of the processor's, waits per step at most {max(untimed)}"
    for sentence in wrong:
        print(f"test_gpu: {sentence}", file=sys.stderr)
    print(f"{said}; seconds {found['seconds']}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
