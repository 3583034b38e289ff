"""From a checked request to the jobs of a model: tensors of the contract for each prompt."""

# Shapes: n candidates, W width of a word list

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from inference.openai.codec import Codec
from inference.openai.errors import ApiError
from inference.openai.generation import Array, GenerationJob, ModelFacts
from inference.openai.parameters import Sampling

# Between the seeds of a request's candidates: odd, and far from the numbers that people choose.
_SEED_STEP = 0x9E3779B97F4A7C15
_SCORE_INPUTS = ("num_log_probs", "num_prompt_log_probs")
# Tensors to the field of a request that needs them.
_FIELD_OF = {
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_length": "min_tokens",
    "bad_words_list": "logit_bias",
    "num_log_probs": "logprobs",
    "num_prompt_log_probs": "logprobs",
}


def generation_job(
    facts: ModelFacts,
    codec: Codec,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    param: str,
    echo: bool = False,
    end_ids: frozenset[int] = frozenset(),
) -> GenerationJob:
    """Return the job of one prompt.

    Args:
        facts: The model asked.
        codec: Its texts and tokens.
        prompt: Token ids.
        sampling: How answers are chosen.
        param: The field of the request that the prompt comes from.
        echo: Whether the prompt is part of the answer, and scored with it.
        end_ids: Tokens that end an answer, next to the model's own.

    Raises:
        ApiError: the model cannot do what was asked for.
    """
    count = sampling.candidates
    if count > facts.max_rows:
        raise ApiError(
            f"{count} candidates are more than the {facts.max_rows} sequences of a request that "
            f"model {facts.name} takes",
            param="best_of" if count > sampling.choices else "n",
        )
    if echo and facts.encoder_decoder and sampling.log_probs is not None:
        raise ApiError("an encoder's prompt has no log probabilities", param="logprobs")
    tensors = _choices(sampling)
    stops = [[token] for stop in sampling.stop for token in codec.single_token(stop)]
    stops += [[token] for token in sorted(end_ids)]
    lists = {"stop_words_list": stops, "bad_words_list": [[token] for token in sampling.banned]}
    tensors |= {name: _word_list(words, count) for name, words in lists.items() if words}
    if sampling.log_probs is not None:
        wanted = _SCORE_INPUTS if echo else _SCORE_INPUTS[:1]
        tensors |= {name: _column(max(sampling.log_probs, 1), np.uint32, count) for name in wanted}
    ranks = count > sampling.choices
    if ranks:
        tensors["is_return_log_probs"] = _column(True, np.bool_, count)
    for name in tensors.keys() - facts.inputs:
        needs = _FIELD_OF.get(name)
        raise ApiError(f"model {facts.name} takes no {name}, which {needs} needs", param=needs)
    return GenerationJob(
        prompt=prompt,
        output_len=_output_len(facts, prompt, sampling, param),
        candidates=count,
        tensors=tensors,
        scores=sampling.log_probs is not None,
        ranks=ranks,
    )


def _output_len(facts: ModelFacts, prompt: Sequence[int], sampling: Sampling, param: str) -> int:
    """Return how many tokens to ask for: as many as there is room for, where no limit is given.

    Raises:
        ApiError: the model has no room for the prompt and so many.
    """
    used, room = len(prompt), facts.context_len
    if not facts.encoder_decoder:
        room -= used
    wanted = max(room if sampling.max_tokens is None else sampling.max_tokens, 1)
    if wanted > room or used > facts.context_len:
        each = ", of the prompt as of the answer" if facts.encoder_decoder else ""
        raise ApiError(  # many clients look for the code, and some for these first words
            f"This model's maximum context length is {facts.context_len} tokens{each}. The prompt "
            f"has {used} and the answer up to {wanted}: shorten the prompt, or lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return wanted


def _choices(sampling: Sampling) -> dict[str, Array]:
    """Return the tensors of how tokens are chosen; those that change nothing are left out."""
    count = sampling.candidates
    if sampling.temperature == 0:
        columns = {"runtime_top_k": _column(1, np.uint32, count)}
    else:
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        seeds = [(seed + number * _SEED_STEP) % (1 << 64) for number in range(count)]
        columns = {
            "runtime_top_k": _column(sampling.top_k, np.uint32, count),
            "runtime_top_p": _column(sampling.top_p, np.float32, count),
            "temperature": _column(sampling.temperature, np.float32, count),
            "random_seed": np.array(seeds, np.uint64)[:, None],
        }
    if sampling.presence_penalty:
        columns["presence_penalty"] = _column(sampling.presence_penalty, np.float32, count)
    if sampling.repetition_penalty != 1:
        columns["repetition_penalty"] = _column(sampling.repetition_penalty, np.float32, count)
    if sampling.min_tokens:
        columns["min_length"] = _column(sampling.min_tokens, np.int32, count)
    return columns


def _column(value: float, kind: type, count: int) -> Array:
    return np.full((count, 1), value, kind)


def _word_list(words: Sequence[Sequence[int]], count: int) -> Array:
    """Return words of one token each, (n, 2, W): ids above the offsets at which they end."""
    ids = [word[0] for word in words]
    return np.tile(np.array([ids, range(1, len(ids) + 1)], np.int32), (count, 1, 1))
