#!/usr/bin/env python3
"""Stands in for NVIDIA's server with the C++ backend: its options, its log lines, its health."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

KNOWN = (
    *("model-repository", "http-port", "grpc-port", "metrics-port", "exit-timeout-secs"),
    *("allow-http", "allow-grpc", "allow-metrics"),
)


def main() -> int:
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    if unknown := set(options) - set(KNOWN):
        print(f"unrecognized option(s) {sorted(unknown)}")
        return 1
    if any(name.startswith("allow-") for name in options):
        print(os.environ.get("FAKE_FURTHER_SERVER_SAYS", ""), flush=True)
        Path(os.environ["FAKE_SERVER_TOLD"] + "-further").write_text(json.dumps(options))
        time.sleep(600)  # as a further node's server: until it is ended
    told = {
        "options": options,
        "cwd": str(Path.cwd()),
        "environment": {
            name: os.environ.get(name) for name in ("NCCL_LAUNCH_MODE", "CUDA_VISIBLE_DEVICES")
        },
    }
    Path(os.environ["FAKE_SERVER_TOLD"]).write_text(json.dumps(told))
    print("[FT][WARNING] gemm_config.in is not found; using default GEMM algo")
    print(os.environ.get("FAKE_SERVER_SAYS", ""), flush=True)
    names = [path.parent.name for path in Path(options["model-repository"]).glob("*/config.pbtxt")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self.rfile.read(size)
            index = [{"name": name, "version": "1", "state": "READY"} for name in names]
            body = json.dumps(index).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            del words

    HTTPServer(("0.0.0.0", int(options["http-port"])), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
