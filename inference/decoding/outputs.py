"""From row results to the output tensors of the serving contract, whole or frame by frame."""

# Shapes: B rows, K beams, P prompt columns, R longest requested answer, H hidden units,
# W best tokens of a position

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inference.decoding.rows import P_TUNING, GenerationRequest, SequenceResult
from inference.decoding.tensor_fields import Array


def assemble_outputs(
    request: GenerationRequest,
    results: Sequence[SequenceResult | None],
    *,
    strict_lengths: bool = False,
) -> dict[str, Array]:
    """Return the output tensors of a finished request, or of one so far (for a streamed frame).

    A result is None for a row that has not started. With `strict_lengths`, `sequence_length`
    counts the row's own prompt, not the padded one.
    """
    shown = [_NOT_STARTED if result is None else result for result in results]
    return (
        _token_tensors(request, shown, strict_lengths)
        | _log_prob_tensors(request, shown)
        | _score_tensors(request, shown)
        | _embedding_tensors(request, shown)
    )


_NOT_STARTED = SequenceResult((), (), (), ())


def prompt_columns(request: GenerationRequest) -> int:
    """Return P: the padded prompt length, or with P-tuning the longest prompt of real tokens."""
    if any(row.prompt is not None and row.prompt.kind == P_TUNING for row in request.rows):
        return max(len(row.returned_ids) for row in request.rows)
    return request.padded_len


def _token_tensors(
    request: GenerationRequest, results: Sequence[SequenceResult], strict_lengths: bool
) -> dict[str, Array]:
    """Return prompt and answer without a gap, then end ids up to the full width.

    An encoder-decoder returns answers only, filled with end ids up to the longest answer and then
    with zeros, in a beam search with zeros only.
    """
    columns = prompt_columns(request)
    dtype: Any = np.int32 if request.encoder_decoder else np.uint32
    filled = width = columns + request.max_output_len
    if request.encoder_decoder:
        columns, width = 0, request.max_output_len
        lengths_found = [len(tokens) for result in results for tokens in result.output_ids]
        filled = max(lengths_found, default=0) if request.beam_width == 1 else 0
    shape = (len(request.rows), request.beam_width)
    output_ids = np.zeros((*shape, width), dtype)  # (B, K, P+R)
    lengths = np.empty(shape, dtype)
    input_lengths = np.empty(shape, np.int32)
    is_finished = np.zeros(shape, np.bool_)
    for b, (row, result) in enumerate(zip(request.rows, results, strict=True)):
        prompt_len = len(row.returned_ids)
        output_ids[b, :, :filled] = row.options.end_id
        output_ids[b, :, :prompt_len] = row.returned_ids
        input_lengths[b] = prompt_len
        lengths[b] = prompt_len if strict_lengths else columns
        for k, tokens in enumerate(result.output_ids):
            output_ids[b, k, prompt_len : prompt_len + len(tokens)] = tokens
            lengths[b, k] += len(tokens)
            # A row that only reached the longest length of its request does not count as finished.
            reason, is_longest = result.finish_reasons[k], row.output_len == request.max_output_len
            is_finished[b, k] = reason is not None and not (reason == "length" and is_longest)
    tensors: dict[str, Array] = {"output_ids": output_ids, "sequence_length": lengths}
    if not request.encoder_decoder:
        tensors |= {"response_input_lengths": input_lengths, "is_finished": is_finished}
    return tensors


def _log_prob_tensors(
    request: GenerationRequest, results: Sequence[SequenceResult]
) -> dict[str, Array]:
    """Return log probabilities if a row asks; 0 for rows that do not, and after an answer's end."""
    if not any(row.options.return_log_probs for row in request.rows):
        return {}
    shape = (len(request.rows), request.beam_width)
    cum = np.zeros(shape, np.float32)
    output = np.zeros((*shape, request.max_output_len), np.float32)  # (B, K, R)
    for b, (row, result) in enumerate(zip(request.rows, results, strict=True)):
        if not row.options.return_log_probs:
            continue
        cum[b, : len(result.cum_log_probs)] = result.cum_log_probs
        for k, values in enumerate(result.output_log_probs):
            output[b, k, : len(values)] = values
    return {"cum_log_probs": cum, "output_log_probs": output}


def _score_tensors(
    request: GenerationRequest, results: Sequence[SequenceResult]
) -> dict[str, Array]:
    """Return scores if a row asks, by position in `output_ids`; 0 for tokens without a score."""
    counts = [(row.options.num_prompt_log_probs, row.options.num_log_probs) for row in request.rows]
    width = max(map(max, counts))
    if not width:
        return {}
    shape = (len(request.rows), 1, prompt_columns(request) + request.max_output_len)
    own = np.zeros(shape, np.float32)  # (B, 1, P+R)
    top_ids = np.zeros((*shape, width), np.uint32)  # (B, 1, P+R, W)
    top = np.zeros((*shape, width), np.float32)
    for b, (row, result, count) in enumerate(zip(request.rows, results, counts, strict=True)):
        # The first token of a prompt has no score, as no token precedes it.
        answer = len(row.returned_ids)
        parts = ((1, result.prompt.scores, count[0]), (answer, result.scores, count[1]))
        for first, scores, best in parts:
            for index, score in enumerate(scores, first):
                own[b, 0, index] = score.log_prob
                top_ids[b, 0, index, :best] = score.top_ids[:best]
                top[b, 0, index, :best] = score.top_log_probs[:best]
    return {"token_log_probs": own, "top_token_ids": top_ids, "top_token_log_probs": top}


def _embedding_tensors(
    request: GenerationRequest, results: Sequence[SequenceResult]
) -> dict[str, Array]:
    embeddings = [result.prompt.embedding for result in results]
    found = [(b, each) for b, each in enumerate(embeddings) if each is not None]
    if not found:
        return {}
    value = np.zeros((len(results), request.beam_width, len(found[0][1])), np.float32)  # (B, K, H)
    for b, embedding in found:
        value[b] = embedding
    return {"context_embeddings": value}


@dataclass
class FrameStream:
    """The builder of a request's streamed frames, which skips repeated ones.

    Every frame holds the whole answer so far. With `omit_prefix` (beam_width 1 only), `output_ids`
    holds only the tokens since the last frame, (B, 1, n), filled with end ids; `sequence_length`
    still counts all tokens, so that its growth is the number of new ones.
    """

    request: GenerationRequest
    strict_lengths: bool = False
    omit_prefix: bool = False
    _last: list[SequenceResult | None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.omit_prefix and self.request.beam_width > 1:
            raise ValueError(
                f"frames without the repeated prefix need beam_width=1, got "
                f"{self.request.beam_width}: a better beam may replace tokens already sent"
            )

    def frame(self, results: Sequence[SequenceResult | None]) -> dict[str, Array] | None:
        """Return the next frame, or None if nothing has changed since the last one."""
        last, self._last = self._last, list(results)
        if last == self._last:
            return None
        tensors = assemble_outputs(self.request, results, strict_lengths=self.strict_lengths)
        if not self.omit_prefix:
            return tensors
        sent = [len(old.output_ids[0]) if old else 0 for old in last or [None] * len(results)]
        added = [new.output_ids[0][n:] if new else () for n, new in zip(sent, results, strict=True)]
        ids = np.empty((len(added), 1, max(map(len, added))), tensors["output_ids"].dtype)
        for b, tokens in enumerate(added):
            ids[b] = self.request.rows[b].options.end_id
            ids[b, 0, : len(tokens)] = tokens
        return {**tensors, "output_ids": ids}
