"""Communication of ranks: a group for plans, one per stage for sums, one between stages.

Groups are created directly on a store, so that one process can have several engines.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from inference.parallel.epilogue import add_terms
from inference.parallel.layout import ParallelLayout
from inference.parallel.peer_memory import PeerMemory, open_peer_memory
from inference.parallel.reachability import check_reachable, listening_address
from inference.parallel.shared_memory import SharedMemoryGroup, open_group

if TYPE_CHECKING:
    from inference.parallel.peer_cuda import PeerSums

# Bytes in the first transfer of a message, its length included; longer ones need a second.
_PACKET = 4096
_LENGTH_BYTES = 4


def _nccl(store: Store, group_rank: int, size: int, timeout: timedelta) -> Any:
    # Builds of torch without CUDA do not have this class.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, group_rank, size, options)


class RankGroups:
    """The communication of one rank with the others.

    Every wait of the host ends after `timeout_s` with a RuntimeError, even if a peer has exited.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        store: Store,
        *,
        device: torch.device,
        timeout_s: float,
        shared_memory: bool = True,
        address: str = "127.0.0.1",
    ) -> None:
        """Connect; every rank must do so at the same time.

        All ranks share `store`, which no earlier groups may have used. On CUDA, hidden states and
        logits are sent over NCCL, and sums of few tokens through peer memory. On CPU they are sent
        through shared memory, or over gloo at this rank's `address` between hosts or if
        `shared_memory` is False.

        Raises:
            RuntimeError: A rank did not join in time, or cannot be reached.
        """
        self.layout = layout
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._may_share_memory = shared_memory
        self._default_address = address
        self._shared: list[SharedMemoryGroup] = []
        self._nccl: list[Any] = []
        everyone = list(range(layout.world_size))
        self._control = self._group("control", everyone, store, torch.device("cpu"))
        if layout.tp_size > 1:
            self._stage = self._group(f"stage{layout.pp_rank}", layout.tp_ranks, store, device)
        self._peers: PeerSums | None = None
        self._peer_memory: PeerMemory | None = None
        if layout.tp_size > 1 and device.type == "cuda":
            self._open_peers(PrefixStore(f"peers{layout.pp_rank}", store))
        if layout.pp_size > 1:
            self._pipe = self._group("pipe", everyone, store, device)

    def _group(self, name: str, ranks: list[int], store: Store, device: torch.device) -> Any:
        """Return a group of torch, or one in shared memory that has the same methods."""
        store = PrefixStore(name, store)
        group_rank = ranks.index(self.layout.rank)
        if device.type == "cuda":
            self._nccl.append(_nccl(store, group_rank, len(ranks), self._timeout))
            return self._nccl[-1]
        if self._may_share_memory:
            timeout_s = self._timeout.total_seconds()
            if shared := open_group(store, group_rank, len(ranks), timeout_s=timeout_s):
                self._shared.append(shared)
                return shared
        address = listening_address(self._default_address)
        if name == "control":
            timeout_s = self._timeout.total_seconds()
            check_reachable(store, address, group_rank, len(ranks), timeout_s=timeout_s)
        # The options that torch.distributed itself sets.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(store, group_rank, len(ranks), options)

    def _open_peers(self, store: Store) -> None:
        from inference.parallel.peer_cuda import PeerSums, memory_bytes

        group_rank, size = self.layout.tp_rank, self.layout.tp_size
        size_bytes = memory_bytes(size)
        memory = open_peer_memory(store, group_rank, size, self._device, size_bytes=size_bytes)
        if memory is not None:
            self._peers = PeerSums(group_rank, memory.addresses(group_rank), self._device)
            self._peer_memory = memory

    def abort(self) -> None:
        """End waits of this process on shared memory; may be called from any thread."""
        for group in self._shared:
            group.abort()

    def close(self) -> None:
        """Shut down; every rank calls this after its last step.

        CUDA graphs that contain sums must be freed before, as NCCL would wait for them.
        """
        if self._nccl:
            torch.cuda.synchronize(self._device)
        for group in self._nccl:
            group.shutdown()
        self._nccl.clear()
        if self._peer_memory is not None:
            self._peer_memory.unmap()
            self.barrier()
            self._peer_memory.free()
            self._peers = self._peer_memory = None

    def all_reduce(
        self,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of `x` (N, E) over the ranks of this stage, + bias + residual.

        `x` may be overwritten.
        """
        x = x.contiguous()
        if self._peers is not None and self._peers.takes(x):
            return self._peers.sum(x, bias=bias, residual=residual)
        self._stage.allreduce([x]).wait()
        return add_terms(x, bias=bias, residual=residual)

    def gather_stage(self, x: Tensor) -> Tensor:
        """Return the tensors of this stage's ranks on a GPU, in rank order (T, ...)."""
        gathered = x.new_empty(self.layout.tp_size, *x.shape)
        self._stage._allgather_base(gathered, x.contiguous()).wait()
        return gathered

    def send(self, x: Tensor, rank: int) -> Work:
        """Begin to send a tensor to a rank of another stage; torch keeps it until it is sent."""
        sent: Work = self._pipe.send([x.contiguous()], rank, 0)
        return sent

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Receive into `x` from a rank of another stage, and return it."""
        self._pipe.recv([x], rank, 0).wait()
        return x

    def gather(
        self,
        part: Tensor | None,
        shape: Sequence[int],
        *,
        ranks: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Return the parts of `ranks`, all of one shape, on rank 0; elsewhere an empty list.

        `part` is this rank's, None if it has none.
        """
        group = self._pipe if self.layout.pp_size > 1 else self._stage
        if self.layout.rank != 0:
            if part is not None:
                group.send([part.contiguous()], 0, 0).wait()
            return []
        parts = []
        for rank in ranks:
            if rank == 0:
                assert part is not None
                parts.append(part)
                continue
            parts.append(torch.empty(shape, dtype=dtype, device=self._device))
            group.recv([parts[-1]], rank, 0).wait()
        return parts

    def send_message(self, message: bytes) -> None:
        """Send a message from rank 0 to every rank."""
        whole = bytearray(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
        rest = whole[_PACKET:]
        self.broadcast(torch.frombuffer(whole[:_PACKET].ljust(_PACKET), dtype=torch.uint8))
        if rest:
            self.broadcast(torch.frombuffer(rest, dtype=torch.uint8))

    def receive_message(self) -> bytes:
        """Return the next message of rank 0."""
        whole = self.broadcast(torch.empty(_PACKET, dtype=torch.uint8)).numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
        if end > _PACKET:
            whole += self.broadcast(torch.empty(end - _PACKET, dtype=torch.uint8)).numpy().tobytes()
        return whole[_LENGTH_BYTES:end]

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's CPU tensor into the other ranks' tensors of the same shape."""
        self._control.broadcast([x]).wait()
        return x

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._control.barrier().wait()
