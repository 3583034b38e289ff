"""Common parts of decoder-only families: keys of config.ini, and tables of prompts.

Prompts: FasterTransformer 5.3, models/gptj/GptJWeight.cc, kernels/unfused_attention_kernels.cu.
"""

from dataclasses import dataclass

from export_scripts.families.layout.config import FTConfig

LAYER = "model.layers.{layer}."
HEAD = "model.lm_head.weight"
PROMPT_TABLE = "model.prompt_table.{task}.weight"

# The prompt_learning_type of prompts that are keys and values in every layer.
PREFIX_PROMPT = 2


def unrotatable(name: str, dims: int, size: int) -> list[str]:
    """Return a problem if `dims` dimensions of a head of `size` cannot be rotated in pairs."""
    if 0 <= dims <= size and dims % 2 == 0:
        return []
    return [
        f"{name} = {dims} is not an even number of at most the head size of {size}; correct the "
        "rotated share of a head (partial_rotary_factor, rotary_pct, rotary_percent)"
    ]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(FTConfig):
    """Keys of all decoders; each family adds its own."""

    model_name: str
    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    vocab_size: int
    start_id: int
    end_id: int

    def problems(self) -> list[str]:
        """Return also a problem if a head cannot have the rotated dimensions."""
        name = "rotary_embedding"
        return super().problems() + unrotatable(name, getattr(self, name, 0), self.size_per_head)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.head_num * self.size_per_head

    @property
    def untied_head(self) -> bool:
        """Whether the folder holds a separate LM head."""
        return not getattr(self, "tie_word_embeddings", False)

    @property
    def has_prefix_prompts(self) -> bool:
        """Whether the prompts are keys and values in every layer."""
        return self.prompt_learning_type == PREFIX_PROMPT
