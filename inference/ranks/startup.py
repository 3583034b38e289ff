"""The start of ranks: which class to load, and milestones that they report through a store."""

import contextlib
import json
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    EncoderArchitecture,
)
from export_scripts.ft.config_ini import read_config
from inference.ranks.base import RankBase
from inference.ranks.decoder_rank import DecoderRank
from inference.ranks.encoder_decoder_rank import EncoderDecoderRank
from inference.ranks.encoder_rank import EncoderRank
from inference.ranks.settings import RankSettings


def make_rank(settings: RankSettings) -> RankBase:
    """Load a rank of the class for the model's architecture.

    Raises:
        CheckpointMismatchError: The folder is not exactly what its config.ini describes.
        ValueError: The model cannot be divided among the ranks.
    """
    architecture = read_config(Path(settings.ft_dir))[1].architecture()
    if isinstance(architecture, DecoderArchitecture):
        return DecoderRank(settings)
    if isinstance(architecture, EncoderArchitecture) or not architecture.decoder_num_layer:
        return EncoderRank(settings)
    return EncoderRank(settings) if settings.encoder_only else EncoderDecoderRank(settings)


def reach_milestone(store: Store, rank: int, milestone: int) -> None:
    """Report a milestone, and wait until every rank has reached it.

    All ranks count the same milestones: loaded and prepared, at the start and in each exchange of
    weights. Rank 0 enforces start_timeout_s; when it gives up, this process ends with it.
    """
    store.set(f"reached/{milestone}/{rank}", "")
    store.wait([f"go/{milestone}"], timedelta(days=1))


def has_reached(store: Store, rank: int, milestone: int) -> bool:
    """Return whether a rank has reported a milestone."""
    return bool(store.check([f"reached/{milestone}/{rank}"]))


def report_failure(store: Store, rank: int, error: BaseException) -> None:
    """Report why a rank fails, unless rank 0 is gone."""
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{rank}", json.dumps(f"{type(error).__name__}: {error}"))


def failure_of(store: Store, rank: int) -> str | None:
    """Return the reason that a rank has reported for its failure, if any."""
    if not store.check([f"failed/{rank}"]):
        return None
    return str(json.loads(store.get(f"failed/{rank}")))


def release_ranks(store: Store, milestone: int) -> None:
    """Let the ranks continue after a milestone that all have reached."""
    store.set(f"go/{milestone}", "")
