"""The rank that a model's architecture asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from export_scripts.families.architecture import (
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.config_ini import read_config
from inference.parallel.groups import RankGroups
from inference.serving.encoder_decoder_rank import EncoderDecoderRank
from inference.serving.encoder_rank import EncoderRank
from inference.serving.plan import ReceivedPlan
from inference.serving.rank import Rank, RankSettings, StepResult


class AnyRank(Protocol):
    """One rank of any model."""

    device: torch.device

    def connect(self, groups: RankGroups) -> None:
        """Join the other ranks."""
        ...

    def ping(self) -> None:
        """Return once every rank has answered."""
        ...

    def run(self, plan: ReceivedPlan, embeddings: torch.Tensor | None = None) -> StepResult | None:
        """Run one step; rank 0 gets the result."""
        ...


_KINDS: dict[type, type[Rank] | type[EncoderDecoderRank] | type[EncoderRank]] = {
    DecoderArchitecture: Rank,
    EncoderDecoderArchitecture: EncoderDecoderRank,
    EncoderArchitecture: EncoderRank,
}


def make_rank(settings: RankSettings) -> AnyRank:
    """Load a rank.

    Raises:
        CheckpointMismatchError: The folder is not exactly what its config.ini describes.
        ValueError: The model does not divide among the ranks, or is of a kind not run here.
    """
    family, config = read_config(Path(settings.ft_dir))
    return _KINDS[type(family.architecture(config))](settings)
