"""One forward pass of one rank: receive from the stage before, run its layers, send the result."""

# Shapes: N tokens of a micro-batch, E hidden

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from inference.parallel.groups import RankGroups
from inference.parallel.layout import ParallelLayout

StepT = TypeVar("StepT")


def run_stage(
    micro_batches: Sequence[StepT],
    *,
    embed: Callable[[StepT], torch.Tensor],
    empty_hidden: Callable[[StepT], torch.Tensor],
    run_layers: Callable[[torch.Tensor, StepT], torch.Tensor],
    layout: ParallelLayout,
    groups: RankGroups | None,
) -> list[torch.Tensor]:
    """Return the last layer's output of each micro-batch on the last stage, elsewhere nothing.

    While a stage works on one micro-batch, the next stage works on the one before.

    Args:
        micro_batches: Steps of the model.
        embed: Returns the input of the model's first layer (N, E).
        empty_hidden: Returns an uninitialised (N, E) for the input of this stage's first layer.
        run_layers: Returns the output of this stage's last layer (N, E).
        layout: This rank's place.
        groups: Its communication; None for a single rank.
    """
    outputs, sends = [], []
    for step in micro_batches:
        if layout.is_first_stage:
            x = embed(step)
        else:
            assert groups is not None
            x = groups.receive(empty_hidden(step), layout.previous_rank)
        x = run_layers(x, step)
        if layout.is_last_stage:
            outputs.append(x)
        else:
            assert groups is not None
            sends.append(groups.send(x, layout.next_rank))
    for sent in sends:
        sent.wait()
    return outputs
