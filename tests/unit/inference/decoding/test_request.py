"""Contract tensors become checked rows; every problem of a request is reported at once."""

import dataclasses
import re

import numpy as np
import pytest

from inference.decoding.request import parse_request
from inference.decoding.sampling_params import SamplingParams
from tests.unit.inference.decoding.contract_tensors import GPT, column, gpt, options, problems


def test_required_inputs_alone_give_greedy_rows_without_padding():
    request = parse_request(gpt(), GPT)
    assert [row.input_ids for row in request.rows] == [(3, 4, 5), (7, 8)]
    assert [row.context_ids for row in request.rows] == [(3, 4, 5), (7, 8)]
    assert [row.output_len for row in request.rows] == [4, 2]
    assert (request.padded_len, request.max_output_len, request.beam_width) == (3, 4, 1)
    expected = SamplingParams(end_id=51, start_id=50, top_p_min=float(np.float32(1e-6)))
    assert [row.options for row in request.rows] == [expected, expected]


def test_every_option_is_read_per_row():
    sent = {
        "runtime_top_k": (column(0, 4), "top_k"),
        "runtime_top_p": (column(0.5, 0.25, dtype=np.float32), "top_p"),
        "temperature": (column(0.5, 2.0, dtype=np.float32), "temperature"),
        "len_penalty": (column(1.0, -0.5, dtype=np.float32), "len_penalty"),
        "beam_search_diversity_rate": (
            column(0.5, -0.5, dtype=np.float32),
            "beam_search_diversity_rate",
        ),
        "repetition_penalty": (column(1.5, 2.0, dtype=np.float32), "repetition_penalty"),
        "min_length": (column(1, 2, dtype=np.int32), "min_length"),
        "random_seed": (column(2**64 - 1, 5, dtype=np.uint64), "random_seed"),
        "start_id": (column(1, 2), "start_id"),
        "end_id": (column(3, 4), "end_id"),
        "top_p_decay": (column(0.5, 0.25, dtype=np.float32), "top_p_decay"),
        "top_p_min": (column(0.125, 0.25, dtype=np.float32), "top_p_min"),
        "top_p_reset_ids": (column(9, 10), "top_p_reset_id"),
        "min_p": (column(0.5, 0.25, dtype=np.float32), "min_p"),
        "nucleus_include_boundary": (column(True, False, dtype=np.bool_), "whole_boundary"),
        "is_return_log_probs": (column(True, False, dtype=np.bool_), "return_log_probs"),
        "is_return_context_embeddings": (
            column(False, True, dtype=np.bool_),
            "return_context_embeddings",
        ),
    }
    request = parse_request(gpt(**{name: value for name, (value, _) in sent.items()}), GPT)
    for value, option in sent.values():
        assert options(request, option) == value[:, 0].tolist(), option


def test_a_request_ends_at_the_models_tokens_or_at_its_own():
    limits = dataclasses.replace(GPT, other_end_ids=(7, 9))
    assert options(parse_request(gpt(), limits), "end_ids") == [(51, 7, 9)] * 2
    assert options(parse_request(gpt(end_id=column(3, 4)), limits), "end_ids") == [(3,), (4,)]
    ignores = gpt(ignore_eos=column(True, False, dtype=np.bool_))
    assert options(parse_request(ignores, limits), "end_ids") == [(), (51, 7, 9)]


def test_beams_take_no_share_of_the_likeliest():
    share = column(0.1, 0, dtype=np.float32)
    assert problems(gpt(min_p=share, beam_width=column(2, 2))) == [
        "min_p needs beam_width=1; leave one of them out"
    ]


def test_one_value_serves_all_rows():
    request = parse_request(gpt(temperature=np.asarray([0.5], np.float32)), GPT)
    assert options(request, "temperature") == [0.5, 0.5]


def test_rows_without_the_inner_axis_are_taken():
    request = parse_request(gpt(runtime_top_k=np.asarray([2, 3], np.uint32)), GPT)
    assert options(request, "top_k") == [2, 3]


@pytest.mark.parametrize(
    "name", ["start_id", "end_id", "top_p_decay", "top_p_min", "top_p_reset_ids"]
)
def test_values_without_a_default_for_all_need_one_per_row(name):
    (problem,) = problems(gpt(**{name: np.asarray([1])}))
    assert problem.startswith(f"{name}: expected")


def test_clamped_selection_is_warned_about():
    tensors = gpt(runtime_top_k=column(2000, 3), runtime_top_p=column(0.5, 1.5, dtype=np.float32))
    request = parse_request(tensors, GPT)
    assert options(request, "top_k") == [1024, 3]
    assert options(request, "top_p") == [0.5, 1.0]
    assert request.warnings == (
        "runtime_top_k=2000 is clamped to 1024 in row 0",
        "runtime_top_p=1.5 is clamped to [0, 1] in row 1",
    )


