"""FlashAttention 4 gets prompts at any place, among single tokens, in a paged cache."""

import importlib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inference.model.gpu import flash_attention
from inference.model.gpu.flash_attention import RELEASE
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.step import AttentionRules, attention_bias
from tests.parity.flash_attention_operator import forward

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
SEGMENTS = np.array([(2, 0, 7), (0, 9, 1), (1, 5, 6), (3, 0, 1), (4, 11, 2)])  # slot, place, count


@pytest.fixture
def kv_cache() -> KVCache:
    shape = CacheShape(2, 5, KV_HEADS, 16, SIZE, block_tokens=BLOCK, blocks=20)
    cache = KVCache(shape, dtype=torch.float16, device=torch.device("cpu"))
    order = np.random.default_rng(0).permutation(20).tolist()
    cache.update([], [(slot, nth, order[4 * slot + nth]) for slot in range(5) for nth in range(4)])
    cache.rows(0).fill_(torch.nan)
    cache.rows(1).copy_(torch.randn_like(cache.rows(1)))
    return cache


@pytest.mark.parametrize(
    "rules",
    [
        AttentionRules(),
        AttentionRules(scale=0.7),
        AttentionRules(sliding_window=3, sliding_layers=(False, True)),
        AttentionRules(sliding_window=3, sliding_layers=(True, False)),
    ],
    ids=["plain", "scaled", "window", "window elsewhere"],
)
def test_prompts_see_their_own_tokens_and_single_tokens_stay(rules, kv_cache, monkeypatch):
    monkeypatch.setattr(flash_attention, "_forward_pass", lambda _: forward)
    sent = [torch.tensor(each, dtype=torch.int32) for each in flash_attention.spans(SEGMENTS)]
    prompts = flash_attention.Prompts(kv_cache, 7, *sent)
    query = torch.randn(17, HEADS + 3, SIZE, dtype=torch.float16)[:, :HEADS]
    out = torch.full((17, HEADS * SIZE), 7.0, dtype=torch.float16)
    prompts.attend(query, 1, rules, out=out)
    first = 0
    for slot, place, count in SEGMENTS.tolist():
        part, end = out[first : first + count].float(), place + count
        if count == 1:
            assert (part == 7).all()
        else:
            rows = kv_cache.token_rows(torch.full((end,), slot), torch.arange(end))
            stored = kv_cache.rows(1)[rows].view(end, 2, KV_HEADS, SIZE).float()
            keys, values = stored.repeat_interleave(HEADS // KV_HEADS, 2).permute(1, 2, 0, 3)
            scores = query[first : first + count].float().transpose(0, 1) @ keys.transpose(1, 2)
            scores = scores * (rules.scale or SIZE**-0.5)
            starts = torch.tensor([place])
            bias = attention_bias(starts, count, end, rules, rules.window(1))[0]
            expected = ((scores + bias).softmax(-1) @ values).transpose(0, 1).flatten(1)
            torch.testing.assert_close(part, expected, rtol=0, atol=4e-3)
        first += count


@pytest.mark.parametrize(
    ("rules", "dtype", "size", "served"),
    [
        (AttentionRules(), torch.float16, 136, True),
        (AttentionRules(), torch.float16, 64, True),
        (AttentionRules(sliding_window=3), torch.bfloat16, 256, True),
        (AttentionRules(softcap=2.0), torch.bfloat16, 256, False),
        (AttentionRules(), torch.float32, 136, False),
        (AttentionRules(), torch.float16, 140, False),
        (AttentionRules(), torch.float16, 264, False),
        (AttentionRules(alibi_slopes=torch.ones(2)), torch.float16, 136, False),
        (AttentionRules(distance_bias=torch.ones(2, 2)), torch.float16, 136, False),
        (AttentionRules(causal=False), torch.float16, 136, False),
        (AttentionRules(batch_invariant=True), torch.float16, 136, False),
    ],
)
def test_only_what_the_library_can_do_goes_there(
    rules,
    dtype,
    size,
    served,
    monkeypatch,
):
    shape = CacheShape(1, 1, 2, 4, size, block_tokens=4, blocks=1)
    cache = KVCache(shape, dtype=dtype, device=torch.device("cpu"))
    assert not flash_attention.serves(rules, cache, longest=2000)  # a CPU
    monkeypatch.setattr(flash_attention, "_forward_pass", lambda _: forward)
    assert flash_attention.serves(rules, cache, longest=2000) == served
    # With small heads the engine's kernels are faster for short prompts.
    assert flash_attention.serves(rules, cache, longest=500) == (served and size > 96)
    assert not flash_attention.serves(rules, cache, longest=100)


@pytest.mark.parametrize(
    ("release", "error", "said"),
    [
        (RELEASE, None, "attends for long prompts"),
        (None, None, ""),
        (RELEASE, OSError("undefined symbol"), "cannot be loaded: undefined symbol"),
        ("4.0.1", None, f"it is 4.0.1, and {RELEASE} is needed"),
    ],
    ids=["there", "absent", "broken", "another release"],
)
def test_the_log_says_whether_the_library_is_used(
    release,
    error,
    said,
    monkeypatch,
    caplog,
):
    def load(name: str) -> object:
        assert name == "flash_attn.cute.interface"
        if error is not None:
            raise error
        return SimpleNamespace(_flash_attn_fwd=forward)

    def version(name: str) -> str:
        if release is None:
            raise metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with caplog.at_level("INFO"):
        attend = flash_attention._forward_pass.__wrapped__(torch.device("cuda"))
    assert attend is (forward if "attends" in said else None)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_the_extra_installs_the_release_that_is_known():
    project = Path(flash_attention.__file__).parents[3] / "pyproject.toml"
    assert f'flash = ["flash-attn-4=={RELEASE};' in project.read_text()
