"""Interactive sessions: a turn is answered as the whole conversation would be, from the cache."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.decoding.grammars import Constraint
from inference.decoding.rows import GenerationRequest, RequestError, SessionTurn
from inference.decoding.tensor_fields import Array
from inference.engine import sessions
from inference.engine.engine import Engine
from inference.engine.errors import EngineBusyError
from inference.engine.options import EngineOptions
from inference.engine.sequence import GenerationStep
from inference.ranks.settings import Placement
from tests.contract import request_of
from tests.ft_folders import write_gpt
from tests.unit.inference.engine.fake_ranks import let_ranks_choose

SLOTS = 9
SESSION_LEN = 70
OUTPUT_LEN = 6  # of `request_of`
SAMPLED: dict[str, Any] = {"runtime_top_k": 12, "random_seed": 5, "repetition_penalty": 1.3}

START, NEXT, LAST = (
    SessionTurn(7, starts=True),
    SessionTurn(7),
    SessionTurn(7, ends=True),
)


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt(tmp_path_factory.mktemp("gpt"))


@pytest.fixture(scope="module")
def engine(ft_dir: Path) -> Iterator[Engine]:
    options = EngineOptions(max_lanes=SLOTS)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        yield engine


def begin(engine: Engine, prompts: Sequence[Sequence[int]], **options: Any) -> GenerationRequest:
    return request_of(engine, prompts, session_len=SESSION_LEN, **options)


def converse(
    engine: Engine, turns: Sequence[Sequence[Sequence[int]]], output_len: int = 6, **options: Any
) -> None:
    """Hold a session and compare each answer with that to the whole conversation at once."""
    history: list[list[int]] = [[] for _ in turns[0]]
    for number, prompts in enumerate(turns):
        request = request_of(engine, prompts, output_len, session_len=SESSION_LEN, **options)
        turn = SessionTurn("talk", starts=number == 0, ends=number == len(turns) - 1)
        answered = engine.generate(request, turn=turn)
        whole = [[*kept, *new] for kept, new in zip(history, prompts, strict=True)]
        alone = engine.generate(request_of(engine, whole, output_len, **options))
        assert [row.output_ids for row in answered.rows] == [row.output_ids for row in alone.rows]
        assert answered.request.padded_len == alone.request.padded_len
        assert [list(row.returned_ids) for row in answered.request.rows] == whole
        for b, row in enumerate(answered.rows):
            ended = row.finish_reasons[0] != "length"
            history[b] = whole[b] + list(row.output_ids[0][: -1 if ended else None])
    assert engine.load().running == 0
    assert engine.load().blocks_used == 0


TURNS = [[[3, 9, 4], [1]], [[5, 8], [2, 2, 7, 30]], [[6], [6, 11]]]


def test_turns_are_answered_as_the_whole_conversation(engine):
    converse(engine, TURNS)
    converse(engine, TURNS, **SAMPLED)


@pytest.mark.parametrize("block_tokens", [0, 4])
def test_beams_go_on_from_the_best_hypothesis(ft_dir, block_tokens):
    # The answers to whole conversations run next to the session.
    options = EngineOptions(max_lanes=12, kv_block_tokens=block_tokens)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        converse(engine, TURNS, beam_width=3)


def test_a_turn_that_ended_early_gives_its_last_token_away(engine):
    answer = engine.generate(request_of(engine, [[3, 9, 4]])).rows[0].output_ids[0]
    converse(engine, [turn[:1] for turn in TURNS], end_id=answer[2])


class OfTwoTokens(Constraint):
    """A form that any two tokens have."""

    problem = ""

    def __init__(self) -> None:
        self._taken = 0

    def mask(self) -> Array:
        return np.full(7, 255, np.uint8)

    def take(self, token: int) -> bool:
        del token
        self._taken += 1
        return self._taken == 2


class OfOneToken(OfTwoTokens):
    """A form that only token 3 has."""

    def mask(self) -> Array:
        return np.array([8, *[0] * 6], np.uint8)


def test_a_form_of_banned_tokens_is_the_fault_of_the_request(engine):
    banned = np.array([[[3], [1]]], np.int32)
    request = request_of(engine, [[3, 9, 4]], bad_words_list=banned)
    request = replace(request, rows=(replace(request.rows[0], constraint=OfOneToken()),))
    with pytest.raises(ValueError, match="every token that can follow"):
        engine.generate(request)


def test_a_turn_whose_form_is_complete_keeps_all_tokens(engine):
    start = begin(engine, [[3, 9, 4]])
    (row,) = start.rows
    start = replace(start, rows=(replace(row, constraint=OfTwoTokens()),))
    (first,) = engine.generate(start, turn=START).rows
    assert first.finish_reasons == ("stop",)
    last = engine.generate(request_of(engine, [[5]]), turn=LAST)
    whole = [3, 9, 4, *first.output_ids[0], 5]
    assert last.request.rows[0].returned_ids == tuple(whole)
    assert (
        last.rows[0].output_ids == engine.generate(request_of(engine, [whole])).rows[0].output_ids
    )


def test_long_turns_come_in_chunks(ft_dir):
    options = EngineOptions(max_lanes=4, max_stall_s=1e-6)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        converse(engine, [[[1, 2, 3]], [[5, 9, 4] * 8], [[8, 1] * 8]], output_len=2)


def test_ranks_that_choose_know_what_the_conversation_has_seen(ft_dir, monkeypatch):
    let_ranks_choose(monkeypatch)
    with Engine(ft_dir, Placement(device="cpu")) as engine:
        converse(engine, TURNS, **SAMPLED)
        converse(engine, TURNS, repetition_penalty=1.5)


def test_streamed_turns_show_the_whole_conversation(engine):
    first = engine.generate(begin(engine, [[3, 9, 4]]), turn=START)
    steps: list[GenerationStep] = []
    future = engine.submit(request_of(engine, [[5]]), on_step=steps.append, turn=LAST)
    result = future.result(30)
    assert len(steps) == len(result.rows[0].output_ids[0]) - 1
    history = [3, 9, 4, *first.rows[0].output_ids[0], 5]
    assert {step.request.rows[0].returned_ids for step in steps} == {tuple(history)}


def test_starting_again_forgets_the_earlier_session(engine):
    engine.generate(begin(engine, [[3, 9, 4]]), turn=START)
    engine.generate(begin(engine, [[8]]), turn=START)
    assert engine.load().running == 1
    result = engine.generate(request_of(engine, [[5]]), turn=LAST)
    assert result.request.rows[0].returned_ids[0] == 8


BAD_TURNS = [
    ([[5]], SessionTurn(8), {}, "session 8 is unknown: it has ended, paused for more than 60 s"),
    ([[5]], START, {}, "session_len: the START request of a session needs it"),
    ([[5]], START, {"session_len": 99}, r"session_len=99 exceeds max_pos_seq_len \(80\)"),
    ([[5]], START, {"session_len": 6}, r"session_len: Session size too low \(6\)"),
    ([[5]] * 5, START, {"session_len": 40, "beam_width": 2}, "need 10 sequences, the cache holds"),
    ([[5], [6]], NEXT, {}, "input_ids: the session was started with 1 rows, not 2"),
    ([[5]], NEXT, {"beam_width": 2}, "beam_width: the session was started with 1, not 2"),
    ([[5]], NEXT, {"session_len": 60}, "session_len: the session was started with 70, not 60"),
    ([[5]], NEXT, {"memory_len": 40}, "memory_len: the session was started with none, not 40"),
    ([[5] * 59], NEXT, {}, r"conversation \(9\) \+ prompt \(59\) \+ request_output_len \(6\)"),
    ([[5]], NEXT, {"is_return_context_embeddings": True}, "is_return_context_embeddings: needs"),
    ([[5]], NEXT, {"num_prompt_log_probs": 1}, "num_prompt_log_probs: needs the whole prompt"),
    ([[5]], None, {"session_len": 40}, "session_len: the request is not part of a session"),
]


@pytest.mark.parametrize(
    ("prompts", "turn", "options", "message"), BAD_TURNS, ids=[each[3] for each in BAD_TURNS]
)
def test_a_refused_turn_leaves_the_session_as_it_was(
    engine,
    prompts,
    turn,
    options,
    message,
):
    kept = SessionTurn("kept", starts=True)
    engine.generate(begin(engine, [[3, 9, 4]]), turn=kept)
    if turn == NEXT:
        turn = SessionTurn("kept")
    with pytest.raises(RequestError, match=message):
        engine.generate(request_of(engine, prompts, **options), turn=turn)
    result = engine.generate(request_of(engine, [[5]]), turn=SessionTurn("kept", ends=True))
    assert len(result.request.rows[0].returned_ids) == 3 + 6 + 1
    assert engine.load().running == 0


@pytest.mark.parametrize("options", [{"beam_width": 2}, {"is_return_context_embeddings": True}])
def test_the_last_turn_ends_its_session_also_when_it_is_refused(engine, options):
    engine.generate(begin(engine, [[3, 9, 4]]), turn=START)
    with pytest.raises(RequestError):
        engine.generate(request_of(engine, [[5]], **options), turn=LAST)
    with pytest.raises(RequestError, match="session 7 is unknown"):
        engine.generate(request_of(engine, [[5]]), turn=NEXT)
    assert engine.load().running == 0


@pytest.mark.parametrize("turn", [NEXT, LAST])
def test_a_turn_during_another_is_refused_and_a_last_one_ends_the_session(engine, turn):
    asked = threading.Event()

    def wait(_step: GenerationStep) -> None:
        asked.wait(30)

    future = engine.submit(begin(engine, [[3, 9, 4]]), on_step=wait, turn=START)
    second = engine.submit(request_of(engine, [[5]]), turn=turn)
    asked.set()
    with pytest.raises(RequestError, match="session 7 is still being answered"):
        second.result(30)
    assert future.result(30).rows
    if turn.ends:
        with pytest.raises(RequestError, match="session 7 is unknown"):
            engine.generate(request_of(engine, [[5]]), turn=NEXT)
    else:
        assert engine.generate(request_of(engine, [[5]]), turn=LAST).rows
    assert engine.load().running == 0


def test_a_refused_last_turn_ends_a_session_whose_start_still_waits(engine):
    asked = threading.Event()

    def wait(_step: GenerationStep) -> None:
        asked.wait(30)

    other = engine.submit(request_of(engine, [[2]]), on_step=wait)
    start = engine.submit(begin(engine, [[3, 9, 4]]), turn=START)
    with pytest.raises(RequestError):
        engine.submit(request_of(engine, [[5]], is_return_context_embeddings=True), turn=LAST)
    asked.set()
    assert other.result(30).rows
    assert start.result(30).rows
    assert engine.load().running == 0


def test_a_cancelled_turn_ends_its_session(engine):
    steps: list[GenerationStep] = []
    engine.generate(begin(engine, [[3, 9, 4]]), turn=START)
    future = engine.submit(request_of(engine, [[5]], 50), on_step=steps.append, turn=NEXT)
    future.cancel()
    with pytest.raises(CancelledError):
        future.result(30)
    with pytest.raises(RequestError, match="session 7 is unknown"):
        engine.generate(request_of(engine, [[5]]), turn=NEXT)
    assert engine.load().running == 0


def test_requests_without_a_slot_next_to_sessions_are_refused(ft_dir):
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(max_lanes=2)) as engine:
        for number in (1, 2):
            engine.generate(begin(engine, [[3]]), turn=SessionTurn(number, starts=True))
        message = "sessions hold 2 of the 2 sequences that the cache holds; end one"
        with pytest.raises(EngineBusyError, match=message):
            engine.generate(begin(engine, [[3]]), turn=SessionTurn(3, starts=True))
        with pytest.raises(EngineBusyError, match=message):
            engine.generate(request_of(engine, [[3]]))
        assert engine.generate(request_of(engine, [[5]]), turn=SessionTurn(1, ends=True)).rows
        assert engine.generate(request_of(engine, [[3]])).rows


def test_sessions_that_exceed_the_blocks_are_refused(ft_dir):
    token_bytes = 2 * 2 * 4 * 6 * 4  # keys and values, layers, heads, head size, fp32
    options = EngineOptions(kv_block_tokens=8, kv_cache_bytes=(10 + 1) * 8 * token_bytes)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        with pytest.raises(RequestError, match="need 144 cached tokens, the cache holds"):
            engine.generate(begin(engine, [[3], [4]]), turn=START)
        engine.generate(begin(engine, [[3]]), turn=START)
        message = "sessions hold 1 of the 10 sequences, and 72 of the 80 tokens, that the cache"
        with pytest.raises(EngineBusyError, match=message):
            engine.generate(request_of(engine, [[3]], 12))
        assert engine.generate(request_of(engine, [[5]]), turn=LAST).rows
        assert engine.load().blocks_used == 0


def test_a_session_that_pauses_for_too_long_is_forgotten(ft_dir):
    options = EngineOptions(max_lanes=1, session_idle_s=0.2)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        engine.generate(begin(engine, [[3]]), turn=SessionTurn(1, starts=True))
        deadline = time.monotonic() + 30
        while True:
            try:
                engine.generate(request_of(engine, [[3]]))
                break
            except EngineBusyError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with pytest.raises(RequestError, match="session 1 is unknown"):
            engine.generate(request_of(engine, [[5]]), turn=SessionTurn(1))


def test_a_session_that_was_only_started_makes_room_and_others_stay(ft_dir, monkeypatch):
    monkeypatch.setattr(sessions, "ABANDONED_S", 0.1)
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(max_lanes=2)) as engine:
        engine.generate(begin(engine, [[3]]), turn=SessionTurn(1, starts=True))
        engine.generate(request_of(engine, [[5]]), turn=SessionTurn(1))
        engine.generate(begin(engine, [[3]]), turn=SessionTurn(2, starts=True))
        time.sleep(0.2)
        assert engine.generate(begin(engine, [[3]]), turn=SessionTurn(3, starts=True)).rows
        with pytest.raises(RequestError, match="session 2 is unknown"):
            engine.generate(request_of(engine, [[5]]), turn=SessionTurn(2))
        assert engine.generate(request_of(engine, [[5]]), turn=SessionTurn(1, ends=True)).rows
