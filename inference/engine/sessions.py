"""Interactive sessions, which keep a conversation in the cache between its requests.

A session holds the slots of its sequences from its first turn to its last. A later turn sends only
new tokens, and is answered like one request whose prompt is the whole conversation; only the new
tokens have to be computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from inference.decoding.request import TASK_IDS, TYPE
from inference.decoding.rows import (
    GenerationRequest,
    ModelLimits,
    RequestError,
    SequenceResult,
    SessionTurn,
)
from inference.decoding.word_lists import ends_with
from inference.engine.capacity import Capacity
from inference.engine.sequence import RunningRequest, RunningSequence, Session

# A conversation without a second turn for so many seconds may be dropped in favour of another.
ABANDONED_S = 5.0


class Sessions:
    """The conversations of one engine; used by the scheduler's thread only."""

    def __init__(self, *, idle_s: float, free: Callable[[Sequence[int]], object]) -> None:
        self._idle_s = idle_s
        self._free = free
        self._sessions: dict[int | str, Session] = {}

    def end_refused(self, session_id: int | str) -> None:
        """End a conversation whose last turn was refused, after any turn that still runs."""
        session = self._sessions.get(session_id)
        if session is not None and session.is_busy:
            session.turn = replace(session.turn, ends=True)
        elif session is not None:
            self.end(session)

    @property
    def held(self) -> tuple[int, int]:
        """Slots and blocks that stay occupied after all running turns are answered."""
        sessions = self._sessions.values()
        open_sessions = [each for each in sessions if each.holds_slots and not each.turn.ends]
        slots = sum(len(each.start.rows) * each.start.beam_width for each in open_sessions)
        return slots, sum(each.blocks for each in open_sessions)

    def expire(self) -> None:
        """End conversations that have paused for too long."""
        now = monotonic()
        for session in list(self._sessions.values()):
            if not session.is_busy and now - session.used_s > self._idle_s:
                self.end(session)

    def end_abandoned(self) -> bool:
        """End the oldest conversation that never had a second turn; return whether there is one."""
        latest = monotonic() - ABANDONED_S
        abandoned = [
            each
            for each in self._sessions.values()
            if each.turn.starts and not each.is_busy and each.used_s <= latest
        ]
        if abandoned:
            self.end(min(abandoned, key=lambda each: each.used_s))
        return bool(abandoned)

    def begin_turn(self, request: RunningRequest, turn: SessionTurn) -> None:
        """Begin a turn of a new conversation, or of one whose sequences continue in their slots.

        Raises:
            RequestError: The conversation is unknown or busy, or the turn does not fit it.
        """
        self.expire()
        session = self._sessions.get(turn.session_id)
        if session is not None and session.is_busy:
            raise RequestError(
                [f"session {turn.session_id} is still being answered; wait for its last turn"]
            )
        if turn.starts:
            begun = Session(turn, request.request)
            _check_fit(begun, request)
            if session is not None:
                self.end(session)
            request.session = self._sessions[turn.session_id] = begun
            for sequence in request.waiting:
                sequence.table.memory_len = begun.start.memory_len
        elif session is None:
            raise RequestError(
                [
                    f"session {turn.session_id} is unknown: it has ended, paused for more than "
                    f"{self._idle_s:g} s, failed, or was never started; send the whole "
                    "conversation as the START of a new one"
                ]
            )
        else:
            _check_fit(session, request)
            session.turn, session.is_busy = turn, True
            _continue(session, request)

    def suspend(self, sequence: RunningSequence, result: SequenceResult) -> None:
        """Keep an answered sequence, so that its conversation can continue from the best answer."""
        session, request, table = sequence.owner.session, sequence.request, sequence.table
        assert session is not None
        answer, reason = result.output_ids[0], result.finish_reasons[0]
        # An answer whose grammar is complete stops, too; its last token belongs to it.
        stops = reason == "stop" and ends_with(
            request.context_ids + answer, request.options.stop_words
        )
        if reason == "end" or stops:
            # As in FasterTransformer, the next turn's first token takes this one's place.
            answer = answer[:-1]
        sequence.prompt = [*sequence.prompt, *answer]
        sequence.request = replace(
            request,
            context_ids=request.context_ids + answer,
            returned_ids=request.returned_ids + answer,
        )
        # Longer beams have cached, and perhaps forgotten, more tokens than this one.
        table.cached = min(table.cached, sequence.prompt_len)
        table.forgotten = min(table.forgotten, table.cached)
        session.idle[sequence.index] = sequence

    def end_turn(self, request: RunningRequest) -> None:
        """Record that a turn was answered."""
        session = request.session
        assert session is not None
        session.is_busy, session.used_s = False, monotonic()
        if session.turn.ends:
            self.end(session)

    def end(self, session: Session) -> None:
        """End a conversation, and free its slots."""
        del self._sessions[session.turn.session_id]
        for sequence in session.idle.values():
            self._free(sequence.slots)


