"""Ranks that a launcher started: how they meet, what they are reported, and which is missed."""

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.ranks.keyed_store import KeyRefusedError, connect_store, write_key
from inference.ranks.rendezvous import Rendezvous, RendezvousError
from inference.ranks.settings import Placement
from inference.system.launch_environment import LaunchEnvironment
from inference.system.ports import pick_free_ports
from tests.engine_logits import prompt_logits
from tests.ft_folders import write_gpt
from tests.integration.started_rank import StartedRank
from tests.waiting import until

NOTICE_S = 60.0  # a slow machine takes long to import torch

Start = Callable[..., StartedRank]


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEY_FILE", str(tmp_path / "key"))
    return tmp_path / "key"


@pytest.fixture
def start(tmp_path: Path, key_file: Path) -> Iterator[Start]:
    """Start ranks other than 0; all of them end with the test."""
    started: list[StartedRank] = []

    def one(rank: int, size: int, port: int, *, job: str = "a") -> StartedRank:
        place = LaunchEnvironment(rank, size, rank, size, "test", job)
        log = tmp_path / f"{len(started)}.log"
        started.append(StartedRank(place, port, key_file, log))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait(NOTICE_S)


def rendezvous_of(size: int, *, timeout_s: float = 5.0, job: str = "a") -> tuple[Rendezvous, int]:
    (port,) = pick_free_ports("127.0.0.1", 1)
    place = LaunchEnvironment(0, size, 0, size, "test", job)
    key_file = Path(os.environ["KEY_FILE"])
    return Rendezvous(place, "127.0.0.1", port, key_file=key_file, timeout_s=timeout_s), port


def until_problem(rendezvous: Rendezvous) -> str:
    until(lambda: bool(rendezvous.problems()), "a problem of the rendezvous")
    return rendezvous.problems()[1]


def until_present(rendezvous: Rendezvous, rank: int) -> None:
    until(lambda: rendezvous.store.check([f"who/{rank}"]), f"the coming of rank {rank}")


