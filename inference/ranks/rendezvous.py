"""Rendezvous, settings and heartbeats of launched ranks.

Rank 0 serves a store. Each other rank connects to it, waits for its settings, and sends a heartbeat
every second. The connections for computation are made later, through the same store.
"""

import contextlib
import errno
import hmac
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import torch
from torch.distributed.distributed_c10d import Store

from foundations import __version__
from inference.ranks.keyed_store import (
    KeyedStore,
    KeyRefusedError,
    StoreServer,
    connect_store,
    read_private,
    write_key,
    write_private,
)
from inference.ranks.settings import RankSettings
from inference.ranks.startup import failure_of, report_failure
from inference.system.launch_environment import LaunchEnvironment
from inference.system.ports import port_problem

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_CHECK_S = 0.5  # between checks of the other ranks
_POLL_S = 0.1
_REFUSAL_S = 8.0  # in which ranks that are still starting can join a failed launch
_LEAVE_S = 2.0  # for an orderly shutdown in progress
_FOREIGN_S = 10.0  # a store of this launch identifies itself at once
_UNREACHED_S = 20.0  # rank 0 listens before it writes its key
JOIN_TIMEOUT_S = 240.0  # below the start-up limit of a server, which can then report this reason
_WAIT_FOREVER = timedelta(days=30)  # the heartbeat ends a process whose rank 0 is gone


class RendezvousError(RuntimeError):
    """The ranks of a launch cannot connect, or rank 0 gave up."""