def turn_problems(
    request: GenerationRequest, turn: SessionTurn, *, capacity: Capacity, limits: ModelLimits
) -> list[str]:
    """Return the problems of a turn that can be found without its conversation."""
    if request.encoder_decoder:
        return ["START: a model with an encoder keeps no sessions"]
    if turn.starts and request.session_len is None:
        return ["session_len: the START request of a session needs it"]
    if turn.starts:
        return [
            *_length_problems(request, request.session_len or 0, capacity, limits),
            *capacity.concurrency_problems(request, request.rows),
        ]
    return _next_problems(request)


def _length_problems(
    request: GenerationRequest, session_len: int, capacity: Capacity, limits: ModelLimits
) -> list[str]:
    problems, memory_len = [], request.memory_len
    if limits.max_pos_seq_len is not None and session_len > limits.max_pos_seq_len:
        problems.append(
            f"session_len={session_len} exceeds max_pos_seq_len ({limits.max_pos_seq_len})"
        )
    if min(session_len, memory_len or session_len) > capacity.max_len:
        name = "session_len" if memory_len is None else "memory_len"
        problems.append(
            f"{name}={memory_len or session_len} exceeds the {capacity.max_len} tokens that a "
            "sequence holds; lower memory_len or session_len, or raise max_seq_len"
        )
    longest = max(row.context_len for row in request.rows)
    if memory_len is not None and longest > memory_len:
        problems.append(
            f"memory_len: Memory size too low ({memory_len}): prompt ({longest}) must fit"
        )
    return problems


def _next_problems(request: GenerationRequest) -> list[str]:
    problems = []
    if request.padded_len == 0:
        problems.append("input_ids: a continuation needs at least one new token")
    asked = {
        "is_return_context_cum_log_probs": "return_context_cum_log_probs",
        "is_return_context_embeddings": "return_context_embeddings",
        "num_prompt_log_probs": "num_prompt_log_probs",
    }
    problems += [
        f"{name}: needs the whole prompt, most of which a continuation does not compute again; "
        "send it with the START request"
        for name, option in asked.items()
        if any(getattr(row.options, option) for row in request.rows)
    ]
    if any(row.prompt and row.prompt.cached_len for row in request.rows):
        problems.append(
            f"{TYPE}, {TASK_IDS}: a virtual prompt precedes all tokens; send it with the START "
            "request"
        )
    return problems


def _check_fit(session: Session, request: RunningRequest) -> None:
    """Raise RequestError if a turn differs in shape from its session, or is too long for it."""
    asked, start, problems = request.request, session.start, []
    for name, value, expected in (
        ("input_ids", len(asked.rows), len(start.rows)),
        ("beam_width", asked.beam_width, start.beam_width),
        ("session_len", asked.session_len or start.session_len, start.session_len),
        ("memory_len", asked.memory_len or start.memory_len, start.memory_len),
    ):
        if value != expected:
            rows = " rows" if name == "input_ids" else ""
            begun = "none" if expected is None else f"{expected}{rows}"
            problems.append(f"{name}: the session was started with {begun}, not {value}")
    for sequence in () if problems else request.waiting:
        idle = session.idle.get(sequence.index)
        history = 0 if idle is None else len(idle.prompt)
        new, more = sequence.prompt_len, sequence.request.output_len
        if history + new + more > session.session_len:
            problems.append(
                f"session_len: Session size too low ({session.session_len}): conversation "
                f"({history}) + prompt ({new}) + request_output_len ({more}) must fit"
            )
    if problems:
        raise RequestError(problems)


def _continue(session: Session, request: RunningRequest) -> None:
    """Prepend a conversation's tokens to the new tokens of each sequence."""
    request.session = session
    for sequence in request.waiting:
        idle = session.idle.pop(sequence.index)
        sequence.table = idle.table
        sequence.prompt = idle.prompt + sequence.prompt
        sequence.prompt_tokens = len(sequence.prompt)
        sequence.request = replace(
            sequence.request,
            input_ids=idle.request.context_ids + sequence.request.input_ids,
            context_ids=idle.request.context_ids + sequence.request.context_ids,
            returned_ids=idle.request.returned_ids + sequence.request.returned_ids,
            prompt=sequence.request.prompt or idle.request.prompt,
        )
    rows = tuple(sequence.request for sequence in request.waiting)
    longest = max(len(row.returned_ids) for row in rows)
    request.request = replace(request.request, rows=rows, padded_len=longest)
