"""Shared by the tests that start a real tritonserver: small models, and what is still running."""

import re
from pathlib import Path
from typing import Any

from inference.front.link import CanaryTimes
from inference.server.kinds import TRITONSERVER
from inference.server.processes import descendants
from inference.server.segments import SHM_FOLDER
from inference.server.server import ModelServer
from inference.system.ports import FREE_PORTS

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


def new_server(repository: Path | str, log_folder: Path, **options: Any) -> ModelServer:
    """Return a server whose models a tritonserver runs, not started."""
    return hosted(TRITONSERVER, repository, log_folder, **options)


def hosted(host: str, repository: Path | str, log_folder: Path, **options: Any) -> ModelServer:
    """Return a server, slipway or tritonserver, not started; it sends no canaries."""
    options = {
        "ports": FREE_PORTS,
        "log_path": log_folder / "server.log",
        "canaries": CanaryTimes(interval_s=3600.0),
        **options,
    }
    return ModelServer(repository, has_triton=host == TRITONSERVER, **options)


def processes(server: ModelServer) -> list[int]:
    """Return the ids of everything a running server consists of."""
    assert server.pid is not None
    return [server.pid, *descendants(server.pid)]


def triton_of(server: ModelServer) -> int:
    """Return the process of the tritonserver that runs the models."""
    (found,) = (
        pid
        for pid in processes(server)
        if Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"
    )
    return found


def segments(server: ModelServer) -> list[Path]:
    """Return the shared memory between a tritonserver and its models."""
    words = Path(f"/proc/{triton_of(server)}/cmdline").read_text()
    prefix = re.search(r"shm-region-prefix-name=([^\0]+)", words)
    assert prefix is not None
    return list(SHM_FOLDER.glob(f"{prefix[1]}*"))
