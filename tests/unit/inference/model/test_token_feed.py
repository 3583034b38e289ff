"""Tokens that a rank chooses: the best one, never a forbidden one, remembered for its slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from inference.decoding.candidates import fetch, select
from inference.model.token_feed import NEWEST, TokenFeed, chosen_to_host

CPU = torch.device("cpu")


def test_the_choice_equals_the_selection() -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = torch.nan
    selected = fetch([select(logits[:, :64], width=1, with_norm=False)])[0]
    feed = TokenFeed(5, CPU, vocab=range(64))
    nothing = torch.full((3,), -1)
    chosen = chosen_to_host(feed.choose(logits, torch.tensor([4, 0, feed.unread]), nothing)).array()
    assert chosen[:, 1].tolist() == selected.ids.ravel().tolist()
    values = chosen[:, 0].view(np.float32)
    np.testing.assert_array_equal(values, selected.values.ravel())
    assert np.isnan(values).tolist() == [False, True, False]
    ids = feed.ids(torch.tensor([NEWEST, 7]), torch.tensor([4, 4]))
    assert ids.tolist() == [chosen[0, 1], 7]


def test_a_forbidden_token_is_replaced_by_the_next_best() -> None:
    logits = torch.arange(8.0).repeat(2, 1)
    feed = TokenFeed(2, CPU, vocab=range(8))
    chosen = feed.choose(logits, torch.tensor([0, 1]), torch.tensor([7, -1]))
    assert chosen[:, 1].tolist() == [6, 7]


@pytest.mark.parametrize("width", [8, 5, 3])  # of a slice; some of the 4 ranks hold no ids
def test_ranks_that_share_the_vocabulary_choose_what_one_would(width: int) -> None:
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
