#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Serves a folder with the headers without which browsers share no memory between threads.

    web/serve.py FOLDER [PORT]      prints the address; `make web-serve` calls it
"""
import functools
import http.server
import sys


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; COOP and COEP isolate the page, and nothing is kept by the browser."""
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript",
                      ".wasm": "application/wasm", ".json": "application/json"}

    def end_headers(self):
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


def main():
    folder, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=folder)) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
