"""A PyTriton server of our own: all ranks on this node, started, watched and stopped together."""

from __future__ import annotations

import os
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from inference.gateway.access import OPEN_ACCESS, Access
from inference.gateway.sockets import ServerSockets, new_sockets
from inference.ports import pick_free_ports
from inference.server.local_http import local_answer, socket_address
from inference.server.server import TritonServer
from inference.server.server_log import ServerLog

_LAUNCHER = "inference.pytriton.local_ranks"
_ROOT = Path(__file__).resolve().parents[2]


class PytritonServer(TritonServer):
    """`python -m inference.pytriton.server` on TP x PP ranks, as a server like the others.

    Rank 0 starts the gateway; its server's sockets are those of this object.
    """

    def __init__(
        self,
        weights: Path,
        *,
        name: str,
        interface: str,
        tp_size: int,
        pp_size: int,
        http_port: int,
        grpc_port: int,
        metrics_port: int,
        host: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        port_keys: Mapping[str, str] | None = None,
        access: Access = OPEN_ACCESS,
    ) -> None:
        super().__init__(
            weights,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            host=host,
            log_path=log_path,
            env=env,
            port_keys=port_keys,
            is_old=True,
            work_dir=_ROOT,
        )
        self._name = name
        self._private: ServerSockets | None = None
        self._ranks = tp_size * pp_size
        self._options = [
            f"--hf-model-name={weights.absolute()}",
            f"--tp={tp_size}",
            f"--pp={pp_size}",
            f"--model-name={name}",
            f"--interface={interface}",
            f"--host={host}",
            # Where rank 0 leaves the key of the launch.
            f"--output-dir={log_path.parent.absolute()}",
            *access.arguments(),
        ]

    @property
    def control_address(self) -> str:
        """See `TritonServer`."""
        assert self._private is not None, "the server was not started"
        return socket_address(self._private.inner.http)

    def stop(self, *, drain_s: float = 30.0) -> None:
        """See `TritonServer`."""
        super().stop(drain_s=drain_s)
        if self._private is not None:
            self._private.remove()

    def _command(self) -> tuple[list[str], dict[str, str]]:
        ports = [f"--{name}-port={port}" for name, port in self._ports.items()]
        (master,) = pick_free_ports("127.0.0.1", 1)
        rendezvous = ["--master-addr=127.0.0.1", f"--master-port={master}"]
        self._private = new_sockets()
        sockets = f"--sockets={self._private.inner.folder}"
        launcher = [sys.executable, "-u", "-m", _LAUNCHER, str(self._ranks)]
        return [*launcher, *self._options, *ports, *rendezvous, sockets], dict(os.environ)

    def _is_ready(self, log: ServerLog) -> bool:
        del log
        path = f"/v2/models/{urllib.parse.quote(self._name, safe='')}/ready"
        try:
            local_answer(self.control_address, path)
        except OSError:
            return False
        self.models = (self._name,)
        return True
