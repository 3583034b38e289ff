"""The GPT-NeoX layout: half-rotated rotary positions, parallel or sequential residual.

Layout: FasterTransformer, models/gptneox/GptNeoXWeight.cc and GptNeoXDecoderLayerWeight.cc
(5.3 line).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import DecoderArchitecture, Rotary
from export_scripts.families.layout.config import ini_field
from export_scripts.families.layout.decoder import PROMPT_WEIGHTS, DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, WeightSpec
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.rotary import plain_rotary_dims
from export_scripts.families.mapping.settings import (
    half_precision_warnings,
    huggingface_settings,
    model_name,
    stored_head,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Compute,
    Constant,
    Copy,
    SplitQKV,
    TensorSource,
    Transpose,
)
from export_scripts.families.mapping.tensors import rounded

LAYER = "model.layers.{layer}."

# NVIDIA's GPT-NeoX runtime always computes with this epsilon.
FT_LAYERNORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """config.ini [gptneox]; absent keys have the loader's defaults."""

    SECTION: ClassVar[str] = "gptneox"

    rotary_embedding: int  # dimensions of each head that are rotated
    # The loader reads it as an integer: the word True would count as its default.
    use_gptj_residual: bool = ini_field(True, as_digit=True)
    # Not FT keys: the model's own values, where FT takes FT_LAYERNORM_EPS and tanh gelu.
    layernorm_eps: float = FT_LAYERNORM_EPS
    exact_gelu: bool = False

    @property
    def has_sequential_residual(self) -> bool:
        """True if the MLP follows attention instead of running parallel to it."""
        return not self.use_gptj_residual


def gptneox_architecture(config: GPTNeoXConfig) -> DecoderArchitecture:
    """Return the decoder a GPT-NeoX config describes."""
    return DecoderArchitecture(
        head_num=config.head_num,
        kv_head_num=config.head_num,
        size_per_head=config.size_per_head,
        hidden=config.hidden,
        inter_size=config.inter_size,
        num_layer=config.num_layer,
        vocab_size=config.vocab_size,
        position="rotary_half",
        rotary=Rotary(dims=config.rotary_embedding),
        norm_eps=config.layernorm_eps,
        exact_gelu=config.exact_gelu,
        residual="parallel" if config.use_gptj_residual else "sequential",
        fused_bias_sum=config.use_gptj_residual,
        untied_head=True,
    )


LAYOUT: tuple[WeightSpec, ...] = (
    WeightSpec("model.wte", ("vocab_size", "hidden")),
    WeightSpec(LAYER + "input_layernorm.weight", ("hidden",)),
    WeightSpec(LAYER + "input_layernorm.bias", ("hidden",)),
    WeightSpec(LAYER + "attention.query_key_value.weight", ("hidden", 3, "hidden"), split=2),
    WeightSpec(LAYER + "attention.query_key_value.bias", (3, "hidden"), split=1),
    WeightSpec(LAYER + "attention.dense.weight", ("hidden", "hidden"), split=0),
    WeightSpec(LAYER + "attention.dense.bias", ("hidden",), when=("has_sequential_residual",)),
    WeightSpec(LAYER + "post_attention_layernorm.weight", ("hidden",)),
    WeightSpec(LAYER + "post_attention_layernorm.bias", ("hidden",)),
    WeightSpec(LAYER + "mlp.dense_h_to_4h.weight", ("hidden", "inter_size"), split=1),
    WeightSpec(LAYER + "mlp.dense_h_to_4h.bias", ("inter_size",), split=0),
    WeightSpec(LAYER + "mlp.dense_4h_to_h.weight", ("inter_size", "hidden"), split=0),
    WeightSpec(LAYER + "mlp.dense_4h_to_h.bias", ("hidden",), when=("has_sequential_residual",)),
    # Both output biases over the ranks: each rank adds it before the all-reduce.
    WeightSpec(LAYER + "mlp.attention.bias.sum", ("hidden",), when=("use_gptj_residual",)),
    WeightSpec("model.final_layernorm.weight", ("hidden",)),
    WeightSpec("model.final_layernorm.bias", ("hidden",)),
    WeightSpec("model.lm_head.weight", ("vocab_size", "hidden")),
    *PROMPT_WEIGHTS,
)

GPTNEOX = ModelFamily(
    name="gptneox",
    model_type="GPT-NeoX",
    config=GPTNeoXConfig,
    architecture=gptneox_architecture,
    layout=LAYOUT,
    # Written by other converters next to the sum that replaces them.
    unread=("model.layers.*.attention.dense.bias.bin", "model.layers.*.mlp.dense_4h_to_h.bias.bin"),
)


