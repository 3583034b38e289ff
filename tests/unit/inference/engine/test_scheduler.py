"""Order of the scheduler: fairness, lock step, chunks, cancellation; logits are made up."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.decoding.sampler import Sampler
from inference.decoding.sampling_params import SamplingParams
from inference.engine.blocks import BlockPool
from inference.engine.planned_step import GeneratingStep
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import GenerationStep, RunningRequest, make_sequence
from inference.engine.sequence_cache import SequenceCache
from inference.engine.step_budget import ChunkSize
from inference.ranks.base import StepResult
from tests.conftest import present

VOCAB = 20
END = 19


def make_scheduler(slots: int) -> Scheduler:
    sampler = Sampler(vocab_size=VOCAB)
    pool = BlockPool(blocks=None, block_tokens=512)
    cache = SequenceCache(slots, pool, shares_prefixes=False, rotary=None)
    return Scheduler(sampler, cache, embedding_base=VOCAB, chunk_size=ChunkSize(0.1))


def make_running(
    lengths: Sequence[int],
    *,
    prompt_lens: Sequence[int] | None = None,
    arrival: int = 0,
    beam_width: int = 1,
    lock_step: bool = False,
) -> RunningRequest:
    options = SamplingParams(end_id=END, beam_width=beam_width)
    rows = []
    for length, prompt_len in zip(lengths, prompt_lens or [3] * len(lengths), strict=True):
        ids = tuple(1 + t % 7 for t in range(prompt_len))
        rows.append(SequenceRequest(ids, length, options, context_ids=ids, returned_ids=ids))
    running = RunningRequest(GenerationRequest(tuple(rows), 3), Future(), arrival)
    running.lock_step = lock_step
    running.waiting = [
        make_sequence(running, index, row, vocab_size=VOCAB, table_rows={})
        for index, row in enumerate(rows)
    ]
    return running


def run(scheduler: Scheduler, step: GeneratingStep, *, seconds: float = 0.001) -> None:
    logits = torch.randn(len(step.plan.output_rows), VOCAB)
    logits[:, END] = -100
    scheduler.finish(step, StepResult(logits, None), seconds=seconds)


def advance(scheduler: Scheduler) -> None:
    step = scheduler.plan()
    assert step is not None
    run(scheduler, step)


def run_all(scheduler: Scheduler) -> list[GeneratingStep]:
    steps = []
    while step := scheduler.plan():
        steps.append(step)
        run(scheduler, step)
    return steps


def test_a_small_request_does_not_wait_for_all_rows_of_a_large_one():
    scheduler = make_scheduler(2)
    large = make_running([5] * 10, arrival=1)
    small = make_running([5], arrival=2)
    scheduler.add(large)
    scheduler.add(small)
    steps = 0
    while not small.future.done():
        advance(scheduler)
        steps += 1
    assert steps <= 2 * 5
    assert sum(result is not None for result in large.results) <= 2
    run_all(scheduler)
    assert len(large.future.result().rows) == 10
    assert scheduler.load().running == 0


def test_the_lowest_free_slots_are_taken_first():
    scheduler = make_scheduler(5)
    scheduler.add(make_running([1, 9, 9]))
    advance(scheduler)  # the first row ends
    second = make_running([9, 9, 9], arrival=1)
    scheduler.add(second)
    advance(scheduler)
    assert [row.slots for row in second.active] == [[0], [3], [4]]


def test_wide_requests_are_not_overtaken_for_ever():
    scheduler = make_scheduler(4)
    scheduler.add(make_running([9], arrival=1))
    wide = make_running([3], arrival=2, beam_width=4)
    scheduler.add(wide)
    for arrival in range(3, 30):
        scheduler.add(make_running([9], arrival=arrival))
        advance(scheduler)
    assert wide.future.done()


def test_prompts_are_cut_to_the_bound_while_others_decode():
    scheduler = make_scheduler(2)
    scheduler.add(make_running([200], arrival=1))
    advance(scheduler)
    scheduler.add(make_running([1], prompt_lens=[600], arrival=2))
    tokens = []
    for _ in range(20):
        step = scheduler.plan()
        assert step is not None
        if step.prompt_tokens:
            tokens.append(step.prompt_tokens)
        run(scheduler, step, seconds=0.001 * max(step.prompt_tokens, 1))  # 1 ms a token
    assert sum(tokens) == 600
    assert max(tokens[1:]) == 100  # 0.1 s at 1 ms each
    assert len(present(step).plan.ids) == 1


def test_a_short_prompt_overtakes_long_ones_that_still_get_on():
    scheduler = make_scheduler(4)
    long = [make_running([1], prompt_lens=[5000], arrival=n) for n in (1, 2)]
    for running in long:
        scheduler.add(running)
    advance(scheduler)
    short = make_running([1], prompt_lens=[40], arrival=3)
    scheduler.add(short)
    step = scheduler.plan()
    assert step is not None
    pieces = {id(chunk.sequence.owner): len(chunk.ids) for chunk in step.chunks}
    run(scheduler, step)
    assert short.future.done()
    # The oldest loses no more than half of a step to whoever comes later.
    assert pieces[id(long[0])] == step.prompt_tokens // 2
    run_all(scheduler)
    assert all(running.future.done() for running in long)


def test_an_oldest_prompt_that_ends_leaves_its_half_of_a_step_to_the_others():
    scheduler = make_scheduler(8)
    for arrival in range(8):
        scheduler.add(make_running([1], prompt_lens=[40], arrival=arrival))
    step = scheduler.plan()
    assert step is not None
    assert step.prompt_tokens == 256  # four times the first step's 64: no row decodes


def test_rows_in_lock_step_begin_together():
    scheduler = make_scheduler(4)
    frames: list[GenerationStep] = []
    running = make_running([4, 4, 4], prompt_lens=[1, 300, 40], lock_step=True)
    running.on_step = frames.append
    scheduler.add(make_running([50], arrival=1))
    scheduler.add(running)
    run_all(scheduler)
    assert len(frames) == 3
    for number, frame in enumerate(frames, start=1):
        assert [row and len(row.output_ids[0]) for row in frame.rows] == [number] * 3


def test_beams_share_the_prompt_and_then_follow_their_parents():
    scheduler = make_scheduler(3)
    scheduler.add(make_running([5], prompt_lens=[7], beam_width=3))
    first, second, *later = run_all(scheduler)
    assert len(first.plan.ids) == 7
    assert second.plan.moves == ((0, 1, 0, 7), (0, 2, 0, 7))
    assert len(second.plan.ids) == 3
    for number, step in enumerate(later, start=8):
        assert all(move[2:] == (7, number) for move in step.plan.moves)
