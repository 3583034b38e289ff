"""Attention of new tokens over the cached blocks of their sequences, by Triton's kernels.

A launch serves the sequences of a step together, whatever their lengths: in each layer one stores
the new keys and values and rotates the queries, one attends for prompts (flash attention), one for
single tokens (flash decoding). The last divides all cached tokens evenly among its programs: none
waits for the longest sequence. In a step of single tokens alone it also rotates and stores the new
keys and values.

Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, H local query heads, K local key/value heads, G query heads of
#         a key/value head, D head size, R rotated dimensions, T entries of a bias table

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import triton

from inference.model.gpu.attention_kernels import (
    flash_attend_prompts,
    flash_decode_evenly,
    flash_decode_grouped,
    store_new_tokens,
)
from inference.model.gpu.flash_attention import Prompts
from inference.model.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import AttentionRules
from inference.parallel.launch_cuda import (
    has_tma,
    launch_options,
    multiprocessors,
    shared_bytes,
    tile_descriptor,
)

# Query rows of a tile, (token, head of the group) each: what a tensor core multiplies at least.
LEAST_ROWS = 16
# Ways of reading the cache for prompts, by head size, in tiles of 64 query rows. Causal attention
# of 8000 tokens on an H200 takes 1.06 ms with 32 query and 8 key heads of 128 (493 TFLOP/s; cuDNN
# 0.87, torch's flash attention 1.67); tiles of 128 rows take 1.18, and two loads in flight 1.25.
# cuDNN plans each new length for 40 ms, in which a short prompt would be computed many times.
_PROMPT_TILES: dict[int, dict[str, int]] = {
    64: {"TOKENS": 64, "num_stages": 2, "num_warps": 4},
    128: {"TOKENS": 64, "num_stages": 3, "num_warps": 4},
    256: {"TOKENS": 64, "num_stages": 2, "num_warps": 4},
}
# Way of reading it for single tokens whose query heads share keys, programs of a multiprocessor,
# and about the most parts of a head. 48 sequences of 4000 tokens with 12 query and 2 key heads of
# 128 take 59 us of a layer (one program for each head: 428), 48 of 2000 to 6000 with 32 and 8 heads
# 190; reading takes 45 and 179.
_DECODE_TILE: dict[str, int] = {
    "TOKENS": 64,
    "MOST_PARTS": 32,
    "programs": 4,
    "num_stages": 2,
    "num_warps": 2,
}
# The same for as many key/value heads of all sequences as there are programs, of which six fit a
# multiprocessor with fewer registers: 96 sequences of 600 tokens with 32 query and 8 key heads of
# 128 take 86 us on an H100, and 93 with the tile above; reading takes 70.
_MANY_DECODE_TILE = _DECODE_TILE | {"TOKENS": 32, "programs": 6, "maxnreg": 168}
_OTHER_SHARED_BYTES = 2048  # barriers, and what reductions exchange
_JOINED_VALUES = (8192, 4096)  # of parts that a program joins at once; fewer with `maxnreg`
# The same where they share none: cached values that a program of `flash_decode_evenly` reads at
# once. A program is one warp, which has no other to wait for; all must fit the 65,536 registers of
# a multiprocessor. 256 sequences of GPT-J-6B, of 32 to 700 tokens, take 386 us of a layer, and 495
# with one program for each head; reading takes 356. One sequence of 300 tokens with 16 heads of 256
# takes 8 us on an H100, and 14 where its parts are joined one by one.
_EVEN_VALUES = 1024
_EVEN_TILE: dict[str, int] = {"MOST_PARTS": 64, "programs": 12, "num_warps": 1, "maxnreg": 168}
_EVEN_JOINED_VALUES = 2048
_LEAST_SEQUENCES = 256  # one kernel serves all steps of fewer


@dataclass(frozen=True)
class Tiles:
    """Runs of new tokens that one launch serves, each of one sequence; (n,) integers each."""

    size: int
    slots: torch.Tensor
    places: torch.Tensor  # of the first token
    rows: torch.Tensor  # of the first token among the step's
    counts: torch.Tensor  # at most `size`


@dataclass(frozen=True)
class PagedAttention:
    """A `CachedAttention` of any number of new tokens for each sequence.

    `single` is true in a graph for steps of one new token of each sequence, which writes none of
    `slots`, `places` and the cache's tables: kernels then read the cache before the ones before
    them end.
    """

    rotates: ClassVar[bool] = True

    slots: torch.Tensor  # (N,) integers: slot of each token
    places: torch.Tensor  # (N,) integers: its index among the sequence's cached tokens
    cache: KVCache
    tiles: tuple[Tiles, ...]
    rules: AttentionRules
    single: bool = False
    prompts: Prompts | None = None  # FlashAttention's, which then are in no tile

    def __call__(
        self,
        query: torch.Tensor,
        *,
        layer: int,
        new: torch.Tensor | None = None,
        angles: Angles | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (N, H*D) as a `CachedAttention` does; queries are not rotated yet."""
        count, H, D = query.shape
        y = query.new_empty(count, H * D) if out is None else out
        launch = _Launch(self, query, layer, angles, y)
        if new is not None and (not self.single or self.rules.batch_invariant):
            launch.store(new)
            launch, new = replace(launch, angles=None), None
        if self.prompts is not None:
            self.prompts.attend(query, layer, self.rules, out=y)
        for tiles in self.tiles:
            if tiles.size > 1 or self.rules.batch_invariant:
                launch.attend_prompts(tiles)
            else:
                launch.decode(tiles, new)
        return y


