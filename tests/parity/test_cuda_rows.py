"""Kernels over whole rows, of norms and of an encoder's attention, give what torch gives.

With TRITON_INTERPRET=1 they run on a CPU, where Triton is installed.
"""

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.nn import functional

from inference.model.layers import QueryKeyNorm
from tests.parity.conftest import skip_without_gpu

pytestmark = pytest.mark.gpu
skip_without_gpu(can_interpret=True)

# For values up to 4: a unit of fp16's 2**-11, and the order of sums in fp32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [48, 768, 1024, 1500, 4096])
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
def test_norms_equal_those_of_torch_for_every_number_of_rows(added, size, dtype, device):
    from inference.model.gpu.norm import norm

    torch.manual_seed(0)
    x = 1 + torch.randn(301, size, device=device, dtype=dtype)
    residual = torch.randn_like(x) if added else None
    weight, bias = torch.randn(2, size, device=device, dtype=dtype)
    wide = (x.float() if residual is None else x.float() + residual.float(), [size], weight.float())
    for centred, shift, expected in (
        (True, bias, functional.layer_norm(*wide, bias.float(), 1e-5)),
        (False, None, functional.rms_norm(*wide, 1e-5)),
    ):
        of = partial(norm, weight=weight, bias=shift, eps=1e-5, centred=centred)
        whole = of(x, residual)
        torch.testing.assert_close(whole.float(), expected, rtol=1e-3, atol=TOLERANCE[dtype])
        for rows in (1, 3, 64, 255, 257):
            assert of(x[:rows], None if residual is None else residual[:rows]).equal(whole[:rows])
        joined = of(x, residual, onto=x, factor=0.5).float()
        torch.testing.assert_close(
            joined, x.float() + 0.5 * expected, rtol=1e-3, atol=2 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 20), ((7, 7), 64), ((8, 1), 256)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_norms_of_queries_and_keys(whole, heads, size, dtype, device):
    torch.manual_seed(0)
    queries, both = heads[0], sum(heads)
    qkv = torch.randn(37, both + heads[1], size, device=device, dtype=dtype)
    given = qkv.clone()
    weight = torch.randn(both, size, device=device)
    counts = (queries, heads[1])
    QueryKeyNorm(weight, counts, 1e-5, whole=whole, reduce=None, tp_size=1)(qkv[:, :both])
    for part in (slice(0, queries), slice(queries, both)):
        x = given[:, part].float()
        joined = [*x.shape[1:]] if whole else [size]
        expected = functional.rms_norm(x, joined, eps=1e-5) * weight[part]
        torch.testing.assert_close(qkv[:, part].float(), expected, rtol=1e-3, atol=TOLERANCE[dtype])
    assert qkv[:, both:].equal(given[:, both:])  # the values


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reach", [None, 7])
@pytest.mark.parametrize("size", [20, 64, 128])
def test_rows_attend_to_themselves_alone(size, reach, dtype, device):
    from inference.model.gpu.rows import attend_rows, row_tiles

    torch.manual_seed(0)
    heads, scale, lengths = 3, size**-0.5, [70, 1, 130, 64]
    qkv = torch.randn(sum(lengths), 3, heads, size, device=device, dtype=dtype)
    bias = None if reach is None else torch.randn(heads, 2 * reach + 1, device=device)
    tiles = torch.from_numpy(row_tiles(lengths)).to(device)
    y = attend_rows(*qkv.unbind(1), tiles=tiles, bias=bias, scale=scale).float()
    for first, count in zip([0, *accumulate(lengths)], lengths, strict=False):
        query, key, value = qkv[first : first + count].float().permute(1, 2, 0, 3)
        mask = None
        if reach is not None and bias is not None:
            offset = torch.arange(count) - torch.arange(count)[:, None]
            mask = bias[:, offset.clamp(-reach, reach) + reach]
        expected = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale
        )
        expected = expected.transpose(0, 1).flatten(1)
        torch.testing.assert_close(
            y[first : first + count], expected, rtol=1e-3, atol=TOLERANCE[dtype]
        )