def test_the_store_listens_at_its_address_alone():
    _, port = rendezvous_of(2)
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A"]
    assert [each for each in listening if each.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_started_ranks_compute_what_one_rank_does(tmp_path, start):
    ids = [1, 2, 3, 40]
    with Engine(write_gpt(tmp_path / "one"), Placement(device="cpu")) as engine:
        expected = prompt_logits(engine, ids)
    folder = write_gpt(tmp_path / "two", tp_size=2)
    rendezvous, port = rendezvous_of(4)
    others = [start(rank, 4, port) for rank in (1, 2, 3)]
    engine = Engine(folder, Placement(tp_size=2, pp_size=2, device="cpu"), rendezvous=rendezvous)
    with engine:
        logits = prompt_logits(engine, ids)
    # Sums in another order.
    assert torch.allclose(logits, expected, atol=1e-5)
    assert [each.wait(NOTICE_S) for each in others] == [0, 0, 0]


def test_strangers_at_the_rendezvous_change_nothing(tmp_path, start, key_file):
    rendezvous, port = rendezvous_of(2)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    with pytest.raises(KeyRefusedError):
        connect_store("127.0.0.1", port, bytes(32), timeout_s=5)
    with pytest.raises(KeyRefusedError):  # what torch's own store would let in
        connect_store("127.0.0.1", port, b"", timeout_s=5)
    # Some say nothing, some say much, some ask as the ranks do without a proof.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    request = json.dumps(["set", "settings", "{}"]).encode()
    for words in (bytes(1 << 20), bytes(64) + len(request).to_bytes(4, "big") + request):
        loud = socket.create_connection(("127.0.0.1", port))
        with loud, contextlib.suppress(OSError):
            loud.sendall(words)
    assert not rendezvous.store.check(["settings"])
    other = start(1, 2, port)
    folder = write_gpt(tmp_path / "two", tp_size=2)
    with Engine(folder, Placement(tp_size=2, device="cpu"), rendezvous=rendezvous) as engine:
        assert torch.isfinite(prompt_logits(engine, [1, 2])).all()
    assert other.wait(NOTICE_S) == 0
    assert not key_file.exists()
    for each in silent:
        each.close()


def test_a_killed_rank_fails_the_engine(tmp_path, start):
    rendezvous, port = rendezvous_of(2, timeout_s=3)
    other = start(1, 2, port)
    options = EngineOptions(rank_timeout_s=3)
    folder = write_gpt(tmp_path, tp_size=2)
    with Engine(
        folder, Placement(tp_size=2, device="cpu"), options=options, rendezvous=rendezvous
    ) as engine:
        other.kill()
        until(lambda: engine.healthy() is not None, "the engine's notice")
        reason = engine.healthy() or ""
    assert "rank 1" in reason


def test_a_stopped_rank_is_missed_while_rank_0_prepares(start):
    rendezvous, port = rendezvous_of(2, timeout_s=3)
    other = start(1, 2, port)
    until_present(rendezvous, 1)
    other.stop()
    problem = until_problem(rendezvous)
    assert problem.startswith("has sent no heartbeat for ")
    assert f"(process {other.pid} on {socket.gethostname()})" in problem


def test_a_rank_that_cannot_load_says_why(tmp_path, start):
    folder = write_gpt(tmp_path, tp_size=2)
    rendezvous, port = rendezvous_of(2)
    other = start(1, 2, port)
    engine = Engine(folder, Placement(tp_size=2, device="cpu"), rendezvous=rendezvous)
    (folder / "model.wpe.bin").write_bytes(b"short")
    with pytest.raises(EngineFailedError, match=r"(?s)rank 0: .*model\.wpe\.bin.*rank 1: "):
        engine.start()
    assert other.wait(NOTICE_S) == 1


def test_ranks_log_why_rank_0_gave_up(start):
    rendezvous, port = rendezvous_of(2)
    other = start(1, 2, port)
    until_present(rendezvous, 1)
    rendezvous.refuse("the disk is full")
    assert "rank 0 gave up: the disk is full" in other.words(NOTICE_S)
    assert other.wait(NOTICE_S) == 1


def test_a_rank_of_another_launch_is_turned_away(start):
    rendezvous, port = rendezvous_of(2, job="mine")
    stranger = start(1, 2, port, job="other")
    said = stranger.words(NOTICE_S)
    assert f"rank 0 at 127.0.0.1:{port} belongs to another launch (" in said
    assert "test job mine of 2, this is" in said
    assert not rendezvous.problems()


def test_two_processes_cannot_be_the_same_rank(start):
    rendezvous, port = rendezvous_of(2)
    start(1, 2, port)
    until_present(rendezvous, 1)
    second = start(1, 2, port)
    assert "two processes have joined as rank 1; each needs its own" in second.words(NOTICE_S)
    assert "two processes have joined as rank 1" in until_problem(rendezvous)


def test_a_listener_that_is_no_store_is_reported(start, key_file):
    with open_silent() as listener:

        def refuse() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        write_key(key_file)
        other = start(1, 2, listener.getsockname()[1])
        assert "does not hold the key in" in other.words(NOTICE_S)
        assert other.wait(NOTICE_S) == 1


def open_silent() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def test_a_taken_port_is_reported_with_its_holder(key_file):
    with open_silent() as listener:
        port = listener.getsockname()[1]
        place = LaunchEnvironment(0, 2, 0, 2)
        with pytest.raises(RendezvousError, match=f"port {port} of the rendezvous is in use by"):
            Rendezvous(place, "127.0.0.1", port, key_file=key_file, timeout_s=5)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.77", "MASTER_ADDR=192.0.2.77 is not an address of"),  # a documentation address
        ("no-such-host.invalid", "cannot be resolved"),
    ],
)
def test_an_address_of_another_node_is_reported(key_file, host, message):
    with pytest.raises(RendezvousError, match=message):
        Rendezvous(LaunchEnvironment(0, 2, 0, 2), host, 0, key_file=key_file, timeout_s=5)
