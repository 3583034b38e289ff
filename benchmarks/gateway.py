"""Requests over gRPC through a server to a model in a tritonserver.

    python -m benchmarks.gateway [--seconds 5]

The model doubles its input at once. Clients are threads of this program, on the same machine.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.program import Cell, percentile, run
from inference.ports import FREE_PORTS
from inference.server.server import ModelServer

CONFIG = """
name: "double" backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_UINT32 dims: -1 }
output { name: "y" data_type: TYPE_UINT32 dims: -1 }
instance_group { count: 1 kind: KIND_CPU }
"""
SCRIPT = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy() * 2)])
            for each in requests
        ]
"""
CALL = "/inference.GRPCInferenceService/ModelInfer"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CASES = ((1, 1 << 10), (16, 1 << 10), (1, 8 << 20))  # clients, bytes of the input


def request(size_bytes: int) -> bytes:
    """Return a request with an input of this size."""
    message = service_pb2.ModelInferRequest(model_name="double")
    message.inputs.add(name="x", shape=[1, size_bytes // 4], datatype="UINT32")
    message.raw_input_contents.append(np.ones(size_bytes // 4, np.uint32).tobytes())
    return bytes(message.SerializeToString())


def durations(address: str, clients: int, data: bytes, seconds: float) -> list[float]:
    """Return how long each request took, of all clients together, in seconds."""
    taken: list[float] = []

    def ask(until: float) -> None:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            call: Callable[..., Any] = channel.unary_unary(CALL)
            call(data, timeout=60)
            while (began := time.perf_counter()) < until:
                call(data, timeout=60)
                taken.append(time.perf_counter() - began)

    until = time.perf_counter() + seconds
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, [until] * clients))  # raises what failed
    return taken


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rate and the latencies of each case, directly and through the front."""
    with tempfile.TemporaryDirectory() as name:
        version = Path(name) / "repository" / "double" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(SCRIPT)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        log_path = Path(name) / "log"
        server = ModelServer(
            version.parents[1], ports=FREE_PORTS, log_path=log_path, has_triton=True
        )
        with server:
            server.start(timeout_s=120)
            ways = {"tritonserver": server.address("grpc")}
            for clients, size_bytes in CASES:
                case = f"{clients} clients, {size_bytes >> 10} KiB"
                for way, address in ways.items():
                    taken = durations(address, clients, request(size_bytes), args.seconds)
                    yield case, way, f"{len(taken) / args.seconds:.0f} requests/s"
                    yield f"{case}, p50", way, f"{percentile(taken, 50) * 1e3:.1f} ms"
                    yield f"{case}, p99", way, f"{percentile(taken, 99) * 1e3:.1f} ms"


if __name__ == "__main__":
    run(measure, __doc__, seconds={"type": float, "default": 5.0, "help": "for each figure"})