class Rendezvous:
    """Rank 0's side: it sends the settings to the other ranks and watches their heartbeats.

    `problems` and `close` may be called from any thread.
    """

    def __init__(
        self, place: LaunchEnvironment, host: str, port: int, key_file: Path, *, timeout_s: float
    ) -> None:
        """Open the rendezvous; the other ranks read its key from `key_file`.

        A rank that falls silent is reported within `timeout_s`.

        Raises:
            RendezvousError: The address is not free, or the key cannot be written.
        """
        assert place.rank == 0, "rank 0 opens the rendezvous"
        self.place = place
        self.others = range(1, place.world_size)
        self._address = f"{host}:{port}"
        # Shorter than the timeout of a collective, so that the error names the silent rank.
        self._silence_s = max(timeout_s / 2, timeout_s - 2 * _HEARTBEAT_S)
        self._opened = self._checked = monotonic()
        self._heartbeats: dict[int, tuple[int, float]] = {}  # rank -> last count, time of its rise
        self._problems: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed = False
        try:
            # Bind a single address; port 0 takes a free port.
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            raise RendezvousError(_listen_problem(host, port, error)) from error
        try:
            # Written only once this launch has the port, so as not to overwrite another launch's.
            key = write_key(key_file)
        except OSError as error:
            listener.close()
            raise RendezvousError(
                f"the key of the launch cannot be left in {key_file}: {error.strerror}"
            ) from error
        self._key_file, self._key = key_file, key
        self._server = StoreServer(listener, key, timeout_s=timeout_s)
        self.store: Store = self._server.store()
        self.store.set("job", _job_text(place))

    def announce(self, settings: RankSettings) -> None:
        """Send every rank the settings to load."""
        self.store.set("settings", json.dumps({"settings": settings.to_json()}))

    def refuse(self, reason: str) -> None:
        """Send every rank the reason why nothing is loaded, and close.

        Ranks that are still starting get some time to join; otherwise they would wait for a rank 0
        that no longer exists.
        """
        self.store.set("settings", json.dumps({"problem": reason}))
        with contextlib.suppress(RuntimeError):  # not all have joined
            self.store.wait([f"left/{rank}" for rank in self.others], timedelta(seconds=_REFUSAL_S))
        self.close(grace_s=_LEAVE_S)

    def problems(self) -> dict[int, str]:
        """Return the ranks that failed, fell silent or never joined; updated twice a second."""
        with self._lock:
            if not self._closed and monotonic() - self._checked >= _CHECK_S:
                found = {n: failure_of(self.store, n) or self._silence(n) for n in self.others}
                self._problems = {rank: reason for rank, reason in found.items() if reason}
                self._checked = monotonic()
            return self._problems

    def _silence(self, rank: int) -> str | None:
        now = monotonic()
        count = self.store.add(f"heartbeat/{rank}", 0)
        if count == 0:
            if reason := self._unreached(rank):
                return reason
            if now - self._opened < JOIN_TIMEOUT_S:
                return None
            return f"did not reach {self._address} within {JOIN_TIMEOUT_S:g} s; is the port open?"
        last, since = self._heartbeats.get(rank, (0, now))
        if count != last:
            self._heartbeats[rank] = (count, now)
        elif now - since > self._silence_s:
            process = self.store.get(f"who/{rank}").decode()
            return f"has sent no heartbeat for {now - since:.1f} s ({process})"
        return None

    def _unreached(self, rank: int) -> str | None:
        """Return the problem that a rank without a connection has written next to the key file."""
        try:
            note = read_private(_note_file(self._key_file, rank))
        except OSError:
            return None
        signature = _signature(self._key)
        if not hmac.compare_digest(note[: len(signature)], signature):
            return None
        text = note[len(signature) :].decode(errors="replace")
        address = self._server.listener.getsockname()[0]
        return f"{text}; rank 0 listens at {address} on {socket.gethostname()}; is the port open?"

    def close(self, *, grace_s: float) -> None:
        """Ask the other ranks to leave, and wait for them; may be called repeatedly."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(RuntimeError):
            self.store.set("over", "")
            joined = [rank for rank in self.others if self.store.add(f"heartbeat/{rank}", 0)]
            self.store.wait([f"left/{rank}" for rank in joined], timedelta(seconds=grace_s))
        for rank in self.others:
            if self._unreached(rank):
                _note_file(self._key_file, rank).unlink(missing_ok=True)
        # The port is freed last: the next launch that takes it writes its own key file.
        self._key_file.unlink(missing_ok=True)
        self._server.close()


class Follower:
    """The side of another rank, whose process ends when rank 0 does."""

    def __init__(
        self, place: LaunchEnvironment, host: str, port: int, key_file: Path, *, timeout_s: float
    ) -> None:
        """Join the rendezvous; `timeout_s` limits the wait for each answer of the store.

        Raises:
            RendezvousError: Rank 0 does not answer, another launch does, or another process has
                joined as this rank.
        """
        self.place = place
        store = _join(host, port, key_file, place.rank, timeout_s=timeout_s)
        self.store: Store = store
        with _store_errors(f"rank 0 at {host}:{port} is gone"):
            self._heartbeat_store = store.clone()
            self.store.wait(["job"], timedelta(seconds=_FOREIGN_S))
            job, expected = self.store.get("job").decode(), _job_text(place)
            if job != expected:
                raise RendezvousError(
                    f"rank 0 at {host}:{port} belongs to another launch ({job}, this is "
                    f"{expected}); choose another MASTER_PORT, or end that one"
                )
            rank = place.rank
            if self.store.add(f"joined/{rank}", 1) > 1:
                reason = f"two processes have joined as rank {rank}; each needs its own"
                report_failure(self.store, rank, error := RendezvousError(reason))
                raise error
            self.store.set(f"who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
            self.store.add(f"heartbeat/{rank}", 1)
        logger.info("joined rank 0 at %s:%d", host, port)
        self._left = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def settings(self) -> RankSettings:
        """Wait for rank 0, which may convert a model first, and return the settings to load.

        Raises:
            RendezvousError: Rank 0 gave up.
        """
        with _store_errors("rank 0 is gone"):
            self.store.wait(["settings"], _WAIT_FOREVER)
            message = json.loads(self.store.get("settings"))
        if "problem" in message:
            raise RendezvousError(f"rank 0 gave up: {message['problem']}")
        settings = RankSettings.from_json(message["settings"])
        return replace(settings, rank=self.place.rank, device_index=self.place.local_rank)

    def close(self) -> None:
        """Report that this process exits normally."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.place.rank}", "")
        self._left.set()

    def _send_heartbeats(self) -> None:
        reason = "rank 0 has ended the run"
        while not self._left.wait(_HEARTBEAT_S):
            try:
                self._heartbeat_store.add(f"heartbeat/{self.place.rank}", 1)
                if not self._heartbeat_store.check(["over"]):
                    continue
            except RuntimeError:
                reason = "rank 0 is gone"
            if self._left.wait(_LEAVE_S):
                return
            logger.error("%s; rank %d ends", reason, self.place.rank)
            os._exit(1)  # the main thread may be blocked, such as in a collective operation


