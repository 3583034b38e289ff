"""The cache of keys and values, and the pool of its slots."""

from dataclasses import replace

import pytest
import torch

from inference.model.kv_cache import WIPE, CacheShape, KVCache, prefix_source

SHAPE = CacheShape(num_layer=2, slots=4, kv_head_num=3, max_len=10, size_per_head=6)


@pytest.fixture
def cache() -> KVCache:
    return KVCache(SHAPE, dtype=torch.float32, device=torch.device("cpu"))


def write(cache: KVCache, layer: int, places: list[tuple[int, int]]) -> torch.Tensor:
    """Store random keys and values of tokens at (slot, position); return them (N, 2, H, D)."""
    slots, positions = (torch.tensor(each) for each in zip(*places, strict=True))
    values = torch.randn(len(places), 2, 3, 6)
    cache.write(layer, cache.token_rows(slots, positions), values)
    return values


def test_tokens_are_read_where_they_were_written(cache):
    values = write(cache, 1, [(1, 0), (1, 1), (2, 0), (2, 1)])
    keys, numbers = cache.reader(1, 2, 2)(1)
    assert keys.shape == (2, 3, 2, 6)
    assert keys.equal(values[:, 0].view(2, 2, 3, 6).transpose(1, 2))
    assert numbers.equal(values[:, 1].view(2, 2, 3, 6).transpose(1, 2))
    assert not cache.reader(0, 4, 10)(0)[0].any()


def test_slots_can_swap(cache):
    write(cache, 0, [(slot, position) for slot in range(4) for position in range(5)])
    before = cache.reader(0, 4, 5)(0)[0].clone()
    cache.update([(0, 3, 2, 5), (3, 0, 2, 5)])
    after = cache.reader(0, 4, 5)(0)[0]
    assert after[0, :, 2:].equal(before[3, :, 2:])
    assert after[3, :, 2:].equal(before[0, :, 2:])
    assert after[:, :, :2].equal(before[:, :, :2])
    assert after[1:3].equal(before[1:3])


def test_a_slot_forgets_its_first_tokens_after_it_was_copied_to(cache):
    write(cache, 0, [(slot, position) for slot in range(4) for position in range(8)])
    before = cache.reader(0, 4, 10)(0)[0].clone()
    cache.update([(2, 2, 3, 8), (1, 2, 5, 8), (0, 0, 1, 8)])
    after = cache.reader(0, 4, 10)(0)[0]
    assert after[2, :, :2].equal(before[2, :, 3:5])
    assert after[2, :, 2:5].equal(before[1, :, 5:8])
    assert after[0, :, :7].equal(before[0, :, 1:8])
    assert after[1].equal(before[1])
    assert after[3].equal(before[3])


def test_wiped_tokens_are_zero(cache):
    write(cache, 0, [(2, position) for position in range(4)])
    cache.update([(WIPE, 2, 0, 3)])
    keys = cache.reader(2, 1, 4)(0)[0]
    assert not keys[:, :, :3].any()
    assert keys[:, :, 3].any()


def test_size_counts_keys_and_values_of_every_layer():
    assert SHAPE.token_bytes(4) == 2 * 2 * 3 * 6 * 4
    assert replace(SHAPE, fp8=True).token_bytes(4) == 2 * 2 * 3 * (6 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_fp8_err_by_a_sixteenth_whatever_their_size(dtype):
    cache = KVCache(replace(SHAPE, fp8=True), dtype=dtype, device=torch.device("cpu"))
    sizes = torch.logspace(-9, 4, 2 * 2 * 3).view(2, 2, 3, 1)
    values = (torch.randn(2, 2, 3, 6) * sizes).to(dtype)
    slots, positions = torch.tensor([1, 1]), torch.tensor([0, 1])
    cache.write(1, cache.token_rows(slots, positions), values)
    found = torch.stack(cache.reader(1, 1, 2)(1))[:, 0].permute(2, 0, 1, 3)
    assert found.dtype == dtype
    largest = values.float().abs().amax(-1, keepdim=True)
    # Half a unit of 3 bits of mantissa, or of the smallest step of 2**-9 in 448.
    bound = torch.maximum(values.float().abs() / 16, largest * (2.0**-10 / 448))
    assert (
        (found.float() - values.float()).abs()
        <= bound * 1.01 + largest * 2.0**-8 * (dtype == torch.bfloat16)
    ).all()
    assert (found.float() != values.float()).any()


def test_what_is_read_of_every_layer_is_the_cache_itself(cache):
    read = cache.reader(1, 2, 5)
    new = write(cache, 1, [(1, 4), (2, 4)]).view(2, 2, 3, 6)
    keys, values = read(1)
    assert keys[:, :, 4].equal(new[:, 0])
    assert values[:, :, 4].equal(new[:, 1])


@pytest.mark.parametrize("fp8", [False, True])
def test_blocks_are_updated_as_whole_sequences_are(fp8):
    """The same tokens, moves and new blocks, in blocks of three tokens and of a sequence."""
    device, prefix = torch.device("cpu"), torch.randn(2, 2, 3, 4, 6)
    shape = replace(SHAPE, block_tokens=3, blocks=2 * 4 * 4)
    whole, paged = (
        KVCache(replace(each, fp8=fp8), dtype=torch.float32, device=device, prefixes=[prefix])
        for each in (SHAPE, shape)
    )
    cells = [(slot, place) for slot in range(4) for place in range(4)]
    paged.update([], [(*cell, nth) for nth, cell in enumerate(cells)])
    slots, positions = torch.arange(4).repeat_interleave(9), torch.arange(9).repeat(4)
    values = torch.randn(36, 2, 3, 6)
    for cache in (whole, paged):
        for layer in range(2):
            cache.write(layer, cache.token_rows(slots, positions), values * (layer + 1))
    # Slots swap, one is wiped before it is copied to, one gets a prefix, one forgets.
    moves = [(0, 1, 2, 9), (1, 0, 2, 7), (WIPE, 2, 0, 9), (prefix_source(0), 2, 0, 4), (3, 3, 4, 9)]
    whole.update(moves)
    paged.update(moves, [(1, 2, 30), (2, 0, 31)])
    for layer in range(2):
        for slot, count in ((0, 9), (1, 9), (2, 4), (3, 5)):
            found, expected = (cache.reader(slot, 1, count)(layer) for cache in (paged, whole))
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.equal(theirs)


def test_a_new_sequence_reads_no_block_of_an_earlier_one():
    shape = CacheShape(
        num_layer=1, slots=2, kv_head_num=1, max_len=8, size_per_head=2, block_tokens=2, blocks=6
    )
    cache = KVCache(shape, dtype=torch.float32, device=torch.device("cpu"))
    cache.update([], [(0, place, place) for place in range(4)])
    cache.update([], [(1, 0, 1), (1, 1, 2), (0, 0, 3)])  # both begin again, with others' blocks
    keys = torch.full((4, 2, 1, 2), torch.nan)
    slots, positions = torch.ones(4, dtype=torch.long), torch.arange(4)
    cache.write(0, cache.token_rows(slots, positions), keys)
    masked, _ = cache.reader(0, 1, 8)(0)
    assert masked.isfinite().all()
    cache.update([], [(0, 1, 5)])
    assert cache.tables[0].tolist() == [3, 5, 6, 6]
