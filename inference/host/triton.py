"""A repository served by a tritonserver that only this process can reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from tritonclient.grpc import service_pb2

from inference.front.guard import RejectedError
from inference.front.link import TritonOptions
from inference.front.rules import UNREACHABLE
from inference.host.hosted import Hosted, UnservedError
from inference.host.models import HostedModel
from inference.host.release_2_51 import is_crash, without_its_clocks
from inference.host.remote import TritonConnection, remote_models
from inference.server import supervisor
from inference.server.installation import find_triton, nvidias_options, server_options
from inference.server.log import fatal_lines, short_reason
from inference.server.processes import ServerWatch, descendants, is_running, model_of
from inference.server.segments import user_prefix
from inference.system.launch_environment import RENDEZVOUS_VARIABLE
from inference.system.parent_process import LinkedProcess
from inference.system.private_folder import PrivateFolder, is_plain, plain_folder
from inference.system.supervision import REPORTS_VARIABLE

_POLL_S = 0.1
_REPORT_S = 0.2  # for the supervisor to report that the server has ended
_CALL_S = 2.0
_METRICS_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_MODEL_END_S = 10.0  # for NVIDIA's backend to leave MPI, and for a model to end its ranks
_KILLED_S = 5.0
_MAX_REPORT_BYTES = 64 * 1024
# A socket's path has at most 108 bytes, of which `/slipway-sockets-12345678/grpc:8001` is a part.
_MAX_FOLDER_BYTES = 68


class TritonRepository(Hosted):
    """The models of a tritonserver, which runs from `load` to `close`."""

    def __init__(
        self, source: str, options: TritonOptions, *, on_failure: Callable[[str], None]
    ) -> None:
        """`source` is a folder or a URL; `on_failure` gets the reason once a model is lost.

        Raises UnservedError if the folder does not exist: tritonserver takes half a minute to
        notice.
        """
        super().__init__(None if "://" in source else Path(source))
        if self.folder is not None and not self.folder.is_dir():
            raise UnservedError([f"{source} is not a folder"])
        self._source, self._options, self._on_failure = source, options, on_failure
        self._held = contextlib.ExitStack()  # resources of a start, which `close` releases
        self._process: LinkedProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reports: list[str] = []

    async def _load(self, say: Callable[[str], None]) -> dict[str, HostedModel]:
        for name in sorted(path.parent.name for path in self._configs()):
            say(f"loading {name}")
        try:
            self._start()
            try:
                index = await self._loaded_index()
            except UnservedError:
                if self._options.has_nvidia_backend or not is_crash(self._exit_status()):
                    raise
                await self.close()
                self._start()
                index = await self._loaded_index()
            configs = {
                (model.name, model.version): await self._config(model.name, model.version)
                for model in index
            }
            takes_canaries = not self._options.has_nvidia_backend
            models = remote_models(configs, self._server, takes_canaries=takes_canaries)
        except BaseException:
            await self.close()
            raise
        for name in models:
            say(f"loaded {name}")
        self._watching = asyncio.create_task(self._watch())
        return models

    def _configs(self) -> list[Path]:
        return [] if self.folder is None else list(self.folder.glob("*/config.pbtxt"))

    def _start(self) -> None:
        options, has_nvidia_backend = self._options, self._options.has_nvidia_backend
        try:
            installation = find_triton(own_backends=not has_nvidia_backend)
        except OSError as error:
            raise UnservedError([str(error)]) from error
        sockets = self._held.enter_context(_sockets_folder())
        repository = self._held.enter_context(plain_folder(self._source))
        options_of = nvidias_options if has_nvidia_backend else server_options
        prefix = f"{user_prefix()}{secrets.token_hex(8)}-"
        self._metrics = sockets / "metrics"
        command = [
            *options.prefix,
            str(installation.program),
            *installation.arguments(sockets),
            *options_of(repository, sockets),
            f"--backend-config=python,shm-region-prefix-name={prefix}",
        ]
        grace_s = _MODEL_END_S if has_nvidia_backend else 0.0
        self._process = LinkedProcess(
            supervisor.PROGRAM,
            [prefix, f"{grace_s:g}", *command],
            log_path=options.log_path,
            env={
                **os.environ,
                **installation.environment(),
                REPORTS_VARIABLE: str(self._receive_reports(sockets)),
            },
        )
        self._server = TritonConnection(f"unix:{sockets / 'grpc'}:8001")
        self._held.callback(self._process.link.close)

    def _receive_reports(self, folder: Path) -> Path:
        """Open a socket on which models report why they end; return its path."""
        receiver = self._held.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        )
        receiver.bind(str(folder / "reports"))
        loop = asyncio.get_running_loop()

        def receive() -> None:
            self._reports.append(receiver.recv(_MAX_REPORT_BYTES).decode(errors="replace"))

        loop.add_reader(receiver, receive)
        self._held.callback(loop.remove_reader, receiver)
        return folder / "reports"

    async def _loaded_index(self) -> list[Any]:
        """Wait until every model is ready; return the index of models. Raises UnservedError."""
        index = None
        while index is None or any(model.state != "READY" for model in index):
            has_ended = self._exit_status() is not None
            fatal = fatal_lines(self._log()) if self._options.has_nvidia_backend else []
            if has_ended or fatal:
                raise UnservedError(fatal)
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(grpc.aio.AioRpcError):  # it may not listen yet
                asked = service_pb2.RepositoryIndexRequest()
                reply = await self._server.calls.RepositoryIndex(asked, timeout=_CALL_S)
                index = list(reply.models)
                failed = [model for model in index if model.state == "UNAVAILABLE"]
                if failed:
                    # An ensemble fails with the model it depends on: list causes first.
                    failed.sort(key=lambda model: "depend" in model.reason)
                    raise UnservedError(
                        [f"model {model.name}: {short_reason(model.reason)}" for model in failed]
                    )
        if not index:
            raise UnservedError([f"{self._source} holds no model"])
        if self._options.has_nvidia_backend and (fatal := fatal_lines(self._log())):
            raise UnservedError(fatal)
        return index

    async def _config(self, name: str, version: str) -> Any:
        asked = service_pb2.ModelConfigRequest(name=name, version=version)
        reply = await self._server.calls.ModelConfig(asked, timeout=_MODEL_END_S)
        return reply.config

    def _log(self) -> str:
        return self._options.log_path.read_text(encoding="utf-8", errors="replace")

    def _exit_status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    async def _watch(self) -> None:
        """Call `on_failure` once the server or the process of a model is lost."""
        assert self._process is not None
        watch = ServerWatch(self._process.pid, names=model_of)
        while True:
            lost = watch.loss()
            if lost:  # perhaps because the server itself ended, which the supervisor reports later
                await self._wait_for_end(_REPORT_S if self._runs() else _KILLED_S)
            if (status := self._exit_status()) is not None:
                lost = f"tritonserver ended with status {status}"
            if lost:
                self._kill()  # so that its running requests fail with "unavailable"
                return self._on_failure("; ".join(self._reports) or lost)
            await asyncio.sleep(_POLL_S)

    def _runs(self) -> bool:
        """Return whether the server runs, rather than only processes of its models."""
        assert self._process is not None
        left = (pid for pid in descendants(self._process.pid) if model_of(pid) is None)
        return any(map(is_running, left))

    async def metrics(self) -> list[str]:
        """Return the lines of the server's own metrics, see `Hosted`."""
        if self._options.has_nvidia_backend:  # old ones expose metrics to the network
            return []
        try:
            connector = aiohttp.UnixConnector(str(self._metrics))
            async with (
                aiohttp.ClientSession(connector=connector, timeout=_METRICS_TIMEOUT) as session,
                session.get("http://tritonserver/metrics") as answer,
            ):
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            raise RejectedError(UNREACHABLE, HTTPStatus.SERVICE_UNAVAILABLE) from None
        return without_its_clocks(text.splitlines())

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.link.send_bytes(supervisor.KILL)

    async def close(self) -> None:
        """End the server, after it has answered its requests."""
        self.models = {}
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            # A model with externally launched ranks must itself report its orderly end to them.
            if self._options.has_nvidia_backend or RENDEZVOUS_VARIABLE in os.environ:
                self._process.terminate()
                await self._wait_for_end(_MODEL_END_S)
            self._kill()
            await self._wait_for_end(_KILLED_S)
            await self._server.channel.close()
        self._held.close()

    async def _wait_for_end(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while self._exit_status() is None and time.monotonic() < until:
            await asyncio.sleep(_POLL_S / 5)


@contextlib.contextmanager
def _sockets_folder() -> Iterator[Path]:
    """Yield a new folder for sockets, of mode 700, on a local disk."""
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    too_long = len(os.fsencode(place)) > _MAX_FOLDER_BYTES
    if too_long or not is_plain(place) or not os.access(place, os.W_OK):
        place = "/tmp"
    folder = PrivateFolder("sockets", place=Path(place))
    try:
        yield folder.path
    finally:
        folder.remove()
