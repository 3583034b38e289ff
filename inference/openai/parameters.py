"""Requests to complete a text or a chat: their fields, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from inference.openai.errors import ApiError, Problems

_T = TypeVar("_T")

# OpenAI's own limits.
_MOST_PROMPTS = 2048
_MOST_CHOICES = 128
_MOST_STOPS = 4
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_MOST_LOG_PROBS = 20
_DEFAULT_TOKENS = 16
_CHAT_LIMIT = "max_completion_tokens"
BAN = -100.0  # a token with this bias is never chosen

_SAMPLING_FIELDS = frozenset(
    {
        *("model", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "max_tokens", "logprobs"),
        # Not OpenAI's; spelled as in other servers.
        *("top_k", "repetition_penalty", "min_tokens", "ignore_eos"),
    }
)
_COMPLETION_FIELDS = _SAMPLING_FIELDS | {"prompt", "echo", "best_of", "suffix"}
_CHAT_FIELDS = _SAMPLING_FIELDS | {
    *("messages", _CHAT_LIMIT, "top_logprobs", "tools", "tool_choice", "functions"),
    *("function_call", "response_format", "modalities", "audio", "prediction"),
    *("web_search_options", "chat_template_kwargs", "add_generation_prompt"),
}
# These concern the account and the service, not the answer.
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("parallel_tool_calls", "verbosity", "reasoning_effort", "prompt_cache_retention"),
    }
)


@dataclass(frozen=True)
class Sampling:
    """Options of the choice of answers.

    Attributes:
        choices: answers to return.
        candidates: answers to generate, of which the likeliest are returned.
        max_tokens: None for all that the model has room for.
        log_probs: best tokens to report in each place; None to report nothing.
        stop: texts that end an answer and are not part of it.
        banned: tokens that no answer has.
    """

    choices: int = 1
    candidates: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    log_probs: int | None = None
    stop: tuple[str, ...] = ()
    banned: tuple[int, ...] = ()


@dataclass(frozen=True)
class CompletionRequest:
    """A request of /v1/completions; each prompt is a text or token ids."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    sampling: Sampling
    echo: bool = False
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A request of /v1/chat/completions; messages as the chat template takes them."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False


def parse_completion(body: Any) -> CompletionRequest:
    """Return the request that a body states. Raises ApiError with every problem."""
    fields = _Fields(body, _COMPLETION_FIELDS)
    best_of = fields.integer("best_of", None, 1, _MOST_CHOICES)
    log_probs = fields.integer("logprobs", None, 0, _MOST_LOG_PROBS)
    sampling = fields.sampling(default_tokens=_DEFAULT_TOKENS, best_of=best_of, log_probs=log_probs)
    stream = fields.flag("stream")
    if stream and sampling.candidates > sampling.choices:
        fields.problems.add("best_of", "must equal n where the answer is streamed")
    if fields.get("suffix"):
        fields.problems.add("suffix", "is not supported: the model continues a text at its end")
    prompts = fields.prompts()
    echo = fields.flag("echo")
    if sampling.max_tokens == 0 and not echo:
        fields.problems.add("max_tokens", "must be at least 1; 0 needs echo=true")
    request = CompletionRequest(
        fields.model(), prompts, sampling, echo, stream, fields.include_usage(stream)
    )
    fields.problems.check()
    return request


def parse_chat(body: Any) -> ChatRequest:
    """Return the request that a body states. Raises ApiError with every problem."""
    fields = _Fields(body, _CHAT_FIELDS)
    top = fields.integer("top_logprobs", None, 0, _MOST_LOG_PROBS)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        fields.problems.add("top_logprobs", "needs logprobs=true")
    log_probs = (top or 0) if wanted else None
    limit = "max_tokens" if fields.get(_CHAT_LIMIT) is None else _CHAT_LIMIT
    sampling = fields.sampling(default_tokens=None, best_of=None, log_probs=log_probs, limit=limit)
    if sampling.max_tokens == 0:
        fields.problems.add(limit, "must be at least 1")
    fields.refuse_tools()
    stream = fields.flag("stream")
    request = ChatRequest(
        fields.model(), fields.messages(), sampling, stream, fields.include_usage(stream)
    )
    fields.problems.check()
    return request


