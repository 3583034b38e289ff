"""The server process: it listens, loads a repository, and serves it.

After SIGTERM it is no longer ready, finishes running requests, refuses new ones with a
Retry-After, and ends.
"""

import asyncio
import contextlib
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Coroutine
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from inference.front.context import FrontContext
from inference.front.grpc_server import grpc_server
from inference.front.guard import RejectedError
from inference.front.http_server import Handler, http_server
from inference.front.link import HostSettings, OwnerLink
from inference.front.tracing import close_tracer, tracer_of
from inference.front.workers import Workers
from inference.host.canaries import Canaries
from inference.host.grpc_calls import KServeGrpc
from inference.host.hosted import Hosted, UnservedError
from inference.host.http import KServeHttp
from inference.host.openai import open_endpoint
from inference.host.repository import Repository, check_text_models
from inference.host.triton import TritonRepository

_POLL_S = 0.02
_END_S = 0.5  # to send the last answers and stop the engines
_FLUSH_S = 0.2  # for gRPC to send its last answers
_TRITON_END_S = 15.0  # for a tritonserver to end
_SEND_S = 0.3  # to send the answers of a failed engine
_USE_REPORT_S = 1.0  # between two reports to the owner that clients send requests
_WATCHDOG_RESET_S, _WATCHDOG_S = (
    5.0,
    120.0,
)  # watchdog: reset period, and limit for one turn of the event loop
_TRIAL_S = 120.0  # for the text models of a new repository to load
_SHUTTING_DOWN = "the server is shutting down; send the request to another server, or again later"
_ENDED = "the process that loads the new repository ended; the log says why"
_STARTING = "the server is starting; send the request again later"
_NOT_EXCHANGED = (
    "weights can be exchanged only in this project's own server, and only if no model has "
    "sessions, which would be lost"
)


def serve_host(settings: HostSettings, connection: Connection) -> NoReturn:
    """Serve until a signal or the owner's end; the process then ends, with 1 after a failure."""
    asyncio.run(_serve_and_exit(_Host(settings, connection)))
    raise AssertionError("the process has ended")


async def _serve_and_exit(host: "_Host") -> NoReturn:
    """Serve, then exit without waiting for threads: one may load a model for minutes."""
    status = await host.serve()
    sys.stderr.flush()
    os._exit(status)


