"""Output tensors in the layout of the contract, whole and as streamed frames."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from inference.decoding.outputs import FrameStream, assemble_outputs
from inference.decoding.rows import (
    P_TUNING,
    SOFT_PROMPT,
    GenerationRequest,
    PromptResult,
    PromptTable,
    SequenceRequest,
    SequenceResult,
)
from inference.decoding.sampling_params import SamplingParams

END = 51


def row(prompt: tuple[int, ...], output_len: int, **options: Any) -> SequenceRequest:
    return SequenceRequest(
        prompt, output_len, SamplingParams(end_id=END, **options), prompt, returned_ids=prompt
    )


def batch(
    *rows: SequenceRequest, padded_len: int, encoder_decoder: bool = False
) -> GenerationRequest:
    if encoder_decoder:  # whose outputs do not repeat the prompt
        rows = tuple(dataclasses.replace(each, returned_ids=()) for each in rows)
    return GenerationRequest(rows, padded_len=padded_len, encoder_decoder=encoder_decoder)


def answer(*tokens: int, reason: Any = None, log_probs: tuple[float, ...] = ()) -> SequenceResult:
    return SequenceResult(
        (tokens,), (sum(log_probs),), (log_probs,) if log_probs else (), (reason,)
    )


PAIR = batch(row((3, 4, 5), 2), row((7,), 4), padded_len=3)


def test_types_are_the_declared_ones() -> None:
    outputs = assemble_outputs(PAIR, [answer(8), answer(9)])
    assert {name: value.dtype.name for name, value in outputs.items()} == {
        "output_ids": "uint32",
        "sequence_length": "uint32",
        "response_input_lengths": "int32",
        "is_finished": "bool",
    }


def test_answer_follows_the_prompt_without_a_gap_and_end_ids_fill_up() -> None:
    outputs = assemble_outputs(PAIR, [answer(8, 9, reason="length"), answer(8, END, reason="end")])
    assert outputs["output_ids"].tolist() == [
        [[3, 4, 5, 8, 9, END, END]],
        [[7, 8, END, END, END, END, END]],
    ]
    assert outputs["sequence_length"].tolist() == [[5], [5]]
    assert outputs["response_input_lengths"].tolist() == [[3], [1]]


def test_strict_lengths_count_the_rows_own_prompt() -> None:
    outputs = assemble_outputs(PAIR, [answer(8, 9), answer(8, END)], strict_lengths=True)
    assert outputs["sequence_length"].tolist() == [[5], [3]]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("end", [True, True]), ("stop", [True, True]), ("length", [True, False]), (None, [False] * 2)],
)
def test_limit_counts_as_finished_for_shorter_rows_only(reason: Any, expected: list[bool]) -> None:
    outputs = assemble_outputs(PAIR, [answer(8, reason=reason)] * 2)
    assert outputs["is_finished"][:, 0].tolist() == expected


def test_every_beam_has_its_own_copy_of_the_prompt() -> None:
    request = batch(row((3, 4), 2, beam_width=2), padded_len=2)
    result = SequenceResult(((8, 9), (END,)), (-1.0, -2.0), (), ("length", "end"))
    outputs = assemble_outputs(request, [result])
    assert outputs["output_ids"].tolist() == [[[3, 4, 8, 9], [3, 4, END, END]]]
    assert outputs["sequence_length"].tolist() == [[4, 3]]
    assert outputs["response_input_lengths"].tolist() == [[2, 2]]
    assert outputs["is_finished"].tolist() == [[False, True]]


def test_virtual_tokens_are_left_out() -> None:
    prompt = PromptTable(P_TUNING, 2, start_id=52, task_id=0)
    tuned = dataclasses.replace(row((52, 3, 53, 4), 2), prompt=prompt, returned_ids=(3, 4))
    outputs = assemble_outputs(batch(tuned, row((7,), 2), padded_len=4), [answer(8), answer(9, 9)])
    assert outputs["output_ids"].tolist() == [[[3, 4, 8, END]], [[7, 9, 9, END]]]
    assert outputs["sequence_length"].tolist() == [[3], [4]]
    assert outputs["response_input_lengths"].tolist() == [[2], [1]]


def test_soft_prompt_does_not_show() -> None:
    prompt = PromptTable(SOFT_PROMPT, 5, start_id=52, embedding=np.zeros((5, 6), np.float32))
    request = batch(dataclasses.replace(row((3, 4), 1), prompt=prompt), padded_len=2)
    outputs = assemble_outputs(request, [answer(8)])
    assert outputs["output_ids"].tolist() == [[[3, 4, 8]]]
    assert outputs["sequence_length"].tolist() == [[3]]


def test_empty_prompt_returns_the_answer_alone() -> None:
    empty = dataclasses.replace(row((50,), 2), returned_ids=())
    outputs = assemble_outputs(batch(empty, padded_len=0), [answer(8, 9)])
    assert outputs["output_ids"].tolist() == [[[8, 9]]]
    assert outputs["sequence_length"].tolist() == [[2]]


def test_log_probs_are_zero_after_the_end_and_for_rows_that_did_not_ask() -> None:
    request = batch(row((3,), 3, return_log_probs=True), row((4,), 3), padded_len=1)
    outputs = assemble_outputs(
        request, [answer(8, END, log_probs=(-1.0, -0.5)), answer(8, 9, 9, log_probs=(-1.0,) * 3)]
    )
    assert outputs["cum_log_probs"].tolist() == [[-1.5], [0.0]]
    assert outputs["output_log_probs"].tolist() == [[[-1.0, -0.5, 0.0]], [[0.0] * 3]]
    assert outputs["output_log_probs"].dtype == np.float32


def test_log_probs_are_absent_unless_asked_for() -> None:
    assert "cum_log_probs" not in assemble_outputs(PAIR, [answer(8), answer(9)])


def test_context_embeddings_are_repeated_for_every_beam() -> None:
    request = batch(
        row((3,), 1, beam_width=2, return_context_embeddings=True),
        row((4,), 1, beam_width=2),
        padded_len=1,
    )
    embedding = np.arange(6, dtype=np.float32)
    result = SequenceResult(((8,), (9,)), (-1.0, -2.0), (), ("length", "length"))
    asked = dataclasses.replace(result, prompt=PromptResult(embedding=embedding))
    outputs = assemble_outputs(request, [asked, result])
    np.testing.assert_array_equal(outputs["context_embeddings"][0], [embedding, embedding])
    assert not outputs["context_embeddings"][1].any()


def test_encoder_decoder_answers_end_with_end_ids_then_zeros() -> None:
    request = batch(row((3,), 5), row((4,), 5), padded_len=1, encoder_decoder=True)
    outputs = assemble_outputs(request, [answer(8, END), answer(8, 9, END)])
    assert outputs["output_ids"].tolist() == [[[8, END, END, 0, 0]], [[8, 9, END, 0, 0]]]
    assert outputs["sequence_length"].tolist() == [[2], [3]]
    assert {value.dtype.name for value in outputs.values()} == {"int32"}


def test_encoder_decoder_beams_are_zero_past_their_end() -> None:
    request = batch(row((3,), 3, beam_width=2), padded_len=1, encoder_decoder=True)
    result = SequenceResult(((8, END), (8, 9, END)), (-1.0, -2.0), (), ("end", "end"))
    outputs = assemble_outputs(request, [result])
    assert outputs["output_ids"].tolist() == [[[8, END, 0], [8, 9, END]]]


# Streaming

SINGLE = batch(row((3, 4), 3), padded_len=2)


def test_full_length_answer_takes_one_frame_per_token() -> None:
    stream = FrameStream(SINGLE)
    states = [answer(8), answer(8, 9), answer(8, 9, 7, reason="length")]
    frames = [stream.frame([state]) for state in states]
    assert [frame and frame["sequence_length"].tolist() for frame in frames] == [
        [[3]],
        [[4]],
        [[5]],
    ]
    final = assemble_outputs(SINGLE, states[-1:])
    assert frames[-1] is not None
    assert frames[-1].keys() == final.keys()
    for name, value in final.items():
        np.testing.assert_array_equal(frames[-1][name], value)


def test_frame_without_news_is_not_made() -> None:
    stream = FrameStream(SINGLE)
    assert stream.frame([answer(8, END, reason="end")]) is not None
    assert stream.frame([answer(8, END, reason="end")]) is None


def test_frame_shows_rows_that_have_not_started_as_prompts() -> None:
    frame = FrameStream(PAIR).frame([answer(8), None])
    assert frame is not None
    assert frame["output_ids"][1, 0].tolist() == [7, *[END] * 6]
    assert frame["sequence_length"].tolist() == [[4], [3]]


def test_frames_without_the_prefix_add_up_to_the_answer() -> None:
    stream = FrameStream(PAIR, omit_prefix=True)
    states = [
        [answer(8), answer(9)],
        [answer(8, END, reason="end"), answer(9, 10)],
        [answer(8, END, reason="end"), answer(9, 10, 11, 12, reason="length")],
    ]
    frames = [stream.frame(state) for state in states]
    assert [frame and frame["output_ids"].tolist() for frame in frames] == [
        [[[8]], [[9]]],
        [[[END]], [[10]]],
        [[[END, END]], [[11, 12]]],
    ]
    assert frames[-1] is not None
    assert frames[-1]["sequence_length"].tolist() == [[5], [7]]


def test_frames_without_the_prefix_are_refused_for_beams() -> None:
    with pytest.raises(ValueError, match="need beam_width=1, got 2"):
        FrameStream(batch(row((3,), 1, beam_width=2), padded_len=1), omit_prefix=True)