def divided_bias_sum(config: GPTNeoXConfig, *biases: Any) -> Any:
    """Return the sum of output biases over the ranks that each add it.

    Each is divided and rounded to the type on disk before the sum, as NVIDIA's converter does.
    """
    kind, ranks = config.weight_data_type, config.tensor_para_size
    shares = [rounded(rounded(bias, kind) / ranks, kind) for bias in biases]
    return functools.reduce(lambda total, share: rounded(total + share, kind), shares)


def _config(facts: Facts) -> GPTNeoXConfig:
    """Return the config of a Hugging Face GPT-NeoX.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    hidden = settings.integer("hidden_size")
    heads = settings.integer("num_attention_heads")
    size_per_head = settings.divide(hidden, heads, "hidden_size by num_attention_heads")
    spelling, exact_gelu = settings.activation("hidden_act", default="gelu")
    if spelling != "Gelu":
        settings.problems.append(
            f"config.json: hidden_act = {facts.config['hidden_act']} cannot be represented: FT "
            "computes GPT-NeoX with gelu"
        )
    start_id, end_id = settings.token_ids(facts, bos=0, eos=2)
    config = GPTNeoXConfig(
        model_name=model_name(facts.config, "gptneox"),
        head_num=heads,
        size_per_head=size_per_head,
        inter_size=settings.integer("intermediate_size"),
        num_layer=settings.integer("num_hidden_layers"),
        vocab_size=settings.integer("vocab_size"),
        rotary_embedding=plain_rotary_dims(settings, size_per_head, fraction=0.25),
        start_id=start_id,
        end_id=end_id,
        use_gptj_residual=settings.flag("use_parallel_residual", default=True),
        layernorm_eps=settings.number("layer_norm_eps", default=1e-5),
        exact_gelu=exact_gelu,
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
    )
    settings.finish()
    return config


_L = "gpt_neox.layers.{layer}."
EMBEDDING = "gpt_neox.embed_in.weight"
# transformers renamed it in version 5.
HEADS = ("embed_out.weight", "lm_head.weight")


def _weights(facts: Facts, _: GPTNeoXConfig) -> Mapping[str, TensorSource]:
    """Return each tensor's source."""
    has_bias = facts.config.get("attention_bias", True)
    mlp_out = _L + "mlp.dense_4h_to_h"
    out_biases = (_L + "attention.dense.bias",) if has_bias else ()
    qkv = "attention.query_key_value."
    copied = {
        LAYER + "input_layernorm": _L + "input_layernorm",
        LAYER + "post_attention_layernorm": _L + "post_attention_layernorm",
        "model.final_layernorm": "gpt_neox.final_layer_norm",
    }
    return {
        "model.wte": Copy(EMBEDDING),
        "model.lm_head.weight": Copy(stored_head(facts, HEADS, EMBEDDING)),
        **{f"{ours}.weight": Copy(f"{theirs}.weight") for ours, theirs in copied.items()},
        **{f"{ours}.bias": Copy(f"{theirs}.bias") for ours, theirs in copied.items()},
        LAYER + qkv + "weight": SplitQKV(_L + qkv + "weight"),
        LAYER + qkv + "bias": SplitQKV(_L + qkv + "bias") if has_bias else Constant((3, "hidden")),
        LAYER + "attention.dense.weight": Transpose(_L + "attention.dense.weight"),
        LAYER + "attention.dense.bias": Copy(_L + "attention.dense.bias")
        if has_bias
        else Constant(("hidden",)),
        LAYER + "mlp.dense_h_to_4h.weight": Transpose(_L + "mlp.dense_h_to_4h.weight"),
        LAYER + "mlp.dense_h_to_4h.bias": Copy(_L + "mlp.dense_h_to_4h.bias"),
        LAYER + "mlp.dense_4h_to_h.weight": Transpose(mlp_out + ".weight"),
        LAYER + "mlp.dense_4h_to_h.bias": Copy(mlp_out + ".bias"),
        LAYER + "mlp.attention.bias.sum": Compute(
            divided_bias_sum, (*out_biases, mlp_out + ".bias")
        ),
    }


GPTNEOX_HUGGINGFACE = with_prompts(
    SourceMapping(
        name="huggingface-gptneox",
        title="Hugging Face GPT-NeoX, Pythia",
        family=GPTNEOX,
        format="huggingface",
        matches=lambda facts: facts.config.get("model_type") == "gpt_neox",
        config=_config,
        weights=_weights,
        ignored=(
            "*.attention.bias",
            "*.attention.masked_bias",
            "*rotary_emb.inv_freq",
        ),
        prefix="gpt_neox.",
        warnings=lambda facts, config: half_precision_warnings(facts, config, EMBEDDING),
    )
)
