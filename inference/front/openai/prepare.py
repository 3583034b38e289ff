"""Turns the body of a request into the jobs of a model: token ids and the model's input tensors.

Worker processes parse, check and tokenize bodies.
"""

# Shapes: S prompt, W width of a word list

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar, cast

import numpy as np

from inference.front.guard import RejectedError
from inference.front.openai.answers import Array
from inference.front.openai.codec import Codec, CodecFiles
from inference.front.openai.requests import (
    MAX_SCORES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Sampling,
    TokenizeRequest,
    read_request,
)
from inference.front.strict_json import parse_json

_T = TypeVar("_T", Sampling, EmbeddingRequest)
# Difference of the seeds of a request's candidates: odd, and unlike seeds that users choose.
_SEED_STEP = 0x9E3779B97F4A7C15
_WHOLE_BOUNDARY = "nucleus_include_boundary"
_SEED = "random_seed"
_REQUIRED = {"input_lengths", "request_output_len", "sequence_length", "max_output_len"}
# The request field behind each tensor that has another name.
_FIELD_OF = {
    "logit_bias_ids": "logit_bias",
    "min_length": "min_tokens",
    "bad_words_list": "logit_bias",
    "num_log_probs": "logprobs",
    "num_prompt_log_probs": "logprobs",
}


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a served model that the endpoint needs."""

    name: str
    inputs: frozenset[str]  # names of its input tensors
    max_rows: int  # candidates per job
    context_len: int  # limit for prompt plus answer in tokens, as far as known
    encoder_decoder: bool = False  # its output does not include the prompt
    encodes: bool = False  # it answers with hidden states
    vocab_size: int | None = None  # None if unknown
    about: tuple[tuple[str, str], ...] = ()  # the checkpoint, see `served_identity`

    def max_answer_len(self, prompt: Sequence[int]) -> int:
        """Return the maximum number of answer tokens after a prompt."""
        return self.context_len - (0 if self.encoder_decoder else len(prompt))


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text if the answer includes it."""

    ids: array[int]
    text: str = ""


@dataclass(frozen=True)
class PreparedRequest:
    """A checked and tokenized request."""

    sampling: Sampling  # without the prompts
    prompts: tuple[Prompt, ...]
    limit: int | None  # maximum answer tokens, None for all that fit the context
    stop_ids: tuple[int, ...]  # end tokens, and tokens that are a whole stop text
    end_ids: frozenset[int] = frozenset()  # tokens that end an answer


def prepare_generation(
    kind: type[Sampling], texts: CodecFiles, models: Mapping[str, ModelFacts], data: bytes
) -> PreparedRequest:
    """Return the request in a body. Raises RejectedError."""
    codec = texts.codec()
    request, facts = _read(kind, models, codec, data)
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        prompts = [Prompt(array("I", codec.encode_chat(request)))]
        if limit is None and "max_tokens" in codec.defaults:
            limit = max(1, min(codec.defaults["max_tokens"], facts.max_answer_len(prompts[0].ids)))
    else:
        assert isinstance(request, CompletionRequest)
        prompts = [_prompt(codec, request, prompt) for prompt in cast(list[Any], request.prompt)]
    # The texts of the prompts need not be sent back from the worker.
    rest = request.model_copy(
        update={"model": facts.name, **dict.fromkeys(("prompt", "messages", "tools"), ())}
    )
    ends = () if request.ignore_eos else codec.end_ids
    prepared = PreparedRequest(
        rest,
        tuple(prompts),
        limit=limit,
        stop_ids=_stop_ids(codec, request),
        end_ids=frozenset((*request.stop_token_ids, *ends)),
    )
    return _checked(facts, prepared)


def _prompt(codec: Codec, request: CompletionRequest, prompt: str | list[int]) -> Prompt:
    shows_text = request.echo or request.logprobs is not None
    if isinstance(prompt, str):
        ids = codec.encode(prompt, special=request.add_special_tokens)
        return Prompt(array("I", ids), prompt if shows_text else "")
    return Prompt(array("I", prompt), codec.tokenizer.decode(prompt) if shows_text else "")


