"""The guard of every protocol: it checks a client and its request's size before any parsing."""

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import zlib
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus

import aiohttp
from aiohttp import HttpVersion11, web

from inference.front.access import Access

# A connection without a call, or with an incomplete request head, is closed after this time.
IDLE_S = 600.0
BODY_TIMEOUT_S = 120.0  # for a request's body to arrive
# A decompressed body may have this many bytes for each compressed one, and 1 MiB more.
MAX_EXPANSION = 256
_FREE_EXPANSION_BYTES = 1 << 20
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
# First byte of each compression; no gRPC message that a handler takes begins with it.
_BEGINNINGS = {b"\x1f": "gzip", b"\x78": "deflate"}
# Refusals that may be sent before the body has been read.
_UNREAD = (
    HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
)  # fmt: skip
_NOT_DECODED = "the body cannot be decoded"
_NO_TOKEN = "this server requires `authorization: Bearer <token>`"


class RejectedError(Exception):
    """A refused request: the reason, and the status for HTTP.

    `param` and `code` are OpenAI's: the field at fault and the kind of error. `closes` is set if
    the connection cannot be reused.
    """

    def __init__(
        self,
        reason: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        *,
        param: str | None = None,
        code: str | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(reason)
        self.status, self.param, self.code = status, param, code
        self.closes = closes or status in _UNREAD


class Guard:
    """The checks on one server's clients; the server listens on the address `listens_at`.

    Web pages from `origins` are admitted; "*" stands for all. `note_use` is called for each request
    to a model.
    """

    def __init__(
        self,
        access: Access,
        *,
        listens_at: str,
        origins: Collection[str] = (),
        note_use: Callable[[], None] = lambda: None,
    ) -> None:
        self.note_use = note_use
        tokens = access.tokens()
        self._tokens = None if tokens is None else [token.encode() for token in tokens]
        self._listens_at = listens_at
        self._origins = frozenset(origins)
        self._limit = access.max_request_bytes

    def token_owner(self, authorization: str | None) -> str | None:
        """Return a name for the token's owner, None if none is required. Raises RejectedError."""
        if self._tokens is None:
            return None
        scheme, _, value = (authorization or "").partition(" ")
        token = value.strip().encode(errors="replace")
        matches = [hmac.compare_digest(token, expected) for expected in self._tokens]
        if scheme.lower() != "bearer" or not any(matches):
            raise RejectedError(_NO_TOKEN, HTTPStatus.UNAUTHORIZED)
        return f"token {hashlib.sha256(token).hexdigest()}"

    def check_page(self, headers: Mapping[str, str]) -> None:
        """Refuse a request from a web page, unless its origin is admitted.

        A page in a browser on this machine can send requests to loopback. They carry the page's
        origin or, after DNS rebinding, the page's own name as the host.
        """
        origin = headers.get("Origin")
        if origin is not None or headers.get("Sec-Fetch-Site", "none") != "none":
            if origin is not None and self.admits(origin):
                return
            reason = "requests from web pages are refused: this one names its origin"
            raise RejectedError(reason, HTTPStatus.FORBIDDEN)
        if (host := headers.get("Host")) is None:  # HTTP/1.0, which no browser speaks
            return
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if _is_loopback(self._listens_at) and not _is_loopback(name):
            reason = f"this server listens on loopback alone, and the request is for {host[:100]!r}"
            raise RejectedError(reason, HTTPStatus.FORBIDDEN)

    def admits(self, origin: str) -> bool:
        """Return whether web pages of an origin are admitted."""
        return "*" in self._origins or origin in self._origins

    async def body(self, request: web.BaseRequest, *, limit: int | None = None) -> bytes:
        """Return the decompressed body of a request; aiohttp's own decompression must be off.

        Raises RejectedError if it is larger than `limit` or `Access` allow, arrives too slowly, or
        is not compressed as its headers say.
        """
        self.note_use()
        limit = min(limit or self._limit, self._limit)
        headers, coding = request.headers, ""
        if "Content-Encoding" in headers:
            coding = ", ".join(headers.getall("Content-Encoding")).strip().lower()
        if coding not in ("", "identity", *_WINDOW_BITS):
            reason = f"Content-Encoding: {coding[:40]} is not one of gzip, deflate"
            raise RejectedError(reason, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        if (request.content_length or 0) > limit:
            raise too_large(limit)
        if "Expect" in headers:
            await ask_for_body(request)
        try:
            if request.content.is_eof():  # a small body has arrived with the head
                body = request.content.read_nowait()
            else:
                body = await asyncio.wait_for(_read(request, limit), BODY_TIMEOUT_S)
        except TimeoutError as error:
            reason = f"the body has not arrived within {BODY_TIMEOUT_S:g} s"
            raise RejectedError(reason, HTTPStatus.REQUEST_TIMEOUT) from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise RejectedError(_NOT_DECODED) from error
        if coding in _WINDOW_BITS:
            return await asyncio.to_thread(decompressed, body, coding, limit)
        return body

    async def message(self, data: bytes) -> bytes:
        """Return a gRPC message, decompressed within the limits of a body. Raises RejectedError."""
        if (coding := _BEGINNINGS.get(data[:1])) is None:
            return data
        return await asyncio.to_thread(decompressed, data, coding, self._limit)


async def ask_for_body(request: web.BaseRequest) -> None:
    """Send `100 Continue` to a client that waits for it (RFC 9110, 10.1.1)."""
    waits = request.headers.get("Expect", "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    body = bytearray()
    async for part in request.content.iter_any():
        if len(body) + len(part) > limit:
            raise too_large(limit)
        body += part
    return bytes(body)


def too_large(limit: int) -> RejectedError:
    """Return the refusal of a request with more bytes than the limit."""
    reason = f"the request is larger than {limit >> 20} MiB; send less, or raise max_request_mb"
    return RejectedError(reason, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def decompressed(body: bytes, coding: str, limit: int) -> bytes:
    """Return a decompressed body: gzip, or deflate with or without zlib's header.

    Raises RejectedError if it is not valid, or expands beyond `limit` or beyond what its compressed
    size allows.
    """
    most = min(limit, _FREE_EXPANSION_BYTES + MAX_EXPANSION * len(body))
    for bits in (_WINDOW_BITS[coding], *((-15,) if coding == "deflate" else ())):
        inflater = zlib.decompressobj(bits)
        try:
            data = inflater.decompress(body, most + 1)
        except zlib.error:
            continue
        if len(data) > most:
            break
        if inflater.eof and not inflater.unused_data:
            return data
    else:
        raise RejectedError(_NOT_DECODED)
    if most == limit:
        raise too_large(limit)
    reason = f"the body expands to over 1 MiB and {MAX_EXPANSION} times its size; send it plain"
    raise RejectedError(reason, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def headers_of(error: RejectedError) -> dict[str, str]:
    """Return the headers that the status of a refusal requires."""
    if error.status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": "1"}
    return {}


def refusal(error: RejectedError, body: object) -> web.Response:
    """Return the response to a refused request."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    response = web.Response(
        body=text.encode(errors="replace"), content_type="application/json", status=error.status
    )
    response.headers.update(headers_of(error))
    if error.closes:
        response.force_close()  # the rest of the body stays unread
    return response


@functools.lru_cache(maxsize=64)  # uncached it takes a tenth of a small request's time
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
