"""Requests of the serving contract for rows of token ids, and the answers in its outputs.

Greedy decoding is requested explicitly, so that a server's defaults never affect a result.
"""

# Shapes: B rows, S padded prompt

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inference.evaluation.task import Ids, RequestFailedError, TokenIds

Array = np.ndarray[Any, Any]

GREEDY = {
    "runtime_top_k": np.array([[1]], np.uint32),
    "runtime_top_p": np.array([[0.0]], np.float32),
    "beam_width": np.array([[1]], np.uint32),
    "temperature": np.array([[1.0]], np.float32),
    "repetition_penalty": np.array([[1.0]], np.float32),
}
# Nucleus sampling with almost no mass also takes the most probable token. Unlike top-k sampling
# with one candidate, it reports the token's log probability over the whole vocabulary.
GREEDY_WITH_LOG_PROBS = {
    **GREEDY,
    "runtime_top_k": np.array([[0]], np.uint32),
    "runtime_top_p": np.array([[1e-6]], np.float32),
    "is_return_log_probs": np.array([[True]]),
}


def padded(rows: Sequence[Ids]) -> tuple[Array, Array]:
    """Return prompts (B, S), each padded on the right with its last token, and lengths (B, 1)."""
    width = max(map(len, rows))
    ids = np.array([[*row, *[row[-1]] * (width - len(row))] for row in rows], np.uint32)
    return ids, np.array([[len(row)] for row in rows], np.uint32)


def generation_request(
    rows: Sequence[Ids],
    output_len: int,
    choice: Mapping[str, Array] = GREEDY,
    *,
    has_encoder: bool,
) -> dict[str, Array]:
    """Return a request for `output_len` tokens after each row, sampled as `choice` says."""
    ids, lengths = padded(rows)
    names = ("sequence_length", "max_output_len") if has_encoder else (
        "input_lengths", "request_output_len"
    )  # fmt: skip
    return {
        "input_ids": ids,
        names[0]: lengths,
        names[1]: np.full((len(rows), 1), output_len, np.uint32),
        **{name: np.repeat(value, len(rows), axis=0) for name, value in choice.items()},
    }


def answers(
    rows: Sequence[Ids], outputs: Mapping[str, Array], *, has_encoder: bool
) -> list[TokenIds]:
    """Return the tokens after each row, up to the end token.

    A decoder's sequence_length counts from the padded length of the prompts, without virtual
    tokens; response_input_lengths holds each prompt's own length.
    """
    starts = [0 if has_encoder else len(row) for row in rows]
    if "response_input_lengths" in outputs:
        starts = outputs["response_input_lengths"].reshape(len(rows), -1)[:, 0].tolist()
    ends = outputs["sequence_length"].reshape(len(rows), -1)[:, 0].tolist()
    lengths = [end - max(starts) for end in ends]
    if min(lengths) < 0 or len(outputs["output_ids"]) != len(rows):
        raise RequestFailedError(f"sequence_length={ends} after prompts of {starts} tokens")
    return [
        tuple(ids[0, start : start + length].tolist())
        for ids, start, length in zip(outputs["output_ids"], starts, lengths, strict=True)
    ]
