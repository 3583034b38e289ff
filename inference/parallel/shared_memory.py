"""Sums, broadcasts and messages among the ranks of one host, through a mapped file.

For CPU ranks of one host: a sum of a token's hidden states takes some 20 us here, over gloo's
sockets some 300 us. Words in the file count the transfers of each rank; a rank waits for another's
word first by spinning, then asleep in the kernel (futex).
"""

# The order of a copy and of the word that announces it is kept by x86 processors; others use gloo.

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic

import torch
from torch.distributed.distributed_c10d import Store, Work

from inference.system.control_groups import usable_cores

_FOLDER = Path("/dev/shm")
_PREFIX = "slipway-"
_CHUNK = 256 * 1024  # bytes of one buffer
_WORD_BYTES = 64  # words lie on cache lines of their own
_SPINS = 2000  # about 0.1 ms before sleeping
_SLICE_S = 0.1  # of sleep, between looks at the clock
_MASK = 0xFFFFFFFF

_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC = ctypes.CDLL(None, use_errno=True)


class _Finished(Work):
    """A transfer that is complete."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:  # noqa: ARG002 - torch's signature
        return True


def open_group(
    store: Store, place: int, size: int, *, timeout_s: float
) -> SharedMemoryGroup | None:
    """Return this rank's end of a group, or None if the ranks do not share memory.

    Every rank of the group must call this, with its `place` in the group and a store that this
    group alone uses; all get the same answer.

    Raises:
        RuntimeError: A rank did not join within the store's timeout.
    """
    segment = _create(size) if place == 0 else None
    try:
        if place == 0:
            store.set("segment", str(segment or ""))
        path = store.get("segment").decode()
        memory = _attach(Path(path), size) if path else None
        store.set(f"attached/{place}", "yes" if memory is not None else "no")
        answers = [store.get(f"attached/{rank}") for rank in range(size)]
    finally:  # also where a rank does not join
        if segment is not None:
            segment.unlink()
    if memory is None or b"no" in answers:
        return None
    return SharedMemoryGroup(memory, place, size, timeout_s=timeout_s)


def _create(size: int) -> Path | None:
    """Return a new zeroed file for a group, or None where that is impossible."""
    if platform.machine() != "x86_64" or not _FOLDER.is_dir():
        return None
    path = _FOLDER / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, _Layout(size).size_bytes)  # fails here, not later by SIGBUS
    except OSError:
        path.unlink()
        return None
    finally:
        os.close(file)
    return path


def _attach(path: Path, size: int) -> mmap.mmap | None:
    if path.parent != _FOLDER or not path.name.startswith(_PREFIX):
        return None
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_uid == os.getuid():
                return mmap.mmap(file, _Layout(size).size_bytes)
        finally:
            os.close(file)
    return None


class _Layout:
    """Offsets of the words and buffers of a group of `size` ranks; words first."""

    def __init__(self, size: int) -> None:
        self.arrived = 0  # per rank: sums whose part it has written
        self.met = size  # per rank: barriers
        self.announced = 2 * size  # one: chunks rank 0 has broadcast
        self.received = 2 * size + 1  # per rank: broadcast chunks it has read
        self.sent = 3 * size + 1  # per rank: message chunks
        self.read = 4 * size + 1  # per rank: of these, those the receiver has read
        self.target = 5 * size + 1  # per rank, two: receivers of the chunks
        words = 7 * size + 1
        self.buffers = math.ceil(words * _WORD_BYTES / mmap.PAGESIZE) * mmap.PAGESIZE
        # Two buffers per rank for sums, two per rank for messages, two for broadcasts.
        self.sums, self.messages, self.broadcasts = 0, 2 * size, 4 * size
        self.size_bytes = self.buffers + (4 * size + 2) * _CHUNK


class SharedMemoryGroup:
    """One rank's end of a group. Waits end with a RuntimeError after `timeout_s`."""

    def __init__(self, memory: mmap.mmap, place: int, size: int, *, timeout_s: float) -> None:
        self._layout = _Layout(size)
        self._place, self._size = place, size
        self._timeout_s = timeout_s
        self._memory = memory
        count = self._layout.buffers // 4
        self._words = (ctypes.c_uint32 * count).from_buffer(memory)
        self._address = ctypes.addressof(self._words)
        # Spinning helps only while every rank has a core.
        self._spins = _SPINS if size <= usable_cores() else 0
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._aborted = False
        self._done = _Finished()

    def abort(self) -> None:
        """End the waits of this process; may be called from any thread."""
        self._aborted = True

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        """Sum a tensor over the ranks, in place; every rank gets the same bits."""
        for part in self._chunks(tensors[0]):
            number = self._get(self._layout.arrived + self._place) + 1
            first = self._layout.sums + number % 2
            self._buffer(first + 2 * self._place, part).copy_(part)
            self._put(self._layout.arrived + self._place, number)
            self._await_all(self._layout.arrived, number)
            parts = [self._buffer(first + 2 * rank, part) for rank in range(self._size)]
            torch.add(parts[0], parts[1], out=part)
            for other in parts[2:]:
                part.add_(other)
        return self._done

    def barrier(self) -> Work:
        """Return once every rank has called this."""
        number = self._get(self._layout.met + self._place) + 1
        self._put(self._layout.met + self._place, number)
        self._await_all(self._layout.met, number)
        return self._done

    def broadcast(self, tensors: list[torch.Tensor]) -> Work:
        """Broadcast the tensor of rank 0."""
        for part in self._chunks(tensors[0]):
            if self._place == 0:
                number = self._get(self._layout.announced) + 1
                # The buffer was last used two chunks ago.
                self._await_all(self._layout.received, number - 2, first=1)
                self._buffer(self._layout.broadcasts + number % 2, part).copy_(part)
                self._put(self._layout.announced, number)
            else:
                number = self._get(self._layout.received + self._place) + 1
                self._await(self._layout.announced, number, "rank 0")
                part.copy_(self._buffer(self._layout.broadcasts + number % 2, part))
                self._put(self._layout.received + self._place, number)
        return self._done

    def send(self, tensors: list[torch.Tensor], rank: int, _tag: int) -> Work:
        """Send a tensor; returns when the last part is copied."""
        me, layout = self._place, self._layout
        for part in self._chunks(tensors[0]):
            number = self._get(layout.sent + me) + 1
            self._await(layout.read + me, number - 2, f"rank {rank}")
            self._buffer(layout.messages + 2 * me + number % 2, part).copy_(part)
            self._set(layout.target + 2 * me + number % 2, rank)
            self._put(layout.sent + me, number)
        return self._done

    def recv(self, tensors: list[torch.Tensor], rank: int, _tag: int) -> Work:
        """Receive a tensor from `rank`."""
        layout = self._layout
        for part in self._chunks(tensors[0]):
            number = self._next_for_me(rank)
            part.copy_(self._buffer(layout.messages + 2 * rank + number % 2, part))
            self._put(layout.read + rank, number)
        return self._done

    def _next_for_me(self, rank: int) -> int:
        """Return the number of the next unread chunk of `rank`, once it is one for this rank."""
        layout = self._layout
        while True:
            number = self._get(layout.read + rank) + 1
            self._await(layout.sent + rank, number, f"rank {rank}")
            receiver = self._get(layout.target + 2 * rank + number % 2)
            if self._get(layout.read + rank) + 1 != number:
                continue  # another rank has read it meanwhile: its buffer may hold a later chunk
            if receiver == self._place:
                return number
            # Another rank must read its chunk first.
            self._await(layout.read + rank, number, f"a reader of rank {rank}")

    def _chunks(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        flat = tensor.view(-1)
        size = _CHUNK // tensor.element_size()
        return (flat,) if len(flat) <= size else flat.split(size)  # type: ignore[no-untyped-call]

    def _buffer(self, number: int, like: torch.Tensor) -> torch.Tensor:
        key = (number, like.dtype)
        whole = self._buffers.get(key)
        if whole is None:
            start = self._layout.buffers + number * _CHUNK
            count = _CHUNK // like.dtype.itemsize
            whole = torch.frombuffer(self._memory, dtype=like.dtype, count=count, offset=start)
            self._buffers[key] = whole
        return whole[: len(like)]

    def _get(self, word: int) -> int:
        return self._words[word * (_WORD_BYTES // 4)]

    def _set(self, word: int, value: int) -> None:
        self._words[word * (_WORD_BYTES // 4)] = value & _MASK

    def _put(self, word: int, value: int) -> None:
        """Set a word and wake its waiters."""
        self._set(word, value)
        address = ctypes.c_void_p(self._address + word * _WORD_BYTES)
        _LIBC.syscall(_SYS_FUTEX, address, _FUTEX_WAKE, 2**30, None, None, 0)

    def _await_all(self, words: int, number: int, *, first: int = 0) -> None:
        for rank in range(first, self._size):
            if rank != self._place:
                self._await(words + rank, number, f"rank {rank}")

    def _await(self, word: int, number: int, who: str) -> None:
        """Wait until a counting word has reached `number`, which may have wrapped around."""
        place, words = word * (_WORD_BYTES // 4), self._words
        for _ in range(self._spins + 1):
            if ((words[place] - number) & _MASK) < 2**31:
                return
        deadline = monotonic() + self._timeout_s
        pause = _Timespec(0, int(_SLICE_S * 1e9))
        address = ctypes.c_void_p(self._address + word * _WORD_BYTES)
        while (((seen := words[place]) - number) & _MASK) >= 2**31:
            if self._aborted:
                raise RuntimeError("the ranks were ended")
            if monotonic() > deadline:
                raise RuntimeError(f"{who} has not answered for {self._timeout_s:g} s")
            value = ctypes.c_uint32(seen)
            _LIBC.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(pause), None, 0)
