"""One guarded address in front of another engine's server of OpenAI's protocol.

`python -m inference.front.openai.proxy --host HOST --port PORT ... -- COMMAND`. The command serves
on loopback, at the port for which {upstream} stands in it, with a token of its own. Clients reach
it through the guard of this project's servers, and nothing but the paths below. At SIGTERM new
requests get 503, `/health` too; once those under way are answered, the command is asked to end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from http import HTTPStatus

import aiohttp
from aiohttp import web

from inference.backend.metrics import METRICS, renamed_metric
from inference.front.access import Access, access_of, add_access_options
from inference.front.guard import Guard, RejectedError, refusal
from inference.front.http_server import http_server
from inference.front.openai.endpoint import HEALTH_PATH, refused
from inference.front.request_log import REQUEST_ID, request_id, with_ids
from inference.front.rules import CLOSED, UNREACHABLE
from inference.front.tracing import close_tracer, outgoing
from inference.system.parent_process import end_with_parent
from inference.system.ports import pick_free_ports

UPSTREAM_FIELD = "{upstream}"  # in a command
_LOOPBACK = "127.0.0.1"
_TOKEN_VARIABLE = "VLLM_API_KEY"  # vllm/envs.py; others pass over it
_CONNECT_S = 5.0
_METRICS_PATH = "/metrics"
# vLLM, docs/serving/openai_compatible_server.md, without those that change the server.
_OPEN = {
    "GET": rf"{HEALTH_PATH}|/v1/models(/.+)?|/version|{_METRICS_PATH}",
    "POST": r"/v1/((chat/)?completions|embeddings|responses|score|rerank|messages(/count_tokens)?)"
    r"|/v1/audio/(transcriptions|translations)|/(v2/)?rerank|/score|/classify|/pooling"
    r"|/(de)?tokenize",
}
# Headers of one connection (RFC 9110, 7.6.1), or decided here.
_OWN_HEADERS = {
    "authorization", "connection", "content-encoding", "content-length", "expect", "host",
    "keep-alive", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
    REQUEST_ID.lower(),
}  # fmt: skip
_PASSED_BACK = (
    "content-type",
    "content-length",
    "content-encoding",
    "cache-control",
    "retry-after",
)
_NAMES = {each.vllm: each.name for each in METRICS if each.vllm != "-"}


class Proxy:
    """Answers clients with what the server behind it answers."""

    def __init__(self, guard: Guard, session: aiohttp.ClientSession) -> None:
        self._guard, self._session = guard, session
        self._is_leaving = False
        self._running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._answers: Counter[int] = Counter()

    async def leave(self) -> None:
        """Refuse requests from now on; return once those under way are answered."""
        self._is_leaving = True
        await self._is_idle.wait()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            response = await self._answer(request)
        except ConnectionError:  # the client has left
            raise
        except Exception as error:
            response = refusal(*refused(error, request_id(request)))
        self._answers[response.status] += 1
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._guard.check_page(request.headers)
        if request.path != HEALTH_PATH:
            self._guard.token_owner(request.headers.get("Authorization"))
        is_open = re.fullmatch(_OPEN.get(request.method, "(?!)"), request.path)
        # No character of a path has a second spelling.
        if not is_open or request.raw_path.partition("?")[0] != request.path:
            raise RejectedError(CLOSED, HTTPStatus.FORBIDDEN)
        if request.path == _METRICS_PATH:
            return web.Response(text="\n".join([*self._counts(), await self._metrics()]))
        if self._is_leaving:
            raise RejectedError("the server is ending", HTTPStatus.SERVICE_UNAVAILABLE)
        self._running += 1
        self._is_idle.clear()
        try:
            body = await self._guard.body(request) if request.method == "POST" else None
            return await self._passed_on(request, body)
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    async def _passed_on(self, request: web.BaseRequest, body: bytes | None) -> web.StreamResponse:
        given = request.headers.items()
        headers = {name: value for name, value in given if name.lower() not in _OWN_HEADERS}
        headers |= {REQUEST_ID: request_id(request), **dict(outgoing())}
        asked = self._session.request(
            request.method, request.path_qs, data=body, headers=headers, allow_redirects=False
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                found = await stack.enter_async_context(asked)
            except aiohttp.ClientError as error:
                raise RejectedError(UNREACHABLE, HTTPStatus.SERVICE_UNAVAILABLE) from error
            kept = {name: found.headers[name] for name in _PASSED_BACK if name in found.headers}
            kept[REQUEST_ID] = request_id(request)
            response = web.StreamResponse(status=found.status, headers=kept)
            await response.prepare(request)
            async for part in _parts(found):
                await response.write(part)
            await response.write_eof()
        return response

    async def _metrics(self) -> str:
        """Return the metrics of the server behind, those of vLLM under our names, too."""
        try:
            async with self._session.get(_METRICS_PATH) as found:
                text = await found.text() if found.status == HTTPStatus.OK else ""
        except aiohttp.ClientError:
            return ""
        return "\n".join([text.rstrip(), *with_own_names(text), ""])

    def _counts(self) -> Iterator[str]:
        yield "# HELP slipway_front_requests_total Requests that the front has answered"
        yield "# TYPE slipway_front_requests_total counter"
        for status, count in sorted(self._answers.items()):
            yield f'slipway_front_requests_total{{code="{status}"}} {count}'
        yield "# HELP slipway_front_requests_running Requests under way behind the front"
        yield "# TYPE slipway_front_requests_running gauge"
        yield f"slipway_front_requests_running {self._running}"


async def _parts(found: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield an answer as it comes.

    Raises:
        ConnectionAbortedError: it was broken off; then the client's answer is, too.
    """
    try:
        async for part in found.content.iter_any():
            yield part
    except aiohttp.ClientError as error:
        raise ConnectionAbortedError(UNREACHABLE) from error


