"""Connections of strangers, which take no place of clients that ask."""

import asyncio
import resource

from aiohttp import web

from inference.front.http_server import BoundServer, max_connections

MAX_CONNECTIONS = 4
HALF = b"GET /half HTTP/1.1\r\nHost: 127"
ASKED = b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_half_requests_displace_each_other_and_no_client():
    go_on = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path == "/slow":
            await go_on.wait()
        return web.Response(text=request.path)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(
            BoundServer(answer, limit=MAX_CONNECTIONS), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]

        async def connected(first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            ends = await asyncio.open_connection("127.0.0.1", port)
            ends[1].write(first)
            held.append(ends[1])  # which would close its connection
            return ends

        async def status(reader: asyncio.StreamReader) -> bytes:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            return head.split()[1]

        held: list[asyncio.StreamWriter] = []
        slow, _ = await connected(ASKED % b"slow")
        kept, again = await connected(ASKED % b"kept")
        assert await status(kept) == b"200"
        strangers = [await connected(HALF) for _ in range(3 * MAX_CONNECTIONS)]
        new, _ = await connected(ASKED % b"new")
        assert await status(new) == b"200"
        again.write(ASKED % b"again")
        assert await status(kept) == b"200"
        go_on.set()
        assert await status(slow) == b"200"
        lost = [stranger for stranger, _ in strangers if stranger.at_eof()]
        assert len(lost) >= 2 * MAX_CONNECTIONS
        server.close()

    asyncio.run(main())


def test_connections_leave_descriptors_to_the_server(monkeypatch):
    for limit in (64, 600, 1024, 1 << 20):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert 1 <= 4 * max_connections() <= limit - min(limit // 3, 512)