@dataclass(frozen=True)
class _Launch:
    """The arguments that the kernels of one layer share."""

    step: PagedAttention
    query: torch.Tensor
    layer: int
    angles: Angles | None
    y: torch.Tensor

    @property
    def cache(self) -> KVCache:
        return self.step.cache

    def _inputs(self, new: torch.Tensor | None) -> tuple[Any, ...]:
        """Return queries, new keys and values, the stride of all three's tokens, and angles."""
        # Absent tensors are not read, but need some pointer in their place.
        query = keys = values = cos = sin = self.query
        if new is not None:
            assert len(query) == 1 or query.stride(0) == new.stride(0)
            K = self.cache.shape.kv_head_num
            keys, values = new[:, :K], new[:, K:]
        if self.angles is not None:
            cos, sin = self.angles.cos, self.angles.sin
        return query, keys, values, query.stride(0), cos, sin

    def _stored(self) -> tuple[Any, ...]:
        keys, values = self.cache.blocks(self.layer)
        tables = self.cache.tables
        return keys, values, keys.stride(0), keys.stride(1), tables, tables.stride(0)

    def _constants(self) -> dict[str, Any]:
        size = self.query.shape[2]
        return {
            "D": size,
            "R": 0 if self.angles is None else self.angles.cos.shape[-1],
            "WIDTH": max(LEAST_ROWS, triton.next_power_of_2(size)),
            "BLOCK": self.cache.shape.block_tokens,
            "INTERLEAVED": self.angles is not None and self.angles.interleaved,
            **launch_options(self.query),
        }

    def _bias(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the additions to the scores, and the kernel's constants for them."""
        rules = self.step.rules
        slopes, table = rules.alibi_slopes, rules.distance_bias
        bias = slopes if table is None else table.contiguous()
        return self.query if bias is None else bias, {
            "WINDOW": rules.window(self.layer) or 0,
            "SOFTCAP": rules.softcap or 0.0,
            "HAS_SLOPES": slopes is not None,
            "TABLE": 0 if table is None else table.shape[1],
        }

    def _result(self) -> tuple[torch.Tensor, int, float]:
        """Return the output, the stride of its tokens, and the factor on the scores."""
        scale = self.step.rules.scale
        factor = self.query.shape[2] ** -0.5 if scale is None else scale
        return self.y, self.y.stride(0), factor

    def store(self, new: torch.Tensor) -> None:
        """Store the new keys and values, rotated, and rotate the queries in place."""
        constants = self._constants()
        count, H, _ = self.query.shape
        K = self.cache.shape.kv_head_num
        heads = triton.next_power_of_2(K)
        store_new_tokens[(count,)](
            *(*self._inputs(new), *self._stored(), self.step.slots, self.step.places),
            H=H,
            K=K,
            QUERIES=triton.next_power_of_2(H),
            PAIRS=triton.next_power_of_2(max(constants["R"] // 2, 1)),
            HEADS=heads,
            num_warps=8 if heads * constants["WIDTH"] > 4096 else 4,
            **constants,
        )

    def attend_prompts(self, tiles: Tiles) -> None:
        """Attend for the queries of some tiles, whose keys and values are all in the cache."""
        K = self.cache.shape.kv_head_num
        group = self.query.shape[1] // K
        constants = self._constants()
        del constants["R"], constants["INTERLEAVED"]  # the queries are rotated
        rows = max(LEAST_ROWS, triton.next_power_of_2(tiles.size * group))
        width, item_bytes = constants["WIDTH"], self.query.dtype.itemsize
        options = _prompt_options(rows, width, item_bytes)
        if self.query.is_cuda:
            room = shared_bytes(self.query.device) - rows * width * item_bytes
            options = fitting(options, room, row_bytes=2 * width * item_bytes)
        described, cache = self._cache_rows(options["TOKENS"], width)
        bias, choices = self._bias()
        flash_attend_prompts[(len(tiles.slots), K)](
            *(self.query, self.query.stride(0), cache, *self._stored()[1:]),
            *(tiles.slots, tiles.places, tiles.rows, tiles.counts),
            *(bias, *self._result()),
            G=group,
            K=K,
            ROWS=rows,
            TMA=described,
            **options,
            **choices,
            **constants,
        )

    def _cache_rows(self, tokens: int, width: int) -> tuple[bool, Any]:
        """Return whether the layer's cache can be read by TMA, and its descriptor or its keys."""
        keys, _ = self.cache.blocks(self.layer)
        block, size = self.cache.shape.block_tokens, self.cache.shape.size_per_head
        if not has_tma(self.query) or block % tokens or size * keys.element_size() % 16:
            return False, keys
        return True, tile_descriptor(self.cache.rows(self.layer), tokens, width)

    def decode(self, tiles: Tiles, new: torch.Tensor | None) -> None:
        """Attend for tiles of one token each; new keys and values, if any, are stored first."""
        constants = self._constants()
        count, H, K = len(tiles.slots), self.query.shape[1], self.cache.shape.kv_head_num
        device, width, item_bytes = self.query.device, constants["WIDTH"], self.query.itemsize
        processors, heads = multiprocessors(device), triton.next_power_of_2(H // K)
        kernel: Any = flash_decode_evenly
        described: list[Any] = []
        if H == K and item_bytes == 2:
            joined = _EVEN_JOINED_VALUES
            options = _EVEN_TILE | {"H": H, "TOKENS": _EVEN_VALUES // width}
        else:
            kernel = flash_decode_grouped
            many = count * K >= processors * _DECODE_TILE["programs"]
            options = dict(_decode_options(width, item_bytes, many=many))
            joined = _JOINED_VALUES["maxnreg" in options]
            options["TMA"], *described = self._cache_rows(options["TOKENS"], width)
            options |= {"G": H // K, "K": K, "GROUP": max(LEAST_ROWS, heads), "HEADS": heads}
        programs = processors * options.pop("programs")
        mixed = torch.empty(programs, 2, heads, width, device=device)
        sums = torch.empty(programs, 2, 2, heads, device=device)
        bias, choices = self._bias()
        kernel[(programs,)](
            *(*self._inputs(new), *described, *self._stored()),
            *(tiles.slots, tiles.places, tiles.rows, tiles.counts, count),
            *(bias, mixed, sums, _tickets(device, triton.next_power_of_2(count * K))),
            *self._result(),
            JOINED=max(joined // (heads * width), 1),
            ROWS=max(triton.next_power_of_2(count), _LEAST_SEQUENCES),
            NEW=new is not None,
            FIXED=self.step.single,
            **options,
            **choices,
            **constants,
        )


@cache
def _tickets(device: torch.device, count: int) -> torch.Tensor:
    """Return zeros, one for each token's head; every kernel leaves them zero."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _prompt_options(rows: int, width: int, item_bytes: int) -> dict[str, int]:
    """Return how a tile of queries reads the cache: tokens at once, loads in flight, warps."""
    if item_bytes == 4:
        return {"TOKENS": 16, "num_stages": 1, "num_warps": 4 if rows < 64 else 8}
    if rows < 64 or width > 256:  # those of batch-invariant steps, or too wide for large tiles
        return {"TOKENS": 32 if width > 128 else 64, "num_stages": 3, "num_warps": 4}
    return _PROMPT_TILES[max(width, 64)]


def fitting(options: dict[str, int], room: int, *, row_bytes: int) -> dict[str, int]:
    """Return the options with fewer loads in flight, or fewer tokens of each, if `room` is short.

    Args:
        options: From `_prompt_options`.
        room: Bytes of shared memory for keys and values.
        row_bytes: Of a token's key and value.
    """
    tokens, stages = options["TOKENS"], options["num_stages"]
    room -= _OTHER_SHARED_BYTES
    while tokens * stages * row_bytes > room and tokens > LEAST_ROWS:
        tokens, stages = (tokens, stages - 1) if stages > 1 else (tokens // 2, stages)
    return options | {"TOKENS": tokens, "num_stages": stages}


def _decode_options(width: int, item_bytes: int, *, many: bool) -> dict[str, int]:
    """Return how a program of `flash_decode_grouped` reads the cache.

    `programs` are those of a multiprocessor.
    """
    if item_bytes == 4:
        return _DECODE_TILE | {"TOKENS": 16, "num_stages": 1}
    if width > 128:
        return _DECODE_TILE | {"TOKENS": 32}
    return _MANY_DECODE_TILE if many else _DECODE_TILE
