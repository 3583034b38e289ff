"""Beam searches: every hypothesis is ruled, scored and ended by its own tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from inference.decoding.rows import PromptResult, SequenceRequest, SequenceResult
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
def test_length_penalty_of_any_size_is_taken(pool: bool, alpha: float) -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    result = search(table, beam_width=2, output_len=4, pool=pool, len_penalty=alpha)
    assert all(torch.isfinite(torch.tensor(result.cum_log_probs)))


@pytest.mark.parametrize("pool", [False, True])
def test_wide_enough_search_finds_the_best_of_all_sequences(pool: bool) -> None:
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


def test_finished_beam_keeps_its_score_and_stays() -> None:
    table = chain(6, t4={END: 0.6, 1: 0.4}, t1={2: 1.0}, t2={1: 1.0})
    result = search(table, beam_width=2, return_log_probs=True)
    assert result.output_ids == ((END,), (1, 2, 1))
    assert result.finish_reasons == ("end", "length")
    assert [len(values) for values in result.output_log_probs] == [1, 3]
    assert result.cum_log_probs[0] == pytest.approx(torch.tensor(0.6).log().item(), abs=1e-4)


def test_row_ends_once_all_beams_have() -> None:
    table = chain(6, t4={END: 0.6, 1: 0.4}, t1={END: 1.0})
    assert search(table, beam_width=2, output_len=50).finish_reasons == ("end", "end")


def test_stop_word_is_looked_for_in_the_hypothesis_itself() -> None:
    # 4 -> 1 -> 2 and 4 -> 2 -> 1; only the first contains the stop word 1 2, and the beams swap.
    table = chain(6, t4={1: 0.4, 2: 0.6}, t1={2: 0.99, 5: 0.01}, t2={1: 0.5, 5: 0.5})
    result = search(table, beam_width=2, output_len=2, stop_words=((1, 2),))
    stopped = [
        ids
        for ids, why in zip(result.output_ids, result.finish_reasons, strict=True)
        if why == "stop"
    ]
    assert stopped == [(1, 2)]


def test_penalty_follows_the_hypothesis_after_a_switch() -> None:
    # Beam 0 starts with 1, beam 1 with 2; the second step swaps them. From then on the penalty
    # must act on each beam's own tokens: after (2, 5) the id 1 is free, after (1, 5) it is not.
    table = chain(7, t4={1: 0.55, 2: 0.45}, t1={5: 0.5, 6: 0.5}, t2={5: 1.0}, t5={1: 0.5, 2: 0.5})
    result = search(table, beam_width=2, presence_penalty=8.0, context=(3, 4))
    assert result.output_ids[0] == (2, 5, 1)
    assert (1, 5, 1) not in result.output_ids


def test_bad_word_is_banned_in_the_beam_that_has_its_prefix() -> None:
    table = chain(6, t4={1: 0.6, 2: 0.4}, t1={5: 1.0}, t2={5: 1.0})
    result = search(table, beam_width=2, output_len=2, bad_words=((1, 5),))
    assert result.output_ids[0] == (2, 5)
    assert (1, 5) not in result.output_ids


def test_minimum_length_holds_for_every_beam() -> None:
    table = chain(6, t4={END: 0.9, 1: 0.1}, t1={END: 0.9, 2: 0.1}, t2={END: 0.9, 1: 0.1})
    for pool in (False, True):
        result = search(table, beam_width=2, min_length=2, output_len=4, pool=pool)
        assert all(END not in ids[:2] for ids in result.output_ids)


def test_length_penalty_lets_a_longer_pooled_hypothesis_win() -> None:
    # 0.5 at once against 0.45 over three tokens.
    table = chain(6, t4={END: 0.5, 1: 0.45, 5: 0.05}, t1={2: 1.0}, t2={END: 1.0}, t5={1: 1.0})
    short = search(table, beam_width=2, output_len=5, pool=True)
    long = search(table, beam_width=2, output_len=5, pool=True, len_penalty=1.0)
    assert short.output_ids[0] == (END,)
    assert long.output_ids[0] == (1, 2, END)


def test_pooled_search_stops_when_the_pool_is_full() -> None:
    table = chain(6, t4={END: 0.5, 1: 0.5}, t1={END: 0.6, 2: 0.4}, t2={END: 1.0})
    result = search(table, beam_width=2, output_len=50, pool=True)
    assert result.output_ids == ((END,), (1, END))
    assert result.finish_reasons == ("end", "end")


def test_stop_word_ends_a_pooled_hypothesis_like_the_end_token() -> None:
    table = chain(6, t4={1: 0.6, 2: 0.4}, t1={5: 1.0}, t2={END: 1.0})
    result = search(table, beam_width=2, output_len=9, pool=True, stop_words=((1, 5),))
    assert result.output_ids == ((1, 5), (2, END))
    assert result.finish_reasons == ("stop", "end")


def test_running_hypotheses_fill_the_pool_at_the_limit() -> None:
    table = chain(6, t4={1: 0.6, 2: 0.4}, t1={2: 1.0}, t2={1: 1.0})
    result = search(table, beam_width=2, output_len=3, pool=True)
    assert result.output_ids == ((1, 2, 1), (2, 1, 2))
    assert result.finish_reasons == ("length", "length")


@pytest.mark.parametrize("pool", [False, True])
def test_log_probs_follow_the_hypothesis_and_add_up(pool: bool) -> None:
    table = torch.randn(30, 30, generator=torch.Generator().manual_seed(2))
    result = search(table, beam_width=4, output_len=6, pool=pool, return_log_probs=True)
    scores = torch.log_softmax(table, -1)
    for ids, values, cum in zip(
        result.output_ids, result.output_log_probs, result.cum_log_probs, strict=True
    ):
        expected = [float(scores[a, b]) for a, b in itertools.pairwise((4, *ids))]
        assert values == pytest.approx(expected, abs=1e-5)
        assert sum(values) == pytest.approx(cum, abs=1e-5)


def test_context_score_is_added_to_every_beam() -> None:
    flags: dict[str, Any] = {"return_log_probs": True, "return_context_cum_log_probs": True}
    row = SequenceRequest((3,), 2, SamplingParams(end_id=END, beam_width=2, **flags), (3,))
    sampler = Sampler(6)
    decoded = sampler.begin(row)
    sampler.step([decoded], torch.zeros(2, 6))
    before = decoded.result().cum_log_probs
    decoded.prompt = PromptResult(-3.0)
    assert decoded.result().cum_log_probs == tuple(value - 3.0 for value in before)


@pytest.mark.parametrize("pool", [False, True])
def test_more_beams_than_tokens_is_no_problem(pool: bool) -> None:
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    result = search(table, beam_width=8, output_len=4, pool=pool, context=(3,))
    assert len(result.output_ids) == 8
    assert all(token < 4 for ids in result.output_ids for token in ids)


def test_negative_diversity_rate_spreads_the_beams_over_parents() -> None:
    # 1 5 before 1 6 before 2 5: 0.55 x 0.55, 0.55 x 0.45 and 0.45 x 0.53.
    table = chain(8, t4={1: 0.55, 2: 0.45}, t1={5: 0.55, 6: 0.45}, t2={5: 0.53, 6: 0.47})
    together = search(table, beam_width=2, output_len=2)
    apart = search(table, beam_width=2, output_len=2, beam_search_diversity_rate=-1.0)
    assert {ids[0] for ids in together.output_ids} == {1}
    assert {ids[0] for ids in apart.output_ids} == {1, 2}


@pytest.mark.parametrize("pool", [False, True])
def test_beams_end_at_any_of_the_end_tokens(pool: bool) -> None:
    table = chain(6, t4={2: 0.6, 3: 0.4}, t2={5: 1.0}, t3={END: 1.0})
    result = search(table, beam_width=2, output_len=4, pool=pool, other_end_ids=(5,))
    assert sorted(zip(result.output_ids, result.finish_reasons, strict=True)) == [
        ((2, 5), "end"),
        ((3, END), "end"),
    ]
    barred = search(table, beam_width=2, output_len=2, other_end_ids=(5,), min_length=2)
    assert {END, 5}.isdisjoint(itertools.chain(*barred.output_ids))
