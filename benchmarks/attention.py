"""Attention of prompts: our kernels, FlashAttention 4, cuDNN and torch's, on one GPU.

python -m benchmarks.attention --record benchmarks/results/NAME.json

A value is the FLOP rate of a causal layer's products in fp16, over the kernels' time alone. Keys
and values are in the paged cache (128 tokens a block) for ours and "FlashAttention 4, paged", and
contiguous for the others.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.program import Cell, run
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.step import AttentionRules

# (query heads, key and value heads, head size) of Llama 8B, Qwen 1.5B, and other head sizes.
HEADS = ((32, 8, 128), (12, 2, 128), (32, 8, 64), (32, 32, 80), (32, 32, 96), (16, 8, 256))
PROMPTS = ((1, 8000), (4, 2000), (16, 512))
BLOCK = 128
LIBRARIES = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch's FlashAttention 2": SDPBackend.FLASH_ATTENTION,
}


def measure(_: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rates of each shape."""
    from triton.testing import do_bench_cudagraph

    for query_heads, kv_heads, size in HEADS:
        for prompts, tokens in PROMPTS:
            row = f"{query_heads}/{kv_heads} heads of {size}, {prompts} x {tokens} tokens"
            pairs = prompts * tokens * (tokens + 1) // 2
            for name, attend in contenders(prompts, tokens, query_heads, kv_heads, size):
                attend()
                seconds = do_bench_cudagraph(attend, rep=20) / 1e3
                yield row, name, f"{4 * query_heads * size * pairs / seconds / 1e12:.0f} TFLOP/s"


def contenders(
    prompts: int, tokens: int, query_heads: int, kv_heads: int, size: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the function of each installed implementation."""
    from inference.model.gpu import flash_attention
    from inference.model.gpu.attention_layout import paged_attention

    device, rules = torch.device("cuda"), AttentionRules(group=query_heads // kv_heads)
    blocks = -(-tokens // BLOCK)
    shape = CacheShape(
        1, prompts, kv_heads, tokens, size, block_tokens=BLOCK, blocks=prompts * blocks
    )
    cache = KVCache(shape, dtype=torch.float16, device=device)
    entries = [(slot, n, slot * blocks + n) for slot in range(prompts) for n in range(blocks)]
    cache.update([], entries)
    segments = np.array([(slot, 0, tokens) for slot in range(prompts)])
    layout = functools.partial(paged_attention, segments, cache, rules=rules)
    heads = (query_heads, kv_heads, kv_heads)
    qkv = torch.randn(prompts * tokens, sum(heads), size, dtype=torch.float16, device=device)
    query, keys, values = qkv.split_with_sizes(heads, dim=1)
    attention = layout(flash=False)
    attention(query, layer=0, new=qkv[:, query_heads:])
    yield "slipway", functools.partial(attention, query, layer=0)
    if flash_attention.serves(rules, cache, longest=tokens):
        yield "FlashAttention 4, paged", functools.partial(layout(), query, layer=0)
    dense = [part.view(prompts, tokens, -1, size).transpose(1, 2).contiguous()
             for part in (query, keys, values)]  # fmt: skip
    attend = functools.partial(
        functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True
    )
    for name, backend in LIBRARIES.items():
        with sdpa_kernel(backend):  # stays active while the caller measures
            yield name, functools.partial(attend, *dense)


if __name__ == "__main__":
    run(measure, __doc__, {})