def test_all_problems_are_reported_together():
    found = problems(
        gpt(
            input_ids=np.asarray([[3, 99, 5], [7, 8, 0]], np.uint32),
            temperature=column(-1.0, 1.0, dtype=np.float32),
            repetition_penalty=column(1.0, 0.0, dtype=np.float32),
            beam_width=column(2, 3),
            made_up=column(1, 1),
        )
    )
    assert {problem.split(":")[0].split(" ")[0] for problem in found} == {
        "made_up",
        "beam_width",
        "temperature[0]=-1",
        "repetition_penalty[1]=0",
        "input_ids[0,1]=99",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_lengths": column(3, 0)}, "input_lengths[1]=0 must be in [1, 3]"),
        ({"input_lengths": column(4, 2)}, "input_lengths[0]=4 must be in [1, 3]"),
        (
            {"input_lengths": column(3, 2, 2)},
            "input_lengths: expected integers of shape [2,1], got uint32 [3, 1]",
        ),
        ({"request_output_len": column(4, 0)}, "request_output_len[1]=0 must be >= 1"),
        (
            {"input_ids": np.asarray([[3, 4, 52], [1, 2, 0]], np.uint32)},
            "input_ids[0,2]=52 outside vocabulary of size 52",
        ),
        ({"beam_width": np.array([65])}, "beam_width[0]=65 must be in [1, 64]"),
        ({"beam_width": np.array([0])}, "beam_width[0]=0 must be in [1, 64]"),
        ({"beam_width": column(2, 3)}, "beam_width must be identical for all rows of a request"),
        (
            {"temperature": column(1, -0.5, dtype=np.float32)},
            "temperature[1]=-0.5 must be >= 0",
        ),
        (
            {"repetition_penalty": column(0, 1, dtype=np.float32)},
            "repetition_penalty[0]=0 must be >= 1e-30",
        ),
        (
            {"frequency_penalty": column(1, -3e38, dtype=np.float32)},
            "frequency_penalty[1]=-3e+38 must be in [-1e+20, 1e+20]",
        ),
        (
            {"repetition_penalty": column(1, 1e-38, dtype=np.float32)},
            "repetition_penalty[1]=1e-38 must be >= 1e-30",
        ),
        (
            {"bad_words_list": np.zeros((2, (1 << 17) + 1), np.int32)},
            "bad_words_list: 131073 ids for each of 2 rows; at most 262144 in all",
        ),
        (
            {"min_length": column(-1, 1, dtype=np.int32)},
            "min_length[0]=-1 must be >= 0",
        ),
        (
            {"runtime_top_p": column(np.nan, 1, dtype=np.float32)},
            "runtime_top_p[0]=nan must be finite",
        ),
        ({"runtime_top_k": column(1.0, 2.0)[:, :, None]}, "runtime_top_k: expected integers"),
        (
            {"runtime_top_k": column(1, 2, dtype=np.float32)},
            "runtime_top_k: expected integers of shape [2,1], got float32 [2, 1]",
        ),
        ({"is_return_log_probs": column(1, 0)}, "is_return_log_probs: expected BOOL of shape"),
        ({"end_id": column(52, 1)}, "end_id[0]=52 outside vocabulary of size 52"),
        ({"max_output_len": column(1, 1)}, "max_output_len: unknown input"),
        ({"ia3_tasks": column(0, 0)}, "ia3_tasks: this model has no IA3 adapters"),
        (
            {
                "repetition_penalty": column(1, 1, dtype=np.float32),
                "presence_penalty": column(0, 0, dtype=np.float32),
            },
            "repetition_penalty and presence_penalty are mutually exclusive",
        ),
        ({"session_len": column(6, 7)}, "session_len must be identical for all rows"),
    ],
)
def test_each_check_names_its_tensor(change, message):
    (problem,) = problems(gpt(**change))
    assert problem.startswith(message)


@pytest.mark.parametrize("name", ["input_ids", "input_lengths", "request_output_len"])
def test_missing_required_input_is_named(name):
    tensors = gpt()
    del tensors[name]
    assert problems(tensors) == [f"{name}: required input is missing"]


def test_misshapen_input_ids_are_named():
    (problem,) = problems(gpt(input_ids=np.asarray([3, 4, 5], np.uint32)))
    assert problem == "input_ids: expected integers of shape [3,-1], got uint32 [3]"


def test_pad_values_are_not_checked():
    tensors = gpt(input_ids=np.asarray([[3, 4, 5], [7, 8, 9999]], np.uint32))
    assert parse_request(tensors, GPT).rows[1].input_ids == (7, 8)


