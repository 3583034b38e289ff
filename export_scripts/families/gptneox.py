"""The GPT-NeoX layout: half-rotated rotary positions, parallel or sequential residual.

Layout: FasterTransformer, models/gptneox/GptNeoXWeight.cc and GptNeoXDecoderLayerWeight.cc
(5.3 line).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import DecoderArchitecture, Rotary
from export_scripts.families.layout.config import ini_field
from export_scripts.families.layout.decoder import PROMPT_WEIGHTS, DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, WeightSpec
from export_scripts.families.mapping.keys import (
    activation_name,
    decoder_values,
    key,
    written_decoder,
)
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.rotary import FT_BASE, plain_rotary_dims, rotary_fraction
from export_scripts.families.mapping.settings import (
    half_precision_warnings,
    huggingface_settings,
    stored_head,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
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
    return config.decoder(
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
    # What the sum was made of, over the ranks likewise, as NVIDIA's converter writes it.
    *(
        WeightSpec(f"{LAYER}{name}.bias", ("hidden",), when=("use_gptj_residual",), optional=True)
        for name in ("attention.dense", "mlp.dense_4h_to_h")
    ),
    WeightSpec("model.final_layernorm.weight", ("hidden",)),
    WeightSpec("model.final_layernorm.bias", ("hidden",)),
    WeightSpec("model.lm_head.weight", ("vocab_size", "hidden")),
    *PROMPT_WEIGHTS,
)

_SUM = LAYER + "mlp.attention.bias.sum"
_SHARES = (LAYER + "attention.dense.bias", LAYER + "mlp.dense_4h_to_h.bias")


def _whole_biases(stored: GPTNeoXConfig, names: Collection[str]) -> dict[str, TensorSource]:
    """Return the sources of the output biases, which a folder divides by its ranks.

    Where only their sum is left, it becomes the MLP's, and attention's zeros.
    """
    if stored.has_sequential_residual:
        return {}
    ranks = stored.tensor_para_size

    def whole(key: str) -> TensorSource:
        return Copy(key) if ranks == 1 else Adjusted(Copy(key), lambda part, _: part * ranks)

    if all(name.format(layer=0) in names for name in _SHARES):
        return {name: whole(name) for name in _SHARES}
    attention, mlp = _SHARES
    return {attention: Constant(("hidden",)), mlp: whole(_SUM)}


GPTNEOX = ModelFamily(
    name="gptneox",
    model_type="GPT-NeoX",
    config=GPTNeoXConfig,
    architecture=gptneox_architecture,
    layout=LAYOUT,
    whole=_whole_biases,
)


def divided_bias_sum(config: GPTNeoXConfig, *biases: Any) -> Any:
    """Return the sum of output biases over the ranks that each add it.

    Each is divided and rounded to the type on disk before the sum, as NVIDIA's converter does.
    """
    shares = [_share(config, bias) for bias in biases]
    kind = config.weight_data_type
    return functools.reduce(lambda total, share: rounded(total + share, kind), shares)


def _share(config: GPTNeoXConfig, bias: Any) -> Any:
    kind = config.weight_data_type
    return rounded(rounded(bias, kind) / config.tensor_para_size, kind)


def output_bias(config: GPTNeoXConfig, key: str) -> TensorSource:
    """Return the source of an output bias: whole, or the share of a rank that adds it."""
    if config.has_sequential_residual or config.tensor_para_size == 1:
        return Copy(key)
    return Compute(_share, (key,))


_KEYS = (
    key("head_num", "num_attention_heads"),
    key("hidden", "hidden_size"),
    key("inter_size", "intermediate_size"),
    key("num_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("use_gptj_residual", "use_parallel_residual", kind="flag", default=True),
    key("layernorm_eps", "layer_norm_eps", kind="number", default=1e-5),
)


def _config(facts: Facts) -> GPTNeoXConfig:
    """Return the config of a Hugging Face GPT-NeoX.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    spelling, exact_gelu = settings.activation("hidden_act", default="gelu")
    if spelling != "Gelu":
        settings.problems.append(
            f"config.json: hidden_act = {facts.config['hidden_act']} cannot be represented: FT "
            "computes GPT-NeoX with gelu"
        )
    values = decoder_values(facts, settings, _KEYS, name="gptneox", bos=0, eos=2)
    rotary_dims = plain_rotary_dims(settings, values["size_per_head"], fraction=0.25)
    settings.finish()
    return GPTNeoXConfig(**values, rotary_embedding=rotary_dims, exact_gelu=exact_gelu)


def _written(config: GPTNeoXConfig, is_tied: bool) -> list[dict[str, Any]]:
    fraction = rotary_fraction(config.rotary_embedding, config.size_per_head)
    return [
        written_decoder("gpt_neox", "GPTNeoXForCausalLM", _KEYS, config)
        | {
            "hidden_act": activation_name("Gelu", exact_gelu=config.exact_gelu),
            "rotary_pct": fraction,
            "rotary_emb_base": FT_BASE,
            "attention_bias": True,
            "tie_word_embeddings": is_tied,
        }
    ]


_L = "gpt_neox.layers.{layer}."
EMBEDDING = "gpt_neox.embed_in.weight"
# transformers renamed it in version 5.
HEADS = ("embed_out.weight", "lm_head.weight")


def _weights(facts: Facts, config: GPTNeoXConfig) -> Mapping[str, TensorSource]:
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
        LAYER + "attention.dense.bias": output_bias(config, _L + "attention.dense.bias")
        if has_bias
        else Constant(("hidden",)),
        LAYER + "mlp.dense_h_to_4h.weight": Transpose(_L + "mlp.dense_h_to_4h.weight"),
        LAYER + "mlp.dense_h_to_4h.bias": Copy(_L + "mlp.dense_h_to_4h.bias"),
        LAYER + "mlp.dense_4h_to_h.weight": Transpose(mlp_out + ".weight"),
        LAYER + "mlp.dense_4h_to_h.bias": output_bias(config, mlp_out + ".bias"),
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
        written=_written,
        positions="max_position_embeddings",
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
