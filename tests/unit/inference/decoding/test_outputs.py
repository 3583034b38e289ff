"""Output tensors in the layout of the contract, whole and as streamed frames."""

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


def test_types_are_the_declared_ones():
    outputs = assemble_outputs(PAIR, [answer(8), answer(9)])
    assert {name: value.dtype.name for name, value in outputs.items()} == {
        "output_ids": "uint32",
        "sequence_length": "uint32",
        "response_input_lengths": "int32",
        "is_finished": "bool",
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("end", [True, True]), ("stop", [True, True]), ("length", [True, False]), (None, [False] * 2)],
)
def test_limit_counts_as_finished_for_shorter_rows_only(reason, expected):
    outputs = assemble_outputs(PAIR, [answer(8, reason=reason)] * 2)
    assert outputs["is_finished"][:, 0].tolist() == expected


def beams(*answers: tuple[int, ...], **more: Any) -> SequenceResult:
    return SequenceResult(answers, (-1.0, -2.0), (), ("length", "end"), **more)


TUNED = dataclasses.replace(
    row((52, 3, 53, 4), 2),
    prompt=PromptTable(P_TUNING, 2, start_id=52, task_id=0),
    returned_ids=(3, 4),
)
SOFT = dataclasses.replace(
    row((3, 4), 1),
    prompt=PromptTable(SOFT_PROMPT, 5, start_id=52, embedding=np.zeros((5, 6), np.float32)),
)
EMPTY = dataclasses.replace(row((50,), 2), returned_ids=())
EMBEDDING = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
OUTPUTS: dict[str, tuple[GenerationRequest, list[SequenceResult], dict[str, Any]]] = {
    "end ids fill up": (
        PAIR,
        [answer(8, 9, reason="length"), answer(8, END, reason="end")],
        {
            "output_ids": [[[3, 4, 5, 8, 9, END, END]], [[7, 8, END, END, END, END, END]]],
            "sequence_length": [[5], [5]],
            "response_input_lengths": [[3], [1]],
        },
    ),
    "each beam has the prompt": (
        batch(row((3, 4), 2, beam_width=2), padded_len=2),
        [beams((8, 9), (END,))],
        {
            "output_ids": [[[3, 4, 8, 9], [3, 4, END, END]]],
            "sequence_length": [[4, 3]],
            "response_input_lengths": [[2, 2]],
            "is_finished": [[False, True]],
        },
    ),
    "without virtual tokens": (
        batch(TUNED, row((7,), 2), padded_len=4),
        [answer(8), answer(9, 9)],
        {
            "output_ids": [[[3, 4, 8, END]], [[7, 9, 9, END]]],
            "sequence_length": [[3], [4]],
            "response_input_lengths": [[2], [1]],
        },
    ),
    "without a soft prompt": (
        batch(SOFT, padded_len=2),
        [answer(8)],
        {"output_ids": [[[3, 4, 8]]], "sequence_length": [[3]]},
    ),
    "an empty prompt": (
        batch(EMPTY, padded_len=0),
        [answer(8, 9)],
        {"output_ids": [[[8, 9]]], "sequence_length": [[2]]},
    ),
    "log probs": (
        batch(row((3,), 3, return_log_probs=True), row((4,), 3), padded_len=1),
        [answer(8, END, log_probs=(-1.0, -0.5)), answer(8, 9, 9, log_probs=(-1.0,) * 3)],
        {
            "cum_log_probs": [[-1.5], [0.0]],
            "output_log_probs": [[[-1.0, -0.5, 0.0]], [[0.0] * 3]],
        },
    ),
    "embeddings of each beam": (
        batch(row((3,), 1, beam_width=2), row((4,), 1, beam_width=2), padded_len=1),
        [beams((8,), (9,), prompt=PromptResult(embedding=np.array(EMBEDDING))), beams((8,), (9,))],
        {"context_embeddings": [[EMBEDDING] * 2, [[0.0] * 6] * 2]},
    ),
    "an encoder-decoder": (
        batch(row((3,), 5), row((4,), 5), padded_len=1, encoder_decoder=True),
        [answer(8, END), answer(8, 9, END)],
        {"output_ids": [[[8, END, END, 0, 0]], [[8, 9, END, 0, 0]]], "sequence_length": [[2], [3]]},
    ),
    "beams of an encoder-decoder": (
        batch(row((3,), 3, beam_width=2), padded_len=1, encoder_decoder=True),
        [beams((8, END), (8, 9, END))],
        {"output_ids": [[[8, END, 0], [8, 9, END]]]},
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_hold_prompts_and_answers(name):
    request, results, expected = OUTPUTS[name]
    outputs = assemble_outputs(request, results)
    assert {name: outputs[name].tolist() for name in expected} == expected
    assert ("cum_log_probs" in outputs) == ("cum_log_probs" in expected)
    kinds = {value.dtype.name for value in outputs.values()}
    assert ("int32" in kinds and "uint32" not in kinds) == request.encoder_decoder


def test_strict_lengths_count_the_rows_own_prompt():
    outputs = assemble_outputs(PAIR, [answer(8, 9), answer(8, END)], strict_lengths=True)
    assert outputs["sequence_length"].tolist() == [[5], [3]]


# Streaming

SINGLE = batch(row((3, 4), 3), padded_len=2)


def test_full_length_answer_takes_one_frame_per_token():
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


def test_frame_without_news_is_not_made():
    stream = FrameStream(SINGLE)
    assert stream.frame([answer(8, END, reason="end")]) is not None
    assert stream.frame([answer(8, END, reason="end")]) is None


def test_frame_shows_rows_that_have_not_started_as_prompts():
    frame = FrameStream(PAIR).frame([answer(8), None])
    assert frame is not None
    assert frame["output_ids"][1, 0].tolist() == [7, *[END] * 6]
    assert frame["sequence_length"].tolist() == [[4], [3]]


def test_frames_without_the_prefix_add_up_to_the_answer():
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


def test_frames_without_the_prefix_are_refused_for_beams():
    with pytest.raises(ValueError, match="need beam_width=1, got 2"):
        FrameStream(batch(row((3,), 1, beam_width=2), padded_len=1), omit_prefix=True)
