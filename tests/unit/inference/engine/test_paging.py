"""Sequences share the cache's blocks: none is lost or has two owners, and no answer changes."""

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_scripts.families.layout.architecture import Rotary
from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.decoding.sampler import Sampler
from inference.decoding.sampling_params import SamplingParams
from inference.engine.blocks import BlockPool
from inference.engine.planned_step import GeneratingStep
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import OnStep, RunningRequest, make_sequence
from inference.engine.sequence_cache import SequenceCache
from inference.engine.step_budget import ChunkSize
from inference.model.kv_cache import WIPE
from inference.model.rotary import position_shift
from inference.ranks.base import StepResult
from inference.ranks.plan import StepPlan
from tests.unit.inference.engine.fake_ranks import FakeRanks, next_token

VOCAB, END = 50, 13
BLOCKS, SIZE, SLOTS = 24, 4, 6
START = 1  # before the tokens of a sampler that has an encoder
WHOLE = 200  # tokens of a slot that is one block
STEP_S, TOKEN_S = 0.01, 0.0001  # of a simulated step, and of each of its tokens


class World:
    """A scheduler, ranks that keep tokens, and the loop between them.

    Without `blocks` each slot has one of its own.
    """

    def __init__(
        self,
        *,
        blocks: int = BLOCKS,
        slots: int = SLOTS,
        overlap: bool = False,
        encoder_layers: int = 0,
        bound_s: float = 0.1,
        rotary: Rotary | None = None,
    ) -> None:
        sampler = Sampler(vocab_size=VOCAB)
        self.pool = BlockPool(blocks=blocks or None, block_tokens=SIZE if blocks else WHOLE)
        self.blocks, self.slots, self.encodes = blocks, slots, encoder_layers > 0
        self.scheduler = Scheduler(
            sampler,
            SequenceCache(slots, self.pool, shares_prefixes=True, rotary=rotary),
            embedding_base=VOCAB,
            chunk_size=ChunkSize(bound_s),
            ranks_choose=overlap,
            encoder_layers=encoder_layers,
        )
        self.ranks = FakeRanks(
            slots=slots,
            blocks=blocks or 2 * slots + 1,
            block_tokens=SIZE if blocks else WHOLE,
            slot_blocks=blocks or 1,
            vocab_size=VOCAB,
            encoder_layers=encoder_layers,
        )
        self.under_way: tuple[GeneratingStep, StepResult] | None = None
        self.overlapped = 0
        self.now_s = 0.0
        self._arrivals = 0

    def add(
        self,
        prompt: Sequence[int],
        output_len: int,
        *,
        end_id: int = END,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> RunningRequest:
        ids = tuple(prompt)
        chosen = SamplingParams(end_id=end_id, **{"random_seed": 1, **options})
        context = (START,) if self.encodes else ids
        row = SequenceRequest(ids, output_len, chosen, context_ids=context, returned_ids=ids)
        self._arrivals += 1
        running = RunningRequest(
            GenerationRequest((row,), len(ids), encoder_decoder=self.encodes),
            *(Future(), self._arrivals, on_step),
        )
        running.waiting = [make_sequence(running, 0, row, vocab_size=VOCAB, table_rows={})]
        self.scheduler.add(running)
        return running

    def answer(self, request: RunningRequest) -> tuple[int, ...]:
        """Return the greedy answer to a request of one row."""
        (row,) = request.request.rows
        prompt = [*row.input_ids, START] if self.encodes else row.input_ids
        return answer(prompt, row.output_len, row.options.end_id)

    def turn(self) -> bool:
        """Plan and run a step as the engine's loop does; False if there was nothing to do."""
        step = self.scheduler.plan(under_way=self.under_way is not None)
        launched = None if step is None else (step, self.ranks.run(step.plan))
        busy = launched is not None or self.under_way is not None
        self.overlapped += launched is not None and self.under_way is not None
        if self.under_way is not None:
            self._finish(self.under_way)
        self.under_way = launched
        if launched is not None and not launched[0].overlaps:
            self._finish(launched)
            self.under_way = None
        return busy

    def _finish(self, launched: tuple[GeneratingStep, StepResult]) -> None:
        step, _ = launched
        decoded = sum(not chunk.is_prompt for chunk in step.chunks)
        seconds = STEP_S + TOKEN_S * (decoded + step.prompt_tokens)
        self.now_s += seconds
        self.scheduler.finish(*launched, seconds=seconds)

    def run(self) -> None:
        """Answer everything; all blocks must come back."""
        while self.turn():
            pass
        assert not self.scheduler.requests
        assert self.pool.free == self.blocks
        assert self.scheduler.load().running == 0


def answer(prompt: Sequence[int], output_len: int, end_id: int = END) -> tuple[int, ...]:
    """Return the greedy answer of `FakeRanks`' model."""
    tokens = list(prompt)
    for _ in range(output_len):
        tokens.append(next_token(tokens, VOCAB))
        if tokens[-1] == end_id:
            break
    return tuple(tokens[len(prompt) :])


def output_of(request: RunningRequest) -> tuple[int, ...]:
    (row,) = request.future.result(timeout=0).rows
    return row.output_ids[0]


# A request: prompt length, tokens wanted, steps before it comes, and how it chooses, or that its
# client leaves or has enough.
REQUESTS = st.lists(
    st.tuples(
        *(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9)),
        st.sampled_from(["", "k", "b", "p", "n", "d", "left", "enough"]),
    ),
    min_size=1,
    max_size=12,
)
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "k": {"top_k": 3},
    "b": {"beam_width": 2, "top_k": 3},
    "left": {},
    "enough": {"on_step": lambda _: True},
    "p": {"top_k": 2, "presence_penalty": 20.5, "bad_words": ((8,), (21,), (0,))},
    "n": {"top_k": 0, "top_p": 0.9, "temperature": 3.0, "stop_words": ((4, 5),)},
    # The host chooses the tokens.
    "d": {"top_k": 0, "top_p": 0.9, "top_p_decay": 0.9, "bad_words": ((3, 4),)},
}


