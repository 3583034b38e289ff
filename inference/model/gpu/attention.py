"""Attention of new tokens over the cached blocks of their sequences, by Triton kernels.

A launch serves all sequences of a step, whatever their lengths. Each layer has up to three: one
stores the new keys and values and rotates the queries, one attends for prompts (flash attention),
one for single tokens (flash decoding). The last divides all cached tokens evenly among its
programs, so that none waits for the longest sequence. In a step with only single tokens it also
rotates and stores.

Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, H local query heads, K local key/value heads, G query heads of
#         a key/value head, D head size, R rotated dimensions, T entries of a bias table

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inference.model.gpu.attention_kernels import (
    Cached,
    Heads,
    Inputs,
    Scores,
    Tiles,
    flash_attend_prompts,
    flash_decode,
    store_new_tokens,
)
from inference.model.gpu.flash_attention import Prompts
from inference.model.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import AttentionRules
from inference.parallel.launch_cuda import (
    is_native,
    launch_options,
    multiprocessors,
    shared_bytes,
)

# Least query rows of a tile, each a token and head of the group: the minimum of a tensor core.
LEAST_ROWS = 16
# From so many new tokens on, prompts use tiles of 128 rows, for heads of 65 to 128. Causal
# attention of 8000 tokens on an H200 reaches 464 TFLOP/s with 32 query and 8 key heads of 128, and
# 496 with 16 and 8 heads of 256 (with tiles of 64 rows 442 and 364). For 16 prompts of 512 tokens
# with heads of 128 it is 225, with 64 rows 234.
_LONG_PROMPT = 2048
# How flash decoding reads the cache; programs per multiprocessor; about the most parts of a head.
# 48 sequences of 4000 tokens with 12 query and 2 key heads of 128 take 59 us per layer (428 with
# one program per head), 48 of 2000 to 6000 with 32 and 8 heads 190; just reading takes 45 and 179.
_DECODE_TILE: dict[str, int] = {
    "TOKENS": 64,
    "MOST_PARTS": 32,
    "programs": 4,
    "num_stages": 2,
    "num_warps": 2,
}
# The same if all sequences have at least as many key/value heads as there are programs. With fewer
# registers six programs fit on a multiprocessor: 96 sequences of 600 tokens with 32 query and 8 key
# heads of 128 take 86 us on an H100, 93 with the tile above; just reading takes 70.
_MANY_DECODE_TILE = _DECODE_TILE | {"TOKENS": 32, "programs": 6, "maxnreg": 168}
# The same for heads of 256: 200 sequences of 1500 tokens with 16 and 8 soft-capped heads take 484
# us on an H200, 624 with 32 tokens at once and four programs; just reading takes 482.
_WIDE_DECODE_TILE = _MANY_DECODE_TILE | {"TOKENS": 16}
_OTHER_SHARED_BYTES = 2048  # for barriers and reductions
_JOINED_VALUES = (8192, 4096)  # of parts that a program joins at once, without and with `maxnreg`
_LEAST_SEQUENCES = 256  # steps of fewer share one compiled kernel


def constants(record: Any) -> Any:
    """Return a record for a kernel, with capitalised fields as compile-time constants."""
    named = record._asdict().items()
    return type(record)(
        *(tl.constexpr(value) if name.isupper() else value for name, value in named)
    )


def prompt_rows(size: int, longest: int = 0) -> int:
    """Return the query rows of a tile for prompts of at most `longest` tokens, 0 for any length."""
    return 128 if size > 128 or (size > 64 and longest >= _LONG_PROMPT) else 64


@dataclass(frozen=True)
class PagedAttention:
    """A `CachedAttention` of any number of new tokens for each sequence.

    `single` is true in a graph for steps of one new token per sequence. It writes none of `slots`,
    `places` and the cache's tables, so that kernels can read these before earlier kernels end.
    """

    rotates: ClassVar[bool] = True

    slots: torch.Tensor  # (N,) integers: slot of each token
    places: torch.Tensor  # (N,) integers: index of each token in its slot
    cache: KVCache
    tiles: tuple[tuple[int, Tiles], ...]  # each with the most tokens of a tile
    rules: AttentionRules
    single: bool = False
    prompts: Prompts | None = None  # prompts that FlashAttention serves, which are in no tile

    def of_rows(self, rows: torch.Tensor) -> "PagedAttention":
        """Return the attention of the tokens at `rows` (n,); other results are undefined.

        A batch-invariant step attends for all: a result depends on the size of its tile.
        """
        if self.rules.batch_invariant:
            return self
        slots, places = (each.index_select(0, rows) for each in (self.slots, self.places))
        # Rows are copied: Triton compiles a kernel again for pointers that are not aligned.
        tiles = Tiles(slots, places, rows.clone(), torch.ones_like(rows))
        return replace(self, tiles=((1, tiles),), prompts=None)

    def __call__(
        self,
        query: torch.Tensor,
        *,
        layer: int,
        new: torch.Tensor | None = None,
        angles: Angles | None = None,
    ) -> torch.Tensor:
        """See `CachedAttention`; queries are not rotated yet."""
        count, H, D = query.shape
        y = query.new_empty(count, H * D)
        launch = _Launch(self, query, layer, angles, y)
        if new is not None and (not self.single or self.rules.batch_invariant):
            launch.store(new)
            launch, new = replace(launch, angles=None), None
        if self.prompts is not None:
            self.prompts.attend(query, layer, self.rules, out=y)
        for size, tiles in self.tiles:
            if size > 1 or self.rules.batch_invariant:
                launch.attend_prompts(tiles, size)
            else:
                launch.decode(tiles, new)
        return y


@dataclass(frozen=True)
class _Launch:
    """The arguments shared by the kernels of one layer."""

    step: PagedAttention
    query: torch.Tensor
    layer: int
    angles: Angles | None
    y: torch.Tensor

    @property
    def cache(self) -> KVCache:
        return self.step.cache

    def _inputs(self, new: torch.Tensor | None) -> Any:
        inputs, angles = Inputs(self.query, self.query.stride(0)), self.angles
        if new is not None:
            assert len(self.query) == 1 or self.query.stride(0) == new.stride(0)
            keys, values = new.chunk(2, dim=1)
            inputs = inputs._replace(key_at=keys, value_at=values)
        if angles is not None:
            turned = angles.cos, angles.sin, angles.cos.shape[-1], angles.interleaved
            inputs = Inputs(*inputs[:4], *turned)
        return constants(inputs)

    def _cached(self) -> Any:
        keys, values = self.cache.blocks(self.layer)
        record = Cached(
            keys_at=keys,
            values_at=values,
            block_stride=keys.stride(0),
            head_stride=keys.stride(1),
            tables_at=self.cache.tables,
            table_width=self.cache.tables.stride(0),
            BLOCK=self.cache.shape.block_tokens,
            largest_at=self.cache.largest(self.layer),
        )
        return constants(record)

    def _described(self, tokens: int, width: int) -> Any:
        """Return the TMA descriptor for tiles of `tokens` in the layer's cache, None without TMA.

        From compute capability 9 on, the tensor memory accelerator copies a tile with a single
        instruction: attention of prompts reaches 472 TFLOP/s on an H200, 388 with an address for
        every 16 bytes.
        """
        block, size = self.cache.shape.block_tokens, self.cache.shape.size_per_head
        has_tma = launch_options(self.query)["EARLY"] and self.query.itemsize == 2
        if not has_tma or block % tokens or size * self.cache.dtype.itemsize % 16:
            return None
        return TensorDescriptor.from_tensor(self.cache.rows(self.layer), [tokens, width])

    def _heads(self, rows: int) -> Heads:
        """Return the sizes of heads, for tiles of `rows` tokens."""
        _, H, size = self.query.shape
        return head_sizes(H, self.cache.shape.kv_head_num, size, rows)

    def _scores(self) -> Any:
        rules = self.step.rules
        table = rules.distance_bias
        record = Scores(
            scale=self.query.shape[2] ** -0.5 if rules.scale is None else rules.scale,
            bias_at=rules.alibi_slopes if table is None else table.contiguous(),
            WINDOW=rules.window(self.layer) or 0,
            SOFTCAP=rules.softcap or 0.0,
            TABLE=0 if table is None else table.shape[1],
            NATIVE=is_native(self.query) and self.query.itemsize == 2,
        )
        return constants(record)

    def store(self, new: torch.Tensor) -> None:
        """Store the new keys and values, rotated, and rotate the queries in place."""
        heads = self._heads(1)
        count, H, _ = self.query.shape
        at_once = triton.next_power_of_2(self.cache.shape.kv_head_num)
        store_new_tokens[(count,)](
            *(self._inputs(new), self._cached()),
            *(self.step.slots, self.step.places, constants(heads)),
            QUERIES=triton.next_power_of_2(H),
            HEADS=at_once,
            num_warps=8 if at_once * heads.WIDTH > 4096 else 4,
            **launch_options(self.query),
        )

    def attend_prompts(self, tiles: Tiles, size: int) -> None:
        """Attend for the queries of tiles whose keys and values are all in the cache."""
        heads = self._heads(size)
        options = prompt_options(self.query, heads)
        described = self._described(options["TOKENS"], heads.WIDTH)
        flash_attend_prompts[(len(tiles.slots), self.cache.shape.kv_head_num)](
            *(replace(self, angles=None)._inputs(None), self._cached(), described),
            *(tiles, self._scores()),
            *(self.y, self.y.stride(0), constants(heads)),
            **options,
            **launch_options(self.query),
        )

    def decode(self, tiles: Tiles, new: torch.Tensor | None) -> None:
        """Attend for tiles of one token each; new keys and values, if any, are stored, too."""
        heads = self._heads(1)
        count, K, group = len(tiles.slots), self.cache.shape.kv_head_num, heads.G
        device, width = self.query.device, heads.WIDTH
        processors, at_once = multiprocessors(device), triton.next_power_of_2(group)
        many = count * K >= processors * _DECODE_TILE["programs"]
        options = dict(_decode_options(width, self.query.dtype.itemsize, many=many))
        programs = processors * options.pop("programs")
        flash_decode[(programs,)](
            *(self._inputs(new), self._cached()),
            self._described(options["TOKENS"], width),
            *(tiles, count, self._scores()),
            torch.empty(programs, 2, at_once, width, device=device),
            torch.empty(programs, 2, at_once, device=device),
            _tickets(device, triton.next_power_of_2(count * K)),
            *(self.y, self.y.stride(0), constants(heads)),
            COUNTED=max(triton.next_power_of_2(count), _LEAST_SEQUENCES),
            HEADS=at_once,
            JOINED=max(_JOINED_VALUES["maxnreg" in options] // (at_once * width), 1),
            FIXED=self.step.single,
            **options,
            **launch_options(self.query),
        )


def head_sizes(query_heads: int, kv_heads: int, size: int, tokens: int) -> Heads:
    """Return the sizes of heads, and of tiles of `tokens` tokens."""
    group = query_heads // kv_heads
    return Heads(
        G=group,
        K=kv_heads,
        D=size,
        WIDTH=max(LEAST_ROWS, triton.next_power_of_2(size)),
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(tokens * group)),
    )


@cache
def _tickets(device: torch.device, count: int) -> torch.Tensor:
    """Return zeroed counters, one per key/value head of each token; kernels reset them to zero."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def prompt_options(query: torch.Tensor, heads: Heads) -> dict[str, int]:
    """Return how a tile of queries reads keys: tokens at once, pipeline stages, warps."""
    rows, width, item_bytes = heads.ROWS, heads.WIDTH, query.dtype.itemsize
    if item_bytes == 4:
        options = {"TOKENS": 16, "num_stages": 1, "num_warps": 4 if rows < 64 else 8}
    elif rows < 64 or width > 256:  # batch-invariant steps, or heads too wide for large tiles
        options = {"TOKENS": 32 if width > 128 else 64, "num_stages": 3, "num_warps": 4}
    else:
        stages = 3 if (width, rows) == (128, 64) else 2
        options = {"TOKENS": 64, "num_stages": stages, "num_warps": 8 if width > 128 else 4}
    if query.is_cuda:
        room = shared_bytes(query.device) - rows * width * item_bytes
        options = fitting(options, room, row_bytes=2 * width * item_bytes)
    return options


def fitting(options: dict[str, int], room: int, *, row_bytes: int) -> dict[str, int]:
    """Return the options with fewer stages, or fewer tokens per stage, to fit into shared memory.

    Args:
        options: From `prompt_options`.
        room: Bytes of shared memory for keys and values.
        row_bytes: Bytes of a token's key and value.
    """
    tokens, stages = options["TOKENS"], options["num_stages"]
    room -= _OTHER_SHARED_BYTES
    while tokens * stages * row_bytes > room and tokens > LEAST_ROWS:
        tokens, stages = (tokens, stages - 1) if stages > 1 else (tokens // 2, stages)
    return options | {"TOKENS": tokens, "num_stages": stages}


def _decode_options(width: int, item_bytes: int, *, many: bool) -> dict[str, int]:
    """Return how a program of `flash_decode` reads the cache.

    `programs` is the number per multiprocessor.
    """
    if item_bytes == 4:
        return _DECODE_TILE | {"TOKENS": 16, "num_stages": 1}
    if width > 128:
        return _WIDE_DECODE_TILE
    return _MANY_DECODE_TILE if many else _DECODE_TILE
