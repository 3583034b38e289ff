#!/usr/bin/env python3
"""Stands in for NVIDIA's server with the C++ backend: its options, its log lines, its health."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from export_scripts.triton.model_config import parse_config
from tests.fake_triton import FakeTriton, RefusedError, served

KNOWN = (
    *("model-repository", "grpc-port", "exit-timeout-secs"),
    *("allow-http", "allow-grpc", "allow-metrics", "backend-config"),
    "grpc-address",  # and no metrics-address, as releases before 23.06
)


def main() -> int:
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    if unknown := set(options) - set(KNOWN):
        print(f"unrecognized option(s) {sorted(unknown)}")
        return 1
    if "allow-grpc" in options:
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
        path.parent.name: parse_config(path.read_text())
        for path in Path(options["model-repository"]).glob("*/config.pbtxt")
    }

    def infer(request: Any) -> None:
        Path(os.environ["FAKE_SERVER_TOLD"] + "-request").write_bytes(request.SerializeToString())
        if said := os.environ.get("FAKE_SERVER_ANSWERS", ""):
            raise RefusedError(said)

    address = f"{options.get('grpc-address', '0.0.0.0')}:{options['grpc-port']}"
    with served(FakeTriton(configs, infer), address):
        time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