def with_own_names(metrics: str) -> Iterator[str]:
    """Yield the lines of vLLM's metrics that this project's servers have, under their names."""
    for line in metrics.splitlines():
        if own := renamed_metric(line, _NAMES, label="model_name", new_label="model"):
            yield own


async def _serve(
    access: Access, command: Sequence[str], *, host: str, port: int, logs: bool
) -> int:
    """Serve until the command ends or a signal comes; return the command's status."""
    token, (upstream,) = secrets.token_hex(32), pick_free_ports(_LOOPBACK, 1)
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    async with aiohttp.ClientSession(
        f"http://{_LOOPBACK}:{upstream}",
        headers={"authorization": f"Bearer {token}"},
        # A connection that is kept could be closed there while a request is being sent.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        auto_decompress=False,
        skip_auto_headers=("accept-encoding", "user-agent", "content-type"),
    ) as session:
        proxy = Proxy(Guard(access, listens_at=host), session)
        runner = await http_server(access, with_ids(proxy.answer, logs=logs), host=host, port=port)
        words = [word.replace(UPSTREAM_FIELD, str(upstream)) for word in command]
        environment = {**os.environ, _TOKEN_VARIABLE: token}
        engine = await asyncio.create_subprocess_exec(
            *words, env=environment, preexec_fn=end_with_parent
        )
        ended, asked = asyncio.ensure_future(engine.wait()), asyncio.ensure_future(leaving.wait())
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await asyncio.wait(
                [ended, asyncio.ensure_future(proxy.leave())], return_when=asyncio.FIRST_COMPLETED
            )
        if not ended.done():
            engine.terminate()
        status = await ended
        await runner.cleanup()
    await close_tracer(access.otlp_collector)
    return status if status >= 0 else 128 - status


def front_command(
    command: Sequence[str], access: Mapping[str, object], *, host: str, port: str, logs: bool
) -> list[str]:
    """Return the command of this module before that of a server, in which `port` is replaced.

    `host` and `port` are the fields in which a command states where it listens, `access` the
    fields of Access.
    """
    inner = [word.replace(host, _LOOPBACK).replace(port, UPSTREAM_FIELD) for word in command]
    options = [
        f"--{name.replace('_', '-')}={value}" for name, value in access.items() if value is not None
    ]
    log = ["--access-log"] if logs else []
    words = [sys.executable, "-m", "inference.front.openai.proxy", f"--host={host}"]
    return [*words, f"--port={port}", *options, *log, "--", *inner]


def main() -> int:
    """Run the command behind a front; return its status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default=_LOOPBACK, help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--access-log", action="store_true", help="a line of JSON for each request")
    add_access_options(parser)
    parser.add_argument("command", nargs="+", help=f"the server's, with {UPSTREAM_FIELD}")
    arguments = parser.parse_args()
    access = access_of(vars(arguments))
    if problems := access.problems(prefix="--", joiner="-"):
        parser.error(" ".join(problems))
    try:
        return asyncio.run(
            _serve(
                access,
                arguments.command,
                host=arguments.host,
                port=arguments.port,
                logs=arguments.access_log,
            )
        )
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
