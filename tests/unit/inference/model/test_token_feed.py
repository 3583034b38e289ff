"""Tokens that a rank chooses: the best one, never a forbidden one, remembered for its slot."""

from __future__ import annotations

import numpy as np
import torch

from inference.decoding.candidates import fetch, select
from inference.model.token_feed import NEWEST, TokenFeed, chosen_to_host

CPU = torch.device("cpu")


def test_the_choice_equals_the_selection() -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = torch.nan
    selected = fetch([select(logits[:, :64], width=1, with_norm=False)])[0]
    feed = TokenFeed(5, CPU)
    nothing = torch.full((3,), -1)
    chosen = chosen_to_host(
        feed.choose(logits, torch.tensor([4, 0, feed.unread]), nothing, 64)
    ).array()
    assert chosen[:, 1].tolist() == selected.ids.ravel().tolist()
    values = chosen[:, 0].view(np.float32)
    np.testing.assert_array_equal(values, selected.values.ravel())
    assert np.isnan(values).tolist() == [False, True, False]
    ids = feed.ids(torch.tensor([NEWEST, 7]), torch.tensor([4, 4]))
    assert ids.tolist() == [chosen[0, 1], 7]


def test_a_forbidden_token_is_replaced_by_the_next_best() -> None:
    logits = torch.arange(8.0).repeat(2, 1)
    feed = TokenFeed(2, CPU)
    chosen = feed.choose(logits, torch.tensor([0, 1]), torch.tensor([7, -1]), 8)
    assert chosen[:, 1].tolist() == [6, 7]
