"""Plans survive packing; prompts are cut to keep the stated bound."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from inference.engine.step_budget import ChunkSize
from inference.model.step import Segment
from inference.ranks.generator_rank import split_segments
from inference.ranks.plan import Command, EncoderRow, StepPlan, pack_message, unpack_message

PLAN = StepPlan(
    ids=[5, 6, 7, 90_000],
    segments=(Segment(0, 3, 1), Segment(4, 0, 3, shift=7)),
    output_rows=[0, 3],
    moves=((1, 2, 0, 9), (-1, 3, 0, 4)),
    has_virtual=True,
    embedding_rows=2,
    pool=True,
    encoder_rows=(EncoderRow(2, (4, 5), 1), EncoderRow(1)),
    encoder_ids=[8, 9, 10],
    attentions=True,
    encoder_layers=3,
    choices=[(4, -1), (-1, 9)],
    with_logits=True,
    draws=[(0.3, 0, 0.9, 1e-6, 1, 2**-32), (1, 1, 1, 0, 0, 1)],
    penalties=[(1.3, 0, 0.5), (0, 0, 0)],
    marks=[(4, [np.array([7, 90]), np.array([5]), np.array([-np.inf], np.float32)])],
)


def test_plan_survives_packing():
    plan = unpack_message(pack_message(PLAN))
    assert isinstance(plan, StepPlan)
    assert plain(plan) == plain(PLAN)


def plain(plan: StepPlan) -> Any:
    """Return the values of a plan, whatever sequences hold them."""
    return json.loads(json.dumps(asdict(plan), default=lambda array: array.tolist()))


@pytest.mark.parametrize("command", [Command("ping"), Command("exchange", "/models/2")])
def test_commands_survive_packing(command):
    assert unpack_message(pack_message(command)) == command


def test_segments_are_cut_into_even_runs():
    segments = [Segment(0, 9, 1), Segment(2, 0, 6), Segment(3, 4, 1)]
    assert split_segments(segments, 2) == [
        [Segment(0, 9, 1), Segment(2, 0, 3)],
        [Segment(2, 3, 3), Segment(3, 4, 1)],
    ]
    assert split_segments(segments, 1) == [segments]


def test_chunks_follow_the_measured_speed():
    chunk = ChunkSize(0.5)
    chunk.observe(tokens=100, seconds=0.1)
    assert chunk.tokens(with_decodes=True) == 500
    assert chunk.tokens(with_decodes=False) > 500
    for _ in range(2):
        chunk.observe(tokens=100, seconds=1.0)
    assert chunk.tokens(with_decodes=True) == 50
    for _ in range(2):
        chunk.observe(tokens=100, seconds=100.0)
    assert chunk.tokens(with_decodes=True) == 16


def test_one_slow_step_does_not_make_prompts_crawl():
    chunk = ChunkSize(0.5)
    chunk.observe(tokens=100, seconds=100.0)  # such as the first of all, which compiles
    assert chunk.tokens(with_decodes=True) == 16
    chunk.observe(tokens=100, seconds=0.1)
    assert chunk.tokens(with_decodes=True) == 500
    chunk.observe(tokens=100, seconds=0.1)
    chunk.observe(tokens=100, seconds=100.0)
    assert chunk.tokens(with_decodes=True) == 500


def test_steps_with_few_prompt_tokens_teach_nothing():
    chunk = ChunkSize(0.5)
    chunk.observe(tokens=100, seconds=0.1)
    chunk.observe(tokens=2, seconds=5.0)
    assert chunk.tokens(with_decodes=True) == 500