def parse_tokenize(body: Any) -> tuple[str, bool]:
    """Return the text to encode, and whether with the model's markers. Raises ApiError."""
    fields = _Fields(body, frozenset({"model", "prompt", "add_special_tokens"}))
    text = fields.get("prompt")
    if not _is_text(text):
        fields.problems.add("prompt", "must be a string")
    special = fields.flag("add_special_tokens", default=True)
    fields.problems.check()
    return text, special


def parse_detokenize(body: Any) -> tuple[int, ...]:
    """Return the token ids to decode. Raises ApiError."""
    fields = _Fields(body, frozenset({"model", "tokens"}))
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not _are_ids(tokens):
        fields.problems.add("tokens", "must be token ids")
    fields.problems.check()
    return tuple(tokens)


class _Fields:
    """The fields of a body; null is as good as absent."""

    def __init__(self, body: Any, known: frozenset[str]) -> None:
        if not isinstance(body, dict):
            raise ApiError("the body must be a JSON object")
        self._values = {name: value for name, value in body.items() if value is not None}
        self.problems = Problems()
        for name in self._values:
            if name not in known | _WITHOUT_EFFECT:
                said = "is not a field of this request"
                self.problems.add(str(name)[:100], said, code="unknown_parameter")

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def model(self) -> str:
        return self._typed("model", str, "a string", "")

    def flag(self, name: str, *, default: bool = False) -> bool:
        return self._typed(name, bool, "true or false", default)

    def integer(self, name: str, default: _T, least: int, most: int) -> int | _T:
        value = self.get(name)
        if value is None:
            return default
        if not _is_integer(value) or not least <= value <= most:
            self.problems.add(name, f"must be a whole number from {least} to {most}")
            return default
        return int(value)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # NaN is not, either
            self.problems.add(name, f"must be a number from {least:g} to {most:g}")
            return default
        return float(value)

    def sampling(
        self,
        *,
        default_tokens: int | None,
        best_of: int | None,
        log_probs: int | None,
        limit: str = "max_tokens",
    ) -> Sampling:
        choices = self.integer("n", 1, 1, _MOST_CHOICES)
        candidates = choices if best_of is None else best_of
        if candidates < choices:
            self.problems.add("best_of", f"must be at least n, which is {choices}")
        if self.number("frequency_penalty", 0.0, -2.0, 2.0):
            self.problems.add(
                "frequency_penalty",
                "must be 0: no penalty grows with the count of a token here; use presence_penalty",
            )
        if self.flag("ignore_eos"):
            self.problems.add("ignore_eos", "is not supported; use min_tokens")
        presence = self.number("presence_penalty", 0.0, -2.0, 2.0)
        repetition = self.number("repetition_penalty", 1.0, 1e-3, 1e3)
        if presence and repetition != 1:
            self.problems.add("repetition_penalty", "must be 1 next to a presence_penalty")
        return Sampling(
            choices=choices,
            candidates=candidates,
            max_tokens=self.integer(limit, default_tokens, 0, _INT32),
            temperature=self.number("temperature", 1.0, 0.0, 2.0),
            top_p=self.number("top_p", 1.0, 0.0, 1.0),
            top_k=max(self.integer("top_k", 0, -1, _INT32), 0),
            seed=self.integer("seed", None, -_INT64 - 1, _INT64),
            presence_penalty=presence,
            repetition_penalty=repetition,
            min_tokens=self.integer("min_tokens", 0, 0, _INT32),
            log_probs=log_probs,
            stop=self._stops(),
            banned=self._banned(),
        )

    def include_usage(self, stream: bool) -> bool:
        options = self._typed("stream_options", dict, "an object", {})
        if options and not stream:
            self.problems.add("stream_options", "needs stream=true")
        for name in options.keys() - {"include_usage", "include_obfuscation"}:
            self.problems.add("stream_options", f"has no field {str(name)[:100]}")
        wanted = options.get("include_usage")
        if wanted not in (None, True, False):
            self.problems.add("stream_options", "include_usage must be true or false")
        return bool(wanted)

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Return the prompts: a text, texts, token ids, or lists of these."""
        value = self.get("prompt")
        expected = "must be a string, a list of strings, token ids, or a list of lists of these"
        if value is None:
            self.problems.add("prompt", "is missing")
            return ()
        if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
            value = [value]
        if not isinstance(value, list) or not 1 <= len(value) <= _MOST_PROMPTS:
            self.problems.add("prompt", f"{expected}, 1 to {_MOST_PROMPTS} of them")
            return ()
        if all(_is_text(each) for each in value):
            return tuple(value)
        if all(isinstance(each, list) and each and _are_ids(each) for each in value):
            return tuple(map(tuple, value))
        self.problems.add("prompt", expected)
        return ()

    def messages(self) -> tuple[Mapping[str, Any], ...]:
        value = self._typed("messages", list, "a list", [])
        if not value:
            self.problems.add("messages", "must have at least one message")
        found = [_message(message) for message in value]
        for number, message in enumerate(found):
            if isinstance(message, str):
                self.problems.add(f"messages[{number}]", message)
        return tuple(message for message in found if not isinstance(message, str))

    def refuse_tools(self) -> None:
        """Note fields that ask for more than text."""
        for name in ("tools", "functions", "audio", "prediction", "web_search_options"):
            if self.get(name):
                self.problems.add(name, "is not supported: this server answers with text")
        for name in ("tool_choice", "function_call"):
            if self.get(name) not in (None, "none", "auto"):
                self.problems.add(name, "is not supported: this server answers with text")
        if self.get("modalities") not in (None, ["text"]):
            self.problems.add("modalities", 'must be ["text"]')
        if self.get("response_format") not in (None, {"type": "text"}):
            self.problems.add("response_format", 'must be {"type": "text"}')
        for name in ("chat_template_kwargs", "add_generation_prompt"):
            if self.get(name) is not None:
                self.problems.add(name, "is not supported")

    def _stops(self) -> tuple[str, ...]:
        value = self.get("stop")
        stops = [value] if isinstance(value, str) else value or []
        if not isinstance(stops, list) or not all(_is_text(each) for each in stops):
            self.problems.add("stop", "must be a string or a list of strings")
            return ()
        if len(stops) > _MOST_STOPS:
            self.problems.add("stop", f"must be at most {_MOST_STOPS} strings")
        return tuple(each for each in stops if each)

    def _banned(self) -> tuple[int, ...]:
        biases = self._typed("logit_bias", dict, "an object", {})
        banned = []
        for token, bias in biases.items():
            is_id = isinstance(token, str) and token.isascii() and token.isdigit()
            if not is_id or not 0 < int(token[:11]) <= _INT32:
                self.problems.add("logit_bias", f"{str(token)[:20]!r} is not a token id from 1 on")
            elif (
                isinstance(bias, bool) or not isinstance(bias, int | float) or bias not in (BAN, 0)
            ):
                self.problems.add(
                    "logit_bias",
                    f"{token}: {str(bias)[:20]} is not supported; {BAN:g} bans a token, and other "
                    "biases would have no exact equal here",
                )
            elif bias:
                banned.append(int(token))
        return tuple(banned)

    def _typed(self, name: str, kind: type[_T], words: str, default: _T) -> _T:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is str and not _is_text(value)):
            self.problems.add(name, f"must be {words}")
            return default
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(values: Sequence[Any]) -> bool:
    return all(_is_integer(each) and 0 <= each <= _INT32 for each in values)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that UTF-8 can write, as JSON's escapes may not be."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _message(value: Any) -> Mapping[str, Any] | str:
    """Return a message with its parts joined, or why it is not one."""
    if not isinstance(value, dict) or not _is_text(value.get("role")):
        return "must be an object with a role"
    if value.get("tool_calls") or value.get("function_call"):
        return "tool calls are not supported"
    content = value.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if _is_text_part(part)]
        if len(texts) < len(content):
            return "content must be text; this server takes nothing else"
        content = "".join(texts)
    if not _is_text(content):
        return "content must be text"
    named = {"name": value["name"]} if _is_text(value.get("name")) else {}
    return {"role": value["role"], "content": content, **named}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and _is_text(part.get("text"))
