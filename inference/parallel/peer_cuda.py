"""All-reduce over the GPUs of one node through each other's memory, in one kernel.

For few tokens an all-reduce is bound by latency. Every rank writes its summand into the memory of
all others, raises a flag there, waits for their flags, and adds the received summands to bias and
residual, for which NCCL would need two more kernels. All ranks add in rank order and get the same
bits. Import this module only where Triton is installed.
"""

# Shapes: N tokens, E hidden

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

# Every program exchanges one region of a tensor: 16 bytes per thread of 128.
_REGION_BYTES = 2048
_WARPS = 4
# Largest summand in bytes for this kernel, by the number of ranks. Each rank receives all summands,
# which NCCL avoids for larger ones. All programs wait for their peers, so that all must fit on the
# GPU at once: the 132 multiprocessors of an H200 hold 2112 programs of 128 threads.
_MOST_BYTES = {2: 2 << 20, 3: 1 << 20, 4: 512 << 10}
_MOST_BYTES_OF_MANY = 256 << 10
# A rank gives up after so many polls of a flag, some minutes: a peer may still be compiling its
# kernels. The engine notices a lost rank much earlier.
_MOST_POLLS = 500_000_000


@triton.jit
def _sum_of_ranks(
    x_at,
    bias_at,
    residual_at,
    y_at,
    memories_at,
    turns_at,
    rank,
    size,
    width,
    capacity,
    max_polls,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
    DATA: tl.constexpr,  # bytes of a memory before its data
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    region = tl.program_id(0)
    place = region * REGION + tl.arange(0, REGION)
    inside = place < size
    wait_for_earlier(EARLY)
    # Double buffering: a peer that writes this half again has seen the flag of the turn in between,
    # which this rank raises only after it has read this half.
    turn = tl.load(turns_at + region) + 1
    half = (turn & 1) * RANKS * capacity
    x = tl.load(x_at + place, mask=inside, other=0.0)
    if bias_at is not None:  # read before the wait for the peers' flags
        bias = tl.load(bias_at + place % width, mask=inside, other=0.0).to(tl.float32)
    if residual_at is not None:
        residual = tl.load(residual_at + place, mask=inside, other=0.0).to(tl.float32)
    for peer in tl.static_range(RANKS):
        data_at = tl.multiple_of((tl.load(memories_at + peer) + DATA).to(x_at.dtype), 16)
        tl.store(data_at + half + rank * capacity + place, x, mask=inside)
    tl.debug_barrier()  # one thread's flag announces the writes of all threads
    for peer in tl.static_range(RANKS):
        flags_at = tl.load(memories_at + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags_at + region * RANKS + rank, turn, sem="release", scope="sys")
    own_at = tl.load(memories_at + rank)
    flags_at = own_at.to(tl.pointer_type(tl.int32)) + region * RANKS
    for peer in tl.static_range(RANKS):
        polls = 0
        # Turns wrap around after days.
        while tl.atomic_add(flags_at + peer, 0, sem="acquire", scope="sys") - turn < 0:
            polls += 1
            if polls > max_polls:
                _fail()
    tl.debug_barrier()
    data_at = tl.multiple_of((own_at + DATA).to(x_at.dtype), 16) + half
    total = tl.zeros((REGION,), tl.float32)
    for peer in tl.static_range(RANKS):
        part = tl.load(
            data_at + peer * capacity + place, mask=inside, other=0.0, cache_modifier=".cg"
        )
        total += part.to(tl.float32)
    if bias_at is not None:
        total += bias
    if residual_at is not None:
        total += residual
    tl.store(y_at + place, total.to(y_at.dtype.element_ty), mask=inside)
    tl.store(turns_at + region, turn)


@triton.jit
def _fail():
    """Abort the kernel with an error, after which the process can no longer use the GPU."""
    tl.inline_asm_elementwise(
        "trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


def _most_bytes(ranks: int) -> int:
    return _MOST_BYTES.get(ranks, _MOST_BYTES_OF_MANY)


def _flag_bytes(ranks: int) -> int:
    return _most_bytes(ranks) // _REGION_BYTES * ranks * 4


def memory_bytes(ranks: int) -> int:
    """Return the size of one rank's memory: a flag for each region and peer, and two buffers."""
    return _flag_bytes(ranks) + 2 * ranks * _most_bytes(ranks)


class PeerSums:
    """One rank's side of the sums through peer memory."""

    def __init__(self, place: int, memories: Sequence[int], device: torch.device) -> None:
        """Bind the memories that all ranks have mapped.

        Args:
            place: This rank's index.
            memories: Addresses, in this process, of the ranks' zeroed memories of `memory_bytes`.
            device: This rank's GPU.
        """
        self._place, self._ranks = place, len(memories)
        self._most_bytes = _most_bytes(self._ranks)
        self._memories = torch.tensor(memories, dtype=torch.int64, device=device)
        regions = self._most_bytes // _REGION_BYTES
        self._turns = torch.zeros(regions, dtype=torch.int32, device=device)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is small enough for this kernel."""
        return 0 < x.nbytes <= self._most_bytes

    def sum(
        self, x: torch.Tensor, *, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of contiguous tensors (N, E) over the ranks, + bias + residual.

        All ranks must call this at the same time, with tensors of one shape. If a peer does not
        answer for minutes, the kernel aborts, and the process can no longer use its GPU.
        """
        y = torch.empty_like(x)
        item = x.element_size()
        _sum_of_ranks[(triton.cdiv(x.nbytes, _REGION_BYTES),)](
            *(x, bias, None if residual is None else residual.contiguous(), y),
            *(self._memories, self._turns, self._place),
            *(x.numel(), x.shape[-1], self._most_bytes // item, _MOST_POLLS),
            RANKS=self._ranks,
            REGION=_REGION_BYTES // item,
            DATA=_flag_bytes(self._ranks),
            num_warps=_WARPS,
            **launch_options(x),
        )
        return y
