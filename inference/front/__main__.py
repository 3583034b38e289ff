"""`python -m inference.front FD`: the ports of a server, in front of tritonserver on Unix sockets.

A server starts it next to its tritonserver: KServe's protocol over HTTP and gRPC, metrics and, if
wanted, OpenAI's protocol. FD is the connection to its owner, see `link.py`. At SIGTERM or Ctrl-C it
accepts no more requests, and ends when the running ones are answered.
"""

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

from aiohttp import web

from inference.front.kserve_grpc import KServeGrpc, grpc_server
from inference.front.kserve_http import Handler, PassingHttp, http_server
from inference.front.link import (
    LEFT,
    LONGEST_REQUEST_S,
    SERVES,
    FrontSettings,
    HostSettings,
    OwnerLink,
    Served,
)
from inference.front.upstream import FrontContext, Upstream

_OPENING_S = 30.0  # for the tokenizer of a server that takes over


def main(descriptor: str) -> int:
    """Serve until a signal or the owner's end; return 0, or 1 if that is impossible."""
    connection = Connection(int(descriptor))
    settings: FrontSettings | HostSettings = connection.recv()
    os.chdir(settings.folder)
    # Idle connections are cheap, as long as there are descriptors for them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if isinstance(settings, HostSettings):
        from inference.host.process import serve_host  # it needs the whole project

        serve_host(settings, connection)
    try:
        asyncio.run(_Front(settings).serve(connection))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: the front cannot serve: {error}\n")
        return 1
    return 0


class _Front:
    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._runners: list[web.ServerRunner] = []

    async def serve(self, connection: Connection) -> None:
        """Listen, follow the owner's orders, and finish what has begun at the end."""
        settings, ports = self._settings, self._settings.ports
        self._link = link = OwnerLink(connection)
        self._context = context = FrontContext(
            settings.access,
            Upstream(settings.served),
            host=settings.host,
            is_ready=lambda: self._context.current.sockets.folder in link.ready,
            note_use=lambda: self._context.current.sockets.note_use(),
        )
        handler = KServeGrpc(context, port=ports["grpc"])
        server = grpc_server(settings.access, handler, host=settings.host, port=ports["grpc"])
        try:
            http = PassingHttp(context)
            await self._listen(http.answer, ports["http"])
            await self._listen(http.answer_metrics, ports["metrics"])
            await server.start()
            following = asyncio.ensure_future(self._follow())
            stopping = asyncio.ensure_future(link.stopped.wait())
            await asyncio.wait([following, stopping], return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            ends = [runner.cleanup() for runner in self._runners]
            await link.finish(server.stop(LONGEST_REQUEST_S), *ends)
        finally:
            context.workers.close()
            await asyncio.gather(server.stop(None), context.current.close())
        context.current.sockets.remove()  # the process that made the folder may have been killed

    async def _listen(self, handler: Handler, port: int) -> None:
        access, host = self._settings.access, self._settings.host
        self._runners.append(await http_server(access, handler, host=host, port=port))

    async def _follow(self) -> None:
        """Open OpenAI's protocol, if wanted, once the models are ready; then follow orders."""
        upstream = self._context.current
        await self._open_endpoint(upstream)
        if self._settings.openai is not None:
            await self._listen(self._answer_openai, self._settings.ports["openai"])
        self._link.tell(SERVES, upstream.sockets.folder)
        while True:
            order = await self._link.orders.get()
            try:
                await self._take_over(order)
            except Exception as error:  # whatever it was, the server that is there goes on
                sys.stderr.write(f"error: the front stays with its server: {error!r}\n")

    async def _take_over(self, served: Served) -> None:
        """Pass requests on to another server; those under way end where they began."""
        found = Upstream(served)
        try:
            await asyncio.wait_for(self._open_endpoint(found), _OPENING_S)
        except BaseException:
            await found.close()
            raise
        self._link.tell(SERVES, found.sockets.folder)
        former = await self._context.exchange(found)
        self._link.tell(LEFT, former.sockets.folder)
        await former.close()

    async def _open_endpoint(self, upstream: Upstream) -> None:
        if self._settings.openai is None:
            return
        from inference.front.openai.endpoint import open_endpoint  # takes time to import
        from inference.front.openai.served import TritonModel, await_ready, is_ready, triton_configs

        await await_ready(upstream.channel)

        async def answers(models: Sequence[str]) -> bool:
            return self._context.is_ready() and await is_ready(upstream.channel, models)

        upstream.endpoint = await open_endpoint(
            self._context,
            self._settings.openai,
            configs=await triton_configs(upstream),
            repository=upstream.repository,
            make=partial(TritonModel, upstream),
            answers=answers,
        )

    async def _answer_openai(self, request: web.BaseRequest) -> web.StreamResponse:
        with self._context.use() as upstream:
            response: web.StreamResponse = await upstream.endpoint.answer(request)
        return response


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
