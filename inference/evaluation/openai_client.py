"""A client of OpenAI's protocol, with the standard library only."""

import email.utils
import http.client
import json
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from foundations.files.json_content import Fields, Table
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.retry import with_retries
from inference.evaluation.statistics import is_number
from inference.evaluation.task import (
    EvaluationError,
    ImplausibleAnswerError,
    RefusedRequestError,
    RequestFailedError,
    RetryableError,
    Tally,
)
from inference.front.access import Credentials

COMPLETIONS, CHAT = "/completions", "/chat/completions"
# finish_reason of OpenAI and of Text Generation Inference -> count of the tally.
_ENDS = {"stop": "stop", "length": "length", "eos_token": "stop", "stop_sequence": "stop"}
# Values that do not change an answer. They override the defaults of the model's folder: vLLM takes
# repetition_penalty from generation_config.json, and transformers' server sets it to 1 plus
# frequency_penalty.
NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0}
_ABORTED = ("abort",)  # finish_reason of vLLM and SGLang when a server that stops drops a request
_REFUSED = (400, 404, 405, 413, 422, 501)  # statuses that concern the content of a request
_MAX_BYTES = 64 << 20
_MAX_LOG_PROB = 1e-3  # positive values up to this are rounding errors
_MIN_SURPRISE = 8  # prompt tokens, of which no model predicts all with probability 1
PROBE = "The old lighthouse stood at the end of the point"
_SHOWN = 300


