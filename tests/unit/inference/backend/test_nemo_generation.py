"""Requests in the form of PyTriton's NeMo example, on the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.triton.signature import declared
from inference.backend.nemo_generation import NemoDeployModel, NemoModel
from inference.backend.text_generation import TextModel
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from inference.decoding.request import parse_request
from inference.decoding.rows import RequestError
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.text_requests import infer, text_model
from tests.tiny_t5_tuning import write_prompts
from tests.tiny_text_gpt2 import write_tiny_gpt2

POSITIONS = 48
TABLE = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))  # 3 virtual tokens


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemo_generation")
    source = write_tiny_gpt2(folder / "source", positions=POSITIONS)
    prompts = (write_prompts(folder / "prompts.nemo", {"squad": TABLE}),)
    return convert(ConversionRequest(source, folder, 1, "fp32", prompt_checkpoints=prompts)).ft_dir


@pytest.fixture(scope="module")
def tokenizer(ft_dir: Path) -> Tokenizer:
    return load_tokenizer(ft_dir)


@pytest.fixture(scope="module")
def engine(ft_dir: Path) -> Iterator[Engine]:
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(max_lanes=6)) as started:
        yield started


@pytest.fixture(scope="module")
def model(engine: Engine, tokenizer: Tokenizer) -> NemoModel:
    return text_model(NemoModel, engine, tokenizer, ["squad"])


def request(prompts: list[str], *, task: str = "text_generation", **options: Any) -> Any:
    """Return a request as the example's client makes it: every option in a column."""
    types = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
    dtypes = {tensor.name: tensor.dtype for tensor in declared("nemo").inputs}
    rows = len(prompts)
    tensors: dict[str, Any] = {
        "tasks": np.array([[task.encode()]] * rows),
        "prompts": np.array([[prompt.encode()] for prompt in prompts]),
    }
    for name, value in options.items():
        tensors[name] = np.full((rows, 1), value, types[dtypes[name]])
    return tensors


def sentences(outputs: dict[str, Any]) -> list[str]:
    return [text.decode() for text in outputs["sentences"][:, 0]]


def test_outputs_are_those_of_the_interface(model):
    (outputs,) = infer(model, [request(["in the end", "a"], max_length=4, add_BOS=True)])
    assert list(outputs) == [tensor.name for tensor in declared("nemo").outputs]
    assert outputs["sentences"].shape == (2, 1)
    rows, one, width = outputs["token_ids"].shape
    assert (rows, one) == (2, 1)
    assert outputs["tokens"].shape == (2, 1, width)
    assert outputs["token_ids"].dtype == np.int32


def test_greedy_answer_is_that_of_the_text_interface(model, engine, tokenizer):
    prompt = "the end of"
    (outputs,) = infer(model, [request([prompt], max_length=6, add_BOS=False, top_p=0.3)])
    plain = text_model(TextModel, engine, tokenizer)
    (expected,) = infer(
        plain,
        [
            {
                "prompts": np.array([[prompt.encode()]], object),
                "request_output_len": np.array([[6]], np.uint32),
            }
        ],
    )
    assert sentences(outputs) == [expected["sentences"][0, 0, 0].decode()]


def test_start_token_goes_in_front_and_is_not_part_of_the_text(model, engine, tokenizer):
    (outputs,) = infer(model, [request(["the end"], max_length=2)])  # add_BOS by default
    prompt = [engine.limits.start_id, *tokenizer.encode("the end")]
    assert outputs["token_ids"][0, 0, : len(prompt)].tolist() == prompt
    assert sentences(outputs)[0].startswith("the end")


def test_answer_ends_with_an_end_string(model, tokenizer):
    plain = request(["the end"], max_length=8, add_BOS=False)
    (outputs,) = infer(model, [plain])
    prompt = len(tokenizer.encode("the end"))
    answer = outputs["token_ids"][0, 0, prompt:].tolist()
    # A token that its own text gives.
    place = next(
        t for t, each in enumerate(answer) if tokenizer.encode(tokenizer.decode([each])) == [each]
    )
    text = tokenizer.decode(answer[place : place + 1])
    strings = np.array([[[text.encode(), b""]]], object)
    (ended,) = infer(model, [plain | {"end_strings": strings}])
    assert ended["token_ids"][0, 0, prompt:].tolist() == answer[: answer.index(answer[place]) + 1]


def test_minimum_length_holds_the_end_token_back(model):
    options: dict[str, Any] = {"use_greedy": False, "top_k": 0, "top_p": 1.0, "add_BOS": False}
    (outputs,) = infer(model, [request(["a"] * 8, max_length=12, min_length=12, **options)])
    assert len({*sentences(outputs)}) > 1, "sampled rows have seeds of their own"
    end_id = model.engine.limits.end_id
    assert (outputs["token_ids"] == end_id).sum() == 0