@settings(max_examples=10)
@given(
    requests=REQUESTS,
    overlap=st.booleans(),
    seed=st.integers(0, 99),
    encoder_layers=st.sampled_from([0, 3]),
)
def test_every_answer_is_that_of_a_request_alone(requests, overlap, seed, encoder_layers):
    draw = random.Random(seed)
    # Passes of the encoder take several steps.
    kind_of_world: dict[str, Any] = {"encoder_layers": encoder_layers, "bound_s": 1e-3}
    world = World(overlap=overlap, **kind_of_world)
    sent: list[tuple[RunningRequest, str]] = []
    for prompt_len, output_len, steps, kind in requests:
        for _ in range(steps):
            world.turn()
        for running in [running for running, kind in sent if kind == "left"]:
            running.future.cancel()
        width = 2 if kind == "b" else 1
        # All that beams can need must fit.
        prompt_len, output_len = prompt_len // width + 1, output_len // width + 1
        # Many prompts begin alike.
        header = [7] * draw.randrange(prompt_len)
        prompt = header + [draw.randrange(VOCAB) for _ in range(prompt_len - len(header))]
        sent.append((world.add(prompt, output_len, **KINDS[kind]), kind))
    world.run()
    for running, kind in sent:
        (row,) = running.request.rows
        if running.future.cancelled():
            continue
        if kind in ("", "enough"):
            found, whole = output_of(running), world.answer(running)
            assert found == (whole[: len(found)] if kind and found else whole)
            continue
        alone = World(overlap=False, **kind_of_world)
        again = alone.add(row.input_ids, row.output_len, **KINDS[kind])
        alone.run()
        assert output_of(running) == output_of(again)


