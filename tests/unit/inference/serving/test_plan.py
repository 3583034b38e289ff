"""Plans survive packing; prompts are cut to keep the stated bound."""

from __future__ import annotations

from inference.model.step import Segment
from inference.serving.chunking import ChunkSize
from inference.serving.plan import Command, StepPlan, command_of, pack, pack_command, unpack
from inference.serving.rank import split_segments


def test_plan_survives_packing() -> None:
    plan = StepPlan(
        ids=[5, 6, 7, 90_000],
        segments=(Segment(0, 3, 1), Segment(4, 0, 3)),
        output_rows=[0, 3],
        moves=((1, 2, 0, 9), (-1, 3, 0, 4)),
        has_virtual=True,
        embedding_rows=2,
        pool=True,
    )
    packed = pack(plan)
    assert command_of(packed) == Command.STEP
    assert int(packed[1]) == len(packed)
    received = unpack(packed)
    assert received.ids.tolist() == plan.ids
    assert received.output_rows.tolist() == plan.output_rows
    assert (received.segments, received.moves) == (plan.segments, plan.moves)
    assert (received.has_virtual, received.embedding_rows, received.pool) == (True, 2, True)


def test_commands_need_no_plan() -> None:
    for command in Command:
        assert command_of(pack_command(command)) == command


def test_segments_are_cut_into_even_runs() -> None:
    segments = [Segment(0, 9, 1), Segment(2, 0, 6), Segment(3, 4, 1)]
    assert split_segments(segments, 2) == [
        [Segment(0, 9, 1), Segment(2, 0, 3)],
        [Segment(2, 3, 3), Segment(3, 4, 1)],
    ]
    assert split_segments(segments, 1) == [segments]


def test_chunks_follow_the_measured_speed() -> None:
    chunk = ChunkSize(0.5)
    chunk.observe(tokens=100, seconds=0.1)
    assert chunk.tokens(somebody_waits=True) == 500
    assert chunk.tokens(somebody_waits=False) > 500
    chunk.observe(tokens=100, seconds=1.0)  # slower is believed at once
    assert chunk.tokens(somebody_waits=True) == 50
    chunk.observe(tokens=100, seconds=100.0)
    assert chunk.tokens(somebody_waits=True) == 16


def test_steps_with_few_prompt_tokens_teach_nothing() -> None:
    chunk = ChunkSize(0.5)
    chunk.observe(tokens=100, seconds=0.1)
    chunk.observe(tokens=2, seconds=5.0)
    assert chunk.tokens(somebody_waits=True) == 500
