"""One forward pass of one rank: receive from the stage before, run its layers, send the result."""

# Shapes: N tokens of a micro-batch, E hidden

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from inference.parallel.groups import RankGroups
from inference.parallel.layout import ParallelLayout

StepT = TypeVar("StepT")
StepT_contra = TypeVar("StepT_contra", contravariant=True)


class StageModel(Protocol[StepT_contra]):
    """The model interface of a pipeline stage."""

    def embed(self, step: StepT_contra) -> torch.Tensor:
        """Return the input of the model's first layer (N, E)."""
        ...

    def empty_hidden(self, step: StepT_contra) -> torch.Tensor:
        """Return an uninitialised (N, E) for the input of this stage's first layer."""
        ...

    def run_layers(self, x: torch.Tensor, step: StepT_contra) -> torch.Tensor:
        """Return the output of this stage's last layer (N, E)."""
        ...


def run_stage(
    model: StageModel[StepT],
    micro_batches: Sequence[StepT],
    *,
    layout: ParallelLayout,
    groups: RankGroups | None,
) -> list[torch.Tensor]:
    """Return the last layer's output of each micro-batch on the last stage, elsewhere nothing.

    While a stage works on one micro-batch, the next stage works on the one before.
    """
    outputs, sends = [], []
    for step in micro_batches:
        if layout.is_first_stage:
            x = model.embed(step)
        else:
            assert groups is not None
            x = groups.receive(model.empty_hidden(step), layout.previous_rank)
        x = model.run_layers(x, step)
        if layout.is_last_stage:
            outputs.append(x)
        else:
            assert groups is not None
            sends.append(groups.send(x, layout.next_rank))
    for sent in sends:
        sent.wait()
    return outputs
