"""The owner's end of the connection to a server."""

from __future__ import annotations

from multiprocessing import Pipe
from threading import Thread

import pytest

from inference.server.server import HostLink
from tests.waiting import until


def test_an_answer_that_comes_late_is_not_kept() -> None:
    own, other = Pipe()
    link = HostLink(own)
    with pytest.raises(ConnectionError):
        link.ask("m", timeout_s=0.05)
    other.send_bytes(b"answered 1 7 ")
    until(lambda: link._advanced == 7, "the late answer")
    assert not link._answers

    def answer() -> None:
        for number in (1, 2):
            assert other.recv().number == number
        other.send_bytes(b"answered 2 8 ")

    answering = Thread(target=answer)
    answering.start()
    link.ask("m", timeout_s=10)
    answering.join()
    assert not link._answers


def test_models_that_still_load_are_shown_until_the_last() -> None:
    own, other = Pipe()
    link = HostLink(own)
    for line in ("loading engine", "loading texts", "loaded texts", "loaded engine"):
        other.send_bytes(b"says " + line.encode())
    other.close()
    link.read_all()
    engine, both = "loading engine", "loading engine, texts"
    assert link.said() == [engine, both, engine, "loaded engine"]