def test_a_task_puts_its_virtual_tokens_in_front(model, engine, tokenizer):
    (outputs,) = infer(model, [request(["the end"], task="squad", max_length=4, add_BOS=False)])
    text, first = tokenizer.encode("the end"), engine.limits.virtual_start_id
    ids = [first, first + 1, first + 2, *text]
    (row,) = engine.generate(
        parse_request(
            {
                "input_ids": np.array([ids], np.uint32),
                "input_lengths": np.array([[len(ids)]], np.uint32),
                "request_output_len": np.array([[4]], np.uint32),
                "runtime_top_k": np.array([[1]], np.uint32),
                "prompt_learning_task_name_ids": np.array([[0]], np.uint32),
            },
            engine.limits,
        )
    ).rows
    assert outputs["token_ids"][0, 0].tolist() == [*text, *row.output_ids[0]]
    assert sentences(outputs)[0].startswith("the end")


def test_log_probabilities_and_offsets_are_of_every_token(model, engine, tokenizer):
    asked = request(["the end of", "a"], max_length=3, add_BOS=False)
    asked["compute_logprob"] = np.array([[True], [False]])
    (outputs,) = infer(model, [asked])
    scores, ids = outputs["logprob"][:, 0], outputs["token_ids"][0, 0].tolist()
    tensors = {
        "input_ids": np.array([ids[:-1]], np.uint32),
        "input_lengths": np.array([[len(ids) - 1]], np.uint32),
        "request_output_len": np.array([[1]], np.uint32),
        "is_return_log_probs": np.array([[True]]),
        "is_return_context_cum_log_probs": np.array([[True]]),
    }
    (row,) = engine.generate(parse_request(tensors, engine.limits)).rows
    assert row.output_ids[0][0] == ids[-1], "greedy"
    assert scores.shape == (2, len(ids) - 1)
    assert np.isfinite(scores[0]).all()
    assert scores[0].sum() == pytest.approx(row.cum_log_probs[0], abs=1e-4)
    assert np.isnan(scores[1]).all()
    pieces = [piece.decode() for piece in outputs["tokens"][0, 0]]
    assert outputs["offsets"][0, 0].tolist() == [
        len("".join(pieces[:t])) for t in range(len(pieces))
    ]


@pytest.mark.parametrize(("name", "value"), [("top_k", 1 << 32 | 1), ("min_length", 1 << 40)])
def test_a_number_that_the_engine_cannot_hold_is_refused(engine, tokenizer, name, value):
    asked = {"prompts": np.array([[b"a"]]), name: np.array([[value]], np.int64)}
    with pytest.raises(RequestError, match=rf"{name}\[0\]={value} must be "):
        text_model(NemoDeployModel, engine, tokenizer).begin(asked)


def test_nemos_query_clients_are_answered_as_the_example(model, engine, tokenizer):
    deployed = text_model(NemoDeployModel, engine, tokenizer, ["squad"])
    prompts = np.array([[b"the end"], [b"a"]])
    (expected,) = infer(model, [request(["the end", "a"], max_length=12)])
    wide = {"max_output_len": np.full((2, 1), 12)}
    (plain,) = infer(deployed, [{"prompts": prompts, **wide}])
    assert sentences(plain) == sentences(expected)
    # Some options of NemoQueryLLM's own example.
    zero = {"top_k": np.full((2, 1), 1), "top_p": np.zeros((2, 1), np.float32)}
    zero |= {"temperature": np.zeros((2, 1), np.float32)}
    (again,) = infer(deployed, [{"prompts": prompts, **wide, **zero}])
    assert sentences(again) == sentences(expected)
    seeded = {"top_k": np.full((2, 1), 50), "random_seed": np.full((2, 1), 7)}
    (one,), (two,) = (infer(deployed, [{"prompts": prompts, **wide, **seeded}]) for _ in range(2))
    assert sentences(one) == sentences(two)
    answer = expected["token_ids"][0, 0, 1 + len(tokenizer.encode("the end")) :].tolist()
    bad = next(
        text for each in answer if tokenizer.encode(text := tokenizer.decode([each])) == [each]
    )
    banned = {"bad_words_list": np.array([[bad.encode()], [b""]])}
    (other,) = infer(deployed, [{"prompts": prompts, **wide, **banned}])
    assert sentences(other)[0] != sentences(expected)[0]
    task = {"task_id": np.full((2, 1), b"squad"), "add_BOS": np.zeros((2, 1), np.bool_)}
    (tuned,) = infer(deployed, [{"prompts": prompts, **wide, **task}])
    (same,) = infer(model, [request(["the end", "a"], task="squad", max_length=12, add_BOS=False)])
    assert sentences(tuned) == sentences(same)
    with pytest.raises(RequestError, match="no_repeat_ngram_size is not supported; send 0"):
        infer(deployed, [{"prompts": prompts, "no_repeat_ngram_size": np.full((2, 1), 2.0)}])


def test_all_problems_are_named_at_once(model):
    wrong = request(["a"], task="boolq", max_length=0, top_k=-1, all_probs=True)
    with pytest.raises(RequestError) as caught:
        infer(model, [wrong])
    assert caught.value.problems == [
        f"max_length[0]=0 must be in [1, {POSITIONS - 1}]",
        "tasks[0]='boolq': the model has no such task; use text_generation or squad",
        "top_k[0]=-1 must be 0 to 4294967295",
        "all_probs is not supported; send false",
    ]
    with pytest.raises(RequestError, match="virtual tokens have no scores"):
        infer(model, [request(["a"], task="squad", compute_logprob=True)])
