"""From the body of a request to the jobs of a model: tokens, and tensors of the contract.

Bodies are read, checked and encoded in a process of `Workers`.
"""

# Shapes: n candidates, W width of a word list

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import numpy as np

from inference.front.guard import RejectedError
from inference.front.openai.answers import Array
from inference.front.openai.codec import Codec, CodecFiles
from inference.front.openai.requests import (
    MOST_SCORES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Sampling,
    TokenizeRequest,
    read_request,
)
from inference.front.strict_json import parse_json

_T = TypeVar("_T", CompletionRequest, ChatRequest, EmbeddingRequest)
# Between the seeds of a request's candidates: odd, and far from the numbers that people choose.
_SEED_STEP = 0x9E3779B97F4A7C15
_WHOLE_BOUNDARY = "nucleus_include_boundary"
_SCORE_INPUTS = ("num_log_probs", "num_prompt_log_probs")
# Fields with a tensor of their name, and the values that change nothing.
_PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
# Tensors to the field of a request that needs them, where that has another name.
_FIELD_OF = {
    "logit_bias_ids": "logit_bias",
    "min_length": "min_tokens",
    "bad_words_list": "logit_bias",
    "num_log_probs": "logprobs",
    "num_prompt_log_probs": "logprobs",
}


@dataclass(frozen=True)
class ModelFacts:
    """A served model."""

    name: str
    inputs: frozenset[str]  # names of the tensors it takes
    max_rows: int  # most candidates of a request
    context_len: int  # most tokens of prompt and answer together, as far as the files say
    encoder_decoder: bool = False  # the prompt is not part of what it returns
    streams: bool = False  # answers come token by token
    encodes: bool = False  # it answers with hidden states
    vocab_size: int | None = None  # None where the files do not say
    about: tuple[tuple[str, str], ...] = ()  # what is served, see `served_identity`

    def room(self, prompt_len: int) -> int:
        """Return the most tokens of an answer to a prompt."""
        return self.context_len - (0 if self.encoder_decoder else prompt_len)


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text where that is part of the answer."""

    ids: array[int]
    text: str = ""


@dataclass(frozen=True)
class PreparedRequest:
    """A request that the model can answer."""

    sampling: Sampling
    prompts: tuple[Prompt, ...]
    limit: int | None  # most tokens of an answer, None for all that the model has room for
    best: int | None  # tokens to report in each place, None to report nothing
    candidates: int  # answers to generate for a prompt, of which the likeliest are returned
    stop_ids: tuple[int, ...]  # tokens that are a stop text by themselves, or end an answer
    end_ids: frozenset[int] = frozenset()  # tokens that end an answer
    echo: bool = False  # the answer begins with the prompt
    prompt_best: int | None = None  # best tokens to report in each place of the prompt
    is_chat: bool = False


def prepare_completion(
    texts: CodecFiles, models: Mapping[str, ModelFacts], data: bytes
) -> PreparedRequest:
    """Return the request that a body of /v1/completions states. Raises RejectedError."""
    codec = texts.codec()
    request, facts = _read(CompletionRequest, models, codec, data)
    shows_text = request.echo or request.logprobs is not None
    prompts = []
    for given in request.prompt:
        if isinstance(given, str):
            ids = codec.encode(given, special=request.add_special_tokens)
            prompts.append(Prompt(array("I", ids), given if shows_text else ""))
        else:
            prompts.append(
                Prompt(array("I", given), codec.tokenizer.decode(given) if shows_text else "")
            )
    prepared = PreparedRequest(
        request.model_copy(update={"prompt": ()}),  # which need not come back
        tuple(prompts),
        limit=request.max_tokens,
        best=request.logprobs,
        candidates=request.best_of or request.n,
        stop_ids=_stop_ids(codec, request),
        end_ids=_end_ids(codec, request),
        echo=request.echo,
        prompt_best=request.prompt_logprobs if not request.echo else request.logprobs,
    )
    return _checked(facts, prepared)


def prepare_chat(
    texts: CodecFiles, models: Mapping[str, ModelFacts], data: bytes
) -> PreparedRequest:
    """Return the request that a body of /v1/chat/completions states. Raises RejectedError."""
    codec = texts.codec()
    request, facts = _read(ChatRequest, models, codec, data)
    ids = codec.encode_chat(request)
    limit = request.max_tokens
    if limit is None and "max_tokens" in codec.defaults:
        limit = max(1, min(codec.defaults["max_tokens"], facts.room(len(ids))))
    prepared = PreparedRequest(
        request.model_copy(update={"messages": ()}),
        (Prompt(array("I", ids)),),
        limit=limit,
        best=(request.top_logprobs or 0) if request.logprobs else None,
        candidates=request.n,
        stop_ids=_stop_ids(codec, request),
        end_ids=_end_ids(codec, request),
        prompt_best=request.prompt_logprobs,
        is_chat=True,
    )
    return _checked(facts, prepared)


def prepare_embeddings(
    texts: CodecFiles, models: Mapping[str, ModelFacts], data: bytes
) -> tuple[EmbeddingRequest, list[array[int]]]:
    """Return what a body of /v1/embeddings asks for, and its rows. Raises RejectedError."""
    codec = texts.codec()
    request, facts = _read(EmbeddingRequest, models, codec, data)
    rows = [array("I", codec.encode(e) if isinstance(e, str) else e) for e in request.input]
    for number, row in enumerate(rows):
        _check_ids(facts, "input", row)
        if not 0 < len(row) <= facts.context_len:
            raise RejectedError(
                f"input {number} has {len(row)} tokens. This model's maximum context length is "
                f"{facts.context_len} tokens, and the least is 1",
                param="input",
                code="context_length_exceeded" if row else None,
            )
    return request.model_copy(update={"input": ()}), rows


def tokenize(texts: CodecFiles, data: bytes) -> dict[str, Any]:
    """Return the answer to a body of /tokenize: the tokens of a text. Raises RejectedError."""
    request = read_request(TokenizeRequest, parse_json(data))
    tokens = texts.codec().tokenize(request.prompt, special=request.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens)}


def detokenize(texts: CodecFiles, data: bytes) -> dict[str, Any]:
    """Return the answer to a body of /detokenize: the text of tokens. Raises RejectedError."""
    request = read_request(DetokenizeRequest, parse_json(data))
    return {"prompt": texts.codec().tokenizer.decode(request.tokens)}


def model_facts(models: Mapping[str, Any], name: str) -> Any:
    """Return the entry of a model, which a request need not name where there is no other.

    Raises RejectedError with the names that there are.
    """
    if name in models:
        return models[name]
    if not name and len(models) == 1:
        return next(iter(models.values()))
    raise RejectedError(
        f"the model {name[:100]!r} does not exist, or is not one for this path; it has "
        f"{', '.join(models) or 'none'}",
        HTTPStatus.NOT_FOUND,
        param="model",
        code="model_not_found",
    )


def _read(
    kind: type[_T], models: Mapping[str, ModelFacts], codec: Codec, data: bytes
) -> tuple[_T, ModelFacts]:
    """Return a request, with the model's defaults and its name, and the model."""
    defaults = {name: value for name, value in codec.defaults.items() if name != "max_tokens"}
    request = read_request(kind, parse_json(data), defaults)
    facts: ModelFacts = model_facts(models, request.model)
    return request.model_copy(update={"model": facts.name}), facts


