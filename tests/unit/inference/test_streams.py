"""New tokens pass the server by: to the stream that they are for, before the answer's end."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from inference.streams import SOCKET_NAME, News, StreamReceiver, StreamSender
from inference.supervision import REPORTS_VARIABLE

LIMIT_S = 20.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a server's sockets, of which its models know."""
    monkeypatch.setenv(REPORTS_VARIABLE, str(tmp_path / "reports"))
    return tmp_path


def test_each_stream_gets_its_own_tokens_in_order(folder: Path) -> None:
    async def main() -> None:
        receiver, senders = StreamReceiver(), [StreamSender(), StreamSender()]
        await receiver.open(folder)
        with receiver.stream() as (first, of_first), receiver.stream() as (second, of_second):
            for number in range(300):
                senders[0].send(first, [[number], []])
                senders[1].send(second, [[-number]])
                senders[0].send("unknown", [[number]])
                for sender in senders:
                    sender.flush()
            found: list[list[News]] = [[], []]
            for news, came in zip(found, (of_first, of_second), strict=True):
                for _ in range(300):
                    news.append(await asyncio.wait_for(came.get(), LIMIT_S))
        assert found[0] == [[[number], []] for number in range(300)]
        assert found[1] == [[[-number]] for number in range(300)]
        for sender in senders:
            await asyncio.to_thread(sender.stop)
        receiver.close()

    asyncio.run(main())


def test_the_news_of_a_step_is_one_message(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen()
        sender = StreamSender()
        sender.send("a", [[1]])
        sender.flush()
        connection, _ = listener.accept()
        with connection, connection.makefile() as lines:
            assert lines.readline() == '[["a", [[1]]]]\n'
            sender.send("a", [[2]])
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(LIMIT_S)
            sender.send("b", [[3]])
            sender.flush()
            assert connection.recv(1000) == b'[["a", [[2]]], ["b", [[3]]]]\n'
            sender.stop()


def test_an_answer_follows_its_tokens(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen()
        sender, is_sent = StreamSender(), threading.Event()
        sender.send("name", [[1, 2]])
        sender.after(is_sent.set)
        connection, _ = listener.accept()
        with connection:
            assert is_sent.wait(LIMIT_S)
            assert connection.recv(1000) == b'[["name", [[1, 2]]]]\n'
            sender.stop()


@pytest.mark.parametrize("listens", [False, True])
def test_without_a_front_answers_still_come(folder: Path, listens: bool) -> None:
    sender = StreamSender()
    done: list[int] = []
    sender.after(lambda: done.append(0))  # nothing was sent: at once
    assert done == [0]
    with socket.socket(socket.AF_UNIX) as listener:
        if listens:
            listener.bind(str(folder / SOCKET_NAME))
            listener.listen()
        sender.send("name", [[1]])
        if listens:
            listener.accept()[0].close()
    for number in range(1, 200):
        sender.send("name", [[number]])
        sender.after(lambda number=number: done.append(number))  # type: ignore[misc]
    sender.stop()
    assert done == list(range(200))


def test_messages_that_wait_are_counted(folder: Path) -> None:
    async def main() -> None:
        receiver, sender = StreamReceiver(), StreamSender()
        await receiver.open(folder)
        with receiver.stream() as (name, came):
            for count, is_behind in ((400, False), (600, True)):
                for _ in range(count - came.qsize()):
                    sender.send(name, [[0]])
                sender.flush()
                while came.qsize() < count:
                    await asyncio.sleep(0.01)
                assert receiver.is_behind == is_behind
            while not came.empty():
                came.get_nowait()
            sender.send(name, [[0]])
            sender.flush()
            await came.get()
            assert not receiver.is_behind
        await asyncio.to_thread(sender.stop)
        receiver.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
