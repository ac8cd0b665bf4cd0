#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""page_test.py BUILD_WEB VJP [PICTURES | --gpu]: uses the page of BUILD_WEB in a headless Chromium as a person would.

VJP is the native program: what the page trains must have its bits. PICTURES: a folder for pictures of the page, which
are made only then. --gpu: only what the page does with a GPU, on Chromium's software GPU. Exits 77 where there is no
Chromium, or with --gpu where that GPU cannot run.
"""
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from browser import find_browser, software_gpu_crashes  # noqa: E402
from chrome import Browser, Failed, Server  # noqa: E402

STEPS = "Number(document.getElementById('steps').textContent)"


def expect(condition, sentence):
    if not condition:
        raise Failed(sentence)


class Test:
    def __init__(self, folder, vjp, gpu):
        self.folder, self.vjp = Path(folder), vjp
        self.scratch = Path(tempfile.mkdtemp(prefix="vjp-page-test-"))
        self.server = Server(folder)
        self.browser = Browser(gpu)

    def close(self):
        self.browser.close()
        self.server.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def steps(self):
        return self.browser.js(STEPS)

    def wait_status(self, word):
        self.browser.wait(f"document.getElementById('status').textContent.includes({word!r})")

    def pause(self):
        self.browser.wait("document.getElementById('start').textContent === 'Pause'", what="a run to pause")
        self.browser.click("start")
        self.wait_status("Paused")
        return self.steps()

    def native(self, *arguments):
        done = subprocess.run([self.vjp, *map(str, arguments)], capture_output=True, text=True, cwd=self.scratch)
        expect(done.returncode == 0, f"vjp {' '.join(map(str, arguments))}: {done.stderr}")
        return done.stdout

    def hash_of(self, output):
        return re.search(r"^losses:? +([0-9a-f]+)", output, re.M).group(1)

    # ---- What is tested, in this order

    def starts_by_itself(self):
        b = self.browser
        b.size(1280, 900)
        b.open(self.server.url)
        b.wait(f"{STEPS} >= 30", what="30 steps")
        curve = b.js("window.vjpPage.losses()")
        expect(3 < curve[0] < 8 and sum(curve[-5:]) / 5 < curve[0] - 1, f"the loss does not fall: {curve}")
        b.wait("document.getElementById('sample').dataset.step", what="a sample")
        b.wait("document.querySelectorAll('#ops i').length > 3", what="the time of each op")
        b.wait("document.getElementById('validation').textContent !== '–'", what="a validation loss")
        expect("MB" in b.text("memory") and "ms per step" in b.text("step-ms"), "memory or speed is missing")
        # This browser has no GPU: the page says so, and does not offer it.
        expect("The GPU is not used" in b.text("notes"), "the page does not say that there is no GPU")
        expect(b.js("document.querySelector('#set-device [value=gpu]').disabled && document.getElementById('compare').hidden"),
               "a GPU is offered that is not there")

    def pauses_and_steps(self):
        b = self.browser
        n = self.pause()
        time.sleep(0.3)
        expect(self.steps() == n, "it trains while it is paused")
        b.click("step")
        b.wait(f"{STEPS} === {n + 1}", what="one more step")
        time.sleep(0.3)
        expect(self.steps() == n + 1, "more than one step was taken")

    def reads_by_keyboard(self):
        b = self.browser
        b.js("document.getElementById('chart').focus()")
        b.key("ArrowLeft")
        b.wait("/step \\d+: loss \\d/.test(document.getElementById('readout').textContent)", what="a step read by key")
        unnamed = b.js("""[...document.querySelectorAll('button, input, select, textarea, canvas')].filter((e) =>
            !e.labels?.length && !e.textContent.trim() && !e.getAttribute('aria-label')).map((e) => e.id || e.outerHTML)""")
        expect(not unnamed, f"controls without a name: {unnamed}")

    def has_the_same_bits(self):
        b = self.browser
        b.click("save-text")
        text = b.downloaded("sources.txt")
        shutil.copy(text, self.scratch / "sources.txt")
        command, shown = b.text("command"), b.js("document.getElementById('hash').value")
        expect(command.startswith("vjp train sources.txt "), f"the command is {command!r}")
        expect(self.hash_of(self.native(*command.split()[1:])) == shown, f"{shown} is not the hash of: {command}")

    def continues_after_a_reload(self):
        b = self.browser
        n = self.steps()
        before = b.js("window.vjpPage.losses()")
        b.reload()
        b.wait(f"document.readyState === 'complete' && window.vjpPage && {STEPS} > {n}", what="the run to continue")
        # The same seed gives the same curve from the start, too: where this page began shows that it continued.
        expect(b.js("window.vjpPage.began()") == n, f"it began at step {b.js('window.vjpPage.began()')}, not at {n}")
        expect(b.js("window.vjpPage.losses()")[:n] == before, "the curve is another one after the reload")

    def sleeps_while_hidden(self):
        b = self.browser
        show = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}}); document.dispatchEvent(new Event('visibilitychange'))"
        b.js(show.format("true"))
        self.wait_status("hidden")
        n = self.steps()
        time.sleep(0.3)
        expect(self.steps() == n, "it trains while the tab is hidden")
        b.js(show.format("false"))
        b.wait(f"{STEPS} > {n}", what="the tab to continue when it is seen")

    def leaves_the_saved_run_to_one_tab(self):
        tab = self.browser.open_tab(self.server.url)
        self.browser.wait("document.getElementById('notes')?.textContent.includes('this one does not save')", what="the sentence on another tab")
        self.browser.wait(f"{STEPS} >= 1", what="a step in the second tab")
        self.browser.close_tab(tab)
        n = self.steps()
        self.browser.wait(f"{STEPS} > {n + 1}", what="the first tab, which is seen again")

    def exports_and_imports(self):
        b = self.browser
        n = self.pause()
        shown = b.js("document.getElementById('hash').value")
        b.click("export")
        archive = b.downloaded(".zip")
        with zipfile.ZipFile(archive) as z:
            expect(z.testzip() is None, "the archive is damaged")
            z.extractall(self.scratch / "run")
        native = self.native("train", "run/text.txt", "--resume", "--out", "run", "--stop-at", n + 3)
        config = json.loads(next((self.scratch / "run").glob("checkpoint-*/config.json")).read_text())
        expect(config["model_type"] == "llama", "the checkpoint is no Llama")
        for _ in range(3):
            m = self.steps()
            b.click("step")
            b.wait(f"{STEPS} === {m + 1}")
        expect(self.hash_of(native) == b.js("document.getElementById('hash').value"),
               "the run that was resumed natively has other bits than the page")
        # Back: what the program has written, as a zip, is a run of the page.
        with zipfile.ZipFile(self.scratch / "native.zip", "w") as z:
            newest = f"checkpoint-{n + 3:08d}"
            for file in sorted((self.scratch / "run").rglob("*")):
                part = file.relative_to(self.scratch / "run")
                if file.is_file() and not part.parts[0].startswith(".") and (len(part.parts) == 1 or part.parts[0] == newest):
                    z.write(file, str(part))
        b.click("reset")
        b.wait(f"{STEPS} === 0")
        b.choose_file("import", self.scratch / "native.zip")
        b.wait(f"{STEPS} === {n + 3}", what="the imported run")
        expect(b.js("document.getElementById('hash').value") == self.hash_of(native), "the imported run has another hash")
        expect(shown != self.hash_of(native), "the hash does not change")
        b.click("export-weights")
        weights = b.downloaded(".safetensors")
        b.choose_file("import", weights)
        b.wait(f"{STEPS} === 0 && document.getElementById('status').textContent.includes('was read')", what="the weights")
        b.click("step")
        b.wait(f"{STEPS} === 1")
        first = b.js("window.vjpPage.losses()[0]")
        expect(first < 4.5, f"with imported weights the first loss is {first}, as if they were random")

    def trains_on_a_dropped_file(self):
        b = self.browser
        text = "the quick brown fox jumps over the lazy dog. " * 200
        (self.scratch / "fox.txt").write_text(text)
        b.drop(self.scratch / "fox.txt")
        b.wait(f"document.getElementById('set-text').value === 'fox.txt' && {STEPS} >= 3", what="training on the file")
        expect("fox.txt" in b.text("command"), "the command does not name the file")
        (self.scratch / "short.txt").write_text("too short")
        b.drop(self.scratch / "short.txt")
        b.wait("document.getElementById('alert').textContent.includes('short.txt has 9 bytes')", what="the refusal of a short file")

    def resets_and_begins_with_other_settings(self):
        b = self.browser
        b.click("reset")
        b.wait(f"{STEPS} === 0 && !document.getElementById('fields').disabled", what="settings to edit")
        b.js("document.getElementById('set-size').value = 'nano'; document.getElementById('set-seed').value = 7;"
             "document.getElementById('set-steps').value = 12; document.getElementById('set-text').value = 'docs.txt'")
        b.click("start")
        b.wait(f"{STEPS} === 12")
        self.wait_status("Done")
        command = b.text("command")
        expect("--seed 7" in command and "--steps 12" in command and "--dim 64" in command, f"the command is {command!r}")
        shutil.copy(self.folder / "docs.txt", self.scratch)
        expect(self.hash_of(self.native(*command.split()[1:])) == b.js("document.getElementById('hash').value"), "other bits: " + command)
        b.click("reset")
        b.js("document.getElementById('set-context').value = 100000")
        b.click("start")
        time.sleep(0.2)
        expect(self.steps() == 0, "a context of 100000 was taken")
        b.js("document.getElementById('set-context').value = 64")

    def proves(self):
        b = self.browser
        b.click("check")
        b.wait("document.querySelectorAll('#checks tbody tr').length > 3", what="rows of three ops")
        b.wait("Number(document.getElementById('check-status').textContent.split(' ')[0].replace(/,/g, '')) > 300", what="300 checks")
        expect(" 0 failed" in b.text("check-status"), b.text("check-status"))
        b.click("check-stop")
        b.js("document.getElementById('break-op').value = 'rms_norm'")
        b.click("break")
        b.wait("document.getElementById('check-status').textContent.startsWith('Caught')", what="the broken kernel to be caught")

    def shows_gradients(self):
        b = self.browser
        names = b.js("document.getElementById('gradient').scrollIntoView({behavior: 'instant'}), [...document.getElementById('op').options].map((o) => o.value)")
        for name in names:
            b.js(f"document.getElementById('op-status').textContent = ''; document.getElementById('op').value = {name!r};"
                 "document.getElementById('op').dispatchEvent(new Event('change'))")
            b.wait("/agree|differ|must|is /.test(document.getElementById('op-status').textContent)", what=f"the gradient of {name}")
            expect("agree" in b.text("op-status"), f"{name}: {b.text('op-status')}")
            expect(b.js("document.querySelectorAll('#op-prose math').length"), f"{name} has no formula")
        b.js("""const e = document.querySelector('#op-inputs textarea'); e.value = 'one two'; e.dispatchEvent(new Event('input', {bubbles: true}))""")
        b.wait("""document.getElementById('op-status').textContent.includes('"one" is no number')""", what="the refusal of a word")

    def fits(self):
        """Small screens need no sideways scrolling; everything compressed is at most 1 MB."""
        b = self.browser
        for width in (360, 390, 768, 1280):
            b.size(width, 800)
            time.sleep(0.1)
            wide = b.js("document.documentElement.scrollWidth")
            expect(wide <= width, f"at {width} pixels the page is {wide} wide")
        used = {r.lstrip("/").split("?")[0] or "index.html" for r in self.server.requests}
        sizes = {name: len(gzip.compress((self.folder / name).read_bytes(), 9)) for name in used if (self.folder / name).is_file()}
        expect(sum(sizes.values()) <= 1 << 20, f"the page has {sum(sizes.values())} bytes compressed: {sizes}")
        return f"{sum(sizes.values()) // 1000} KB compressed"

    def trains_on_the_gpu(self):
        b = self.browser
        b.size(1280, 900)
        b.open(self.server.url)
        b.wait(f"window.vjpPage && {STEPS} >= 1", what="a step on the processor, since the GPU is software")
        b.click("reset")
        b.wait(f"{STEPS} === 0 && !document.getElementById('fields').disabled", what="settings to edit")
        b.js("for (const [name, value] of Object.entries({size: 'nano', device: 'gpu', steps: 30, context: 32, batch: 2}))"
             "document.getElementById(`set-${name}`).value = value")
        b.click("start")
        b.wait(f"{STEPS} === 30", what="30 steps on the GPU")
        self.wait_status("Done")
        expect(b.text("device") == "GPU", f"it runs on {b.text('device')}")
        compared = b.wait("/in 30 steps .*/.exec(document.getElementById('compare').textContent)?.[0]", what="30 steps on the processor")
        found = re.search(r"at most ([0-9.e-]+)", compared)
        expect(found and float(found.group(1)) <= 5e-6, f"the page says: {compared}")
        curve = b.js("window.vjpPage.losses()")
        expect(sum(curve[-5:]) / 5 < curve[0] - 1, f"the loss does not fall: {curve}")
        b.wait("document.querySelectorAll('#ops i').length > 3", what="the time of each op")
        return compared

    def catches_a_kernel_broken_on_the_gpu(self):
        b = self.browser
        b.js("document.getElementById('break-op').value = 'scale'")
        b.click("break")
        b.wait("document.getElementById('check-status').textContent.startsWith('Caught')", what="the broken kernel to be caught")

    def has_no_errors(self):
        expect(not self.browser.problems, f"errors in the console: {self.browser.problems}")

    def works_without_threads(self):
        """From a server that sends no headers for threads."""
        if not (self.folder / "vjp-relaxed.wasm").exists():
            return "not tested: that variant of the module was not built"
        server = Server(self.folder, isolate=False)
        try:
            self.browser.open(server.url)
            self.browser.wait(f"{STEPS} >= 2", what="steps with one thread")
            expect("trains with one" in self.browser.text("notes"), "it does not say that there is one thread")
        finally:
            server.close()


def take_pictures(test, folder):
    """The page after a minute, in both themes, on a desk and on a phone."""
    b = test.browser
    b.size(1280, 900)
    b.open(test.server.url)
    b.wait(f"window.vjpPage && document.getElementById('start').textContent === 'Pause'", 60)
    b.click("reset")
    b.click("start")
    b.wait(f"{STEPS} >= 300", 400)
    b.js("document.getElementById('gradient').scrollIntoView({behavior: 'instant'})")
    b.wait("document.getElementById('op-status').textContent.includes('agree')", 60)
    b.click("check")
    b.wait("document.querySelectorAll('#checks tbody tr').length > 6", 120)
    b.click("check-stop")
    step = test.steps()
    b.wait(f"{STEPS} > {step + 12}", 60, "the speed without the checks")
    for width, height in ((1280, 900), (390, 844)):
        for dark in (False, True):
            b.size(width, height, dark)
            b.js("scrollTo({top: 0, behavior: 'instant'})")
            time.sleep(1)
            theme = "dark" if dark else "light"
            b.picture(Path(folder) / f"page-{width}-{theme}.png")
            b.picture(Path(folder) / f"whole-{width}-{theme}.png", whole=True)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    if not find_browser():
        print("page_test: there is no Chromium")
        sys.exit(77)
    gpu = sys.argv[3:] == ["--gpu"]
    if gpu and software_gpu_crashes():
        print("page_test: Chromium's software GPU would use SVE instructions, which are switched off on this machine")
        sys.exit(77)
    pictures = sys.argv[3] if len(sys.argv) > 3 and not gpu else None
    test = Test(Path(sys.argv[1]).resolve(), str(Path(sys.argv[2]).resolve()), gpu)
    parts = [test.starts_by_itself, test.pauses_and_steps, test.reads_by_keyboard, test.has_the_same_bits,
             test.continues_after_a_reload, test.sleeps_while_hidden, test.leaves_the_saved_run_to_one_tab, test.exports_and_imports,
             test.trains_on_a_dropped_file, test.resets_and_begins_with_other_settings, test.proves, test.shows_gradients,
             test.fits, test.works_without_threads, test.has_no_errors]
    if gpu:
        parts = [test.trains_on_the_gpu, test.catches_a_kernel_broken_on_the_gpu, test.has_no_errors]
    try:
        begun = time.monotonic()
        for part in parts:
            start = time.monotonic()
            more = part()
            name = part.__name__.replace("_", " ")
            print(f"ok {name}{f', {more}' if more else ''} ({time.monotonic() - start:.1f} s)", flush=True)
        print(f"page_test: {len(parts)} parts ok in {time.monotonic() - begun:.0f} s")
        if pictures:
            take_pictures(test, pictures)
    except Failed as failure:
        print(f"page_test: {failure}\nconsole: {test.browser.problems}", file=sys.stderr)
        sys.exit(1)
    finally:
        test.close()


if __name__ == "__main__":
    main()
