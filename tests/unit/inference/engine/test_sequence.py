"""The states of sequences: walks of random requests take every transition, and no other."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from inference.engine.sequence import TRANSITIONS, RunningRequest, RunningSequence, SequenceStatus
from tests.unit.inference.engine.test_paging import LONGROPE, VOCAB, World

ROOT = Path(__file__).resolve().parents[4]
Transition = tuple[SequenceStatus, SequenceStatus]


def walk(world: World, chance: random.Random) -> list[RunningRequest]:
    """Send requests, some of which are cancelled; check all of them between steps."""
    sent: list[RunningRequest] = []
    for _ in range(40):
        beams = chance.choice((1, 1, 1, 2))
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40 // beams))]
        count = chance.randint(1, 30 // beams)
        sent.append(world.add(prompt, count, beam_width=beams, end_id=chance.choice((13, VOCAB))))
        for _ in range(chance.randint(0, 3)):
            world.turn()
            for request in world.scheduler.requests:
                check(request)
        if chance.random() < 0.3:
            chance.choice(sent).future.cancel()
        running = [request for request in world.scheduler.requests if request.active]
        if running and chance.random() < 0.2:  # the newest: many are in their prompts
            running[-1].future.cancel()
    world.run()
    return sent


def check(request: RunningRequest) -> None:
    """Check what the state of each sequence of a running request says of it."""
    for sequence in request.waiting:
        assert sequence.status.value in ("waiting", "preempted")
        assert not sequence.slots
    for sequence in request.active:
        assert sequence.status.value in ("encode", "prefill", "decode")
        assert len(sequence.slots) == request.request.beam_width
        is_decoding = sequence.status is SequenceStatus.DECODE
        assert is_decoding <= (sequence.table.cached >= sequence.prompt_len)
    assert not any(sequence.is_over for sequence in [*request.waiting, *request.active])


def test_random_walks_take_every_transition_and_no_other(monkeypatch):
    taken: Counter[Transition] = Counter()
    become = RunningSequence.become

    def note(sequence: RunningSequence, status: SequenceStatus) -> None:
        taken[sequence.status, status] += 1
        become(sequence, status)

    monkeypatch.setattr(RunningSequence, "become", note)
    for seed in range(12):
        chance = random.Random(seed)
        encoder_layers = chance.choice((0, 3))
        world = World(
            overlap=chance.random() < 0.5,
            encoder_layers=encoder_layers,
            bound_s=1e-3,
            rotary=None if encoder_layers else LONGROPE,
        )
        for request in walk(world, chance):
            assert request.future.done()
    legal = {(before, after) for before, reached in TRANSITIONS.items() for after in reached}
    assert set(taken) == legal


def test_a_finished_sequence_cannot_begin_again():
    world = World()
    request = world.add([3, 1, 4], 2)
    (sequence,) = request.waiting
    world.run()
    assert sequence.status is SequenceStatus.FINISHED
    with pytest.raises(AssertionError, match="cannot become"):
        sequence.begin()


def test_the_page_draws_the_transitions():
    text = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    drawn = {}
    for status in SequenceStatus:
        (line,) = re.findall(rf"^\| `{status.value}` \|(.*)\|$", text, flags=re.MULTILINE)
        after = re.findall(r"`(\w+)`", line.split("|")[-1])
        drawn[status] = {SequenceStatus(name) for name in after}
    assert drawn == TRANSITIONS
