"""Beam searches: every hypothesis is ruled, scored and ended by its own tokens."""

import itertools
from typing import Any

import pytest
import torch

from inference.decoding.rows import SequenceRequest, SequenceResult
from inference.decoding.sampler import Sampler
from inference.decoding.sampling_params import SamplingParams

END = 0


def search(
    table: torch.Tensor,
    *,
    context: tuple[int, ...] = (3, 4),
    output_len: int = 3,
    pool: bool = False,
    **options: Any,
) -> SequenceResult:
    """Search where the logits after a token are its row of `table`; check every step's slots."""
    row = SequenceRequest(context, output_len, SamplingParams(end_id=END, **options), context)
    sampler = Sampler(table.shape[1], hypothesis_pool=pool)
    decoded = sampler.begin(row)
    newest = [context[-1]] * decoded.slots
    for _ in range(output_len):
        sampler.step([decoded], table[newest])
        assert decoded.parents is not None
        assert len(decoded.tokens) == len(decoded.parents) == options["beam_width"]
        newest = list(decoded.tokens)
        if decoded.is_finished:
            break
    assert decoded.is_finished
    return decoded.result()


def chain(size: int, **likely: dict[int, float]) -> torch.Tensor:
    """Return a table of probabilities after each token, as logits; the rest shares what is left."""
    table = torch.full((size, size), 1e-6)
    for token, following in likely.items():
        for other, probability in following.items():
            table[int(token.lstrip("t")), other] = probability
    return (table / table.sum(-1, keepdim=True)).log()


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("alpha", [3e38, -3e38])
def test_length_penalty_of_any_size_is_taken(pool, alpha):
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    result = search(table, beam_width=2, output_len=4, pool=pool, len_penalty=alpha)
    assert all(torch.isfinite(torch.tensor(result.cum_log_probs)))


@pytest.mark.parametrize("pool", [False, True])
def test_wide_enough_search_finds_the_best_of_all_sequences(pool):
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    table[:, END] = -50.0  # all sequences have the full length
    scores = torch.log_softmax(table, -1).double()
    expected = sorted(
        (
            (-float(scores[4, a] + scores[a, b] + scores[b, c]), (a, b, c))
            for a, b, c in itertools.product(range(1, 5), repeat=3)
        ),
    )
    result = search(table, beam_width=64, pool=pool)
    assert result.output_ids[:10] == tuple(tokens for _, tokens in expected[:10])
    for found, (negative, _) in zip(result.cum_log_probs, expected[:10], strict=False):
        assert found == pytest.approx(-negative, abs=1e-5)


# 4 -> 1 -> 2 and 4 -> 2 -> 1; the beams swap in the second step.
SWAPPING = chain(6, t4={1: 0.4, 2: 0.6}, t1={2: 0.99, 5: 0.01}, t2={1: 0.5, 5: 0.5})
TO_FIVE = chain(6, t4={1: 0.6, 2: 0.4}, t1={5: 1.0}, t2={5: 1.0})


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(
    ("table", "words", "stopped"),
    [(SWAPPING, ((1, 2),), (1, 2)), (TO_FIVE, ((4, 1),), (1,))],
    ids=["of the answer", "begun in the prompt"],
)
def test_stop_words_are_looked_for_in_the_hypothesis_itself(table, words, stopped, pool):
    result = search(table, beam_width=2, output_len=2, stop_words=words, pool=pool)
    found = zip(result.output_ids, result.finish_reasons, strict=True)
    assert [ids for ids, why in found if why == "stop"] == [stopped]


@pytest.mark.parametrize("word", [(1, 5), (4, 1)])
def test_bad_words_are_banned_in_the_beam_that_has_their_prefix(word):
    result = search(TO_FIVE, beam_width=2, output_len=2, bad_words=(word,))
    assert result.output_ids[0] == (2, 5)
    assert (1, 5) not in result.output_ids


@pytest.mark.parametrize("pool", [False, True])
def test_more_beams_than_tokens_is_no_problem(pool):
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    result = search(table, beam_width=8, output_len=4, pool=pool, context=(3,))
    assert len(result.output_ids) == 8
    assert all(token < 4 for ids in result.output_ids for token in ids)


@pytest.mark.parametrize("pool", [False, True])
def test_beams_end_at_any_of_the_end_tokens(pool):
    table = chain(6, t4={2: 0.6, 3: 0.4}, t2={5: 1.0}, t3={END: 1.0})
    result = search(table, beam_width=2, output_len=4, pool=pool, other_end_ids=(5,))
    assert sorted(zip(result.output_ids, result.finish_reasons, strict=True)) == [
        ((2, 5), "end"),
        ((3, END), "end"),
    ]
    barred = search(table, beam_width=2, output_len=2, other_end_ids=(5,), min_length=2)
    assert {END, 5}.isdisjoint(itertools.chain(*barred.output_ids))