def prepare_embeddings(
    texts: CodecFiles, models: Mapping[str, ModelFacts], data: bytes
) -> tuple[EmbeddingRequest, list[array[int]]]:
    """Return the request in a body of /v1/embeddings, and its token rows. Raises RejectedError."""
    codec = texts.codec()
    request, facts = _read(EmbeddingRequest, models, codec, data)
    rows = [
        array("I", codec.encode(row) if isinstance(row, str) else row)
        for row in cast(list[Any], request.input)
    ]
    for number, row in enumerate(rows):
        _check_ids(facts, "input", row)
        if not 0 < len(row) <= facts.context_len:
            raise RejectedError(
                f"input {number} has {len(row)} tokens. This model's maximum context length is "
                f"{facts.context_len} tokens, and the least is 1",
                param="input",
                code="context_length_exceeded" if row else None,
            )
    return request.model_copy(update={"model": facts.name, "input": ()}), rows


def tokenize(texts: CodecFiles, data: bytes) -> dict[str, Any]:
    """Answer a body of /tokenize. Raises RejectedError."""
    request = read_request(TokenizeRequest, parse_json(data))
    tokens = texts.codec().tokenize(request.prompt, special=request.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens)}


def detokenize(texts: CodecFiles, data: bytes) -> dict[str, Any]:
    """Answer a body of /detokenize. Raises RejectedError."""
    request = read_request(DetokenizeRequest, parse_json(data))
    return {"prompt": texts.codec().tokenizer.decode(request.tokens)}


def model_facts(models: Mapping[str, Any], name: str) -> Any:
    """Return the entry of a model; "" stands for the only one.

    Raises RejectedError, which names the existing models.
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
    """Return a request with the model's defaults filled in, and the model."""
    defaults = {name: value for name, value in codec.defaults.items() if name != "max_tokens"}
    request = read_request(kind, parse_json(data), defaults)
    return request, model_facts(models, request.model)


def _stop_ids(codec: Codec, request: Sampling) -> tuple[int, ...]:
    """Return the tokens at which the model should stop, in addition to its `end_id`.

    FasterTransformer's own backend has a single end token.
    """
    forms = (ids for stop in request.stop for ids in codec.tokenizer.word_forms(stop))
    # The model would stop there before `min_tokens`, too.
    singles = (ids[0] for ids in forms if len(ids) == 1 and not request.min_tokens)
    others = () if request.ignore_eos else codec.end_ids[1:]
    return tuple(dict.fromkeys((*singles, *request.stop_token_ids, *others)))


def _checked(facts: ModelFacts, request: PreparedRequest) -> PreparedRequest:
    """Check a request against the model's inputs, vocabulary and context. Raises RejectedError."""
    sampling, scores = request.sampling, 0
    _check_ids(facts, "logit_bias", sampling.biases)
    if facts.encoder_decoder and sampling.prompt_top_n is not None:
        raise RejectedError("an encoder's prompt has no log probabilities", param="logprobs")
    names = {name for name, _, _ in _values(facts, request, ())}
    for name in names - facts.inputs - _REQUIRED:
        needs = _FIELD_OF.get(name, name)
        raise RejectedError(f"model {facts.name} takes no {name}, which {needs} needs", param=needs)
    field = "messages" if sampling.kind == "chat" else "prompt"
    for prompt in request.prompts:
        _check_ids(facts, field, prompt.ids)
        prompt_len = len(prompt.ids)
        output_len = _output_len(facts, request, prompt.ids)
        if output_len > facts.max_answer_len(prompt.ids) or prompt_len > facts.context_len:
            scope = " for prompt and answer each" if facts.encoder_decoder else ""
            raise RejectedError(  # clients match the code, and some also the first words
                f"This model's maximum context length is {facts.context_len} tokens{scope}. The "
                f"prompt has {prompt_len} and the answer up to {output_len}: shorten the prompt, "
                "or lower max_tokens",
                param=field,
                code="context_length_exceeded",
            )
        if sampling.top_n is not None:
            scores += sampling.n * output_len * (sampling.top_n + 1)
        if sampling.prompt_top_n is not None:
            scores += prompt_len * (sampling.prompt_top_n + 1)
    if scores > MAX_SCORES:
        raise RejectedError(
            f"the request asks for {scores} log probabilities, {MAX_SCORES} at most; send fewer "
            "prompts, or lower n, max_tokens or logprobs",
            param="logprobs",
        )
    return request


