"""Requests in the form of PyTriton's NeMo example, on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from inference.decoding.request import RequestError
from inference.engine.engine import Engine, EngineOptions
from inference.pytriton.nemo_service import NemoService
from inference.pytriton.serving import pytriton_tensors
from inference.pytriton.signature import NEMO_INPUTS, NEMO_OUTPUTS
from inference.pytriton.text_service import TextService
from inference.ranks.settings import Placement
from tests.tiny_text_gpt2 import write_tiny_gpt2

POSITIONS = 48


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemo_service")
    source = write_tiny_gpt2(folder / "source", positions=POSITIONS)
    return convert(ConversionRequest(source, folder, tp_size=1, weight_data_type="fp32")).ft_dir


@pytest.fixture(scope="module")
def tokenizer(ft_dir: Path) -> Tokenizer:
    return load_tokenizer(ft_dir)


@pytest.fixture(scope="module")
def engine(ft_dir: Path) -> Iterator[Engine]:
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(max_lanes=6)) as started:
        yield started


@pytest.fixture(scope="module")
def service(engine: Engine, tokenizer: Tokenizer) -> NemoService:
    return NemoService(engine, tokenizer)


def request(prompts: list[str], *, task: str = "text_generation", **options: Any) -> Any:
    """Return a request as the example's client makes it: every option in a column."""
    types = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
    declared = {tensor.name: tensor.dtype for tensor in NEMO_INPUTS}
    rows = len(prompts)
    tensors: dict[str, Any] = {
        "tasks": np.array([[task.encode()]] * rows),
        "prompts": np.array([[prompt.encode()] for prompt in prompts]),
    }
    for name, value in options.items():
        tensors[name] = np.full((rows, 1), value, types[declared[name]])
    return tensors


def sentences(outputs: dict[str, Any]) -> list[str]:
    return [text.decode() for text in outputs["sentences"][:, 0]]


def test_pytriton_takes_the_types_of_the_tensors() -> None:
    found = {tensor.name: tensor.dtype for tensor in pytriton_tensors(NEMO_INPUTS)}
    assert found["prompts"] is np.bytes_
    assert found["use_greedy"] is np.bool_  # PyTriton knows no bool
    assert found["top_k"] is np.int32


def test_outputs_are_those_of_the_interface(service: NemoService) -> None:
    (outputs,) = service.infer([request(["in the end", "a"], max_length=4, add_BOS=True)])
    assert list(outputs) == [tensor.name for tensor in NEMO_OUTPUTS]
    assert outputs["sentences"].shape == (2, 1)
    rows, one, width = outputs["token_ids"].shape
    assert (rows, one) == (2, 1)
    assert outputs["tokens"].shape == (2, 1, width)
    assert outputs["token_ids"].dtype == np.int32


def test_greedy_answer_is_that_of_the_text_interface(
    service: NemoService, engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = "the end of"
    (outputs,) = service.infer([request([prompt], max_length=6, add_BOS=False, top_p=0.3)])
    plain = TextService(engine, tokenizer)
    (expected,) = plain.infer(
        [
            {
                "prompts": np.array([[prompt.encode()]], object),
                "request_output_len": np.array([[6]], np.uint32),
            }
        ]
    )
    assert sentences(outputs) == [expected["sentences"][0, 0, 0].decode()]


def test_start_token_goes_in_front_and_is_not_part_of_the_text(
    service: NemoService, engine: Engine, tokenizer: Tokenizer
) -> None:
    (outputs,) = service.infer([request(["the end"], max_length=2)])  # add_BOS by default
    prompt = [engine.limits.start_id, *tokenizer.encode("the end")]
    assert outputs["token_ids"][0, 0, : len(prompt)].tolist() == prompt
    assert sentences(outputs)[0].startswith("the end")


def test_answer_ends_with_an_end_string(service: NemoService, tokenizer: Tokenizer) -> None:
    plain = request(["the end"], max_length=8, add_BOS=False)
    (outputs,) = service.infer([plain])
    prompt = len(tokenizer.encode("the end"))
    answer = outputs["token_ids"][0, 0, prompt:].tolist()
    # A token that its own text gives.
    place = next(
        t for t, each in enumerate(answer) if tokenizer.encode(tokenizer.decode([each])) == [each]
    )
    text = tokenizer.decode(answer[place : place + 1])
    strings = np.array([[[text.encode(), b""]]], object)
    (ended,) = service.infer([plain | {"end_strings": strings}])
    assert ended["token_ids"][0, 0, prompt:].tolist() == answer[: answer.index(answer[place]) + 1]


def test_minimum_length_holds_the_end_token_back(service: NemoService) -> None:
    options = {"use_greedy": False, "top_k": 0, "top_p": 1.0, "add_BOS": False}
    (outputs,) = service.infer([request(["a"] * 8, max_length=12, min_length=12, **options)])
    assert len({*sentences(outputs)}) > 1, "sampled rows have seeds of their own"
    end_id = service._engine.limits.end_id
    assert (outputs["token_ids"] == end_id).sum() == 0


def test_all_problems_are_named_at_once(service: NemoService) -> None:
    wrong = request(["a"], task="squad", max_length=0, top_k=-1, compute_logprob=True)
    with pytest.raises(RequestError) as caught:
        service.infer([wrong])
    assert caught.value.problems == [
        "tasks[0]='squad': the model has no such task; use text_generation",
        f"max_length[0]=0 must be in [1, {POSITIONS - 1}]",
        "top_k[0]=-1 must not be negative",
        "compute_logprob is not computed here; send false",
    ]
