"""Ranks, stages and slices of the vocabulary."""

import pytest

from inference.parallel.layout import ParallelLayout


def test_stages_that_do_not_divide_the_layers_are_refused():
    with pytest.raises(ValueError, match=r"pipeline_para_size=3 does not divide num_layer=4; use"):
        ParallelLayout(0, pp_size=3).layers(4)


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(131, 4), (8, 4), (5, 4), (2, 4), (7, 1)])
def test_slices_hold_the_vocabulary_once(vocab_size, tp_size):
    layouts = [ParallelLayout(rank, tp_size=tp_size) for rank in range(tp_size)]
    rows = [row for layout in layouts for row in layout.vocab_rows(vocab_size)]
    assert rows == list(range(vocab_size))
    width = layouts[0].vocab_rows_per_rank(vocab_size)
    assert width * tp_size >= vocab_size