def _end_ids(codec: Codec, request: Sampling) -> frozenset[int]:
    return frozenset((*request.stop_token_ids, *(() if request.ignore_eos else codec.end_ids)))


def _stop_ids(codec: Codec, request: Sampling) -> tuple[int, ...]:
    """Return the tokens at which the model shall stop, next to its `end_id`.

    FasterTransformer's own backend knows no other end token.
    """
    forms = (ids for stop in request.stop for ids in codec.tokenizer.word_forms(stop))
    singles = (ids[0] for ids in forms if len(ids) == 1)
    others = () if request.ignore_eos else codec.end_ids[1:]
    return tuple(dict.fromkeys((*singles, *request.stop_token_ids, *others)))


def _checked(facts: ModelFacts, request: PreparedRequest) -> PreparedRequest:
    """Return a request that the model has room and tokens for. Raises RejectedError."""
    sampling, scores = request.sampling, 0
    _check_ids(facts, "logit_bias", sampling.biases)
    if facts.encoder_decoder and request.prompt_best is not None:
        raise RejectedError("an encoder's prompt has no log probabilities", param="logprobs")
    for name in _options(facts, request, count=1, seed=0).keys() - facts.inputs:
        needs = _FIELD_OF.get(name, name)
        raise RejectedError(f"model {facts.name} takes no {name}, which {needs} needs", param=needs)
    field = "messages" if request.is_chat else "prompt"
    for prompt in request.prompts:
        _check_ids(facts, field, prompt.ids)
        prompt_len = len(prompt.ids)
        output_len = _output_len(facts, request, prompt_len)
        if output_len > facts.room(prompt_len) or prompt_len > facts.context_len:
            each = ", of the prompt as of the answer" if facts.encoder_decoder else ""
            raise RejectedError(  # many clients look for the code, and some for these first words
                f"This model's maximum context length is {facts.context_len} tokens{each}. The "
                f"prompt has {prompt_len} and the answer up to {output_len}: shorten the prompt, "
                "or lower max_tokens",
                param=field,
                code="context_length_exceeded",
            )
        if request.best is not None:
            scores += request.candidates * output_len * (request.best + 1)
        if request.prompt_best is not None:
            scores += prompt_len * (request.prompt_best + 1)
    if scores > MOST_SCORES:
        raise RejectedError(
            f"the request asks for {scores} log probabilities, {MOST_SCORES} at most; send fewer "
            "prompts, or lower n, max_tokens or logprobs",
            param="logprobs",
        )
    return request


