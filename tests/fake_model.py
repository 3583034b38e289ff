"""A model that needs no server: it continues the texts it knows."""

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.evaluation.task import Completion, RequestFailedError, RequestTensors

VIRTUAL_ID = 1_000_000  # ids from here on are virtual tokens
_PIECE = re.compile(r" ?\S+|\s+")


class FakeModel:
    """Pieces of at most three characters are its tokens.

    `continuations` maps a context to the pieces that follow it; after these, and after any other
    context, it says "?" for ever. Every token has log probability -0.5
    unless `log_probs` says otherwise of a whole text. Contexts in `refuses` fail,
    with `reason` where there is one.
    """

    def __init__(
        self,
        continuations: Mapping[str, Sequence[str]] | None = None,
        *,
        refuses: Sequence[str] = (),
        unavailable: bool = False,
        streams: bool = False,
    ) -> None:
        self.continuations = dict(continuations or {})
        self.refuses = set(refuses)
        self.unavailable = unavailable
        self.streams = streams
        self.reason = ""
        self.log_prob = -0.5
        self.inputs: tuple[str, ...] = ("input_ids", "input_lengths", "request_output_len")
        self.requests: list[str] = []
        self.tensors: list[dict[str, object]] = []
        self.log_probs: dict[str, float] = {}
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}

    def check_unchanged(self) -> None:
        """It has no server that could serve another model."""

    def ids(self, pieces: Sequence[str]) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._ids.setdefault(piece, len(self._ids) + 1) for piece in pieces)

    def encode(self, text: str) -> tuple[int, ...]:
        words = _PIECE.findall(text)
        return self.ids([word[at : at + 3] for word in words for at in range(0, len(word), 3)])

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            pieces = {number: piece for piece, number in self._ids.items()}
        return "".join(pieces[each] for each in ids)

    def decode_answer(self, ids: Sequence[int]) -> str:
        return self.decode(ids).split("?")[0]

    def complete_ids(
        self, input_ids: Sequence[int], *, output_len: int, tensors: RequestTensors | None = None
    ) -> tuple[int, ...]:
        self.tensors.append(dict(tensors or {}))
        known = [each for each in input_ids if each < VIRTUAL_ID]
        return self._continue(self.decode(known), output_len)

    def complete_rows(
        self,
        rows: Sequence[Sequence[int]],
        *,
        output_len: int,
        each_frame: Callable[[], None] | None = None,
    ) -> list[tuple[int, ...]]:
        answers = [self.complete_ids(row, output_len=output_len) for row in rows]
        if self.streams and each_frame:
            for _ in range(output_len):
                threading.Event().wait(0.001)
                each_frame()
        return answers

    def complete_text(self, prompt: str, *, output_len: int) -> Completion:
        answer = self._continue(prompt, output_len)
        return Completion(self.decode(answer), len(answer))

    def input_names(self) -> Collection[str]:
        return self.inputs

    def infer(self, tensors: RequestTensors, outputs: Sequence[str]) -> Mapping[str, Any]:
        self.tensors.append(dict(tensors))
        self._request(f"infer {self.inputs}")
        return dict.fromkeys(outputs)

    def context_log_prob(self, input_ids: Sequence[int]) -> float:
        text = self.decode(input_ids)
        self._request(text)
        return self._log_prob(text)

    def _log_prob(self, text: str) -> float:
        return self.log_probs.get(text, self.log_prob * (len(self.encode(text)) - 1))

    def _continue(self, context: str, count: int) -> tuple[int, ...]:
        self._request(context)
        pieces = [*self.continuations.get(context, ()), *["?"] * count]
        return self.ids(pieces[:count])

    def _request(self, context: str) -> None:
        with self._lock:
            self.requests.append(context)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            if self.unavailable or context in self.refuses:
                raise RequestFailedError(self.reason or f"refused {context!r}")
            threading.Event().wait(0.002)
        finally:
            with self._lock:
                self._in_flight -= 1


PASSAGES = (
    "The cook lit the lamp",
    "They crossed the old stone bridge",
    "She opened the garden gate",
    "He had lost his key",
)


def write_passages(path: Path) -> Path:
    """Write PASSAGES in LAMBADA's form."""
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in PASSAGES))
    return path


def partly_right_model() -> FakeModel:
    """Return a model that knows the first passage whole, and the last token of the second."""
    return FakeModel(
        {
            "The cook lit the": (" la", "mp"),
            "The cook lit the la": ("mp",),
            "They crossed the old stone bridg": ("e",),
        }
    )