def test_beams_hold_their_prompt_once():
    world = World(blocks=200)
    prompt = [draw * 31 % VOCAB for draw in range(512)]
    for _ in range(2):
        running = world.add(prompt, 32, beam_width=4, end_id=VOCAB)
        # Each beam's blocks of 31 tokens of its answer; the last one is never cached.
        most = 512 // SIZE + 4 * 8
        while not running.future.done():
            assert world.turn()
            assert world.scheduler.load().blocks_used in (0, most)
    # All but the block that holds the prompt's last token.
    assert world.scheduler.load().shared_tokens == 512 - SIZE
    world.run()


def wiped(step: GeneratingStep) -> list[tuple[int, int]]:
    """Return slot and index of each token that a step wipes."""
    spans = [move[1:] for move in step.plan.moves if move[0] == WIPE]
    return [(slot, place) for slot, start, stop in spans for place in range(start, stop)]


def test_a_failed_beam_search_wipes_each_block_once():
    world = World()
    other = world.add([3, 1, 4, 1, 5, 9], 9)
    world.turn()
    failing = world.add([3, 1, 4, 1, 5, 9], 9, beam_width=3)
    for _ in range(4):
        world.turn()
    (row,) = failing.active
    slots, end = row.slots, row.table.held
    row.answer.fail()
    world.scheduler.drop(failing)
    step = world.scheduler.plan()
    assert step is not None
    # The neighbour holds the first block; the beams share others, and each has a last one.
    assert {slot for slot, place in wiped(step) if place == end - 1} == {*slots}
    assert {place for _, place in wiped(step)} == {*range(SIZE, end)}
    world.scheduler.finish(step, world.ranks.run(step.plan), seconds=0.01)
    world.run()
    assert output_of(other) == answer([3, 1, 4, 1, 5, 9], 9)


def test_a_request_that_is_encoded_and_joins_takes_no_token_from_others():
    world = World(blocks=60, overlap=True, encoder_layers=4, bound_s=1e-3)
    running = world.add([3, 1, 4], 30, end_id=VOCAB)
    for _ in range(9):
        world.turn()
    late = world.add([token % VOCAB for token in range(90)], 9, end_id=VOCAB)
    layers = []
    while not late.future.done():
        overlapped = world.overlapped
        assert world.turn()
        assert world.under_way is not None
        step, _ = world.under_way
        layers.append(step.plan.encoder_layers)
        # Steps of one token for each sequence, planned one ahead: graphs on a GPU.
        assert world.overlapped == overlapped + 1
        assert [segment.tokens for segment in step.plan.segments] == [1] * len(step.chunks)
        assert step.chunks[0].sequence.owner is running
    assert [count for count in layers if count] == [2, 2]
    world.run()
    assert output_of(running) == world.answer(running)
    assert output_of(late) == world.answer(late)


def test_the_newest_row_is_preempted_and_the_oldest_never():
    world = World(blocks=12, overlap=False)
    oldest, newest = (world.add(ids, 40, end_id=VOCAB) for ids in ([1, 2, 3], [4, 5, 6]))
    news: list[list[list[int]]] = []
    newest.on_step, newest.only_tokens = news.append, True
    gave_way = 0
    while not oldest.future.done():
        assert world.turn()
        assert len(oldest.waiting) == 0
        gave_way += len(newest.waiting)
    assert gave_way
    world.run()
    whole = answer([4, 5, 6], 40, VOCAB)
    assert output_of(newest) == whole
    assert [token for (new,) in news for token in new] == [*whole[:-1]]


ORIGINAL = 10
LONGROPE = Rotary(dims=2, kind="longrope", scaling={"original_max_position_embeddings": ORIGINAL})