def test_empty_prompt_starts_from_the_start_id_and_returns_nothing():
    tensors = gpt(input_ids=np.zeros((2, 0), np.uint32), input_lengths=column(0, 0))
    request = parse_request(tensors, GPT)
    assert [row.input_ids for row in request.rows] == [(50,), (50,)]
    assert [row.returned_ids for row in request.rows] == [(), ()]
    assert request.padded_len == 0


def test_start_id_of_the_model_is_checked_where_it_is_fed():
    limits = dataclasses.replace(GPT, start_id=99, end_id=99)
    assert parse_request(gpt(), limits).rows[0].options.start_id == 99
    empty = gpt(input_ids=np.zeros((2, 0), np.uint32), input_lengths=column(0, 0))
    assert problems(empty, limits) == [
        f"start_id[{b}]=99 outside vocabulary of size 52" for b in (0, 1)
    ]


def test_context_outputs_are_unknown_where_the_model_has_none():
    limits = dataclasses.replace(GPT, encoder_decoder=True)
    flags = {"is_return_context_embeddings": column(True, True, dtype=np.bool_)}
    found = problems(gpt(**flags), limits)
    assert any(each.startswith("is_return_context_embeddings: unknown input") for each in found)


def test_context_score_without_log_probs_is_warned_about():
    flags = {"is_return_context_cum_log_probs": column(True, False, dtype=np.bool_)}
    (warning,) = parse_request(gpt(**flags), GPT).warnings
    assert warning.startswith("is_return_context_cum_log_probs has no effect")


# Word lists


def words(*rows: tuple[list[int], list[int]]) -> np.ndarray:
    return np.asarray(rows, np.int32)


def test_word_lists_are_read_per_row_without_empty_entries():
    stops = words(([9, 3, 7, 0], [1, 1, 3, -1]), ([0, 0, 0, 0], [-1, -1, -1, -1]))
    request = parse_request(gpt(stop_words_list=stops), GPT)
    assert options(request, "stop_words") == [((9,), (3, 7)), ()]
    empty = np.zeros((2, 2, 0), np.int32)
    assert options(parse_request(gpt(bad_words_list=empty), GPT), "bad_words") == [(), ()]


def test_one_bad_word_list_serves_all_rows():
    bad = np.asarray([[9, 3], [1, 2]], np.int32)
    assert options(parse_request(gpt(bad_words_list=bad), GPT), "bad_words") == [((9,), (3,))] * 2


@pytest.mark.parametrize("offsets", [[2, 1], [1, 3]])
@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_bad_offsets_are_refused(name, offsets):
    value = words(([1, 2], [1, 2]), ([1, 2], offsets))
    (problem,) = problems(gpt(**{name: value}))
    assert problem.startswith(f"{name}[1]: bad offsets")


def test_biases_are_read_per_row_and_padded_with_negative_ids():
    ids = np.array([[7, 0, -1], [-1, -1, -1]], np.int32)
    bias = np.array([[2.5, -1, 9], [0, 0, 0]], np.float32)
    request = parse_request(gpt(logit_bias_ids=ids, logit_bias=bias), GPT)
    assert options(request, "logit_bias") == [((7, 2.5), (0, -1.0)), ()]


@pytest.mark.parametrize(
    ("ids", "bias", "problem"),
    [
        ([[1], [2]], None, "logit_bias_ids and logit_bias belong together"),
        ([[1, 2]], [[1.0], [2.0]], r"logit_bias_ids: expected integers of shape \[2,-1\]"),
        ([[1], [2]], [[1.0, 2.0], [3.0, 4.0]], r"of shape \[2,1\], got float64 \[2, 2\]"),
        ([[1], [2]], [[1], [2]], r"logit_bias: expected floating-point values .*, got int64"),
        ([[1], [2]], [[1.0], [np.nan]], "not finite"),
        ([[1], [10**6]], [[1.0], [1.0]], r"logit_bias_ids\[1\]=1000000 outside vocabulary"),
    ],
)
def test_bad_biases_are_refused(ids, bias, problem):
    given = {"logit_bias_ids": ids, "logit_bias": bias}
    tensors = {name: np.array(value) for name, value in given.items() if value is not None}
    (found,) = problems(gpt(**tensors))
    assert re.search(problem, found)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2, 3), (2, 1, 3)])
def test_stop_words_of_another_shape_are_refused(shape):
    (problem,) = problems(gpt(stop_words_list=np.zeros(shape, np.int32)))
    got = f"int32 {list(shape)}"
    assert problem == f"stop_words_list: expected integers of shape [2,2,-1], got {got}"
