"""Shared by the tests that start a real tritonserver: small models, and what is still running."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from inference.ports import FREE_PORTS
from inference.server.kinds import SLIPWAY, TRITONSERVER
from inference.server.server import TritonServer
from inference.server.slipway import SlipwayServer
from inference.server.supervisor import descendants

CONFIG = """
name: "{name}" backend: "python" max_batch_size: 8
input {{ name: "x" data_type: TYPE_UINT32 dims: -1 }}
output {{ name: "y" data_type: TYPE_UINT32 dims: -1 }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy() * 2)])
            for request in requests
        ]
"""


def add_model(repository: Path, name: str, script: str) -> Path:
    """Write a Python model with one input x and one output y."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(script)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    return repository


AnyServer: TypeAlias = TritonServer | SlipwayServer
HOSTS: dict[str, type[AnyServer]] = {SLIPWAY: SlipwayServer, TRITONSERVER: TritonServer}


def new_server(repository: Path | str, log_folder: Path) -> TritonServer:
    return TritonServer(repository, ports=FREE_PORTS, log_path=log_folder / "triton.log")


def hosted(host: str, repository: Path, log_folder: Path, **options: Any) -> AnyServer:
    """Return a server of one of HOSTS, not started."""
    options = {"ports": FREE_PORTS, "log_path": log_folder / "server.log", **options}
    return HOSTS[host](repository, **options)


def processes(server: AnyServer) -> list[int]:
    """Return the ids of everything a running server consists of."""
    assert server.pid is not None
    return [server.pid, *descendants(server.pid)]