@pytest.mark.parametrize("blocks", [0, BLOCKS])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_exceeds_the_original_length_computes_its_keys_again(overlap, blocks):
    world = World(overlap=overlap, blocks=blocks, rotary=LONGROPE)
    shifts: dict[int, list[int]] = {}  # of each slot's tokens
    run = world.ranks.run

    def watched(plan: StepPlan) -> StepResult:
        for each in plan.segments:
            kept = [] if each.start == 0 else shifts[each.slot]
            assert len(kept) == each.start, "keys of other positions are shared"
            shifts[each.slot] = [*kept, *[each.shift] * each.tokens]
            assert set(shifts[each.slot]) == {each.shift}
            if each.tokens == 1:  # a prompt that exceeds the length has its shift from the start
                assert each.shift == position_shift(LONGROPE, each.stop)
        return run(plan)

    world.ranks.run = watched  # type: ignore[method-assign]
    sent = [
        world.add([(3 * place + 7 * row) % VOCAB for place in range(count)], more, end_id=VOCAB)
        for row, (count, more) in enumerate([(6, 3), (6, 12), (9, 2), (10, 3), (11, 4)])
    ]
    world.run()
    for request in sent:
        assert output_of(request) == world.answer(request)


@pytest.mark.parametrize(("output_len", "is_long"), [(8, False), (9, True)])
def test_beams_that_may_exceed_the_original_length_do_so_from_the_start(output_len, is_long):
    world = World(rotary=LONGROPE)
    world.add([1, 2, 3], output_len, beam_width=2, end_id=VOCAB)
    step = world.scheduler.plan()
    assert step is not None
    assert [segment.shift > 0 for segment in step.plan.segments] == [is_long]


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_beginnings_are_computed_once(overlap):
    header = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    world = World(overlap=overlap)
    first = world.add([*header, 8], 5)
    for _ in range(3):
        world.turn()
    others = [world.add([*header, 9], 5), world.add(header[:5], 5), world.add(header[:8], 5)]
    world.run()
    for running in (first, *others):
        (row,) = running.request.rows
        assert output_of(running) == answer(row.input_ids, 5)
    # Two full blocks, one, and one: the last token is computed in any case.
    assert world.scheduler.load().shared_tokens == (2 + 1 + 1) * SIZE
    late = world.add([*header, 9, 9], 5)
    world.run()
    assert output_of(late) == answer([*header, 9, 9], 5)
    assert world.scheduler.load().shared_tokens == (2 + 1 + 1 + 2) * SIZE


@pytest.mark.parametrize("bound_s", [0.1, 1e-3])  # all in one step, and a chunk at a time
@pytest.mark.parametrize("overlap", [False, True])
def test_equal_beginnings_that_come_together_are_computed_once(overlap, bound_s):
    header = [(7 * number) % VOCAB for number in range(6 * SIZE + 1)]
    world = World(overlap=overlap, bound_s=bound_s)
    sent = [world.add([*header, 20 + number], 3) for number in range(4)]
    planned = world.scheduler.plan
    lengths = []

    def plan(*, under_way: bool = False) -> GeneratingStep | None:
        step = planned(under_way=under_way)
        lengths.append(0 if step is None else step.prompt_tokens)
        return step

    world.scheduler.plan = plan  # type: ignore[method-assign]
    world.run()
    assert [output_of(running) for running in sent] == [world.answer(each) for each in sent]
    assert world.scheduler.load().shared_tokens == 3 * 6 * SIZE
    assert sum(lengths) == len(header) + 1 + 3 * 2


def test_values_that_are_not_finite_are_wiped_where_they_are_not_shared():
    header = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    world = World(overlap=False)
    failing = world.add([*header, 8], 9)
    for _ in range(2):
        world.turn()
    other = world.add([*header, 9], 5)
    world.turn()
    (row,) = failing.active
    (slot,), end = row.slots, row.table.held
    row.answer.fail()
    world.scheduler.drop(failing)
    step = world.scheduler.plan()
    assert step is not None
    assert wiped(step) == [(slot, place) for place in range(2 * SIZE, end)]
    world.scheduler.finish(step, world.ranks.run(step.plan), seconds=0.01)
    world.run()
    assert output_of(other) == answer([*header, 9], 5)