def _output_len(facts: ModelFacts, request: PreparedRequest, prompt_len: int) -> int:
    """Return the tokens to ask for: all there is room for, where no number is given."""
    return max(facts.room(prompt_len) if request.limit is None else request.limit, 1)


def _check_ids(facts: ModelFacts, field: str, ids: Iterable[int]) -> None:
    """Refuse a token that the model does not have before any of the prompts runs."""
    if facts.vocab_size is not None and (largest := max(ids, default=0)) >= facts.vocab_size:
        raise RejectedError(
            f"{field}: the model has no token {largest}; its ids are below {facts.vocab_size}",
            param=field,
            code="invalid_value",
        )


def generation_jobs(
    facts: ModelFacts, request: PreparedRequest, prompt: Sequence[int]
) -> Iterator[dict[str, Array]]:
    """Yield the tensors of each job of one prompt: no more rows than a request of the model has."""
    sampling = request.sampling
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    input_name, output_name = ("input_lengths", "request_output_len")
    if facts.encoder_decoder:
        input_name, output_name = ("sequence_length", "max_output_len")
    output_len = _output_len(facts, request, len(prompt))
    for first in range(0, request.candidates, facts.max_rows):
        count = min(facts.max_rows, request.candidates - first)
        yield {
            "input_ids": np.tile(np.array(prompt, np.uint32), (count, 1)),  # (n, S)
            input_name: _column(len(prompt), np.uint32, count),
            output_name: _column(output_len, np.uint32, count),
            **_options(facts, request, count=count, seed=seed + first * _SEED_STEP),
        }


def _options(
    facts: ModelFacts, request: PreparedRequest, *, count: int, seed: int
) -> dict[str, Array]:
    """Return the optional tensors of a job; those that change nothing are left out."""
    sampling = request.sampling
    tensors = _choices(sampling, count, seed)
    # As OpenAI's API has it; FasterTransformer's own backend knows its own rule alone.
    if sampling.top_p != 1 and "runtime_top_p" in tensors and _WHOLE_BOUNDARY in facts.inputs:
        tensors[_WHOLE_BOUNDARY] = _column(True, np.bool_, count)
    lists = {"stop_words_list": request.stop_ids, "bad_words_list": sampling.banned}
    for name, ids in lists.items():
        if ids:  # words of one token each, (n, 2, W): ids above the offsets at which they end
            words = np.array([ids, range(1, len(ids) + 1)], np.int32)
            tensors[name] = np.tile(words, (count, 1, 1))
    numbers = dict(zip(_SCORE_INPUTS, (request.best, request.prompt_best), strict=True))
    if any(number is not None for number in numbers.values()):
        best = {name: max(number or 0, 1) for name, number in numbers.items()}
        if request.prompt_best is None:
            del best["num_prompt_log_probs"]
        tensors |= {name: _column(number, np.uint32, count) for name, number in best.items()}
    if request.candidates > sampling.n:
        tensors["is_return_log_probs"] = _column(True, np.bool_, count)
    return tensors


def _choices(sampling: Sampling, count: int, seed: int) -> dict[str, Array]:
    if sampling.temperature == 0:
        columns = {"runtime_top_k": _column(1, np.uint32, count)}
    else:
        seeds = [(seed + number * _SEED_STEP) % (1 << 64) for number in range(count)]
        columns = {
            "runtime_top_k": _column(max(sampling.top_k, 0), np.uint32, count),
            "runtime_top_p": _column(sampling.top_p, np.float32, count),
            "temperature": _column(sampling.temperature, np.float32, count),
            "random_seed": np.array(seeds, np.uint64)[:, None],
        }
        if sampling.min_p:
            columns["min_p"] = _column(sampling.min_p, np.float32, count)
    if sampling.structured_outputs:
        text = json.dumps(sampling.structured_outputs).encode()
        columns["structured_output"] = np.full((count, 1), text, np.object_)
    if sampling.ignore_eos:
        columns["ignore_eos"] = _column(True, np.bool_, count)
    for name, nothing in _PENALTIES.items():
        if (value := getattr(sampling, name)) != nothing:
            columns[name] = _column(value, np.float32, count)
    if sampling.min_tokens:
        columns["min_length"] = _column(sampling.min_tokens, np.int32, count)
    if biases := sampling.biases:
        columns["logit_bias_ids"] = np.tile(np.array(list(biases), np.int32), (count, 1))
        columns["logit_bias"] = np.tile(np.array(list(biases.values()), np.float32), (count, 1))
    return columns


def _column(value: float, kind: type, count: int) -> Array:
    return np.full((count, 1), value, kind)
