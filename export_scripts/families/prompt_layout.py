"""Files of the loaded prompts of a decoder-only model, of the type that its config.ini names.

Source: FasterTransformer 5.3, models/gptj/GptJWeight.cc and kernels/unfused_attention_kernels.cu.
"""

from __future__ import annotations

from export_scripts.families.spec import ModelConfig, WeightSpec

# prompt_learning_type of keys and values that precede the prompt in every layer.
PREFIX_PROMPT = 2


def _has_prefixes(config: ModelConfig) -> bool:
    return config.prompt_learning_type == PREFIX_PROMPT


def _has_tables(config: ModelConfig) -> bool:
    return not _has_prefixes(config)


PROMPT_WEIGHTS = (
    WeightSpec("model.prompt_table.{task}.weight", ("prompt_length", "hidden"), None, _has_tables),
    # Keys, which no rotary embedding turns any more, then values of every layer.
    WeightSpec(
        "model.prefix_prompt.{task}.weight",
        ("num_layer", 2, "head_num", "prompt_length", "size_per_head"),
        2,
        _has_prefixes,
    ),
)
