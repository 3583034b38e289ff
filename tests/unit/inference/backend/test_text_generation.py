"""Text requests on the engine, as PyTriton calls for them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.backend.text_generation import TextModel
from inference.backend.tokenizer import load_tokenizer
from inference.decoding.rows import RequestError
from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.text_requests import infer, text_model
from tests.tiny_text_gpt2 import write_tiny_gpt2
from tests.waiting import until

POSITIONS = 48


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_generation")
    source = write_tiny_gpt2(folder / "source", positions=POSITIONS)
    return convert(ConversionRequest(source, folder, tp_size=1, weight_data_type="fp32")).ft_dir


@pytest.fixture(scope="module")
def model(ft_dir: Path) -> Iterator[TextModel]:
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(max_lanes=6)) as engine:
        yield text_model(TextModel, engine, load_tokenizer(ft_dir))


def column(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint32)[:, None]


def request(prompts: Sequence[str | bytes], lengths: list[int], *, beams: int | None = None) -> Any:
    texts = np.array([[p.encode() if isinstance(p, str) else p] for p in prompts], dtype=object)
    tensors = {"prompts": texts, "request_output_len": column(lengths)}
    return tensors if beams is None else tensors | {"beam_width": column([beams] * len(prompts))}


def sentences(outputs: dict[str, Any]) -> list[list[str]]:
    return [[text.decode() for text in row[:, 0]] for row in outputs["sentences"]]


def test_shapes_and_types_are_those_of_the_interface(model):
    (outputs,) = infer(model, [request(["in the end", "a"], [4, 9], beams=3)])
    assert {name: (value.dtype.str, value.shape) for name, value in outputs.items()} == {
        "sentences": ("|O", (2, 3, 1)),
        "sequence_length": ("<i8", (2, 3)),
        "cum_log_probs": ("<f4", (2, 3)),
        "sequence_tokens": ("<i8", (2, 3)),
    }


def test_a_sentence_is_the_prompt_and_its_answer_and_is_counted_in_characters(
    model,
):
    prompt = "the Straße"
    (outputs,) = infer(model, [request([prompt], [5])])
    ((text,),) = sentences(outputs)
    assert text.startswith(prompt)
    assert outputs["sequence_length"].tolist() == [[len(text)]]
    ids = model.tokenizer.encode(prompt)
    assert outputs["sequence_tokens"].tolist() == [[len(ids) + 5]]
    assert outputs["cum_log_probs"][0, 0] < 0


def test_every_row_has_its_own_number_of_tokens(model):
    prompts = ["the a", "the a", "s"]
    (together,) = infer(model, [request(prompts, [2, 7, 30])])
    alone = [
        infer(model, [request([prompt], [length])])[0]
        for prompt, length in zip(prompts, [2, 7, 30], strict=True)
    ]
    assert sentences(together) == [sentences(each)[0] for each in alone]
    assert np.diff(together["sequence_tokens"][:2, 0]).tolist() == [5]


def test_requests_of_one_call_are_answered_apart(model):
    first, second = request(["the"], [3]), request(["in", "on"], [6, 2], beams=2)
    together = infer(model, [first, second])
    apart = [*infer(model, [first]), *infer(model, [second])]
    for outputs, alone in zip(together, apart, strict=True):
        assert sentences(outputs) == sentences(alone)
        # The order of summation follows the number of rows: the last digits of fp32.
        np.testing.assert_allclose(outputs["cum_log_probs"], alone["cum_log_probs"], rtol=1e-5)


def test_long_prompts_are_cut_to_leave_room_for_the_answer(model):
    long, output_len = "x" * 200, 20
    (outputs,) = infer(model, [request([long, "x"], [output_len, POSITIONS - 1])])
    assert sentences(outputs)[0][0].startswith("x" * (POSITIONS - output_len))
    assert outputs["sequence_tokens"][:, 0].tolist() == [POSITIONS, POSITIONS]


def test_empty_prompt_is_answered(model):
    (outputs,) = infer(model, [request([""], [4])])
    assert outputs["sequence_tokens"].tolist() == [[4]]


def test_markers_are_not_part_of_the_text(model):
    limits = model.engine.limits
    assert model.tokenizer.special_ids == {limits.end_id}
    asked = SimpleNamespace(rows=[SimpleNamespace(returned_ids=(limits.start_id, 40))])
    row = SimpleNamespace(output_ids=((41, limits.end_id),), cum_log_probs=[0.0])
    result: Any = SimpleNamespace(request=asked, rows=[row])
    outputs = model.answer(result)
    assert sentences(outputs) == [[model.tokenizer.decode([40, 41])]]
    assert outputs["sequence_tokens"].tolist() == [[4]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(["a", "b"], [1, 0]), r"request_output_len\[1\]=0 must be in \[1, 47\]"),
        (request(["a"], [POSITIONS]), r"request_output_len\[0\]=48 must be in \[1, 47\]"),
        (request(["a"], [1], beams=0), "beam_width"),
        (request(["a"], [1], beams=7), "beam_width=7: rows need 7 sequences"),
        (request(["a"], [1, 1]), r"request_output_len: expected shape \[1,1\]"),
        (request(["a"], [1]) | {"beam_width": column([1, 2])}, "beam_width: expected shape"),
        (
            request(["a", "b"], [1, 1]) | {"beam_width": column([1, 2])},
            "beam_width must be identical for all rows of a request",
        ),
        (request(["a", b"\xff"], [1, 1]), r"prompts\[1\]: not UTF-8 at byte 0"),
    ],
)
def test_wrong_requests_are_refused(model, bad, message):
    with pytest.raises(ValueError, match=message):
        infer(model, [bad])


def test_a_refused_request_leaves_no_work_behind(model):
    good = request(["the"] * 3, [40] * 3)
    with pytest.raises(RequestError):
        infer(model, [good, request(["a"], [0])])
    until(lambda: model.engine.load().running == 0, "the end of the first request's work")


def test_a_failed_engine_is_the_answer(ft_dir):
    engine = Engine(ft_dir, Placement(device="cpu"))
    with engine:
        model = text_model(TextModel, engine, load_tokenizer(ft_dir))
    with pytest.raises(EngineFailedError, match="the engine was stopped"):
        infer(model, [request(["a"], [1])])