class OpenAIClient:
    """Requests to one server, each with its own connection, so that threads can share a client.

    Attributes:
        chat: whether prompts are sent as chat messages.
        retry_s: time limit of `complete_with_retries`, in seconds.
        tally: outcomes of its requests.
    """

    def __init__(
        self,
        server: str,
        credentials: Credentials,
        *,
        timeout_s: float,
        chat: bool = False,
        retry_s: float = 0.0,
    ) -> None:
        self.url = base_url(server, uses_tls=credentials.uses_tls)
        self.chat, self.retry_s, self.tally = chat, retry_s, Tally()
        self.path = CHAT if chat else COMPLETIONS
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._answered_by: Any = None
        ca = credentials.ca
        tls = ssl.create_default_context(cafile=None if ca is None else str(ca))
        # The token must not reach a proxy or the target of a redirection.
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers, _NoRedirection())

    def get(self, path: str) -> Any:
        """Return the JSON at a path below the base URL. Raises RequestFailedError."""
        return self._json(path, None)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the server describes its tokenizer, as ours does and vLLM's may."""
        try:
            with self._answer("/tokenizer_info", None, base=self.url.removesuffix("/v1")):
                return True
        except RequestFailedError:
            return False

    def greedy_request(self, model: str, prompt: Any, output_len: int) -> Fields:
        """Return the body of a request for the greedy tokens after a prompt."""
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {
            "prompt": prompt
        }  # fmt: skip
        return {"model": model, **content, "max_tokens": output_len, "temperature": 0, "n": 1}

    def complete(self, body: Table) -> Table:
        """Return the answer to a request, with one complete choice for each prompt, in their order.

        Raises:
            RequestFailedError: there is no answer, or a choice is missing or incomplete.
            ImplausibleAnswerError: the server counts other tokens than were sent, generates more
                than requested, or serves another model than before.
        """
        answer = self._json(self.path, body)
        if not isinstance(answer, dict):
            raise RequestFailedError(f"{self.url}: {str(answer)[:_SHOWN]} is not an answer")
        prompt = body.get("prompt")
        rows = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
        found, choices = choices_of(answer), {}
        for place, choice in enumerate(found):
            index = choice.get("index", place)
            choices[index if isinstance(index, int) else -1] = choice
        if sorted(choices) != [*range(len(rows))] or len(found) != len(rows):
            error = answer.get("error") or f"choices {sorted(choices)} to {len(rows)} prompts"
            raise RequestFailedError(f"{self.url}: an answer with {str(error)[:_SHOWN]}")
        for choice in choices.values():
            self.count_end(choice)
        self._check_answer(answer, body.get("max_tokens"), len(rows))
        counted = usage_count(answer, "prompt_tokens")
        if counted is not None and all(map(_are_ids, rows)):
            self.check_count(counted, sum(map(len, rows)))
        return {**answer, "choices": [choices[place] for place in sorted(choices)]}

    def _check_answer(self, answer: Table, most: Any, rows: int) -> None:
        """Raise ImplausibleAnswerError for another model's answer, or for more than `most` tokens.

        Some servers also count the end token. `system_fingerprint` is not compared, because it
        differs between the replicas of a public service.
        """
        by = answer.get("model")
        self._answered_by = self._answered_by or by
        if by != self._answered_by:
            raise ImplausibleAnswerError(
                f"{self.url} answers with model {by!r}, and before with {self._answered_by!r}."
            )
        generated = usage_count(answer, "completion_tokens")
        if isinstance(most, int) and generated is not None and generated > rows * (most + 1):
            raise ImplausibleAnswerError(
                f"{self.url} generated {generated} tokens, more than max_tokens={rows * most}."
            )

    def check_count(self, counted: int, sent: int) -> None:
        """Raise ImplausibleAnswerError if the server has not read as many tokens as were sent."""
        if counted != sent:
            raise ImplausibleAnswerError(
                f"{self.url} counts {counted} tokens in prompts of {sent} (usage.prompt_tokens): "
                "they were truncated, or read by another tokenizer than evaluate.tokenizer."
            )

    def complete_with_retries(self, body: Table, *, lost_too: bool = True) -> Table:
        """Return the result of `complete`, retried for up to `retry_s` seconds."""
        once = partial(self.complete, body)
        return with_retries(once, within_s=self.retry_s, tally=self.tally, lost_too=lost_too)

    def complete_or_none(self, body: Table) -> Table | None:
        """Return the answer to a request; None if the server refuses or misreads it."""
        with suppress(RefusedRequestError, ImplausibleAnswerError):
            return self.complete_with_retries(body)
        return None

    def accepted_parameters(self, body: Table, more: Table) -> Fields:
        """Return those of the parameters `more` that the server accepts in addition to `body`."""
        if self.complete_or_none({**body, **more}):
            return dict(more)
        return {
            key: value for key, value in more.items() if self.complete_or_none({**body, key: value})
        }

    def stream(self, body: Table) -> Iterator[Table]:
        """Yield the events of a streamed answer to one prompt on arrival.

        Raises:
            RequestFailedError: the request fails, or the stream ends before the answer.
        """
        last: Table = {}
        with self._answer(self.path, {**body, "stream": True}) as response:
            left = _MAX_BYTES
            while line := response.readline(left + 1):
                left -= len(line)
                self._check(left)
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                if not isinstance(event, dict) or "error" in event:
                    raise RequestFailedError(f"{self.url}: {str(event)[:_SHOWN]}")
                last = next((each for each in choices_of(event) if each.get("finish_reason")), last)
                yield event
        if not last:
            raise RetryableError(f"{self.url}: a stream ended before its answer did")
        self.count_end(last)

    def count_end(self, choice: Table) -> None:
        """Count the end of an answer.

        Raises:
            RetryableError: the server aborted it.
            RequestFailedError: its finish_reason is missing or unknown.
        """
        reason = choice.get("finish_reason")
        if reason in _ABORTED:
            raise RetryableError(
                f"{self.url}: the server aborted the request (finish_reason {reason})"
            )
        if not isinstance(reason, str) or reason not in _ENDS:
            raise RequestFailedError(
                f"{self.url}: finish_reason {json.dumps(reason)} is not the end of an answer; "
                f"expected {', '.join(_ENDS)}"
            )
        self.tally.count(_ENDS[reason])

    def _json(self, path: str, body: Table | None) -> Any:
        with self._answer(path, body) as response:
            data = response.read(_MAX_BYTES + 1)
            self._check(_MAX_BYTES - len(data))
            if response.length:  # announced bytes are missing; read(n) does not report that
                raise http.client.IncompleteRead(data, response.length)
            return json.loads(data)

    def _check(self, left: int) -> None:
        if left < 0:
            raise RequestFailedError(f"{self.url}: an answer of more than {_MAX_BYTES} bytes")

    @contextmanager
    def _answer(self, path: str, body: Table | None, *, base: str = "") -> Iterator[Any]:
        """Yield the open response of status 200; errors while it is read are failed requests."""
        headers = {"content-type": "application/json", **self._credentials.headers()}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request((base or self.url) + path, data, headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            reason = "its reason cannot be read"
            with closing(error), suppress(OSError, http.client.HTTPException):
                reason = error.read(_SHOWN).decode("utf-8", "replace")
            message = f"{self.url}{path}: {error.code}: {reason}"
            if is_retryable(error.code):
                after_s = seconds_of(error.headers.get("retry-after"))
                asks = "" if after_s is None else f" (Retry-After: {after_s:g} s)"
                raise RetryableError(message + asks, after_s=after_s) from error
            kind = RefusedRequestError if error.code in _REFUSED else RequestFailedError
            raise kind(message) from error
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            message = f"{self.url}{path}: {error!r}"
            cause = getattr(error, "reason", error)  # urllib wraps the cause
            if is_lost(cause):
                raise RetryableError(message, is_lost=True) from error
            raise RequestFailedError(message) from error


def client_of(options: EvaluationOptions, url: str) -> OpenAIClient:
    """Return a client for the options of an evaluation."""
    return OpenAIClient(
        url,
        options.credentials,
        timeout_s=options.request_timeout_s,
        chat=options.openai.chat,
        retry_s=options.retry_s,
    )


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def base_url(server: str, *, uses_tls: bool) -> str:
    """Return the base URL of a server that is named by URL or as `host:port`.

    Raises:
        ValueError: it is not an address.
    """
    url = server if "://" in server else f"{'https' if uses_tls else 'http'}://{server}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(f"{server} is not http://host:port/v1 or host:port")
    _ = parts.port  # raises ValueError if it is not a port
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def is_retryable(status: int) -> bool:
    """Return whether an HTTP status means that the same request may succeed later.

    These are 408, 425 and 429 (RFC 6585), and a gateway's statuses for a busy or unreachable
    server; 500, 501 and 505 concern the request.
    """
    return status in (408, 425, 429) or (status > 501 and status != 505)


def is_lost(error: object) -> bool:
    """Return whether a connection was refused or broke, as when a server restarts."""
    kinds = (ConnectionError, http.client.IncompleteRead, http.client.BadStatusLine)
    return isinstance(error, kinds)


def seconds_of(header: str | None) -> float | None:
    """Return the seconds of Retry-After, a number or a date (RFC 9110, section 10.2.3)."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = moment.timestamp() - time.time()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def usage_count(answer: Table, key: str) -> int | None:
    """Return a count of the answer's `usage`; None without one."""
    usage = answer.get("usage")
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None


def choices_of(answer: Table) -> list[Table]:
    """Return the choices of an answer or event that are objects."""
    choices = answer.get("choices")
    found = choices if isinstance(choices, list) else []
    return [each for each in found if isinstance(each, dict)]


def prompt_scores(choice: Table, count: int) -> list[float] | None:
    """Return the log probabilities of a prompt's tokens after the first; None without them.

    Raises:
        ImplausibleAnswerError: one is NaN or that of a probability above 1, or all have
            probability 1.
    """
    found = choice.get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list) or not count <= len(values) <= count + 1:
        return None
    scores = values[1:count]
    wrong = [score for score in scores if isinstance(score, float) and not score <= _MAX_LOG_PROB]
    if wrong:
        raise ImplausibleAnswerError(f"the server gave {wrong[0]} as a token's log probability")
    if len(scores) >= _MIN_SURPRISE and not any(scores):
        raise ImplausibleAnswerError(f"the server gave each of {len(scores)} tokens probability 1")
    return [float(score) for score in scores] if all(map(is_number, scores)) else None


def listed_model(client: OpenAIClient, name: str | None = None) -> Table:
    """Return the entry of `name` in a server's list of models; without a name, the only entry.

    Raises:
        EvaluationError: there is no such model, or there are several and no name.
    """
    answer = client.get("/models")
    data = answer.get("data") if isinstance(answer, dict) else None
    models = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    found = [each for each in models if name is None or each.get("id") == name]
    if len(found) != 1:
        names = ", ".join(str(each.get("id")) for each in models)
        raise EvaluationError(
            f"{client.url} lists {names or 'no model'}, and the option model (evaluate.model) is "
            f"{name or 'null'}; set it to a listed name."
        )
    return found[0]