def _output_len(facts: ModelFacts, request: PreparedRequest, prompt: Sequence[int]) -> int:
    """Return the number of tokens to generate: without a limit, all that fit the context."""
    return max(facts.max_answer_len(prompt) if request.limit is None else request.limit, 1)


def _check_ids(facts: ModelFacts, field: str, ids: Iterable[int]) -> None:
    """Refuse token ids outside of the vocabulary. Raises RejectedError."""
    if facts.vocab_size is not None and (largest := max(ids, default=0)) >= facts.vocab_size:
        raise RejectedError(
            f"{field}: the model has no token {largest}; its ids are below {facts.vocab_size}",
            param=field,
            code="invalid_value",
        )


def generation_jobs(
    facts: ModelFacts, request: PreparedRequest, prompt: Sequence[int]
) -> Iterator[dict[str, Array]]:
    """Yield the tensors of each job of one prompt; a job has at most `max_rows` candidates."""
    sampling = request.sampling
    values = _values(facts, request, prompt)
    row: dict[str, Array] = {name: np.array(value, kind, ndmin=1) for name, kind, value in values}
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    seeds = [(seed + n * _SEED_STEP) % (1 << 64) for n in range(sampling.n)]
    for first in range(0, len(seeds), facts.max_rows):
        own = np.array(seeds[first : first + facts.max_rows], np.uint64)[:, None]
        job = {name: np.repeat(value[None], len(own), axis=0) for name, value in row.items()}
        yield job | ({_SEED: own} if _SEED in row else {})


def _values(
    facts: ModelFacts, request: PreparedRequest, prompt: Sequence[int]
) -> Iterator[tuple[str, type, Any]]:
    """Yield name, type and value of each tensor; values without effect are left out."""
    sampling, biases = request.sampling, request.sampling.biases
    lengths = ("input_lengths", "request_output_len")
    if facts.encoder_decoder:
        lengths = ("sequence_length", "max_output_len")
    top_n, prompt_top_n = sampling.top_n, sampling.prompt_top_n
    is_scored = top_n is not None or prompt_top_n is not None
    is_greedy = sampling.temperature == 0
    sampled = {"runtime_top_p": sampling.top_p, "temperature": sampling.temperature,
             "min_p": sampling.min_p or None}  # fmt: skip
    # OpenAI's top_p rule; FasterTransformer's own backend has only its own rule.
    is_whole = not is_greedy and sampling.top_p != 1 and _WHOLE_BOUNDARY in facts.inputs
    structure, penalty = sampling.structured_outputs, sampling.repetition_penalty
    values: dict[type, dict[str, Any]] = {
        np.uint32: {
            "input_ids": prompt,
            lengths[0]: len(prompt),
            lengths[1]: _output_len(facts, request, prompt),
            "runtime_top_k": 1 if is_greedy else max(sampling.top_k, 0),
            "num_log_probs": max(top_n or 0, 1) if is_scored else None,
            "num_prompt_log_probs": None if prompt_top_n is None else max(prompt_top_n, 1),
        },
        np.uint64: {_SEED: None if is_greedy else 0},
        np.float32: {
            **({} if is_greedy else sampled),
            "presence_penalty": sampling.presence_penalty or None,
            "frequency_penalty": sampling.frequency_penalty or None,
            "repetition_penalty": None if penalty == 1 else penalty,
            "logit_bias": [*biases.values()] or None,
        },
        np.int32: {
            "stop_words_list": _words(request.stop_ids),
            "bad_words_list": _words(sampling.banned),
            "min_length": sampling.min_tokens or None,
            "logit_bias_ids": [*biases] or None,
        },
        np.bool_: {
            _WHOLE_BOUNDARY: is_whole or None,
            "ignore_eos": sampling.ignore_eos or None,
        },
        np.object_: {"structured_output": json.dumps(structure).encode() if structure else None},
    }
    for kind, named in values.items():
        yield from ((name, kind, value) for name, value in named.items() if value is not None)


def _words(ids: Sequence[int]) -> list[Sequence[int]] | None:
    """Return a word list of single tokens, (2, W): ids, and the offsets at which words end."""
    return [ids, range(1, len(ids) + 1)] if ids else None
