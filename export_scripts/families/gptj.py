"""The GPT-J layout: rotary positions, one layernorm that feeds both attention and MLP.

Layout: FasterTransformer, models/gptj/GptJWeight.cc and GptJDecoderLayerWeight.cc (5.3 line).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import DecoderArchitecture, Rotary
from export_scripts.families.layout.decoder import PROMPT_WEIGHTS, DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, WeightSpec
from export_scripts.families.mapping.keys import decoder_values, key, written_decoder
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.settings import (
    Settings,
    huggingface_settings,
    stored_head,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, StackQKV, TensorSource, Transpose

LAYER = "model.layers.{layer}."

# NVIDIA's GPT-J runtime always computes with this epsilon.
FT_LAYERNORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(DecoderConfig):
    """config.ini [gptj]; absent keys have the loader's defaults."""

    SECTION: ClassVar[str] = "gptj"

    rotary_embedding: int  # dimensions of each head that are rotated
    # Not an FT key (FT_LAYERNORM_EPS is built in there): the model's own value.
    layernorm_eps: float = FT_LAYERNORM_EPS


def gptj_architecture(config: GPTJConfig) -> DecoderArchitecture:
    """Return the decoder a GPT-J config describes."""
    return config.decoder(
        position="rotary_interleaved",
        rotary=Rotary(dims=config.rotary_embedding),
        norm_eps=config.layernorm_eps,
        residual="parallel_shared",
        untied_head=True,
        head_bias=True,
    )


LAYOUT: tuple[WeightSpec, ...] = (
    WeightSpec("model.wte", ("vocab_size", "hidden")),
    WeightSpec(LAYER + "input_layernorm.weight", ("hidden",)),
    WeightSpec(LAYER + "input_layernorm.bias", ("hidden",)),
    WeightSpec(LAYER + "attention.query_key_value.weight", ("hidden", 3, "hidden"), split=2),
    WeightSpec(LAYER + "attention.dense.weight", ("hidden", "hidden"), split=0),
    WeightSpec(LAYER + "mlp.dense_h_to_4h.weight", ("hidden", "inter_size"), split=1),
    WeightSpec(LAYER + "mlp.dense_h_to_4h.bias", ("inter_size",), split=0),
    WeightSpec(LAYER + "mlp.dense_4h_to_h.weight", ("inter_size", "hidden"), split=0),
    WeightSpec(LAYER + "mlp.dense_4h_to_h.bias", ("hidden",)),
    WeightSpec("model.final_layernorm.weight", ("hidden",)),
    WeightSpec("model.final_layernorm.bias", ("hidden",)),
    WeightSpec("model.lm_head.weight", ("vocab_size", "hidden")),
    WeightSpec("model.lm_head.bias", ("vocab_size",)),
    *PROMPT_WEIGHTS,
)

GPTJ = ModelFamily(
    name="gptj",
    model_type="GPT-J",
    config=GPTJConfig,
    architecture=gptj_architecture,
    layout=LAYOUT,
)


def check_rotary(settings: Settings, name: str, dims: int, size_per_head: int) -> None:
    """Note a problem unless `dims` dimensions of a head can be rotated, two at a time."""
    if dims % 2 or dims > size_per_head:
        settings.problems.append(
            f"{settings.label}: {name} = {dims} is not an even number of at most the head size of "
            f"{size_per_head}"
        )


_KEYS = (
    key("head_num", "n_head", "num_attention_heads"),
    key("hidden", "n_embd", "hidden_size"),
    key("inter_size", "n_inner", default=lambda known: 4 * known["hidden"]),
    key("num_layer", "n_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("layernorm_eps", "layer_norm_epsilon", kind="number", default=1e-5),
)


def _config(facts: Facts) -> GPTJConfig:
    """Return the config of a Hugging Face GPT-J.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    if settings.activation("activation_function", default="gelu_new") != ("Gelu", False):
        name = facts.config["activation_function"]
        settings.problems.append(
            f"config.json: activation_function = {name} cannot be represented: FT computes GPT-J "
            "with gelu_new"
        )
    values = decoder_values(facts, settings, _KEYS, name="gptj", bos=50256, eos=50256)
    # transformers rotates whole heads where the key is null, and 64 dimensions where it is absent.
    usual = values["size_per_head"] if "rotary_dim" in facts.config else 64
    rotary_dims = settings.integer("rotary_dim", default=usual, least=2)
    check_rotary(settings, "rotary_dim", rotary_dims, values["size_per_head"])
    settings.finish()
    return GPTJConfig(**values, rotary_embedding=rotary_dims)


def _written(config: GPTJConfig, is_tied: bool) -> list[dict[str, Any]]:
    return [
        written_decoder("gptj", "GPTJForCausalLM", _KEYS, config)
        | {
            "activation_function": "gelu_new",
            "rotary_dim": config.rotary_embedding,
            "tie_word_embeddings": is_tied,
        }
    ]


_H = "transformer.h.{layer}."
WTE = "transformer.wte.weight"


def _weights(facts: Facts, _: GPTJConfig) -> Mapping[str, TensorSource]:
    """Return each tensor's source; a tied head may be stored as the embedding alone."""
    q, k, v = (f"{_H}attn.{part}_proj.weight" for part in "qkv")
    return {
        "model.wte": Copy(WTE),
        LAYER + "input_layernorm.weight": Copy(_H + "ln_1.weight"),
        LAYER + "input_layernorm.bias": Copy(_H + "ln_1.bias"),
        LAYER + "attention.query_key_value.weight": StackQKV(q, k, v),
        LAYER + "attention.dense.weight": Transpose(_H + "attn.out_proj.weight"),
        LAYER + "mlp.dense_h_to_4h.weight": Transpose(_H + "mlp.fc_in.weight"),
        LAYER + "mlp.dense_h_to_4h.bias": Copy(_H + "mlp.fc_in.bias"),
        LAYER + "mlp.dense_4h_to_h.weight": Transpose(_H + "mlp.fc_out.weight"),
        LAYER + "mlp.dense_4h_to_h.bias": Copy(_H + "mlp.fc_out.bias"),
        "model.final_layernorm.weight": Copy("transformer.ln_f.weight"),
        "model.final_layernorm.bias": Copy("transformer.ln_f.bias"),
        "model.lm_head.weight": Copy(stored_head(facts, ("lm_head.weight",), WTE)),
        "model.lm_head.bias": Copy("lm_head.bias"),
    }


GPTJ_HUGGINGFACE = with_prompts(
    SourceMapping(
        name="huggingface-gptj",
        title="Hugging Face GPT-J",
        family=GPTJ,
        format="huggingface",
        matches=lambda facts: facts.config.get("model_type") == "gptj",
        config=_config,
        written=_written,
        positions="n_positions",
        weights=_weights,
        ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions"),
        prefix="transformer.",
    )
)
