"""The request for a Triton repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from export_scripts.ft.layout import ft_directory

VERSION = "1"


@dataclass(frozen=True)
class RepositoryRequest:
    """The request for a Triton repository.

    `model_dir` is `<repository>/<model name>`, with the weights at `model_dir/1/<tp_size>-gpu`.
    `max_queue_delay_us` switches the server's batcher on; the C++ backend batches only with it,
    our engine always does. A portable repository holds no absolute path. `parameters` are
    further entries for the model's config.pbtxt. `model_type` other than that of the weights can be
    T5-Encoder, for the encoder of a whole T5.
    """

    model_dir: Path
    tp_size: int
    pp_size: int
    max_batch_size: int
    data_type: str
    int8_mode: int = 0
    enable_custom_all_reduce: int = 0
    engine: str = "pytorch"
    decoupled: bool = False
    ensemble: bool = True
    overwrite: bool = False
    portable: bool = True
    interactive: bool = False
    answer_only: bool = False
    max_queue_delay_us: int | None = None
    instance_count: int = 1
    model_type: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights_dir(self) -> Path:
        """Folder of the converted weights."""
        return ft_directory(self.model_dir / VERSION, self.tp_size)
