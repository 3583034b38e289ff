"""The pool of blocks: none is lost, and no slot writes where another one reads."""

import itertools
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.decoding.sampling_params import SamplingParams
from inference.engine.blocks import BlockPool, max_blocks, prefix_hashes
from inference.model.kv_cache import Move
from inference.model.step import Segment
from inference.ranks.plan import StepPlan
from tests.unit.inference.engine.fake_ranks import FakeRanks

BLOCKS, SIZE, SLOTS, MOST_TOKENS = 24, 4, 6, 40


class BlocksOfSlots(RuleBasedStateMachine):
    """Slots take, share, reserve, fork and release blocks in any order, and keep their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(blocks=BLOCKS, block_tokens=SIZE)
        self.ranks = FakeRanks(
            slots=SLOTS, blocks=BLOCKS, block_tokens=SIZE, slot_blocks=BLOCKS, vocab_size=1
        )
        self.tokens: dict[int, list[int]] = {}  # of each slot
        self.tables: dict[tuple[int, int], int] = {}
        self.beams: dict[tuple[int, ...], tuple[int, int]] = {}  # slots -> blocks, most tokens
        self.fresh = itertools.count(100)

    def _run(self, written: dict[int, list[int]], moves: Sequence[Move] = ()) -> None:
        """Run a step that adds tokens to slots."""
        entries = self.pool.take_entries()
        self.tables |= {(slot, place): block for slot, place, block in entries}
        segments = [
            Segment(slot, len(self.tokens.get(slot, ())), len(ids)) for slot, ids in written.items()
        ]
        ids = [token for each in written.values() for token in each]
        self.ranks.run(StepPlan(ids, tuple(segments), [], moves=tuple(moves), entries=entries))
        for slot, each in written.items():
            self.tokens.setdefault(slot, []).extend(each)

    def _is_beam(self, slot: int) -> bool:
        return any(slot in slots for slots in self.beams)

    def _new(self, count: int) -> list[int]:
        return list(itertools.islice(self.fresh, max(count, 0)))

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, MOST_TOKENS))
    def extend(self, slot: int, count: int) -> None:
        """A slot of its own grows, if it can."""
        if self._is_beam(slot):
            return
        if self.pool.count(count) - len(self.pool._held.get(slot, ())) > self.pool.free:
            return
        assert self.pool.extend(slot, count) >= count
        self._run({slot: self._new(count - len(self.tokens.get(slot, ())))})

    @rule(
        first=st.integers(0, SLOTS - 1),
        prompt=st.lists(st.integers(0, 1), max_size=5),
        width=st.integers(1, 3),
        answer_len=st.integers(0, 9),
    )
    def begin(self, first: int, prompt: list[int], width: int, answer_len: int) -> None:
        """A slot, perhaps with beams, takes a prompt of full blocks, and shares what it can."""
        slots = tuple(range(first, min(first + width, SLOTS)))
        names = prefix_hashes([token for token in prompt for _ in range(SIZE)], SIZE)
        assert len(names) == len(prompt)
        length = len(prompt) * SIZE
        options, ids = SamplingParams(end_id=0, beam_width=len(slots)), (0,) * length
        row = SequenceRequest(ids, answer_len + 1, options, context_ids=ids)
        most = max_blocks(GenerationRequest((row,), length), row, SIZE)
        if any(slot in self.tokens or self._is_beam(slot) for slot in slots):
            return
        if most - self.pool.used(names) > self.pool.free:
            return
        shared = self.pool.share(first, 0, names) * SIZE
        if width > 1:
            self.pool.reserve(slots, most)
            self.beams[slots] = (most, length + answer_len)
        self.pool.extend(first, length)
        self.tokens[first] = [token for token in prompt for _ in range(SIZE)][:shared]
        self._run({first: [token for token in prompt for _ in range(SIZE)][shared:]})
        for nth, name in enumerate(names):
            self.pool.register(first, nth, name)

    @precondition(lambda self: self.beams)
    @rule(
        nth=st.integers(0, SLOTS),
        steps=st.lists(st.tuples(*[st.integers(-1, 2)] * 3), min_size=1, max_size=9),
    )
    def fork(self, nth: int, steps: list[tuple[int, ...]]) -> None:
        """Beams continue from any of them, -1 from none."""
        slots = sorted(self.beams)[nth % len(self.beams)]
        for parents in steps:
            running = [slot for slot in slots if slot in self.tokens]
            held = len(self.tokens[running[0]])
            pairs = zip(slots, parents, strict=False)
            sources = {slot: running[nth % len(running)] for slot, nth in pairs if nth >= 0}
            if held == self.beams[slots][1] or not sources:
                continue
            moves = self.pool.fork(sources, held)
            copied = held % SIZE * (len(sources) - len(set(sources.values())))
            assert sum(stop - start for _, _, start, stop in moves) == copied
            before = {slot: self.tokens.pop(slot) for slot in running}
            self.tokens |= {slot: list(before[source]) for slot, source in sources.items()}
            self._run({slot: self._new(1) for slot in sources}, moves)
            self.every_block_is_free_held_or_reserved()

    @precondition(lambda self: self.beams)
    @rule(data=st.data(), count=st.integers(1, MOST_TOKENS))
    def go_on_alone(self, data: st.DataObject, count: int) -> None:
        """The only one of some beams that is left reads further tokens."""
        slots = data.draw(st.sampled_from(sorted(self.beams)))
        running = [slot for slot in slots if slot in self.tokens]
        held = len(self.tokens[running[0]])
        if len(running) == 1:
            count = min(count, self.beams[slots][1] - held)
            self.pool.extend(running[0], held + count)
            self._run({running[0]: self._new(count)})

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        """A slot ends, or all of some beams."""
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        slots = next((slots for slots in self.beams if slot in slots), (slot,))
        blocks = {slot: self._blocks(slot) for slot in slots}
        own = self.pool.release(slots, forget=forget)
        self.beams.pop(slots, None)
        for slot in slots:
            self.tokens.pop(slot, None)
        left = {block for slot in self.tokens for block in self._blocks(slot)}
        wiped = [
            block
            for slot, first, stop in own
            for block in blocks[slot][first // SIZE : stop // SIZE]
        ]
        assert sorted(wiped) == sorted(set().union(*blocks.values()) - left)

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(1, MOST_TOKENS))
    def end_before_the_next_step(self, slot: int, tokens: int) -> None:
        """A slot that ends at once leaves no table entry behind."""
        if slot in self.tokens or self._is_beam(slot):
            return
        if self.pool.count(tokens) > self.pool.free:
            return
        self.pool.extend(slot, tokens)
        self.pool.release([slot])
        assert not self.pool.take_entries()

    def _blocks(self, slot: int) -> list[int]:
        count = self.pool.count(len(self.tokens.get(slot, ())))
        return [self.tables[slot, place] for place in range(count)]

    @invariant()
    def every_block_is_free_held_or_reserved(self) -> None:
        """No block is lost, and no slot writes where another one reads."""
        held = {block for slot in self.tokens for block in self._blocks(slot)}
        promised = sum(
            most - len({block for slot in slots for block in self._blocks(slot)})
            for slots, (most, _) in self.beams.items()
        )
        assert len(held) + self.pool.free + promised == BLOCKS
        assert self.pool.free >= 0
        assert self.pool.reserved == sum(most for most, _ in self.beams.values())
        for slot, tokens in self.tokens.items():
            assert self.ranks.tokens(slot, len(tokens)) == tokens


TestBlocksOfSlots = BlocksOfSlots.TestCase
TestBlocksOfSlots.settings = settings(max_examples=30, stateful_step_count=25)
