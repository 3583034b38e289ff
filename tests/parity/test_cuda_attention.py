"""Attention kernels over a cache in blocks give what attention over whole sequences gives.

With TRITON_INTERPRET=1 they run on a CPU, where Triton is installed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from inference.model.gpu import flash_attention
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.layers import alibi_slopes
from inference.model.rotary import Angles
from inference.model.step import AttentionRules, attention_bias
from tests.parity.conftest import skip_without_gpu
from tests.parity.flash_attention_operator import forward

pytestmark = pytest.mark.gpu
skip_without_gpu(can_interpret=True)

SLOTS, MAX_LEN = 9, 400
LAYER = 1  # of two
# One unit in the last place of values from 4 to 8 in fp16 and bf16; 40 of fp32, in which sums run
# over up to 301 keys, whose scores are sums of up to 256 products.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Sequences:
    """Random keys and values in whole sequences, and the same in a cache of shuffled blocks."""

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int]],  # (slot, cached tokens, new ones)
        *,
        heads: tuple[int, int, int],
        rules: AttentionRules,
        dtype: torch.dtype,
        device: torch.device,
        rotated: int = 0,
        interleaved: bool = False,
        block: int = 64,
        fp8: bool = False,
    ) -> None:
        self.query_heads, kv_heads, size = heads
        self.segments = np.array(segments)
        self.rules = replace(rules, group=self.query_heads // kv_heads)
        blocks = SLOTS * -(-MAX_LEN // block)
        shape = CacheShape(
            *(2, SLOTS, kv_heads, MAX_LEN, size), block_tokens=block, blocks=blocks, fp8=fp8
        )
        self.cache = KVCache(shape, dtype=dtype, device=device)
        order = iter(np.random.default_rng(1).permutation(blocks).tolist())
        entries = [
            (slot, nth, next(order))
            for slot, cached, new in segments
            for nth in range(-(-(cached + new) // block))
        ]
        self.cache.update([], entries)
        count = sum(new for _, _, new in segments)
        width = self.query_heads + 2 * kv_heads
        self.qkv = torch.randn(count, width, size, dtype=dtype, device=device)
        self.angles = None
        if rotated:
            angles = torch.rand(count, 1, rotated // 2, device=device) * 6
            repeated = (
                angles.repeat_interleave(2, dim=2) if interleaved else torch.cat((angles,) * 2, 2)
            )
            self.angles = Angles(repeated.cos().to(dtype), repeated.sin().to(dtype), interleaved)
        self.old = [torch.randn(n, 2, kv_heads, size, dtype=dtype, device=device)
                    for _, n, _ in segments]  # fmt: skip
        for (slot, cached, _), values in zip(segments, self.old, strict=True):
            slots = torch.full((cached,), slot, device=device)
            rows = self.cache.token_rows(slots, torch.arange(cached, device=device))
            self.cache.write(LAYER, rows, values)

    def expected(self) -> torch.Tensor:
        """Return (N, H*D) fp32 by whole sequences."""
        kv_heads = self.cache.shape.kv_head_num
        x = self.qkv.float()
        heads = self.query_heads + kv_heads
        if self.angles is not None:
            x = torch.cat((self._turn(x[:, :heads]), x[:, heads:]), dim=1)
        outputs, first = [], 0
        for (slot, cached, new), old in zip(self.segments.tolist(), self.old, strict=True):
            mine = x[first : first + new]
            first += new
            query = mine[:, : self.query_heads].transpose(0, 1)  # (H, Q, D)
            stored = mine[:, self.query_heads :].unflatten(1, (2, kv_heads))
            every = torch.cat((old.float(), stored))
            if self.cache.shape.fp8:
                every = self._kept(slot, every)
                if (self.segments[:, 2] == 1).all():  # these see their own as they are
                    every[cached:] = stored
            keys, values = every.permute(1, 2, 0, 3)  # (K, S, D)
            group = self.query_heads // kv_heads
            keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
            starts = torch.tensor([cached], device=x.device)
            bias = attention_bias(starts, new, cached + new, self.rules, self.rules.window(LAYER))
            scores = query @ keys.transpose(1, 2) * (self.rules.scale or query.shape[2] ** -0.5)
            if self.rules.softcap is not None:
                scores = self.rules.softcap * (scores / self.rules.softcap).tanh()
            weights = (scores + bias[0]).softmax(-1)
            outputs.append((weights @ values).transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def _kept(self, slot: int, every: torch.Tensor) -> torch.Tensor:
        """Return the keys and values (S, 2, K, D) that the cache has stored of some in FP8."""
        kept = torch.stack(self.cache.reader(slot, 1, len(every))(LAYER))[:, 0].permute(2, 0, 1, 3)
        if kept.is_cuda:  # Triton's interpreter rounds otherwise
            scale = every.abs().amax(-1, keepdim=True) / 448
            digits = (every / scale).to(torch.float8_e4m3fn).float()
            apart = (kept.float() / scale - digits).abs() > 0.01 * digits.abs()
            assert apart.float().mean() < 1e-2  # but for numbers halfway between two others
        return kept.float()

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        assert self.angles is not None
        width = self.angles.cos.shape[2]
        part = x[..., :width]
        if self.angles.interleaved:
            quarter = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        else:
            quarter = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), dim=-1)
        turned = part * self.angles.cos.float() + quarter * self.angles.sin.float()
        return torch.cat((turned, x[..., width:]), dim=-1)

    def attended(self, rows: torch.Tensor | None = None, *, flash: bool = False) -> torch.Tensor:
        """Return (N, H*D) by the kernels; with `flash` FlashAttention serves the prompts.

        With `rows` (n,) the results of these tokens, (n, H*D).
        """
        from inference.model.gpu.attention_layout import paged_attention

        attention = paged_attention(self.segments, self.cache, rules=self.rules, flash=flash)
        attention = replace(attention, single=bool((self.segments[:, 2] == 1).all()))
        if rows is not None:
            attention = attention.of_rows(rows)
        qkv = self.qkv.clone()  # queries may be rotated where they lie
        y = attention(
            qkv[:, : self.query_heads],
            layer=LAYER,
            new=qkv[:, self.query_heads :],
            angles=self.angles,
        )
        return y if rows is None else y[rows]


def check(sequences: Sequences) -> None:
    dtype = sequences.qkv.dtype
    for _ in range(2):  # the second time over what the first has stored
        y = sequences.attended().float()
        torch.testing.assert_close(y, sequences.expected(), rtol=0, atol=TOLERANCE[dtype])


MIXED = [(3, 0, 70), (0, 130, 1), (5, 33, 17), (1, 0, 1), (8, 15, 1), (2, 16, 16)]
SINGLE = [(3, 0, 1), (0, 300, 1), (5, 33, 1), (1, 15, 1), (8, 16, 1), (2, 31, 1)]


@pytest.mark.parametrize("segments", [MIXED, SINGLE], ids=["mixed", "single"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 64), (7, 1, 80), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("block", [16, 64])  # a tile of tokens lies in several, or in one
def test_sequences_of_all_lengths(
    block,
    heads,
    dtype,
    segments,
    device,
):
    torch.manual_seed(0)
    rules = AttentionRules()
    check(Sequences(segments, heads=heads, rules=rules, dtype=dtype, device=device, block=block))


def test_values_left_in_a_block_are_not_seen(device):
    torch.manual_seed(0)
    kind: dict[str, Any] = {"heads": (4, 2, 64), "dtype": torch.float16, "device": device}
    for segments in ([(0, 70, 30), (1, 5, 1)], [(0, 70, 1), (1, 5, 1)]):
        sequences = Sequences(segments, rules=AttentionRules(), **kind)
        for layer in range(2):
            rows = sequences.cache.rows(layer)
            rows.masked_fill_(rows == 0, float("nan"))  # no token was stored there
        check(sequences)


def test_attention_of_the_rows_with_outputs(device):
    torch.manual_seed(0)
    for rules in (AttentionRules(sliding_window=40), AttentionRules(batch_invariant=True)):
        sequences = Sequences(
            MIXED, heads=(6, 2, 64), rules=rules, dtype=torch.float16, device=device, rotated=32
        )
        rows = torch.tensor([69, 70, 87, 105], dtype=torch.int32, device=device)
        y = sequences.attended(rows).float()
        torch.testing.assert_close(y, sequences.expected()[rows], rtol=0, atol=4e-3)


# With many heads: more programs than fill a GPU take the kernel of tiles, or that of even shares.
MANY = [(slot, 7 * slot, 1) for slot in range(SLOTS)]


@pytest.mark.parametrize("segments", [MIXED, SINGLE, MANY], ids=["mixed", "single", "many"])
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "slopes",
        "window",
        "window-here",
        "window-there",
        "capped",
        "capped-window",
        "table",
        "halves",
        "pairs",
    ],
)
@pytest.mark.parametrize(
    ("group", "dtype"), [(2, torch.float32), (2, torch.float16), (1, torch.float16)], ids=str
)
def test_biases_windows_and_turned_keys(group, dtype, kind, segments, device):
    torch.manual_seed(0)
    heads = 6 if segments is not MANY else 126
    rules = {
        "slopes": AttentionRules(alibi_slopes=alibi_slopes(heads).to(device)),
        "window": AttentionRules(sliding_window=9),
        "window-here": AttentionRules(sliding_window=9, sliding_layers=(False, True)),
        "window-there": AttentionRules(sliding_window=9, sliding_layers=(True, False)),
        "capped": AttentionRules(scale=0.7, softcap=2.0),
        "capped-window": AttentionRules(softcap=1.5, sliding_window=9),
        "table": AttentionRules(distance_bias=torch.randn(heads, 20, device=device)),
    }.get(kind, AttentionRules())
    rotated = {"halves": 24, "pairs": 32}.get(kind, 0)
    check(
        Sequences(
            segments,
            heads=(heads, heads // group, 32),
            rules=rules,
            dtype=dtype,
            device=device,
            rotated=rotated,
            interleaved=kind == "pairs",
        )
    )


@pytest.mark.parametrize("segments", [MIXED, SINGLE, MANY], ids=["mixed", "single", "many"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("heads", "rules", "block"),
    [
        ((6, 2, 64), AttentionRules(), 64),
        ((7, 1, 80), AttentionRules(sliding_window=9), 16),
        ((8, 2, 128), AttentionRules(alibi_slopes=alibi_slopes(8)), 64),
        ((2, 2, 256), AttentionRules(scale=0.2, softcap=2.0), 64),
    ],
    ids=str,
)
def test_keys_and_values_in_fp8(
    heads,
    rules,
    block,
    dtype,
    segments,
    device,
):
    torch.manual_seed(0)
    if rules.alibi_slopes is not None:
        rules = replace(rules, alibi_slopes=rules.alibi_slopes.to(device))
    kind: dict[str, Any] = {"heads": heads, "dtype": dtype, "device": device}
    sequences = Sequences(segments, rules=rules, block=block, fp8=True, **kind)
    check(sequences)


def test_cached_tokens_are_attended_without_new_keys(device):
    from inference.model.gpu.attention_layout import paged_attention

    torch.manual_seed(0)
    rules = AttentionRules()
    whole = Sequences(
        [(2, 30, 1), (4, 5, 1)], heads=(4, 4, 32), rules=rules, dtype=torch.float32, device=device
    )
    expected, _ = whole.expected(), whole.attended()
    for places in (whole.segments, whole.segments[:1]):
        attention = paged_attention(places, whole.cache, rules=rules)
        y = attention(whole.qkv[: len(places), :4], layer=1)
        torch.testing.assert_close(y, expected[: len(places)], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "rules"),
    [
        ((8, 2, 128), AttentionRules()),
        ((4, 4, 80), AttentionRules(sliding_window=9)),
        ((2, 2, 256), AttentionRules(scale=0.2)),
    ],
    ids=str,
)
def test_prompts_by_flash_attention(heads, rules, device, monkeypatch):
    torch.manual_seed(0)
    if flash_attention._forward_pass(device) is None:
        monkeypatch.setattr(flash_attention, "_forward_pass", lambda _: forward)
    monkeypatch.setattr(flash_attention, "_MIN_TOKENS", 2)
    sequences = Sequences(MIXED, heads=heads, rules=rules, dtype=torch.half, device=device)
    for _ in range(2):
        y = sequences.attended(flash=True).float()
        torch.testing.assert_close(y, sequences.expected(), rtol=0, atol=4e-3)


@pytest.mark.parametrize("shared", [232448, 166912, 101376, 65536])  # H200, A100, L4, T4
@pytest.mark.parametrize("row_bytes", [256, 512, 1024])
def test_tiles_fit_the_shared_memory(row_bytes, shared):
    from inference.model.gpu.attention import fitting

    wanted = {"TOKENS": 64, "num_stages": 3, "num_warps": 4}
    room = shared - 32 * row_bytes  # next to the queries: 64 rows, half of a key and value each
    fitted = fitting(wanted, room, row_bytes=row_bytes)
    assert fitted["TOKENS"] * fitted["num_stages"] * row_bytes < room
    assert (fitted == wanted) == (192 * row_bytes + 2048 <= room)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16, 32, 128])
@pytest.mark.parametrize("slots", [4, 256])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [128, 2048])
def test_a_graph_has_tiles_for_every_mixture(tokens, group, slots, batch_invariant):
    from inference.model.gpu.attention_layout import cut_tiles, tile_sizes
    from inference.model.gpu.prompt_graph import tile_room

    sizes = tile_sizes(AttentionRules(batch_invariant=batch_invariant, group=group), 64)
    room = tile_room(tokens, slots, sizes)
    draw = np.random.default_rng(0)
    mixtures = [np.full(slots, n) for n in (1, 2, 3, 5, 9, 16, 17, 33, 65, 128)]
    mixtures += [draw.choice((1, 2, 16, 17, 65), slots) for _ in range(20)]
    for counts in mixtures:
        counts = counts[np.cumsum(counts) <= tokens]
        segments = np.stack((np.arange(len(counts)), np.full(len(counts), 7), counts), axis=1)
        small, large = cut_tiles(segments, sizes, room[1])
        assert small.shape[1] <= room[0]
        assert large.shape[1] <= room[1]
        assert small[3].sum() + large[3].sum() == counts.sum()
