"""The rank that a model's architecture asks for."""

from __future__ import annotations

from pathlib import Path

from export_scripts.families.architecture import (
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.config_ini import read_config
from inference.serving.encoder_decoder_rank import EncoderDecoderRank
from inference.serving.encoder_rank import EncoderRank
from inference.serving.rank import Rank
from inference.serving.rank_base import RankBase
from inference.serving.rank_settings import RankSettings

_KINDS: dict[type, type[Rank] | type[EncoderDecoderRank] | type[EncoderRank]] = {
    DecoderArchitecture: Rank,
    EncoderDecoderArchitecture: EncoderDecoderRank,
    EncoderArchitecture: EncoderRank,
}


def make_rank(settings: RankSettings) -> RankBase:
    """Load a rank.

    Raises:
        CheckpointMismatchError: The folder is not exactly what its config.ini describes.
        ValueError: The model does not divide among the ranks.
    """
    family, config = read_config(Path(settings.ft_dir))
    return _KINDS[type(family.architecture(config))](settings)
