"""The pydantic models of requests: fields, types and ranges.

A null field counts as absent. One error reports every wrong field. Fields that are accepted without
effect are in fields.tsv.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    ValidationError,
    model_validator,
)

from inference.decoding.grammars import compiled
from inference.front.guard import RejectedError

# OpenAI's own limits.
MAX_PROMPTS = 2048
MAX_CHOICES = 128
MAX_STOP_IDS = 64
MAX_LOG_PROBS = 20
# Each one costs time in every step; OpenAI's own limits are lower or unknown.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_TEXT_BYTES = 1 << 20  # one prompt; the same limit as in the text models
MAX_TOKENS = 1 << 18  # of a /detokenize request
MAX_TOOLS = 128
MAX_FIELDS = 256  # an error names each wrong field
# Limits for a whole request: prompts x n, and scores over all positions.
MAX_SEQUENCES = 2048
MAX_SCORES = 1 << 19
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
# Variables of chat templates that only the server sets.
TEMPLATE_NAMES = ("messages", "add_generation_prompt", "continue_final_message", "tools",
                  "bos_token", "eos_token", "pad_token", "unk_token", "chat_template")  # fmt: skip
BAN = -100.0  # a token with this bias is never chosen
_T = TypeVar("_T", bound="RequestRecord")


_Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
_Stops = Annotated[
    _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)],
    Field(
        description=f"a string or a list of strings, at most {MAX_STOPS} of "
        f"{MAX_STOP_CHARACTERS} characters each"
    ),
    AfterValidator(
        lambda value: [stop for stop in ([value] if isinstance(value, str) else value) if stop]
    ),
]


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Biases = Annotated[
    dict[
        Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, Field(ge=BAN, le=-BAN)],
    ],
    Field(
        max_length=MAX_BIASES,
        description=f"an object with at most {MAX_BIASES} token ids, each with a number from "
        f"{BAN:g} to {-BAN:g}",
    ),
]


def _check_length(text: str) -> str:
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"a text may have {MAX_TEXT_BYTES >> 20} MiB")
    return text


def _one_by_one(value: Any) -> Any:
    """Return a list of prompts, also for a single prompt."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


_TokenId = Annotated[int, Field(ge=0, le=_INT32)]
_StopIds = Annotated[
    list[Annotated[_TokenId, BeforeValidator(_whole_number)]],
    Field(max_length=MAX_STOP_IDS),
]
_Text = Annotated[str, AfterValidator(_check_length)]
_Ids = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_FEW = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
_Prompts = Annotated[
    _Text | _Ids | Annotated[list[_Text], _FEW] | Annotated[list[_Ids], _FEW],
    AfterValidator(_one_by_one),
    Field(
        description="a string, a list of strings, token ids, or a list of lists of these, 1 to "
        f"{MAX_PROMPTS} of them"
    ),
]


