# SPDX-License-Identifier: MIT
"""A headless Chromium that a test drives as a person would: clicks, keys, dropped files, downloads, pictures.

The browser is told what to do over a pair of pipes (--remote-debugging-pipe), in the DevTools protocol: JSON, each
message ended by a zero byte. Nothing but the standard library is needed. A server, with or without the headers that
threads need, runs beside it.
"""
import base64
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time

from browser import GPU_FLAGS, NO_GPU_FLAGS, find_browser, serve


class Handler(serve.Handler):
    isolate = True

    def end_headers(self):
        if self.isolate:
            super().end_headers()
        else:
            http.server.SimpleHTTPRequestHandler.end_headers(self)

    def log_message(self, *arguments):
        self.server.requests.append(self.path)


class Server:
    def __init__(self, folder, isolate=True):
        handler = type("SiteHandler", (Handler,), {"isolate": isolate})
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
        self.http.requests = []
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def requests(self):
        return self.http.requests

    def close(self):
        self.http.shutdown()
        self.http.server_close()


class Failed(Exception):
    pass


class Browser:
    def __init__(self, gpu=False):
        self.folder = tempfile.mkdtemp(prefix="vjp-page-")
        self.downloads = os.path.join(self.folder, "downloads")
        os.mkdir(self.downloads)
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()

        def pipes():  # the browser reads 3 and writes 4
            a, b = os.dup(to_read), os.dup(back_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [find_browser(), "--headless=new", "--no-sandbox", *(GPU_FLAGS if gpu else NO_GPU_FLAGS), "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
             f"--user-data-dir={self.folder}/profile", "about:blank"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(back_write)
        self.buffer = b""
        self.count = 0
        self.problems = []  # errors in the console, and exceptions that no one caught
        self.session = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=self.downloads, browser=True)

    def close(self):
        try:
            self.call("Browser.close", browser=True)
            self.process.wait(10)
        except (Failed, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- The protocol

    def call(self, method, browser=False, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session and not browser:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive(60)
            if answer is None:
                raise Failed(f"the browser did not answer {method}")
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0, end - time.monotonic()))
            if not ready:
                return None
            part = os.read(self.back, 1 << 20)
            if not part:
                raise Failed("the browser ended")
            self.buffer += part
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        self.note(message)
        return message

    def note(self, message):
        what, about = message.get("method"), message.get("params", {})
        if what == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif what == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif what == "Runtime.consoleAPICalled" and about["type"] == "error":
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in about["args"]))

    # ---- What a person does

    def open(self, url):
        self.call("Page.navigate", url=url)

    def open_tab(self, url):
        """Another tab, in which everything happens until close_tab() gets what this returns."""
        first = self.session
        target = self.call("Target.createTarget", browser=True, url=url)["targetId"]
        self.session = self.call("Target.attachToTarget", browser=True, targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        return first, target

    def close_tab(self, opened):
        self.session, target = opened
        self.call("Target.closeTarget", browser=True, targetId=target)
        self.call("Page.bringToFront")

    def reload(self):
        self.call("Page.reload")

    def js(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in answer:
            raise Failed(f"{expression}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def text(self, id):
        return self.js(f"(document.getElementById({id!r}) || {{}}).textContent") or ""

    def wait(self, expression, seconds=180, what=None):
        """Until the expression is true; returns its value. The limit is long: a busy machine is no failure."""
        end = time.monotonic() + seconds
        while True:
            try:
                value = self.js(expression)
            except Failed:  # between two pages
                value = None
            if value:
                return value
            if time.monotonic() > end:
                state = self.js("document.body.innerText")[:1500]
                raise Failed(f"waited {seconds} s for {what or expression}; the page says:\n{state}\nproblems: {self.problems}")
            self.receive(0.05)

    def click(self, id):
        """At the middle of the element, where a finger would go; again where the page moved under the finger."""
        find = f"""(() => {{ const e = document.getElementById({id!r});
            e.scrollIntoView({{block: 'center', behavior: 'instant'}});
            e.wasClicked = false;
            e.addEventListener('click', () => e.wasClicked = true, {{once: true}});
            const r = e.getBoundingClientRect();
            const x = r.x + r.width / 2, y = r.y + r.height / 2, hit = document.elementFromPoint(x, y);
            return {{x, y, hit: e === hit || e.contains(hit), off: e.disabled}}; }})()"""
        for _ in range(5):
            box = self.js(find)
            if not box["hit"] or box["off"]:
                time.sleep(0.2)
                continue
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=box["x"], y=box["y"], button="left", clickCount=1)
            if self.js(f"document.getElementById({id!r}).wasClicked"):
                return
        raise Failed(f"{id} cannot be clicked: {box}")

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def drop(self, path):
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=200, y=200,
                      data={"items": [], "files": [str(path)], "dragOperationsMask": 1})

    def choose_file(self, id, path):
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=f"#{id}")["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def downloaded(self, ending, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name in os.listdir(self.downloads):
                if name.endswith(ending):
                    return os.path.join(self.downloads, name)
            self.receive(0.1)
        raise Failed(f"no {ending} was downloaded")

    def size(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path, whole=False):
        parameters = {"format": "png"}
        if whole:
            height = self.js("document.documentElement.scrollHeight")
            width = self.js("innerWidth")
            parameters.update(captureBeyondViewport=True, clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", **parameters)["data"]))
