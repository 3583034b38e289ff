"""Tokens that a rank chooses: the best one, never a forbidden one, remembered for its slot."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import tests.reference_choice  # noqa: F401 - ranks choose on CPUs, too
from inference.decoding.candidates import select
from inference.decoding.draws import ARG_MAX, UNMARKED, Penalty, TokenMarks
from inference.decoding.rows import SequenceRequest
from inference.decoding.sampler import Sampler
from inference.decoding.sampling_params import SamplingParams
from inference.model.token_feed import (
    NEWEST,
    TokenFeed,
    marks_bytes,
)

CPU = torch.device("cpu")


def test_the_choice_equals_the_selection():
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = torch.nan
    selected = select(logits[:, :64], width=1, with_norm=False)
    feed = TokenFeed(5, CPU, vocab=range(64))
    nothing = torch.full((3,), -1)
    chosen = feed.choose(logits, torch.tensor([4, 0, feed.unread]), nothing).numpy()
    assert chosen[:, 1].tolist() == selected.ids.ravel().tolist()
    values = chosen[:, 0].view(np.float32)
    np.testing.assert_array_equal(values, selected.values.ravel())
    assert np.isnan(values).tolist() == [False, True, False]
    ids = feed.ids(torch.tensor([NEWEST, 7]), torch.tensor([4, 4]))
    assert ids.tolist() == [chosen[0, 1], 7]


def test_the_memory_of_marks_is_what_the_plan_of_memory_counts():
    feed = TokenFeed(5, CPU, vocab=range(64))
    assert feed._seen.nbytes + feed._bias.nbytes == marks_bytes(5, 64)


def test_a_forbidden_token_is_replaced_by_the_next_best():
    logits = torch.arange(8.0).repeat(2, 1)
    feed = TokenFeed(2, CPU, vocab=range(8))
    chosen = feed.choose(logits, torch.tensor([0, 1]), torch.tensor([7, -1]))
    assert chosen[:, 1].tolist() == [6, 7]


@pytest.mark.parametrize("width", [8, 5, 3])  # of a slice; some of the 4 ranks hold no ids
def test_ranks_that_share_the_vocabulary_choose_what_one_would(width):
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    logits[1, [2, 6]] = 9.0  # a tie: the lower id
    logits[2, 7] = torch.nan
    slots, forbidden = torch.arange(5), torch.tensor([-1, -1, -1, 6, int(logits[4].argmax())])
    expected = TokenFeed(5, CPU, vocab=range(8)).choose(logits.clone(), slots, forbidden)
    starts = range(0, 4 * width, width)
    padded = torch.nn.functional.pad(logits, (0, 4 * width - 8))

    def choices(gather: Callable[[torch.Tensor], torch.Tensor] | None) -> list[torch.Tensor]:
        feeds = [
            TokenFeed(5, CPU, vocab=range(min(at, 8), min(at + width, 8)), gather=gather)
            for at in starts
        ]
        slices = [padded[:, at : at + width].clone() for at in starts]
        chosen = [
            feed.choose(part, slots, forbidden) for feed, part in zip(feeds, slices, strict=True)
        ]
        if gather is not None:
            newest = torch.full((5,), NEWEST)
            assert all(
                torch.equal(feed.ids(newest, slots), chosen[0][:, 1].long()) for feed in feeds
            )
        return chosen

    every = torch.stack(choices(None))
    assert all(torch.equal(each, expected) for each in choices(lambda _: every))


@pytest.mark.parametrize("changed", [
    {"return_log_probs": True},
    {"num_log_probs": 1},
    {"bad_words": ((3,), (4, 5))},
    {"top_k": 0, "top_p_decay": 0.5},
    {"top_k": 0, "top_p": 0.1, "top_p_min": 0.2},
    {"min_length": 1, "other_end_ids": (2,)},
    {"min_p": 0.1},
    {"beam_width": 2},
], ids=str)  # fmt: skip
def test_rows_that_need_more_than_a_token_are_not_drawn_by_ranks(changed):
    sampler = Sampler(60)
    plain = {"end_id": 1, "top_k": 5, "top_p": 0.5, "temperature": 0.5}
    for options, expected in (plain, True), ({**plain, **changed}, False):
        row = sampler.begin(SequenceRequest((0, 0), 2, SamplingParams(**options), (0, 0)))
        assert row.rank_chooses == expected


MARKS = TokenMarks(np.array([6]), np.array([7]), np.array([-np.inf], np.float32))


def test_rows_without_marks_do_not_see_those_of_an_earlier_row():
    feed = TokenFeed(2, CPU, vocab=range(8))
    for slot in range(2):
        feed.mark(slot, *MARKS)
    chosen = feed.choose(
        torch.arange(8.0).repeat(2, 1),
        torch.arange(2),
        torch.full((2,), -1),
        torch.tensor([ARG_MAX, ARG_MAX]),
        torch.tensor([UNMARKED, Penalty(2, 0, 0)]),
    )
    assert chosen[:, 1].tolist() == [7, 5]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_usable_logits_are_seen_among_drawn_ones(bad):
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(1))
    logits[2] = bad
    draws = torch.tensor([[1, 0, 0.9, 0, 0, 0.5], [1, 5, 0.9, 0, 0, 0.5]]).repeat(2, 1)
    chosen = TokenFeed(4, CPU, vocab=range(60)).choose(
        logits, torch.arange(4), torch.full((4,), -1), draws
    )
    finite = np.isfinite(chosen.numpy()[:, 0].copy().view(np.float32))
    assert finite.tolist() == [True, True, False, True]
    assert 0 <= chosen[:, 1].min() <= chosen[:, 1].max() < 60


@pytest.mark.parametrize("width", [64, 24])  # of a slice; the last one ends beyond the vocabulary
def test_ranks_that_share_the_vocabulary_draw_what_one_would(width):
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(2))
    slots, forbidden = torch.arange(5), torch.tensor([-1, 3, -1, 60, 7])
    draws = torch.tensor([[0.7, 0, 0.9, 0, 0, 0.3]] * 5)
    penalties = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.5, 0.3]] * 2 + [[0.5, 0.0, 0.0]])
    biased = np.array([int(logits[1].argmax()), int(logits[4].argmax()), 0, 59])
    bias = np.array([-np.inf, -np.inf, 2, 0.5], np.float32)

    def choose(feed: TokenFeed, part: torch.Tensor) -> torch.Tensor:
        for slot in range(5):
            feed.mark(slot, np.array([0, 3, 19, 20, 57]), biased, bias)
        feed.choose(part.clone(), slots, forbidden, draws, penalties)  # marks what it chooses
        return feed.choose(part, slots, forbidden, draws, penalties)

    expected = choose(TokenFeed(5, CPU, vocab=range(60)), logits.clone())
    starts = range(0, 3 * 20, 20)
    parts = torch.stack(
        [torch.nn.functional.pad(logits[:, at : at + 20], (0, width - 20)) for at in starts]
    )
    for nth, at in enumerate(starts):
        feed = TokenFeed(
            *(5, CPU), vocab=range(at, at + 20), vocab_size=60, gather=lambda _: parts.clone()
        )
        chosen = choose(feed, parts[nth])
        assert torch.equal(chosen, expected)
        assert torch.equal(feed.ids(torch.full((5,), NEWEST), slots), chosen[:, 1].long())
