"""Virtual prompts and encoder-decoder names of a request become checked rows."""

import dataclasses

import numpy as np
import pytest

from inference.decoding.request import parse_request
from inference.decoding.rows import P_TUNING, SOFT_PROMPT
from tests.unit.inference.decoding.contract_tensors import GPT, T5, column, gpt, problems


def sent_prompt(kind: int, **change: np.ndarray) -> dict[str, np.ndarray]:
    prompt = {
        "request_prompt_embedding": np.ones((2, 3, 6), np.float16),
        "request_prompt_lengths": column(3, 2),
        "request_prompt_type": column(kind, kind),
    }
    return {**prompt, **change}


def test_sent_p_tuning_prompt_declares_its_virtual_ids():
    ids = np.asarray([[52, 53, 5], [52, 8, 53]], np.uint32)
    tensors = gpt(input_ids=ids, input_lengths=column(3, 3), **sent_prompt(P_TUNING))
    first, second = parse_request(tensors, GPT).rows
    assert first.prompt is not None
    assert second.prompt is not None
    assert (first.prompt.kind, first.prompt.length, second.prompt.length) == (P_TUNING, 3, 2)
    assert first.prompt.embedding is not None
    assert first.prompt.embedding.dtype == np.float32
    assert first.prompt.embedding.shape == (3, 6)
    assert (first.input_ids, first.returned_ids) == ((52, 53, 5), (5,))
    assert (second.input_ids, second.returned_ids) == ((52, 8, 53), (8,))


def test_virtual_id_past_its_table_is_refused():
    ids = np.asarray([[52, 53, 5], [52, 8, 54]], np.uint32)
    tensors = gpt(input_ids=ids, input_lengths=column(3, 3), **sent_prompt(P_TUNING))
    assert problems(tensors) == [
        "input_ids[1,2]=54 outside vocabulary of size 52 and virtual ids 52 to 53"
    ]


def test_virtual_ids_may_start_inside_the_vocabulary():
    limits = dataclasses.replace(GPT, prompt_learning_start_id=40)
    ids = np.asarray([[40, 5, 41], [39, 42, 43]], np.uint32)
    tensors = gpt(input_ids=ids, input_lengths=column(3, 3), **sent_prompt(P_TUNING))
    found = problems(tensors, limits)
    assert found == [
        "input_ids[1,1]=42 outside vocabulary of size 52 and virtual ids 40 to 41 (and 1 more)"
    ]


def test_soft_prompt_takes_room_in_the_cache():
    request = parse_request(gpt(**sent_prompt(SOFT_PROMPT)), GPT)
    assert [row.context_len for row in request.rows] == [6, 4]


def test_incomplete_prompt_is_refused():
    prompt = sent_prompt(P_TUNING)
    del prompt["request_prompt_lengths"]
    (problem,) = problems(gpt(**prompt))
    assert problem.endswith("missing: request_prompt_lengths")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"request_prompt_embedding": np.ones((2, 3, 5), np.float16)},
            "request_prompt_embedding: expected floating-point values of shape [2,-1,6], got",
        ),
        (
            {"request_prompt_embedding": np.ones((2, 3, 6), np.int32)},
            "request_prompt_embedding: expected floating-point values of shape [2,-1,6], got",
        ),
        ({"request_prompt_lengths": column(4, 1)}, "request_prompt_lengths[0]=4 must be in"),
        ({"request_prompt_type": column(1, 2)}, "request_prompt_type[1]=2 must be one of 0, 1, 3"),
    ],
)
def test_misfit_prompt_is_refused(change, message):
    assert problems(gpt(**sent_prompt(SOFT_PROMPT, **change)))[0].startswith(message)


def test_virtual_prompt_needs_a_context_pass():
    tensors = gpt(input_ids=np.asarray([[1], [2]], np.uint32), input_lengths=column(1, 1))
    (problem,) = problems({**tensors, **sent_prompt(SOFT_PROMPT)})
    assert problem.startswith("request_prompt_embedding: a virtual prompt needs at least 2")


TUNED = dataclasses.replace(GPT, prompt_learning_type=P_TUNING, prompt_lengths={0: 2, 4: 1})


def test_task_ids_select_a_loaded_table_per_row():
    ids = np.asarray([[52, 53, 5], [52, 8, 0]], np.uint32)
    tensors = gpt(input_ids=ids, prompt_learning_task_name_ids=column(0, 4))
    request = parse_request(tensors, TUNED)
    assert [row.prompt and row.prompt.task_id for row in request.rows] == [0, 4]
    assert [row.returned_ids for row in request.rows] == [(5,), (8,)]


def test_unknown_task_id_is_named():
    found = problems(gpt(prompt_learning_task_name_ids=column(0, 3)), TUNED)
    assert found == ["prompt_learning_task_name_ids[1]=3 is unknown; loaded tasks: 0, 4"]


def test_task_ids_without_loaded_prompts_are_refused():
    (problem,) = problems(gpt(prompt_learning_task_name_ids=column(0, 0)))
    assert "prompt_learning_type=0" in problem


def test_sent_prompt_overrides_task_ids():
    tensors = gpt(prompt_learning_task_name_ids=column(9, 9), **sent_prompt(P_TUNING))
    assert parse_request(tensors, TUNED).rows[0].prompt is not None


def t5(**more: np.ndarray) -> dict[str, np.ndarray]:
    tensors = {
        "input_ids": np.asarray([[3, 4, 5], [7, 8, 0]], np.uint32),
        "sequence_length": column(3, 2),
        "max_output_len": column(4, 2),
    }
    return {**tensors, **more}


def test_encoder_decoder_names_and_start_token():
    request = parse_request(t5(), T5)
    assert [row.input_ids for row in request.rows] == [(3, 4, 5), (7, 8)]
    assert [row.context_ids for row in request.rows] == [(0,), (0,)]
    assert [row.output_len for row in request.rows] == [4, 2]


def test_encoder_decoder_start_id_can_be_overridden():
    request = parse_request(t5(start_id=column(2, 3)), T5)
    assert [row.context_ids for row in request.rows] == [(2,), (3,)]


def test_encoder_decoder_prompt_needs_no_type():
    prompt = sent_prompt(P_TUNING)
    del prompt["request_prompt_type"]
    ids = np.asarray([[53, 54, 5], [7, 8, 0]], np.uint32)
    request = parse_request(t5(input_ids=ids, **prompt), T5)
    assert request.rows[0].prompt is not None
    assert request.rows[0].prompt.start_id == 53


def test_ia3_tasks_are_checked_per_row():
    limits = dataclasses.replace(T5, ia3_num_tasks=2)
    request = parse_request(t5(ia3_tasks=column(1, 0, dtype=np.int32)), limits)
    assert [row.ia3_task for row in request.rows] == [1, 0]
    found = problems(t5(ia3_tasks=column(2, -1, dtype=np.int32)), limits)
    assert found == ["ia3_tasks[0]=2 must be in [0, 1]", "ia3_tasks[1]=-1 must be in [0, 1]"]
