"""Sessions that remember their newest tokens alone answer as a model with a sliding window does."""

from pathlib import Path
from typing import Any

import pytest

from export_scripts.families.dense.layout import DENSE, DenseConfig
from inference.decoding.rows import RequestError, SessionTurn
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.contract import request_of
from tests.ft_folders import write_gpt, write_random

MEMORY_LEN, SESSION_LEN = 12, 60
WHOLE = {"min_length": 6}  # as many tokens as are asked for
TURNS = ([3, 9, 4, 1], [5, 8, 2], [6] * 3 + list(range(20)), [7])
SAMPLED = {"runtime_top_k": 7, "repetition_penalty": 1.3}


def write_llama(folder: Path, *, sliding_window: int | None = None) -> Path:
    config = DenseConfig(
        model_name="llama",
        weight_data_type="fp32",
        tensor_para_size=1,
        head_num=4,
        kv_head_num=2,
        size_per_head=6,
        hidden_size=28,
        inter_size=36,
        num_layer=2,
        vocab_size=41,
        start_id=39,
        end_id=40,
        max_pos_seq_len=90,
        layernorm_eps=1e-5,
        rotary_embedding=6,
        sliding_window=sliding_window,
    )
    return write_random(DENSE, config, folder)


def converse(remembering: Engine, windowed: Engine, **options: Any) -> None:
    """Hold a session; compare each answer with the window's to the whole conversation."""
    history: list[int] = []
    for number, prompt in enumerate(TURNS):
        lengths = {"session_len": SESSION_LEN, "memory_len": MEMORY_LEN} if not number else {}
        turn = SessionTurn(1, starts=not number, ends=number == len(TURNS) - 1)
        request = request_of(remembering, [prompt], **lengths, **WHOLE, **options)
        (row,) = remembering.generate(request, turn=turn).rows
        history += prompt
        (expected,) = windowed.generate(request_of(windowed, [history], **WHOLE, **options)).rows
        assert row.output_ids == expected.output_ids, number
        history += row.output_ids[0]
    assert len(history) > 3 * MEMORY_LEN
    assert remembering.load().running == 0


@pytest.mark.parametrize("block_tokens", [0, 5])
def test_only_the_newest_tokens_are_seen(tmp_path, block_tokens):
    # A sequence of the cache is shorter than the conversation.
    options = EngineOptions(max_lanes=4, max_seq_len=MEMORY_LEN, kv_block_tokens=block_tokens)
    folder = write_llama(tmp_path / "plain")
    window, place = (
        write_llama(tmp_path / "window", sliding_window=MEMORY_LEN),
        Placement(device="cpu"),
    )
    with (
        Engine(folder, place, options=options) as plain,
        Engine(window, place, options=EngineOptions(max_lanes=4)) as windowed,
    ):
        converse(plain, windowed)
        converse(plain, windowed, **SAMPLED)
        converse(plain, windowed, beam_width=3)


@pytest.mark.parametrize(
    ("lengths", "turn", "message"),
    [
        ({"session_len": 60, "memory_len": 30}, SessionTurn(1, starts=True), "memory_len=30 exc"),
        ({"session_len": 60}, SessionTurn(1, starts=True), "session_len=60 exceeds the 20"),
        ({"session_len": 99, "memory_len": 9}, SessionTurn(1, starts=True), "max_pos_seq_len"),
        ({"memory_len": 9}, None, "memory_len: the request is not part of a session"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(tmp_path, lengths, turn, message):
    engine = Engine(
        write_gpt(tmp_path), Placement(device="cpu"), options=EngineOptions(max_seq_len=20)
    )
    with pytest.raises(RequestError, match=message):
        engine.submit(request_of(engine, TURNS[:1], **lengths), turn=turn)
