"""A client of OpenAI's protocol, from the standard library alone."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from inference.evaluation.task import RequestFailedError
from inference.front.access import Credentials

_MOST_BYTES = 64 << 20
_SHOWN = 300


class OpenAIClient:
    """Requests to one server; a connection for each, so threads may share a client."""

    def __init__(self, server: str, credentials: Credentials, *, timeout_s: float) -> None:
        self.url = base_url(server, uses_tls=credentials.uses_tls)
        self._timeout_s = timeout_s
        self._credentials = credentials
        ca = credentials.ca
        tls = ssl.create_default_context(cafile=None if ca is None else str(ca))
        # Neither a proxy nor a redirection to elsewhere gets the token.
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers, _NoRedirection())

    def get(self, path: str) -> Any:
        """Return the JSON at a path below the base URL. Raises RequestFailedError."""
        return self._json(path, None)

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a request for completions. Raises RequestFailedError."""
        answer = self._json("/completions", body)
        if not isinstance(answer, dict) or not choices_of(answer):
            raise RequestFailedError(f"{self.url}: an answer without choices")
        return answer

    def stream(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a streamed answer as they come. Raises RequestFailedError."""
        with self._answer("/completions", {**body, "stream": True}) as response:
            left = _MOST_BYTES
            while line := response.readline(left + 1):
                left -= len(line)
                self._check(left)
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if not isinstance(event, dict) or "error" in event:
                    raise RequestFailedError(f"{self.url}: {str(event)[:_SHOWN]}")
                yield event

    def _json(self, path: str, body: Mapping[str, Any] | None) -> Any:
        with self._answer(path, body) as response:
            data = response.read(_MOST_BYTES + 1)
            self._check(_MOST_BYTES - len(data))
            return json.loads(data)

    def _check(self, left: int) -> None:
        if left < 0:
            raise RequestFailedError(f"{self.url}: an answer of more than {_MOST_BYTES} bytes")

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None) -> Iterator[Any]:
        """Yield an answer of status 200, open; what fails until it is read is a failed request."""
        headers = {"content-type": "application/json", **self._credentials.headers()}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            reason = error.read(_SHOWN).decode("utf-8", "replace")
            raise RequestFailedError(f"{self.url}{path}: {error.code}: {reason}") from error
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise RequestFailedError(f"{self.url}{path}: {error!r}") from error


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def base_url(server: str, *, uses_tls: bool) -> str:
    """Return the base URL of a server: as given, or of `host:port`.

    Raises:
        ValueError: It is not an address.
    """
    url = server if "://" in server else f"{'https' if uses_tls else 'http'}://{server}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(f"{server} is not http://host:port/v1 or host:port")
    _ = parts.port  # raises ValueError if it is none
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def choices_of(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the choices of an answer or event that are objects."""
    choices = answer.get("choices")
    found = choices if isinstance(choices, list) else []
    return [each for each in found if isinstance(each, dict)]
