"""Requests on their way to a model: read, checked and encoded in a process of `Workers`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

from inference.front.openai.codec import Codec
from inference.front.openai.errors import ApiError
from inference.front.openai.generation import ModelFacts
from inference.front.openai.jobs import PreparedRequest, Prompt, check_job
from inference.front.openai.requests import (
    MOST_SCORES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
    read_request,
)
from inference.front.validation import parse_json


class Texts(Protocol):
    """The source of a codec in any process, see `CodecFiles`."""

    def codec(self) -> Codec:
        """Return it."""


def load_codec(texts: Texts) -> None:
    """Read the files of a codec before the first request."""
    texts.codec()


def prepare_completion(
    texts: Texts, models: Mapping[str, ModelFacts], data: bytes
) -> PreparedRequest:
    """Return the request that a body of /v1/completions states. Raises RequestRefusedError."""
    request = read_request(CompletionRequest, parse_json(data))
    facts, codec = model_facts(models, request.model), texts.codec()
    shows_text = request.echo or request.logprobs is not None
    prompts = []
    for given in request.prompt:
        if isinstance(given, str):
            prompts.append(Prompt(array("I", codec.encode(given)), given if shows_text else ""))
        else:
            prompts.append(Prompt(array("I", given), codec.text(given) if shows_text else ""))
    stops = _single_tokens(codec, request)
    asked = request.model_copy(update={"prompt": ()})  # which need not come back
    return _checked(facts, PreparedRequest(asked, tuple(prompts), stops, echo=request.echo))


def prepare_chat(texts: Texts, models: Mapping[str, ModelFacts], data: bytes) -> PreparedRequest:
    """Return the request that a body of /v1/chat/completions states. Raises RequestRefusedError."""
    request = read_request(ChatRequest, parse_json(data))
    facts, codec = model_facts(models, request.model), texts.codec()
    prompt = Prompt(array("I", codec.encode_chat(request.messages)))
    ends = frozenset(() if codec.chat_end_id is None else (codec.chat_end_id,))
    stops = (*_single_tokens(codec, request), *ends)
    asked = request.model_copy(update={"messages": ()})
    return _checked(facts, PreparedRequest(asked, (prompt,), stops, ends, is_chat=True))


def tokenize(texts: Texts, data: bytes) -> list[int]:
    """Return the tokens of a text, as a body of /tokenize asks. Raises RequestRefusedError."""
    request = read_request(TokenizeRequest, parse_json(data))
    return texts.codec().tokenize(request.prompt, special=request.add_special_tokens)


def detokenize(texts: Texts, data: bytes) -> str:
    """Return the text of tokens, as a body of /detokenize asks. Raises RequestRefusedError."""
    return texts.codec().text(read_request(DetokenizeRequest, parse_json(data)).tokens)


def model_facts(models: Mapping[str, Any], name: str) -> Any:
    """Return the entry of a model. Raises ApiError with the names that there are."""
    if name in models:
        return models[name]
    raise ApiError(
        f"the model {name[:100]!r} does not exist; this server has {', '.join(models)}",
        status=HTTPStatus.NOT_FOUND,
        param="model",
        code="model_not_found",
    )


def _single_tokens(codec: Codec, request: Sampling) -> tuple[int, ...]:
    return tuple(token for stop in request.stop for token in codec.single_token(stop))


def _checked(facts: ModelFacts, request: PreparedRequest) -> PreparedRequest:
    """Return a request that the model has room for. Raises ApiError."""
    sampling, places = request.sampling, 0
    for prompt in request.prompts:
        output_len = check_job(facts, request, len(prompt.ids))
        places += sampling.candidates * output_len + (len(prompt.ids) if request.echo else 0)
    if sampling.best is not None and places * (sampling.best + 1) > MOST_SCORES:
        raise ApiError(
            f"{places} tokens with {sampling.best + 1} log probabilities each are more than the "
            f"{MOST_SCORES} of a request; send fewer prompts, or lower n, max_tokens or logprobs",
            param="logprobs",
        )
    return request
