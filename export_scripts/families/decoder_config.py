"""What the config.ini of every decoder-only family tells."""

from __future__ import annotations

from dataclasses import dataclass

from export_scripts.families.spec import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Keys that all decoders have; each family adds its own."""

    model_name: str
    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    vocab_size: int
    start_id: int
    end_id: int

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.head_num * self.size_per_head
