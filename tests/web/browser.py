# SPDX-License-Identifier: MIT
"""Runs a page of tests in a headless Chromium or Firefox and returns what it posts. No web driver: the page sends its
results to the server that it came from.

    Site(folders, routes)      serves the folders, first match; routes: {path: function(bytes) -> bytes} for POST
    site.run(path, timeout)    opens a page, waits for a POST to /result and returns its JSON; gpu=True: with WebGPU;
                               name: "chromium" or "firefox"
"""
import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "web"))
import serve  # noqa: E402

NAMES = {"chromium": ("chromium", "chromium-browser", "google-chrome"), "firefox": ("firefox-esr", "firefox")}
# Chromium's own software GPU; without the flag there is no adapter. It compiles memory that a shader shares between
# threads and that is zeroed by Vulkan as one store per element, which takes ten seconds; zeroed by a loop of the shader's, as
# on a GPU without that extension, less than two.
GPU_FLAGS = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader",
             "--disable-dawn-features=use_vulkan_zero_initialize_workgroup_memory_extension")
NO_GPU_FLAGS = ("--disable-gpu",)


# No pages of its own, no updates, no waiting for a network that is not there.
FIREFOX_SETTINGS = {
    "app.normandy.enabled": False, "app.update.enabled": False, "browser.aboutwelcome.enabled": False,
    "browser.shell.checkDefaultBrowser": False, "browser.startup.homepage_override.mstone": "ignore",
    "datareporting.policy.dataSubmissionEnabled": False, "datareporting.policy.firstRunURL": "",
    "extensions.systemAddon.update.enabled": False, "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False, "toolkit.telemetry.reportingpolicy.firstRun": False}

# On any adapter of the system's Vulkan, also Mesa's software GPU.
FIREFOX_GPU_SETTINGS = {"dom.webgpu.enabled": True, "dom.webgpu.workers.enabled": True, "gfx.webgpu.ignore-blocklist": True}


def find_browser(name="chromium"):
    """The path of a browser: $VJP_CHROMIUM or $VJP_FIREFOX, or one on PATH. None: there is none."""
    named = os.environ.get(f"VJP_{name.upper()}")
    return named or next((path for path in map(shutil.which, NAMES[name]) if path), None)


def command(name, profile, gpu):
    if name == "chromium":
        # Shared memory in a file, since /dev/shm is small in containers.
        return [find_browser(), "--headless=new", "--no-sandbox", *(GPU_FLAGS if gpu else NO_GPU_FLAGS), "--disable-dev-shm-usage",
                "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
    settings = {**FIREFOX_SETTINGS, **(FIREFOX_GPU_SETTINGS if gpu else {})}
    with open(os.path.join(profile, "user.js"), "w") as file:
        file.writelines(f"user_pref({json.dumps(key)}, {json.dumps(value)});\n" for key, value in settings.items())
    return [find_browser(name), "--headless", "--no-remote", "--profile", profile]


def software_gpu_crashes():
    """On a Neoverse whose SVE is switched off Chromium's software GPU, like Mesa's (src/gpu/webgpu/device.c), compiles
    for the model of the processor and ends with an illegal instruction."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    models = any(line.startswith("CPU part") and line.split()[-1] in ("0xd40", "0xd49", "0xd4f") for line in lines)
    return models and not any(line.startswith("Features") and " sve" in line for line in lines)


class Handler(serve.Handler):
    def __init__(self, site, *arguments):
        self.site = site
        super().__init__(*arguments)

    def translate_path(self, path):
        for folder in self.site.folders:
            self.directory = folder
            found = super().translate_path(path)
            if os.path.exists(found):
                return found
        return found

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            reply, status = self.site.routes[self.path](body) or b"", 200
        except Exception as error:  # the page's test fails with it
            reply, status = str(error).encode(), 500
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


class Site:
    def __init__(self, folders, routes=None):
        self.folders = folders
        self.results = queue.Queue()
        self.routes = {"/result": lambda body: self.results.put(json.loads(body)), **(routes or {})}
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, path, timeout, gpu=False, name="chromium"):
        if not find_browser(name):
            raise RuntimeError(f"there is no {name}; scripts/setup test installs Chromium")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            errors = open(os.path.join(profile, "errors"), "w+", errors="replace")
            process = subprocess.Popen(
                [*command(name, profile, gpu), f"http://127.0.0.1:{self.server.server_port}/{path}"],
                stdout=subprocess.DEVNULL, stderr=errors)
            end = time.monotonic() + timeout
            try:
                while time.monotonic() < end and process.poll() is None:
                    try:
                        return self.results.get(timeout=1)
                    except queue.Empty:
                        continue
                why = f"ended with {process.returncode}" if process.poll() is not None else f"sent no result within {timeout} s"
                errors.seek(0)
                raise RuntimeError(f"{path}: the browser {why}; it said:\n{errors.read()[-2000:]}")
            finally:
                process.kill()
                errors.close()
                process.wait()
