"""The engine of encoders: requests of any size, together or apart, and what is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.decoding.rows import RequestError
from inference.engine.encoder_engine import EncoderEngine
from inference.engine.encoding import EncodingRequest, parse_encoding
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.ft_folders import write_bert, write_gpt
from tests.t5_reference import Reference
from tests.tiny_t5 import TinyT5, t5_tensors, write_t5
from tests.tiny_t5_tuning import ia3_scalers, write_ia3

MODEL = TinyT5()
TENSORS = t5_tensors(MODEL)
TASKS = [ia3_scalers(MODEL, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderEngine]:
    with EncoderEngine(
        write_bert(tmp_path_factory.mktemp("bert")), Placement(device="cpu")
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderEngine]:
    folder = tmp_path_factory.mktemp("t5")
    archives = tuple(write_ia3(folder / f"{n}.nemo", task, MODEL) for n, task in enumerate(TASKS))
    request = ConversionRequest(
        write_t5(folder / "t5.nemo", TENSORS, MODEL),
        folder / "out",
        1,
        "fp32",
        ia3_checkpoints=archives,
    )
    with EncoderEngine(convert(request).ft_dir, Placement(device="cpu")) as engine:
        yield engine


def states_request(engine: EncoderEngine, states: Any, lengths: list[int]) -> EncodingRequest:
    return parse_encoding(
        {
            "input_hidden_state": states,
            "sequence_lengths": np.array(lengths, np.int32)[:, None],
        },
        engine.architecture,
    )


def ids_request(engine: EncoderEngine, prompts: list[list[int]], **more: Any) -> EncodingRequest:
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    lengths = np.array([[len(prompt)] for prompt in prompts], np.uint32)
    return parse_encoding(
        {"input_ids": ids, "sequence_length": lengths, **more}, engine.architecture
    )


def random_states(rows: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, width, 24)).astype(np.float32)


def test_more_rows_than_fit_in_a_step_are_all_answered(bert):
    states = random_states(12, 600)
    hidden = bert.encode(states_request(bert, states, [600] * 12)).hidden
    alone = bert.encode(states_request(bert, states[7:8], [600])).hidden
    assert torch.allclose(hidden[7], alone[0], atol=1e-5)


def test_t5_rows_have_their_own_ia3_tasks(t5):
    prompt = [5, 9, 2, 38]
    request = ids_request(t5, [prompt, prompt], ia3_tasks=np.array([[1], [0]], np.int32))
    hidden = t5.encode(request).hidden
    for row, task in ((0, TASKS[1]), (1, TASKS[0])):
        expected = Reference(TENSORS, MODEL, scalers=task).encode(prompt)
        assert torch.allclose(hidden[row], expected, atol=1e-4)


def test_a_request_that_overflows_spoils_no_other(bert):
    huge = np.clip(random_states(1, 1) * 1e38, -3e38, 3e38)
    others = [states_request(bert, random_states(1, n, seed=n), [n]) for n in range(2, 6)]
    alone = [bert.encode(request).hidden for request in others]
    # The first step holds back the others, which share a step with the second of these.
    spoilt = [bert.submit(states_request(bert, huge, [1])) for _ in range(3)]
    futures = [bert.submit(request) for request in others]
    assert all(not each.result().hidden.isfinite().all() for each in spoilt)
    for future, expected in zip(futures, alone, strict=True):
        assert torch.allclose(future.result().hidden, expected, atol=1e-5)


def test_attentions_come_only_when_asked_for(t5):
    asked = {"is_return_attentions": np.array([[False], [True]])}
    prompts = [[5, 9, 2, 38], [7]]
    quiet = t5.submit(ids_request(t5, prompts))
    result = t5.submit(ids_request(t5, prompts, **asked)).result()
    assert quiet.result().attentions is None
    assert result.attentions is not None
    assert result.attentions.shape == (2, 2, 4, 4, 4)
    assert torch.allclose(result.attentions[0].sum(-1), torch.ones(2, 4, 4))
    assert torch.equal(result.hidden, quiet.result().hidden) or torch.allclose(
        result.hidden, quiet.result().hidden, atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sequence_lengths": np.array([[0], [5]], np.int32)}, "sequence_lengths[0]=0"),
        ({"sequence_lengths": np.array([[7], [5]], np.int32)}, "sequence_lengths[0]=7"),
        ({"sequence_lengths": None}, "sequence_lengths: required input is missing"),
        ({"input_hidden_state": random_states(2, 6)[:, :, :20]}, "-1,24]"),
        ({"input_hidden_state": random_states(2, 6)[:0]}, "-1,24]"),
        ({"input_ids": np.zeros((2, 6), np.uint32)}, "input_ids: unknown input"),
        ({"input_hidden_state": np.full((2, 6, 24), np.nan, np.float32)}, "not finite"),
        ({"input_hidden_state": np.full((2, 6, 24), 1e300)}, "not finite"),
    ],
    ids=[
        *("empty row", "too long", "no lengths", "wrong width", "no rows", "ids for BERT"),
        *("nan", "overflow"),
    ],
)
def test_bad_states_are_refused(bert, change, words):
    tensors = {
        "input_hidden_state": random_states(2, 6),
        "sequence_lengths": np.array([[6], [5]], np.int32),
    }
    with pytest.raises(RequestError) as caught:
        parse_encoding(
            {k: v for k, v in (tensors | change).items() if v is not None}, bert.architecture
        )
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "more", "words"),
    [
        ([[5, 40]], {}, "input_ids[0,1]=40 outside vocabulary of size 40"),
        ([[5] * 25], {}, "25 exceeds max_pos_seq_len (24)"),
        ([[5]], {"ia3_tasks": np.array([[2]], np.int32)}, "ia3_tasks[0]=2 must be in [0, 1]"),
        ([[5]], {"temperature": np.ones((1, 1), np.float32)}, "temperature: unknown input"),
    ],
    ids=["vocabulary", "positions", "task", "unknown"],
)
def test_bad_ids_are_refused(t5, prompts, more, words):
    with pytest.raises(RequestError) as caught:
        ids_request(t5, prompts, **more)
    assert words in str(caught.value)


def test_rows_beyond_the_bound_are_refused(tmp_path):
    engine = EncoderEngine(
        write_bert(tmp_path), Placement(device="cpu"), options=EngineOptions(max_seq_len=5)
    )
    with pytest.raises(RequestError, match="rows of 6 tokens, padding included; the limit is 5"):
        engine.submit(states_request(engine, random_states(1, 6), [2]))


@pytest.mark.parametrize(
    ("asked", "words"),
    [(True, "is_return_attentions: the answer"), (False, "output_hidden_state: the answer")],
)
def test_answers_that_no_memory_holds_are_refused(t5, monkeypatch, asked, words):
    # One byte of padding asks for the states of a token.
    monkeypatch.setattr("inference.engine.encoder_engine.available_bytes", lambda: 10**9)
    ids = np.zeros((2000, 4096), np.uint8)
    tensors: dict[str, np.ndarray] = {
        "input_ids": ids,
        "sequence_length": np.ones((len(ids), 1), np.uint32),
        "is_return_attentions": np.array([[asked]]),
    }
    with pytest.raises(RequestError, match=words):
        t5.submit(parse_encoding(tensors, t5.architecture))


def test_a_request_that_no_queue_holds_is_refused(tmp_path):
    options = EngineOptions(max_queued_rows=3)
    with EncoderEngine(write_bert(tmp_path), Placement(device="cpu"), options=options) as engine:
        request = states_request(engine, random_states(4, 2), [2] * 4)
        with pytest.raises(RequestError, match="4 rows exceed max_queued_rows=3"):
            engine.submit(request)


def test_sizes_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)head_num=4.*inter_size=28.*num_layer=2"):
        EncoderEngine(write_bert(tmp_path), Placement(tp_size=3, pp_size=3, device="cpu"))


def test_int8_is_refused(tmp_path):
    with pytest.raises(ValueError, match="int8_mode=1"):
        EncoderEngine(write_bert(tmp_path), Placement(int8_mode=1, device="cpu"))


def test_a_decoder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="family gpt has no encoder"):
        EncoderEngine(write_gpt(tmp_path), Placement(device="cpu"))


def test_missing_weights_are_named(tmp_path):
    folder = write_bert(tmp_path)
    (folder / "model.encoder.layer.1.output.dense.weight.0.bin").unlink()
    with pytest.raises(
        EngineFailedError, match=r"layer\.1\.output\.dense\.weight\.0\.bin is missi"
    ):
        EncoderEngine(folder, Placement(device="cpu")).start()
