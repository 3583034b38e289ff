#!/usr/bin/env python3
"""Stands in for NVIDIA's server with the C++ backend: its options, its log lines, its health."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from export_scripts.triton.model_config import parse_config

KNOWN = (
    *("model-repository", "http-port", "grpc-port", "metrics-port", "exit-timeout-secs"),
    *("allow-http", "allow-grpc", "allow-metrics", "backend-config"),
    *("http-address", "grpc-address"),  # and no metrics-address, as releases before 23.06
)


def main() -> int:
    if sys.argv[1:] == ["--help"]:
        print("".join(f"  --{name} <string>\n\tas it says\n" for name in KNOWN), file=sys.stderr)
        return 1
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    if unknown := set(options) - set(KNOWN):
        print(f"unrecognized option(s) {sorted(unknown)}")
        return 1
    if any(name.startswith("allow-") for name in options):
        print(os.environ.get("FAKE_FURTHER_SERVER_SAYS", ""), flush=True)
        Path(os.environ["FAKE_SERVER_TOLD"] + "-further").write_text(json.dumps(options))
        time.sleep(600)  # as a further node's server: until it is ended
    reported = {
        "options": options,
        "cwd": str(Path.cwd()),
        "environment": {
            name: os.environ.get(name) for name in ("NCCL_LAUNCH_MODE", "CUDA_VISIBLE_DEVICES")
        },
    }
    Path(os.environ["FAKE_SERVER_TOLD"]).write_text(json.dumps(reported))
    print("[WARNING] gemm_config.in is not found; using default GEMM algo")
    print(os.environ.get("FAKE_SERVER_SAYS", ""), flush=True)
    configs = {
        path.parent.name: json_format.MessageToDict(
            parse_config(path.read_text()), preserving_proto_field_name=True
        )
        for path in Path(options["model-repository"]).glob("*/config.pbtxt")
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            words = self.path.strip("/").split("/")  # v2/models/<name>/config
            self.reply(200, configs[words[2]] if words[-1] == "config" else {})

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            body = self.rfile.read(size)
            if self.path.endswith("/infer"):
                Path(os.environ["FAKE_SERVER_TOLD"] + "-request").write_bytes(body)
                said = os.environ.get("FAKE_SERVER_ANSWERS", "")
                self.reply(500 if said else 200, {"error": said} if said else {})
                return
            names = [{"name": name, "version": "1", "state": "READY"} for name in configs]
            self.reply(200, names)

        def reply(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            del words

    HTTPServer(
        (options.get("http-address", "0.0.0.0"), int(options["http-port"])), Handler
    ).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
