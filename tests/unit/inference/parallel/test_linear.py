"""Linears and tables cut among ranks add up to the whole ones."""

import torch

from inference.model.layers import Embedding
from inference.model.step import Tokens
from inference.parallel.epilogue import add_terms
from inference.parallel.gemm import make_gemm
from inference.parallel.linear import VocabParallelHead, make_row_gemm

RANKS = 3


class Sum:
    """An all-reduce for ranks that are computed one after the other: the last call has the sum."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None

    def __call__(
        self,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.total = x if self.total is None else self.total + x
        return add_terms(self.total.clone(), bias=bias, residual=residual)


def test_rows_sum_to_the_whole_with_one_bias():
    x, weight, bias = torch.randn(5, 12), torch.randn(12, 8), torch.randn(8)
    residual, add = torch.randn(5, 8), Sum()
    for part, rows in zip(x.chunk(RANKS, 1), weight.chunk(RANKS), strict=True):
        y = make_row_gemm(rows, bias, reduce=add)(part, residual)
    torch.testing.assert_close(y, x @ weight + bias + residual)
    single = make_row_gemm(weight, bias)(x, residual)
    torch.testing.assert_close(single, x @ weight + bias + residual)


def test_tokens_are_found_on_the_rank_that_holds_them():
    table, ids, add = torch.randn(7, 4), torch.tensor([6, 0, 3, 3, 5]), Sum()
    for first, stop in ((0, 3), (3, 6), (6, 7), (7, 7)):
        part = Embedding(table[first:stop], 7, torch.float32, first_row=first, reduce=add)
        rows = part(Tokens(ids=ids, positions=ids))
    assert rows.equal(table[ids])


def test_logits_beyond_the_vocabulary_are_the_lowest_number():
    table, x = torch.randn(7, 4), torch.randn(2, 4)
    padded = torch.cat((table[4:], torch.zeros(2, 4)))
    heads = [
        VocabParallelHead(make_gemm(table[:4].t()), rows=4, width=4),
        VocabParallelHead(make_gemm(padded.t(), torch.zeros(5)), rows=3, width=4),
    ]
    logits = torch.full((2, 8), torch.nan)
    for head, out in zip(heads, logits.split(4, dim=1), strict=True):
        assert head(x, out) is out
        assert head(x).equal(out)
    torch.testing.assert_close(logits[:, :7], x @ table.t())
    assert logits[:, 7].eq(torch.finfo(torch.float32).min).all()
    assert VocabParallelHead(None, rows=0, width=4)(x).shape == (2, 4)