async def _watch_loop() -> None:
    """Exit, with the stack of each thread in the log, if the event loop hangs."""
    try:
        while True:
            faulthandler.dump_traceback_later(_WATCHDOG_S, exit=True)
            await asyncio.sleep(_WATCHDOG_RESET_S)
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Host:
    def __init__(self, settings: HostSettings, connection: Connection) -> None:
        self._settings, self._connection = settings, connection
        self._runners: list[web.ServerRunner] = []
        self._use_reported_s = 0.0
        self._is_shutting_down = False
        self._canaries: Canaries | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Listen, load, execute the owner's orders; at the end finish the running requests."""
        settings = self._settings
        self._link = OwnerLink(self._connection)
        self._workers = Workers()
        try:
            hosted = self._repository(settings.repository)
        except ValueError as error:
            return self._fail(error)
        self._context = FrontContext[Hosted](
            settings.access,
            hosted,
            host=settings.host,
            is_ready=self._is_ready,
            note_use=self._note_use,
            workers=self._workers,
        )
        try:
            await self._serve(self._link)
        except (OSError, ValueError) as error:
            return self._fail(error)
        finally:
            self._workers.close()
            await close_tracer(settings.access.otlp_collector)
        return 0

    async def _serve(self, link: OwnerLink) -> None:
        settings = self._settings
        grpc_port = settings.ports["grpc"]
        logs = settings.openai is not None and settings.openai.access_log
        tracer = tracer_of(settings.access.otlp_collector)
        calls = KServeGrpc(self._context, port=grpc_port, logs=logs, tracer=tracer)
        # Never stopped: gRPC cancels the calls that it has not read by then, which clients do not
        # repeat. Those that are open when the process ends are UNAVAILABLE to them.
        self._grpc = grpc_server(settings.access, calls, host=settings.host, port=grpc_port)
        http = KServeHttp(self._context)
        await self._listen(http.answer, "http", logs=logs)
        await self._listen(http.answer_metrics, "metrics")
        await self._grpc.start()
        following = asyncio.ensure_future(self._load_and_follow())
        stopping = asyncio.ensure_future(link.stopped.wait())
        await asyncio.wait([following, stopping], return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await link.finish(self._wait_until_idle())
        ends = [runner.cleanup() for runner in self._runners]
        close_s = _END_S if settings.triton is None else _TRITON_END_S
        closing = asyncio.ensure_future(self._context.current.close())
        for end, limit_s in (
            (asyncio.gather(asyncio.sleep(_FLUSH_S), *ends), _END_S),
            (closing, close_s),
        ):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(end, limit_s)

    async def _load_and_follow(self) -> None:
        """Load the repository, open OpenAI's port if configured, then execute orders."""
        hosted, settings = self._context.current, self._settings
        try:
            await self._load(hosted)
            if settings.openai is not None:
                await self._listen(self._answer_openai, "openai", logs=settings.openai.access_log)
        except Exception as error:  # of any kind: the owner gets the reason
            if not isinstance(error, (OSError, ValueError)):
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(self._fail(error))  # engines that have loaded need no time to end
        await self._announce(hosted)
        self._spawn(_watch_loop())
        while True:
            await self._link.reload.wait()
            self._link.reload.clear()
            order = self._link.order
            assert order is not None
            await (self._exchange_weights if order.exchanges else self._reload)(order.repository)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task and hold a reference to it, which the event loop does not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce(self, hosted: Hosted) -> None:
        """Send canaries to these models instead of the former ones, and tell the owner of them."""
        if self._canaries is not None:
            await self._canaries.close()
        self._canaries = Canaries(hosted, self._settings.canaries, on_failure=self._shut_down)
        models = {name: dict(model.about) for name, model in hosted.models.items()}
        self._link.send(models=models)

    async def _load(self, hosted: Hosted) -> None:
        await hosted.load(lambda line: self._link.send(says=line))
        if self._settings.openai is None:
            return
        hosted.endpoint = await open_endpoint(self._context, hosted, self._settings.openai)

    async def _exchange_weights(self, source: str) -> None:
        """Load a repository into the current engines, for models that agree.

        Running requests finish first, and new ones are refused meanwhile. A failure after that ends
        the process.
        """
        try:
            if self._settings.triton is not None or self._keeps_sessions():
                raise ValueError(_NOT_EXCHANGED)
            new = self._repository(source)
        except ValueError as error:
            self._link.send(kept=str(error))
            return
        if self._canaries is not None:
            await self._canaries.close()
            self._canaries = None
        new.former = await self._context.exchange(new)
        try:
            await self._load(new)
        except Exception as error:  # of any kind: no model is loaded now
            self._shut_down(f"the weights of {source} could not be loaded: {error}")
            return
        await self._announce(new)

    async def _reload(self, source: str) -> None:
        """Serve a repository as it is now; running requests finish with the former models.

        A separate process reads its files first, in case they are bad.
        """
        if (new := await self._load_new(source)) is None:
            return
        self._spawn(self._exchange(new))
        await asyncio.sleep(0)  # lets the task start: new requests go to the new models
        await self._announce(new)

    async def _exchange(self, new: Hosted) -> None:
        await (await self._context.exchange(new)).close()

    async def _load_new(self, source: str) -> Hosted | None:
        """Load a repository; return None if that fails, after the owner has the reason."""
        new = None
        trial = Workers(1, work_s=_TRIAL_S)
        try:
            if self._keeps_sessions():
                raise ValueError("its sessions would be lost; restart the stage")
            if self._settings.triton is None:
                await trial.run(check_text_models, Path(source), size_bytes=0)
            new = self._repository(source)
            await self._load(new)
        except Exception as error:  # of any kind: the current repository stays
            self._link.send(kept=str(error) or _ENDED)
            if new is not None:
                await new.close()
            return None
        finally:
            trial.close()
        return new

    def _keeps_sessions(self) -> bool:
        return any(model.keeps_sessions for model in self._context.current.models.values())

    def _repository(self, source: str) -> Hosted:
        triton = self._settings.triton
        if triton is None:
            return Repository(Path(source), on_failure=self._shut_down, workers=self._workers)
        return TritonRepository(source, triton, on_failure=self._shut_down)

    def _is_ready(self) -> bool:
        hosted = self._context.current
        is_ending = self._is_shutting_down or self._link.stopped.is_set()
        answers = self._canaries is None or self._canaries.is_ready()
        is_whole = hosted.endpoint is not None or self._settings.openai is None
        return bool(hosted.models) and is_whole and answers and not is_ending

    def _note_use(self) -> None:
        if (now := time.monotonic()) - self._use_reported_s > _USE_REPORT_S:
            self._use_reported_s = now
            self._link.send(used=time.time())
        if self._link.stopped.is_set() and not self._context.current.open_sessions():
            raise RejectedError(_SHUTTING_DOWN, HTTPStatus.SERVICE_UNAVAILABLE, closes=True)
        if not self._context.current.models:
            raise RejectedError(_STARTING, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _wait_until_idle(self) -> None:
        """Wait until no request is running and no session is open."""
        hosted = self._context.current
        while self._context.users() or hosted.open_sessions():
            await asyncio.sleep(_POLL_S)

    async def _listen(self, handler: Handler, port: str, *, logs: bool = False) -> None:
        settings = self._settings
        access, host, number = settings.access, settings.host, settings.ports[port]
        runner = await http_server(access, handler, host=host, port=number, logs=logs)
        self._runners.append(runner)

    async def _answer_openai(self, request: web.BaseRequest) -> web.StreamResponse:
        with self._context.use() as hosted:
            if hosted.endpoint is None:  # weights are being exchanged
                raise web.HTTPServiceUnavailable(text=_STARTING, headers={"Retry-After": "1"})
            response: web.StreamResponse = await hosted.endpoint.answer(request)
        return response

    def _shut_down(self, reason: str) -> None:
        """End the process soon after a failure; answers that are ready are sent first."""
        self._is_shutting_down = True
        sys.stderr.write(f"error: {reason}\n")
        self._link.send(lost=reason)
        sys.stderr.flush()
        self._spawn(self._end())

    async def _end(self) -> NoReturn:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_until_idle(), _SEND_S)
        await asyncio.sleep(_POLL_S)  # the last answer is sent after its `use` block ends
        os._exit(1)

    def _fail(self, error: Exception) -> int:
        sys.stderr.write(f"error: {error}\n")
        reasons = error.problems if isinstance(error, UnservedError) else (f"{error}",)
        self._link.send(failures=reasons)
        return 1
