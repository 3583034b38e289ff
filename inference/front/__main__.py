"""`python -m inference.front`: the ports of a server, in front of a tritonserver on Unix sockets.

`deploy` starts it next to its server: KServe's protocol over HTTP and gRPC, metrics and, with
`--openai-port`, OpenAI's protocol. At SIGTERM or Ctrl-C it accepts no more requests, and ends when
the running ones are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from inference.front.access import Access, access_of, add_access_options
from inference.front.cancellation import Cancellations
from inference.front.declared_inputs import read_declared_inputs
from inference.front.exchange import Exchangeable
from inference.front.guard import Guard
from inference.front.kserve_grpc import KServeGrpc, grpc_server, server_channel
from inference.front.kserve_http import Handler, KServeHttp, http_server
from inference.front.rules import Rules
from inference.front.sessions import ClientSessions
from inference.front.sockets import ServerSockets
from inference.front.stop import LONGEST_REQUEST_S, Stop
from inference.front.workers import Workers
from inference.ports import TRITON_PORTS

_OPENING_S = 30.0  # for the tokenizer of a server that takes over
# A request that is not HTTP or cannot be decoded, and a client that has left before its end.
_CLIENTS_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return 0, 1 if that is impossible or 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    access = access_of(vars(arguments))
    if problems := access.problems(prefix="--", joiner="-"):
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
        return 2
    # Idle connections are cheap, as long as there are descriptors for them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    try:
        asyncio.run(_serve(arguments, access))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: the front cannot serve: {error}\n")
        return 1
    return 0


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a client's error, of which aiohttp would log a traceback each time."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_ERRORS))


async def _serve(arguments: argparse.Namespace, access: Access) -> None:
    host, sockets = arguments.host, ServerSockets(arguments.sockets)
    models = dict(read_declared_inputs(arguments.repository))
    rules = Rules(client_shared_memory=access.client_shared_memory)
    shared: dict[str, Any] = {
        "models": models, "sessions": ClientSessions(host), "limit": access.max_request_bytes,
    }  # fmt: skip
    note_use = lambda: sockets.note_use()  # noqa: E731 - of the server that has the front by then
    guard, cancellations = Guard(access, listens_at=host, note_use=note_use), Cancellations()
    stop = Stop(arguments.lifeline)
    runners: list[web.ServerRunner] = []

    async def listen(handler: Handler, port: int) -> None:
        runners.append(await http_server(access, handler, host=host, port=port))

    async with contextlib.AsyncExitStack() as stack:
        workers = Workers()
        stack.callback(workers.close)
        http = KServeHttp(guard, rules, sockets=sockets, workers=workers, **shared)
        stack.push_async_callback(http.close)
        await listen(http.answer, arguments.http_port)
        await listen(http.answer_metrics, arguments.metrics_port)
        channel = server_channel(sockets)
        stack.push_async_callback(channel.close)
        grpc = KServeGrpc(
            guard, rules, channel=channel, unready=sockets.unready, workers=workers,
            port=arguments.grpc_port, cancellations=cancellations, **shared,
        )  # fmt: skip
        address = f"[{host}]" if ":" in host else host
        server = grpc_server(access, grpc, address=f"{address}:{arguments.grpc_port}")
        await server.start()
        openai: list[Exchangeable[Any]] = []

        async def endpoint(channel: Any, sockets: ServerSockets, repository: Path | None) -> Any:
            from inference.front.openai.endpoint import open_endpoint  # takes time to import

            pages = Guard(
                access, listens_at=host, origins=arguments.openai_origin, note_use=note_use
            )
            return await open_endpoint(
                channel, pages, workers, cancellations, unready=sockets.unready,
                repository=repository, tokenizer=arguments.openai_tokenizer,
            )  # fmt: skip

        async def answer_openai(request: web.BaseRequest) -> web.StreamResponse:
            with openai[0].use() as current:
                response: web.StreamResponse = await current.answer(request)
            return response

        async def exchange(order: Mapping[str, str | None]) -> None:
            """Pass requests on to another server; those under way end where they began."""
            nonlocal sockets
            former, found = sockets, ServerSockets(Path(order["sockets"] or ""))
            repository = Path(order["repository"]) if order["repository"] else None
            declared, other = read_declared_inputs(repository), server_channel(found)
            stack.push_async_callback(other.close)
            waits: list[Callable[[], Awaitable[Any]]] = []
            if openai:
                opening = endpoint(other, found, repository)
                waits.append(openai[0].exchange(await asyncio.wait_for(opening, _OPENING_S)))
            models.clear()
            models.update(declared)
            waits += [grpc.exchange(other, found.unready), http.exchange(found)]
            sockets = found
            sockets.listening.touch()
            await asyncio.gather(*(ended() for ended in waits))
            former.listening.unlink(missing_ok=True)

        async def follow_orders() -> None:
            while True:
                order = json.loads(await stop.orders.get())
                try:
                    await exchange(order)
                except Exception as error:  # whatever it was, the server that is there goes on
                    sys.stderr.write(f"error: the front stays with its server: {error!r}\n")

        if await _opened(arguments, endpoint(channel, sockets, arguments.repository), stop, openai):
            if openai:
                await listen(answer_openai, arguments.openai_port)
            sockets.listening.touch()
            following = asyncio.ensure_future(follow_orders())
            await stop.wait()
            following.cancel()
        ends = [runner.cleanup() for runner in runners]
        await stop.finish(server.stop(LONGEST_REQUEST_S), *ends)
    if arguments.lifeline is not None:
        sockets.remove()  # the process that made the folder may have been killed


async def _opened(
    arguments: argparse.Namespace,
    endpoint: Coroutine[Any, Any, Any],
    stop: Stop,
    openai: list[Exchangeable[Any]],
) -> bool:
    """Open OpenAI's protocol, if wanted, once the models are ready; return False at a stop."""
    if arguments.openai_port is None:
        endpoint.close()
        return True
    opening = asyncio.ensure_future(endpoint)
    ending = asyncio.ensure_future(stop.wait())
    await asyncio.wait([ending, opening], return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if not opening.done():
        opening.cancel()
        return False
    openai.append(Exchangeable(opening.result()))
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.front", description=__doc__)
    add = parser.add_argument
    add("--sockets", type=Path, required=True, help="folder of the server's sockets")
    add("--repository", type=Path, help="folder of the models that it serves")
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    for name, port in TRITON_PORTS.items():
        add(f"--{name}-port", type=int, default=port, help="(%(default)s)")
    add("--openai-port", type=int, help="port of OpenAI's protocol; none without it")
    add("--openai-tokenizer", type=Path, help="its tokenizer, if not the repository's own")
    add("--openai-origin", action="append", default=[], metavar="ORIGIN",
        help="web page that may ask it, https://host; * for all; may be repeated")  # fmt: skip
    add("--lifeline", type=int, metavar="FD",
        help="a pipe of the owner: the front ends when it is closed; a line of JSON with the "
        "sockets and the repository of another server exchanges the one behind it")  # fmt: skip
    add_access_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
