"""The kind of rank for each architecture."""

from __future__ import annotations

from pathlib import Path

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.config_ini import read_config
from inference.ranks.base import RankBase
from inference.ranks.decoder_rank import DecoderRank
from inference.ranks.encoder_decoder_rank import EncoderDecoderRank
from inference.ranks.encoder_rank import EncoderRank
from inference.ranks.settings import RankSettings

_KINDS: dict[type, type[DecoderRank] | type[EncoderDecoderRank] | type[EncoderRank]] = {
    DecoderArchitecture: DecoderRank,
    EncoderDecoderArchitecture: EncoderDecoderRank,
    EncoderArchitecture: EncoderRank,
}


def make_rank(settings: RankSettings) -> RankBase:
    """Load a rank of the kind that the model's architecture needs.

    Raises:
        CheckpointMismatchError: The folder is not exactly what its config.ini describes.
        ValueError: The model does not divide among the ranks.
    """
    family, config = read_config(Path(settings.ft_dir))
    return _KINDS[type(family.architecture(config))](settings)