def _one_structure(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the structure that a request asks for in one of several fields."""
    found = [structure for name, value in fields.items() if (structure := _structure(name, value))]
    if len(found) > 1:
        raise ValueError(f"only one of {', '.join(fields)} is possible")
    if found:
        compiled(found[0])
    return found[0] if found else {}


def _structure(name: str, value: Any) -> dict[str, Any]:
    """Return a structure in the form that `grammars.compiled` takes, empty for free text."""
    if name.startswith("guided_"):
        if not isinstance(value, dict | list | str):
            raise ValueError("must be a text, a list or an object")
        return {name.removeprefix("guided_"): value}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if name == "structured_outputs":
        return {key: option for key, option in value.items() if option not in (None, False)}
    kind = value.get("type")
    if kind == "json_schema":
        schema = value.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if not isinstance(schema, dict):
            raise ValueError("json_schema must be an object with a schema")
        return {"json": schema}
    if kind not in ("text", "json_object"):
        raise ValueError("its type must be text, json_object or json_schema")
    return {"json_object": True} if kind == "json_object" else {}


def _check_names(values: dict[str, Any]) -> dict[str, Any]:
    if wrong := ", ".join(name[:40] for name in values if name in TEMPLATE_NAMES):
        raise ValueError(f"{wrong} is a request field or is set by the server")
    return values


class _Fixed(NamedTuple):
    """A field of fields.tsv: the accepted values, None for any, and the reason."""

    values: list[Any] | None
    reason: str


def _fixed_fields() -> Iterator[tuple[str, str, _Fixed]]:
    text = Path(__file__).with_name("fields.tsv").read_text(encoding="utf-8")
    for line in text.splitlines()[3:]:
        name, kinds, values, reason = line.split("\t")
        accepted = None if values == "any" else [json.loads(text) for text in values.split()]
        yield from ((kind, name, _Fixed(accepted, reason)) for kind in kinds.split())


_FIXED = tuple(_fixed_fields())
# Alternative names: of the answer's length, where the smallest counts, and of its structure:
# OpenAI's, vLLM's former ones and its current one.
SPELLINGS = {
    "max_tokens": ("max_completion_tokens", "max_tokens", "max_new_tokens"),
    "structured_outputs": (
        *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "structured_outputs",
    ),
}


class RequestRecord(BaseModel):
    """A request or a part of one: strict types, unknown fields refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    kind: ClassVar[str] = ""

    @classmethod
    @functools.cache
    def fixed(cls) -> dict[str, _Fixed]:
        """Return the fields of fields.tsv that this kind of request accepts."""
        return {name: field for kind, name, field in _FIXED if kind in ("*", cls.kind)}

    @model_validator(mode="before")
    @classmethod
    def _with_one_spelling(cls, value: Any) -> Any:
        """Drop nulls, and turn 4.0 into 4: some languages write whole numbers so."""
        if not isinstance(value, dict):
            return value
        return {name: _whole_number(v) for name, v in value.items() if v is not None}


class StreamOptions(RequestRecord):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage in each chunk; vLLM's
    include_obfuscation: Literal[False] = False


class _Open(RequestRecord):
    """A part of a conversation; further fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")


class CalledFunction(_Open):
    """A function call in an answer; templates expect its arguments as an object."""

    name: str
    # "" stands for none, as in OpenAI's API.
    arguments: Annotated[
        dict[str, Any] | Json[dict[str, Any]], BeforeValidator(lambda value: value or {})
    ] = {}


class ToolCall(_Open):
    """A tool call in an answer."""

    function: CalledFunction


class TextPart(_Open):
    """A part of the text of a message."""

    type: Literal["text"]
    text: str


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(_Open):
    """A message of a conversation."""

    role: str
    content: Annotated[str | list[TextPart], AfterValidator(_joined),
                       AfterValidator(_check_length)] = ""  # fmt: skip
    tool_calls: list[ToolCall] = []

    @model_validator(mode="after")
    def _with_content(self) -> "Message":
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("a message has no text content")
        if (self.model_extra or {}).get("function_call"):
            raise ValueError("function_call is not supported; tool_calls are")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for a template: the fields that were sent, with text content."""
        return {**self.model_dump(exclude_unset=True), "content": self.content}


class Function(_Open):
    """A function that an answer may call."""

    name: str


class Tool(_Open):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class Sampling(RequestRecord):
    """Options that completions and chats share."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: _Biases = {}
    stop: _Stops = []
    max_tokens: int | None = Field(None, ge=0, le=_INT32)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    model: str = ""
    # Not OpenAI's: the names of vLLM and others.
    top_k: int = Field(0, ge=-1, le=_INT32)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=1e-3, le=1e3)
    min_tokens: int = Field(0, ge=0, le=_INT32)
    ignore_eos: bool = False
    stop_token_ids: _StopIds = []
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOG_PROBS)
    return_token_ids: bool = False
    # A key of `grammars.STRUCTURES` with its value; empty for free text.
    structured_outputs: Annotated[dict[str, Any], BeforeValidator(_one_structure)] = {}

    echo: bool = False

    @property
    def top_n(self) -> int | None:
        """Number of top tokens to report per position of an answer, None for no scores."""
        raise NotImplementedError

    @property
    def prompt_top_n(self) -> int | None:
        """Number of top tokens to report per position of the prompt, None for no scores."""
        return self.top_n if self.echo else self.prompt_logprobs

    @property
    def banned(self) -> list[int]:
        """Tokens that are never generated; token 0 is left out, as word lists cannot hold it."""
        return [
            int(token) for token, bias in self.logit_bias.items() if bias == BAN and token != "0"
        ]

    @property
    def biases(self) -> dict[int, float]:
        """Biases to add to the logits of tokens that are not banned."""
        pairs = ((int(token), bias) for token, bias in self.logit_bias.items())
        return {token: bias for token, bias in pairs if bias and (bias != BAN or token == 0)}

    def problems(self) -> dict[str, str]:
        """Return the fields that conflict with others, and why."""
        found = {}
        if self.stream_options != StreamOptions() and not self.stream:
            found["stream_options"] = "needs stream=true"
        if self.presence_penalty and self.repetition_penalty != 1:
            found["repetition_penalty"] = "must be 1 if presence_penalty is set"
        if self.stream and self.prompt_logprobs is not None:
            found["prompt_logprobs"] = "needs stream=false"
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            found["min_tokens"] = f"must be at most max_tokens, which is {self.max_tokens}"
        if self.min_tokens and self.stop_token_ids:
            found["min_tokens"] = "must be 0 with stop_token_ids, which end an answer of any length"
        return found


class CompletionRequest(Sampling):
    """A request of /v1/completions; each prompt is a text or token ids."""

    kind: ClassVar[str] = "completions"
    prompt: _Prompts
    max_tokens: int | None = Field(16, ge=0, le=_INT32)
    add_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=MAX_LOG_PROBS)

    @property
    def top_n(self) -> int | None:
        """Number of top tokens to report per position of an answer, None for no scores."""
        return self.logprobs

    def problems(self) -> dict[str, str]:
        """Return the fields that conflict with others, and why."""
        found = super().problems()
        if self.max_tokens == 0 and not self.echo:
            found["max_tokens"] = "must be at least 1; 0 needs echo=true"
        if len(self.prompt) * self.n > MAX_SEQUENCES:
            found["n"] = (
                f"{len(self.prompt)} prompts with {self.n} answers each are more than "
                f"the {MAX_SEQUENCES} sequences of a request; send fewer"
            )
        return found


class ChatRequest(Sampling):
    """A request of /v1/chat/completions; messages as the chat template takes them."""

    kind: ClassVar[str] = "chat"
    messages: list[Message] = Field(
        min_length=1,
        fail_fast=True,
        description="a list of at least one message, each with a role and text content; this "
        "server takes nothing else",
    )
    # Passed to the template; the answer is the model's text, without parsed tool calls.
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto"] = "auto"  # a tool call cannot be forced
    parallel_tool_calls: bool = True
    # Each template defines its own values.
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_names)] = {}
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOG_PROBS)

    @property
    def top_n(self) -> int | None:
        """Number of top tokens to report per position of an answer, None for no scores."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def problems(self) -> dict[str, str]:
        """Return the fields that conflict with others, and why."""
        found = super().problems()
        if self.top_logprobs and not self.logprobs:
            found["top_logprobs"] = "needs logprobs=true"
        if self.max_tokens == 0:
            found["max_tokens"] = "must be at least 1"
        if self.continue_final_message and self.add_generation_prompt:
            found["continue_final_message"] = "needs add_generation_prompt=false"
        if self.tools and not self.parallel_tool_calls:
            found["parallel_tool_calls"] = "must be true: calls in an answer are not counted"
        return found


class EmbeddingRequest(RequestRecord):
    """A request of /v1/embeddings; each input is a text or token ids."""

    kind: ClassVar[str] = "embeddings"
    input: _Prompts
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"


class TokenizeRequest(RequestRecord):
    """A request of /tokenize."""

    prompt: Annotated[str, AfterValidator(_check_length)]
    model: str = ""
    add_special_tokens: bool = True


class DetokenizeRequest(RequestRecord):
    """A request of /detokenize."""

    tokens: list[_TokenId] = Field(max_length=MAX_TOKENS, fail_fast=True)
    model: str = ""


def read_request(
    kind: type[_T], body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> _T:
    """Return the request in a JSON object, with `defaults` for absent fields.

    Raises RejectedError, which names every problem.
    """
    if len(body) > MAX_FIELDS:
        raise RejectedError(f"the request has {len(body)} fields, {MAX_FIELDS} at most")
    fixed = kind.fixed()
    stated = {name: value for name, value in body.items() if value is not None}
    values = {name: value for name, value in stated.items() if name not in fixed}
    spelled = _with_one_name(values)
    for name, value in (defaults or {}).items():
        # A request's presence_penalty replaces a default repetition_penalty.
        is_replaced = name == "repetition_penalty" and values.get("presence_penalty")
        if name in kind.model_fields and values.get(name) is None and not is_replaced:
            values[name] = value
    problems = {}
    code = "invalid_value"
    try:
        request = kind.model_validate(values)
        problems = request.problems() if isinstance(request, Sampling) else {}
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # Pydantic reports unknown fields last; report them first.
        found.sort(key=lambda problem: problem["type"] != "extra_forbidden")
        for problem in found:
            problems.setdefault(str(problem["loc"][0])[:100], _words(kind, problem))
        if found[0]["type"] == "extra_forbidden" and len(found[0]["loc"]) == 1:
            code = "unknown_parameter"
    for name, (accepted, reason) in fixed.items():
        if name in stated and accepted is not None and stated[name] not in accepted:
            problems[name] = reason
    problems = {spelled.get(name, name): words for name, words in problems.items()}
    if problems:
        text = "; ".join(f"{name}: {words}" for name, words in problems.items())
        raise RejectedError(text, param=next(iter(problems)), code=code)
    return request


def _with_one_name(values: dict[str, Any]) -> dict[str, str]:
    """Merge alternative names of a field; return the name that the client used for each field."""
    spelled = {}
    for field, names in SPELLINGS.items():
        if sent := {name: values.pop(name) for name in names if name in values}:
            if field == "structured_outputs":
                spelled[field], values[field] = next(iter(sent)), sent
            else:  # a value of a wrong type ranks first, so that it is refused under its own name
                spelled[field] = min(sent, key=lambda name: _rank(sent[name]))
                values[field] = sent[spelled[field]]
    return spelled


def _rank(value: Any) -> float:
    return value if isinstance(value, int | float) else -math.inf


def _words(kind: type[RequestRecord], error: Any) -> str:
    name, *inner = error["loc"]
    if error["type"] == "missing" and not inner:
        return "is missing"
    if error["type"] == "extra_forbidden":
        return f"has no field {str(inner[0])[:100]}" if inner else "is not a field of this request"
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    place = f"number {inner[0]}: " if inner and isinstance(inner[0], int) else ""
    described = kind.model_fields[str(name)].description
    words = str(error["msg"]).replace("Input should", "must")
    return place + (f"must be {described}" if described else words)
