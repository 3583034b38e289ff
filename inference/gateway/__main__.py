"""`python -m inference.gateway`: HTTP and gRPC in front of a tritonserver on Unix sockets.

`deploy` starts it next to its server. At SIGTERM or Ctrl-C it accepts no more requests, and ends
when the running ones are answered.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from inference.gateway.access import Access, add_access_options
from inference.gateway.check_process import CheckProcess
from inference.gateway.declared_inputs import read_declared_inputs
from inference.gateway.grpc_relay import GrpcRelay, grpc_server
from inference.gateway.http_relay import HttpRelay
from inference.gateway.process import IDLE_S, LONGEST_REQUEST_S, Stop, run
from inference.gateway.rules import Rules
from inference.gateway.sockets import ServerSockets


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return 0, 1 if a port is unavailable or 2 for wrong arguments."""
    return run(_parser().parse_args(argv), _serve, failure="the gateway cannot listen")


async def _serve(arguments: argparse.Namespace, access: Access) -> None:
    host, sockets = arguments.host, ServerSockets(arguments.sockets)
    models = read_declared_inputs(arguments.repository)
    rules = Rules(tokens=access.tokens(), client_shared_memory=access.client_shared_memory)
    stop = Stop(arguments.lifeline)
    runners = []
    async with contextlib.AsyncExitStack() as stack:
        checks = CheckProcess()
        stack.callback(checks.close)
        http = HttpRelay(
            access, rules, sockets=sockets, checks=checks, models=models, listens_at=host
        )
        stack.push_async_callback(http.close)
        tls = access.ssl_context()
        for handler, port in (
            (http.answer, arguments.http_port),
            (http.answer_metrics, arguments.metrics_port),
        ):
            runner = web.ServerRunner(
                web.Server(
                    handler, access_log=None, handler_cancellation=True, keepalive_timeout=IDLE_S
                ),
                shutdown_timeout=LONGEST_REQUEST_S,
            )
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        grpc = GrpcRelay(access, rules, sockets=sockets, checks=checks, models=models)
        stack.push_async_callback(grpc.close)
        address = f"[{host}]" if ":" in host else host
        server = grpc_server(access, grpc, address=f"{address}:{arguments.grpc_port}")
        await server.start()
        sockets.listening.touch()
        await stop.wait()
        ends = [runner.cleanup() for runner in runners]
        await stop.finish(server.stop(LONGEST_REQUEST_S), *ends)
    if arguments.lifeline is not None:
        sockets.remove()  # the process that made the folder may have been killed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.gateway", description=__doc__)
    add = parser.add_argument
    add("--sockets", type=Path, required=True, help="folder of the server's sockets")
    add("--repository", type=Path, help="folder of the models that it serves")
    add("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    add("--http-port", type=int, default=8000, help="default 8000")
    add("--grpc-port", type=int, default=8001, help="default 8001")
    add("--metrics-port", type=int, default=8002, help="default 8002")
    add("--lifeline", type=int, metavar="FD",
        help="end when the other end of this pipe is closed")  # fmt: skip
    add_access_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
