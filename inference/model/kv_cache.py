"""Keys and values of the running sequences, in blocks that sequences take as they grow.

A sequence runs in a slot, whose row of the block table locates its tokens. On a GPU a block holds a
few tokens (paged attention). On CPU a block holds a whole sequence, since attention reads
contiguous tokens fastest; the system backs a page only when a token is first written to it.
"""

# Shapes: L local layers, B slots, H local key/value heads, S tokens of a block, D head size,
#         N tokens of a step, n copied tokens

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

# Type of 8-bit keys and values; each row is scaled so that its largest magnitude is E4M3's.
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_SCALE_BYTES = 4

# Source of a move that writes zeros, to remove values that are not finite.
WIPE = -1

# A copy of cached tokens: (source slot, target slot, first token, end).
Move = tuple[int, int, int, int]
# Cached tokens: (slot, first token, end).
Span = tuple[int, int, int]
# A block that a slot takes: (slot, index among the slot's blocks, block).
TableEntry = tuple[int, int, int]


def prefix_source(task_id: int) -> int:
    """Return the source of a move that copies the loaded prefix of a prompt task."""
    return WIPE - 1 - task_id


def encoder_slot(slots: Sequence[int], sequences: int) -> int:
    """Return the slot of the encoder's output for a sequence whose decoder has `slots`.

    A cache has `sequences` decoder slots, the scratch slot, and then the slots of encoder outputs.
    """
    return sequences + 1 + slots[0]


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one rank's cache; without `block_tokens` each slot has one fixed block.

    With `parts` 2 there are as many slots again, see `encoder_slot`. With `fp8`, keys and values
    have 8 bits, with the largest magnitude of each head's key and value in fp32.
    """

    num_layer: int
    slots: int
    kv_head_num: int
    max_len: int  # most tokens of a sequence
    size_per_head: int
    block_tokens: int = 0
    blocks: int = 0
    parts: int = 1
    fp8: bool = False

    def __post_init__(self) -> None:
        if not self.block_tokens:
            object.__setattr__(self, "block_tokens", self.max_len)
            object.__setattr__(self, "blocks", self.slots * self.parts)

    @property
    def slot_blocks(self) -> int:
        """Most blocks of a slot."""
        return -(-self.max_len // self.block_tokens)

    @property
    def is_contiguous(self) -> bool:
        """Whether a slot's tokens lie in one block."""
        return self.slot_blocks == 1

    def token_bytes(self, item_size: int) -> int:
        """Return the memory of one token's keys and values."""
        size = self.size_per_head
        row = size + _SCALE_BYTES if self.fp8 else size * item_size
        return 2 * self.num_layer * self.kv_head_num * row


