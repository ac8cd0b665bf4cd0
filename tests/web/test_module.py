#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The module for browsers in a headless Chromium or Firefox, beside the program of this machine: the same hashes of bits_hash, the
same losses of 20 steps, checkpoints that go out, continue natively and come back, vjp check --quick, and the example.

    tests/web/test_module.py WEB BUILD [VARIANT] [--ops LIST] [--browser firefox]

WEB is the folder of scripts/web (built with VJP_WEB_TESTS=ON), BUILD that of the program and bits_hash. The variants
simd are compared with the program's set plain, which BUILD must have. On a processor whose plainest code has fused
multiply-add, as on aarch64, no set of the program has their bits: then only what the page does alone is tested, unless
BUILD was compiled without (-DVJP_PLAIN_FLAGS="-U__ARM_FEATURE_FMA -U__FP_FAST_FMAF"), which --same tells.
"""
import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile

from browser import ROOT, Site, find_browser

TEXT = os.path.join(ROOT, "src/train/job/job.c")
STEPS, ALL_STEPS = 20, 30
OPTIONS = f"""--preset tiny --dim 64 --layers 2 --heads 4 --kv-heads 2 --ffn 160 --context 64 --batch 4 --steps {ALL_STEPS}
              --warmup 5 --seed 7 --validate-every 10 --threads 1""".split()


def unpack(archive, folder):
    zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)


def pack(folder):
    """As the page reads it: stored, without the link to the newest checkpoint."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not os.path.islink(os.path.join(path, name))]
            for name in sorted(names):
                if name != "text.txt" and not name.startswith("."):
                    archive.write(os.path.join(path, name), os.path.relpath(os.path.join(path, name), folder))
    return out.getvalue()


class Native:
    """The program's run with the same settings, and what it does with the page's checkpoint."""

    def __init__(self, build, folder, plain, same):
        self.program, self.folder, self.same = os.path.join(build, "vjp"), folder, same
        self.environment = {**os.environ, "VJP_ISA": "plain"} if plain else None
        self.hashes = subprocess.run([os.path.join(build, "bits_hash"), "1"], check=True, capture_output=True, text=True,
                                     env=self.environment).stdout
        self.out = os.path.join(folder, "native")
        self.train(TEXT, *OPTIONS, "--out", self.out, "--stop-at", str(STEPS))
        self.losses = [json.loads(line)["loss"] for line in open(os.path.join(self.out, "metrics.jsonl"))]
        self.hash = self.recorded(self.out, STEPS)
        self.files = {name: self.read(self.out, STEPS, name) for name in ("model.safetensors", "optimizer.safetensors", "config.json")}
        self.end = self.train("--resume", "--out", self.out)

    def train(self, *arguments):
        """Returns the hash of the losses that the program prints."""
        done = subprocess.run([self.program, "train", *arguments], check=False, capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("losses: "))

    @staticmethod
    def read(out, step, name):
        with open(os.path.join(out, f"checkpoint-{step:08d}", name), "rb") as file:
            return file.read()

    def recorded(self, out, step):
        return json.loads(self.read(out, step, "trainer.json"))["loss_hash"]

    def resume(self, archive):
        """POST /continue: five steps by the program, from the page's checkpoint."""
        out = os.path.join(self.folder, "from-page")
        unpack(archive, out)
        for name, wanted in self.files.items():
            if self.same and self.read(out, STEPS, name) != wanted:
                raise RuntimeError(f"the page's {name} is not the program's")
        self.train(os.path.join(out, "text.txt"), "--resume", "--out", out, "--stop-at", str(STEPS + 5))
        return pack(out)

    def finish(self, archive):
        """POST /finished: the last checkpoint of the page."""
        out = os.path.join(self.folder, "finished")
        unpack(archive, out)
        for name in self.files:
            if self.same and self.read(out, ALL_STEPS, name) != self.read(self.out, ALL_STEPS, name):
                raise RuntimeError(f"after the way there and back the page's {name} is not the program's")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("web")
    parser.add_argument("build")
    parser.add_argument("variant", nargs="?", default="relaxed-threads", choices=("relaxed-threads", "relaxed", "simd-threads", "simd"))
    parser.add_argument("--same", action="store_true", help="the set plain of BUILD has no fused multiply-add")
    parser.add_argument("--ops", default="", help="check only these, separated by commas")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--browser", default="chromium", choices=("chromium", "firefox"))
    options = parser.parse_args()
    if not find_browser(options.browser):
        print(f"test_module: there is no {options.browser}")
        return 77
    plain = options.variant.startswith("simd")
    same = not plain or options.same or platform.machine() in ("x86_64", "AMD64")
    wrong = []

    def require(condition, sentence):
        if not condition:
            wrong.append(sentence)

    with tempfile.TemporaryDirectory() as folder:
        native = Native(options.build, folder, plain, same)
        with open(TEXT, "rb") as source, open(os.path.join(folder, "text.txt"), "wb") as copy:
            copy.write(source.read())
        site = Site([options.web, os.path.join(ROOT, "tests/web"), folder],
                    {"/continue": native.resume, "/finished": native.finish})
        # In Chromium page_test.py uses the page as a person would.
        page = "&page=1" if options.browser == "firefox" else ""
        threads = 2 if options.variant.endswith("threads") else 1
        found = site.run(f"test.html?variant={options.variant}&threads={threads}&ops={options.ops}&example=1{page}", options.timeout,
                         name=options.browser)
        if found.get("page") and "hash" in found["page"]:
            arguments = found["page"]["command"].split()[2:] # after "vjp train": the text, options, --out and a folder
            arguments[0], arguments[-1] = os.path.join(options.web, arguments[0]), os.path.join(folder, "page")
            found["page"]["native"] = native.train(*arguments)
    if "error" in found:
        sys.exit(f"test_module: {found['error']}")
    train, proof = found["train"], found["proof"]
    mine, other = found["hashes"].splitlines(), native.hashes.splitlines()
    equal = sum(one == two for one, two in zip(mine, other))
    require(found["variant"] == options.variant, f"{found['variant']} was loaded")
    require(found["fused"] or plain, "this processor does not fuse relaxed_madd")
    require(not found["fused"] or not plain, f"{options.variant} says that it has the bits of the program's other sets")
    require(len(mine) == len(other) > 400, f"{len(mine)} hashes; the program has {len(other)}")
    require(equal == len(other) or not same, f"{len(other) - equal} of {len(other)} hashes differ: " +
            ", ".join(one for one, two in zip(mine, other) if one != two)[:1000])
    require(train["losses"] == native.losses or not same, f"losses differ: {train['losses']} {native.losses}")
    require(train["hash"] == native.hash or not same, f"the hash of the losses is {train['hash']}, the program's {native.hash}")
    require(train["end"] == native.end or not same, f"after the way there and back it is {train['end']}, the program's {native.end}")
    require(proof["failed"] == 0, f"{proof['failed']} of {proof['rows']} checks failed: {proof['failures']}")
    require("dy" in found["example"] and "0.36" in found["example"], f"example.html shows {found['example']!r}")
    if page:
        require(found["page"].get("hash", "") == found["page"].get("native"), f"the page shows {found['page']}")
    for sentence in wrong:
        print(f"test_module: {sentence}", file=sys.stderr)
    print(f"{options.browser}, {options.variant}, {found['threads']} threads: {equal} of {len(other)} hashes equal; {STEPS} losses "
          f"{'equal' if train['losses'] == native.losses else 'differ'}, {train['hash']}; {proof['rows']} checks, "
          f"{proof['failed']} failed, {proof['broken']} of a broken kernel; seconds {found['seconds']}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