@pytest.mark.parametrize("blocks", [0, BLOCKS])
def test_a_prompt_that_is_given_up_halfway_is_wiped(blocks):
    world = World(blocks=blocks, bound_s=1e-6)
    neighbour = world.add([3, 1, 4], 30)
    world.turn()
    prompt = [5, 9, 2, 6] * 18  # longer than a step takes
    left = world.add(prompt, 9)
    world.turn()
    (row,) = left.active
    (slot,), end = row.slots, row.table.held
    assert 0 < end < len(prompt)
    assert left.future.cancel()
    step = world.scheduler.plan()
    assert step is not None
    assert wiped(step) == [(slot, place) for place in range(end)]
    world.scheduler.finish(step, world.ranks.run(step.plan), seconds=0.01)
    world.run()
    assert output_of(neighbour) == answer([3, 1, 4], 30)


def test_a_request_that_is_given_up_before_its_first_step_wipes_nothing():
    world = World()
    world.add([3, 1, 4], 30)
    world.turn()
    left = world.add([3, 1, 4, 1, 5], 9)
    world.scheduler._admit()
    assert left.active
    assert left.future.cancel()
    step = world.scheduler.plan()  # the table of ranks still names the blocks of an earlier row
    assert step is not None
    assert not step.plan.moves


def test_a_common_beginning_takes_its_blocks_once():
    header = [7] * 2 * SIZE
    world = World(blocks=2 + 3, overlap=False)
    sent = [world.add([*header, number], SIZE - 1) for number in range(3)]
    world.turn()
    assert [len(running.active) for running in sent] == [1, 0, 0]
    world.turn()
    assert [len(running.active) for running in sent] == [1, 1, 1]  # three blocks each, alone
    world.run()
    for number, running in enumerate(sent):
        assert output_of(running) == answer([*header, number], SIZE - 1)


def test_results_of_a_failed_request_are_not_shared():
    world = World(overlap=False)
    failing = world.add([3, 1, 4, 1, 5, 9], 30)
    world.turn()
    world.scheduler.drop(failing)
    world.add([3, 1, 4, 1, 5, 9], 5)
    world.run()
    assert world.scheduler.load().shared_tokens == 0


@pytest.mark.soak
@pytest.mark.parametrize("encoder_layers", [0, 6])
def test_requests_that_arrive_at_random_are_answered_in_time(soak, encoder_layers):
    """Arrivals at four fifths of the rate that the simulated device can serve, at most 10,000."""
    draw = random.Random(3)
    world = World(blocks=480, slots=32, overlap=True, encoder_layers=encoder_layers)
    count = min(300 * soak, 10_000)
    asked = [(draw.randint(2, 120), draw.randint(1, 40)) for _ in range(count)]
    # Full steps give a token to each of 32 sequences; prompts share the steps.
    busy_s = sum(prompt * TOKEN_S + tokens * (STEP_S / 32 + TOKEN_S) for prompt, tokens in asked)
    arrivals = itertools.accumulate(draw.expovariate(0.8 * count / busy_s) for _ in asked)
    sent: list[tuple[RunningRequest, float, list[float]]] = []
    for at, (prompt_len, tokens) in zip(arrivals, asked, strict=True):
        while world.now_s < at and world.turn():
            pass
        world.now_s = max(world.now_s, at)
        prompt = [draw.randrange(VOCAB) for _ in range(prompt_len)]
        frames: list[float] = []
        clock = partial(_note_time, world, frames)
        running = world.add(prompt, tokens, end_id=VOCAB, on_step=clock)
        running.future.add_done_callback(clock)
        sent.append((running, at, frames))
    world.run()
    for running, _, _ in sent:
        assert output_of(running) == world.answer(running)
    first_s = sorted(frames[0] - at for _, at, frames in sent)
    assert first_s[count // 2] < 0.15
    assert first_s[99 * count // 100] < 1.5
    assert first_s[-1] < 2.0


def _note_time(world: World, frames: list[float], _: object) -> None:
    frames.append(world.now_s)
