"""Frames of a stream: one for each step, and fewer once they wait to be sent."""

from __future__ import annotations

from typing import Any

import pytest

from inference.backend.python_backend import StreamedAnswer


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    steps: list[Any] = []
    monkeypatch.setattr(StreamedAnswer, "send", lambda _, step, **__: steps.append(step))
    return steps


def answer() -> Any:
    nothing: Any = None
    return StreamedAnswer(nothing, nothing, leading_axis=False)


def test_frames_leave_in_order(sent: list[Any]) -> None:
    stream = answer()
    stream.waiting.extend([1, 2, 3])
    for _ in range(3):
        stream.send_oldest()
    assert sent == [1, 2, 3]


def test_a_newer_frame_takes_the_place_of_one_that_waits(sent: list[Any]) -> None:
    stream = answer()
    assert not stream.replace_newest(1), "nothing waits: a frame of its own is due"
    stream.waiting.append(1)
    assert stream.replace_newest(2)
    assert stream.replace_newest(3)
    stream.send_oldest()
    assert sent == [3]
    assert not stream.replace_newest(4), "the newest was sent: another is due"