class KVCache:
    """One rank's keys and values."""

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefixes: Sequence[Tensor] = (),
    ) -> None:
        """Allocate the cache, for keys and values that are computed in `dtype`.

        `prefixes` are the loaded prefix of each prompt task, (L, 2, H, tokens, D).
        """
        self.shape, self.device = shape, device
        self.dtype = FP8 if shape.fp8 else dtype  # as stored
        self._computed = dtype
        self._prefixes = prefixes
        # One more block takes tokens that pad a step of fixed size.
        heads, size = shape.kv_head_num, shape.size_per_head
        sizes = (shape.num_layer, shape.blocks + 1, 2, heads, shape.block_tokens, size)
        self._data = _zeros(sizes, torch.uint8 if shape.fp8 else dtype, device)
        self._layers = list(self._data.view(self.dtype).unbind(0))  # each (blocks, 2, H, S, D)
        # FP8 is stored as bytes, with the largest magnitude of each row, (..., S, 1).
        self._stores = [self._data]
        if shape.fp8:
            self._stores.append(_zeros((*sizes[:-1], 1), torch.float32, device))
        self._rows = [
            [layer.view(-1, store.shape[-1]) for layer in store.unbind(0)] for store in self._stores
        ]
        slots = shape.slots * shape.parts + 1
        self._table = np.full((slots, shape.slot_blocks), shape.blocks, np.int32)
        if shape.is_contiguous:
            self._table[:, 0] = np.arange(slots)
        self.tables = torch.from_numpy(self._table.copy()).to(device)  # (slots, slot_blocks)

    @property
    def scratch_slot(self) -> int:
        """The slot for tokens whose results are discarded."""
        return self.shape.slots

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a local layer, (blocks, H, S, D) views."""
        return self._layers[layer][:, 0], self._layers[layer][:, 1]

    def rows(self, layer: int) -> Tensor:
        """Return a local layer as rows, each the key or value of one token's head: (rows, D)."""
        return self._rows[0][layer].view(self.dtype)

    def largest(self, layer: int) -> Tensor | None:
        """Return the largest magnitude of each of `rows`, (rows,), in an FP8 cache, else None."""
        return self._rows[1][layer].view(-1) if self.shape.fp8 else None

    def token_rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of tokens' keys and values, for `write`: (N * 2 * H,)."""
        size = self.shape.block_tokens
        blocks = slots if self.shape.is_contiguous else self.tables[slots, positions // size].long()
        heads = self.shape.kv_head_num
        parts = torch.arange(2 * heads, device=slots.device)  # key heads, then value heads
        rows = (blocks * (2 * heads)).unsqueeze(1) + parts  # (N, 2H)
        return (rows * size + (positions % size).unsqueeze(1)).flatten()

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store the (N, 2, H, D) keys and values of a local layer at `rows` of `token_rows`."""
        flat = self._encoded(keys_values.reshape(-1, self.shape.size_per_head))
        for each, part in zip(self._rows, flat, strict=True):
            each[layer].index_copy_(0, rows, part)

    def reader(
        self, slot: int, slot_count: int, length: int
    ) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Return a function from a local layer to the first keys and values of adjacent slots.

        They are (slot_count, H, length, D) each; views if a slot is one block, else copies.
        """
        read = [_reader(store, slot, slot_count, length, self) for store in self._stores]
        if not self.shape.fp8:
            return read[0]

        def widened(layer: int) -> tuple[Tensor, Tensor]:
            (keys, values), largest = (each(layer) for each in read)
            dtype = self._computed
            return _widened(keys, largest[0], dtype), _widened(values, largest[1], dtype)

        return widened

    def update(self, moves: Sequence[Move], entries: Sequence[TableEntry] = ()) -> None:
        """Copy tokens among slots, and give slots their new blocks.

        All sources are read before a target is written or a slot gets a block, so that slots may
        swap. The source WIPE writes zeros to the slot's old blocks, `prefix_source` a loaded
        prefix. Last, in a move from a slot to itself the tokens move to its beginning, which drops
        those before them.
        """
        copies = [move for move in moves if move[0] != move[1] and move[0] > WIPE]
        values = self._load([(source, start, stop) for source, _, start, stop in copies])
        self._store([move[1:] for move in moves if move[0] == WIPE], None)
        self._assign(entries)
        self._store([move[1:] for move in copies], values)
        for source, target, start, stop in moves:
            if source < WIPE:
                part = self._prefixes[WIPE - 1 - source][:, :, :, start:stop].to(self._computed)
                part = part if self.shape.is_contiguous else part.permute(3, 0, 1, 2, 4)
                self._store([(target, start, stop)], [self._encoded(part)])
        shifted = [move[1:] for move in moves if move[0] == move[1]]
        values = self._load(shifted)
        self._store([(slot, 0, stop - start) for slot, start, stop in shifted], values)

    def _assign(self, entries: Sequence[TableEntry]) -> None:
        if not entries:
            return
        # A slot's stale entries would read values of other sequences at masked positions.
        ends = dict.fromkeys((slot for slot, _, _ in entries), 0)
        for slot, place, _ in entries:
            ends[slot] = max(ends[slot], place + 1)
        none = self.shape.blocks
        stale = [
            (slot, end + int(place), none)
            for slot, end in ends.items()
            for place in np.flatnonzero(self._table[slot, end:] != none)
        ]
        slots, places, blocks = np.asarray([*entries, *stale], np.int64).T
        self._table[slots, places] = blocks
        cells = on_device(np.stack((slots * self.shape.slot_blocks + places, blocks)), self.device)
        self.tables.view(-1).index_copy_(0, cells[0], cells[1].int())

    def _encoded(self, values: Tensor) -> list[Tensor]:
        """Return values (..., D) as stored: in FP8 as bytes and each row's largest, (..., 1)."""
        if not self.shape.fp8:
            return [values]
        values = values.float()
        largest = values.abs().amax(-1, keepdim=True)
        digits = (values * (_LARGEST / largest.clamp_min(1e-30))).clamp(-_LARGEST, _LARGEST)
        return [digits.to(FP8).view(torch.uint8), largest]

    def _load(self, spans: Sequence[Span]) -> list[list[Tensor]]:
        """Return copies of the tokens of spans, from each store (D is 1 for largest magnitudes).

        They are (L, 2, H, n, D) for each span if a slot is one block, else (n, L, 2, H, D) for all
        spans together.
        """
        if self.shape.is_contiguous:
            return [
                [store[:, slot, :, :, start:stop].clone() for store in self._stores]
                for slot, start, stop in spans
            ]
        if not spans:
            return []
        blocks, places = self._cells(spans)
        # Indexing two axes that are not adjacent puts the tokens first.
        return [[store[:, blocks, :, :, places] for store in self._stores]]

    def _store(self, spans: Sequence[Span], values: Sequence[Sequence[Tensor]] | None) -> None:
        """Store values in the format of `_load`, or zeros for None."""
        for number, store in enumerate(self._stores):
            if self.shape.is_contiguous:
                for nth, (slot, start, stop) in enumerate(spans):
                    target = store[:, slot, :, :, start:stop]
                    target.zero_() if values is None else target.copy_(values[nth][number])
            elif spans:
                blocks, places = self._cells(spans)
                zero = store.new_zeros(())
                store[:, blocks, :, :, places] = zero if values is None else values[0][number]

    def _cells(self, spans: Sequence[Span]) -> Tensor:
        """Return the block of each token and its index in the block, (2, n)."""
        tokens = [np.arange(start, stop) for _, start, stop in spans]
        slots = np.repeat([slot for slot, _, _ in spans], [len(each) for each in tokens])
        nth, places = np.divmod(np.concatenate(tokens), self.shape.block_tokens)
        blocks = self._table[slots, nth].astype(np.int64)
        return on_device(np.stack((blocks, places)), self.device)


def on_device(values: Array, device: torch.device) -> Tensor:
    """Return an array on a device, without a synchronisation."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: in uninitialised memory, a masked NaN would still spoil its row.

    On CPU the system provides zeroed pages, allocated when first written.
    """
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    count = math.prod(sizes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes)


def _widened(digits: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values (..., D) from FP8 bytes and largest magnitudes (..., 1)."""
    return (digits.view(FP8).float() * (largest / _LARGEST)).to(dtype)


def _reader(
    store: Tensor, slot: int, slot_count: int, length: int, cache: KVCache
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return `KVCache.reader` for one of its stores."""
    slots = slice(slot, slot + slot_count)
    if cache.shape.is_contiguous:
        # For all layers at once: creating a view per layer would cost more than a small product.
        keys, values = store[:, slots, :, :, :length].unbind(2)  # (L, slots, H, S, D)
        return list(zip(keys.unbind(0), values.unbind(0), strict=True)).__getitem__
    blocks = cache.tables[slots, : -(-length // cache.shape.block_tokens)].long()

    def read(layer: int) -> tuple[Tensor, Tensor]:
        tokens = store[layer][blocks]  # (slots, slot blocks, 2, H, S, D)
        keys, values = tokens.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length]
        return keys, values

    return read