def device_problems(store: Store, others: range, own: torch.device) -> dict[int, str]:
    """Return the ranks that use the same GPU as a lower rank, once every rank has loaded."""
    seen = {device_name(own): 0}
    problems = {}
    for rank in others:
        name = store.get(f"device/{rank}").decode()
        first = seen.setdefault(name, rank)
        if name and first != rank:
            problems[rank] = (
                f"uses the same GPU as rank {first} ({name}); start at most one process per "
                "visible GPU, or compute on the CPU (device=cpu)"
            )
    return problems


def device_name(device: torch.device) -> str:
    """Return a name of the device: for a GPU unique in the cluster, for a CPU empty."""
    if device.type == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {getattr(properties, 'uuid', device)}"


def _job_text(place: LaunchEnvironment) -> str:
    """Return a description of the launch, the same in all its processes."""
    return f"slipway {__version__}, {place.launcher} job {place.job or '-'} of {place.world_size}"


def _listen_problem(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"MASTER_ADDR={host} cannot be resolved: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"MASTER_ADDR={host} is not an address of {socket.gethostname()}, where rank 0 runs; "
            "set it to the host of rank 0"
        )
    problem = port_problem(host, port) or f"is unavailable: {error.strerror}"
    return f"port {port} of the rendezvous {problem}; choose another MASTER_PORT"


def _signature(key: bytes) -> bytes:
    return hmac.digest(key, b"unreached", "sha256")


def _note_file(key_file: Path, rank: int) -> Path:
    return key_file.with_name(f"{key_file.name}.rank{rank}")


def _join(host: str, port: int, key_file: Path, rank: int, *, timeout_s: float) -> KeyedStore:
    """Wait for rank 0 and its key, and return a connection to its store.

    A rank that can read the key but not reach the port leaves a note for rank 0 next to the key.

    Raises:
        RendezvousError: Rank 0 does not answer, or another process listens there.
    """
    deadline = monotonic() + JOIN_TIMEOUT_S
    noted_key = b""
    since: dict[str, float] = {}

    def persists(state: str, limit_s: float, *, is_now: bool = True) -> bool:
        """Return whether every attempt for longer than `limit_s` has found this state."""
        if not is_now:
            since.pop(state, None)
        return is_now and monotonic() - since.setdefault(state, monotonic()) > limit_s

    while True:
        key = b""
        try:
            key = read_private(key_file)
            return connect_store(host, port, key, timeout_s=timeout_s)
        except KeyRefusedError as error:
            # The key file may still be an earlier launch's, which rank 0 is about to replace.
            if persists("foreign", _FOREIGN_S):
                raise RendezvousError(
                    f"{host}:{port} is in use by a process that does not hold the key in "
                    f"{key_file} ({error}); choose another MASTER_PORT, or end that process"
                ) from error
        except PermissionError as error:
            raise RendezvousError(f"the key of the launch is unusable: {error}") from error
        except OSError as error:
            # Rank 0 of this launch writes its key as soon as it listens.
            lacks_key = isinstance(error, FileNotFoundError) and _listens(host, port)
            if persists("foreign", _FOREIGN_S, is_now=lacks_key):
                raise RendezvousError(
                    f"rank 0 at {host}:{port} belongs to another launch (it left no key in "
                    f"{key_file}); choose another MASTER_PORT, end that one, or check that all "
                    "nodes see that folder"
                ) from error
            if persists("unreached", _UNREACHED_S, is_now=bool(key)):
                problem = (
                    f"process {os.getpid()} on {socket.gethostname()} cannot reach {host}:{port} "
                    f"({error.strerror or error})"
                )
                if noted_key != key:
                    write_private(_note_file(key_file, rank), _signature(key) + problem.encode())
                    noted_key = key
            if monotonic() > deadline or (noted_key and not key):
                raise RendezvousError(
                    f"rank 0 does not answer at {host}:{port} ({error}); do MASTER_ADDR and "
                    "MASTER_PORT name its host, is the port open between the nodes, and do all "
                    f"nodes see {key_file.parent}?"
                ) from error
        sleep(_POLL_S)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def _store_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except RendezvousError:
        raise
    except (OSError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise RendezvousError(f"{problem} ({first_line})") from error
