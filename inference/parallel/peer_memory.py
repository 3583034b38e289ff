"""GPU memory that the other ranks of a host map, through the CUDA driver."""

import ctypes
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_MAP_PEER = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: the GPUs share an NVLink
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class PeerMemory:
    """This rank's memory and the mapped memories of its peers; see `open_peer_memory`."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate zeroed memory on the current GPU.

        Raises:
            OSError: The driver is missing, or the allocation failed.
        """
        self._driver = ctypes.CDLL(_LIBRARY)
        self._own = ctypes.c_uint64()
        self._mapped: dict[int, ctypes.c_uint64] = {}
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(size_bytes))
        zero, size = ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes)
        self._call("cuMemsetD8_v2", self._own, zero, size)
        self._call("cuCtxSynchronize")

    def handle(self) -> str:
        """Return the handle by which other processes map this rank's memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes(handle).hex()

    def map(self, rank: int, handle: str, device: int, other: int) -> None:
        """Map the memory of another rank, on the GPU `other`, for this rank's `device`.

        Raises:
            OSError: The GPUs do not support atomic operations in each other's memory.
        """
        linked, address = ctypes.c_int(), ctypes.c_uint64()
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(linked), _NATIVE_ATOMICS, device, other)
        if not linked.value:
            raise OSError(f"GPUs {device} and {other} have no NVLink")
        named = _Handle.from_buffer_copy(bytes.fromhex(handle))
        flags = ctypes.c_uint(_MAP_PEER)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), named, flags)
        self._mapped[rank] = address

    def addresses(self, group_rank: int) -> list[int]:
        """Return the addresses of all memories in rank order; `group_rank` is this rank."""
        memories = self._mapped | {group_rank: self._own}
        return [memories[rank].value for rank in sorted(memories)]

    def unmap(self) -> None:
        """Unmap the memories of the other ranks, which no kernel may use any more."""
        mapped, self._mapped = self._mapped, {}
        for address in mapped.values():
            self._call("cuIpcCloseMemHandle", address)

    def free(self) -> None:
        """Free this rank's memory, after the others have unmapped it."""
        self._call("cuMemFree_v2", self._own)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise OSError(f"{name}: CUDA error {status}")


def open_peer_memory(
    store: Store, group_rank: int, size: int, device: torch.device, *, size_bytes: int
) -> PeerMemory | None:
    """Return this rank's memory with all others mapped, or None if one cannot be mapped.

    Every rank of the group must call this, with its `group_rank` and a store that only this group
    uses; all get the same result.
    """
    torch.cuda.synchronize(device)  # creates the context for calls to the driver
    memory = None
    try:
        memory = PeerMemory(size_bytes)
        offered = {
            "host": _BOOT_ID.read_text(encoding="utf-8"),
            "device": device.index,
            "handle": memory.handle(),
        }
    except OSError as error:
        offered = {"problem": str(error)}
    store.set(f"memory/{group_rank}", json.dumps(offered))
    offers = [json.loads(store.get(f"memory/{rank}")) for rank in range(size)]
    problem = ""
    try:
        for other in offers:
            if "problem" in other:
                raise OSError(other["problem"])
        assert memory is not None
        for rank, other in enumerate(offers):
            if other["host"] != offered["host"]:
                raise OSError(f"rank {rank} runs on another host")
            if rank != group_rank:
                memory.map(rank, other["handle"], device.index, other["device"])
    except OSError as error:
        problem = str(error)
    store.set(f"mapped/{group_rank}", problem)
    problems = {store.get(f"mapped/{rank}").decode() for rank in range(size)} - {""}
    if not problems:
        return memory
    logger.info("peer memory is unavailable, NCCL sums instead: %s", "; ".join(sorted(problems)))
    if memory is not None:
        memory.unmap()  # not freed, since a peer may still have it mapped
    return None
