"""The Llama layout from Hugging Face Llama, Mistral and Qwen2."""

# Shapes: k key/value heads, d size per head, h hidden

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.llama.layout import (
    GATED,
    LAYER,
    LLAMA,
    LlamaConfig,
    in_first,
    repeated_heads,
    rotary_fields,
    written_rotary,
)
from export_scripts.families.mapping.keys import (
    activation_name,
    decoder_values,
    key,
    written_decoder,
)
from export_scripts.families.mapping.rotary import rotary_settings
from export_scripts.families.mapping.settings import (
    Settings,
    half_precision_warnings,
    head_is_tied,
    huggingface_settings,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Mapped, TensorSource, Transpose, turned

_MODEL_TYPES = ("llama", "mistral", "qwen2")

WTE = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
HF_LAYER = "model.layers.{layer}."


KEYS = (
    key("head_num", "num_attention_heads"),
    key("hidden", "hidden_size"),
    key("kv_head_num", "num_key_value_heads", default=lambda known: known["head_num"]),
    key("inter_size", "intermediate_size"),
    key("num_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("max_pos_seq_len", "max_position_embeddings"),
    key("layernorm_eps", "rms_norm_eps", kind="number", default=1e-6),
)


def _config(facts: Facts) -> LlamaConfig:
    """Return the config of a Hugging Face Llama, Mistral or Qwen2.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    # Qwen2 has no default tokens.
    is_llama, is_qwen = (facts.config["model_type"] == kind for kind in ("llama", "qwen2"))
    ids = {} if is_qwen else {"bos": 1, "eos": 2}
    name = str(facts.config["model_type"])
    values = decoder_values(facts, settings, KEYS, name=name, head_dim=True, **ids)
    heads, kv_heads = values["head_num"], values["kv_head_num"]
    settings.divide(heads, kv_heads, "num_attention_heads by num_key_value_heads")
    activation, exact_gelu = settings.activation("hidden_act", default="silu")
    rotary = rotary_settings(settings)
    if rotary.fraction != 1:
        settings.problems.append(
            f"config.json: partial_rotary_factor = {rotary.fraction:g} cannot be represented: "
            "transformers rotates whole heads in these models"
        )
    has_bias = is_llama and settings.flag("attention_bias", default=False)
    config = LlamaConfig(
        **values,
        hidden_size=settings.integer("hidden_size"),
        activation_type=GATED[activation.lower()],
        exact_gelu=exact_gelu,
        tie_word_embeddings=head_is_tied(facts, settings, LM_HEAD, WTE, default=False),
        # Tensors of other biases than transformers would read are reported as unknown.
        has_qkv_bias=is_qwen or has_bias,
        has_attention_dense_bias=has_bias
        and facts.has(f"{HF_LAYER.format(layer=0)}self_attn.o_proj.bias"),
        has_mlp_bias=is_llama and settings.flag("mlp_bias", default=False),
        sliding_window=_sliding_window(settings),
        **rotary_fields(rotary, values["size_per_head"]),
    )
    settings.finish()
    return config


def _written(config: LlamaConfig, is_tied: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    window = config.sliding_window
    own = {
        "head_dim": config.size_per_head,
        "hidden_act": activation_name(config.activation_type, exact_gelu=config.exact_gelu),
        "tie_word_embeddings": config.tie_word_embeddings,
        **written_rotary(config),
    }
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("Llama", {"attention_bias": config.has_qkv_bias, "mlp_bias": config.has_mlp_bias}),
        ("Mistral", {"sliding_window": window}),
        (
            "Qwen2",
            {
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "max_window_layers": 0,
            },
        ),
    )
    return [
        written_decoder(kind.lower(), f"{kind}ForCausalLM", KEYS, config) | own | further
        for kind, further in kinds
        # transformers gives a Llama all biases of attention or none.
        if kind != "Llama" or config.has_qkv_bias == config.has_attention_dense_bias
    ]


def _sliding_window(settings: Settings) -> int | None:
    """Return the sliding window of all layers, or None; differing layers are a problem.

    transformers gives a Llama none, whatever its configuration says, a Mistral one unless the key
    is null, and a Qwen2 one from layer max_window_layers on if use_sliding_window is set.
    """
    source, model_type = settings.source, settings.source["model_type"]
    in_use = model_type == "mistral" or source.get("use_sliding_window")
    if model_type == "llama" or not in_use or source.get("sliding_window", 0) is None:
        return None
    count = settings.integer("num_hidden_layers")
    full = 0
    if model_type == "qwen2":
        full = min(settings.integer("max_window_layers", default=28, least=0), count)
    layers = source.get("layer_types") or (
        ["full_attention"] * full + ["sliding_attention"] * (count - full)
    )
    if layers == ["full_attention"] * count:
        return None
    if layers != ["sliding_attention"] * count:
        settings.problems.append(
            f"{settings.label}: only some layers have a sliding window; the layout has one "
            "window for all layers"
        )
    return settings.integer("sliding_window", default=4096)


def _heads_apart(rows: Any, config: LlamaConfig) -> Any:
    """Return (heads, d[, h]) of a projection (heads * d, h), or of its bias."""
    d = config.size_per_head
    return rows.reshape(rows.shape[0] // d, d, *rows.shape[1:])


def _query(rows: Any, config: LlamaConfig) -> Any:
    return in_first(_heads_apart(rows, config))


def _key_or_value(rows: Any, config: LlamaConfig) -> Any:
    return in_first(repeated_heads(_heads_apart(rows, config), config))


def _linear(ours: str, theirs: str) -> dict[str, TensorSource]:
    return {
        f"{LAYER}{ours}.weight": Transpose(f"{HF_LAYER}{theirs}.weight"),
        f"{LAYER}{ours}.bias": Copy(f"{HF_LAYER}{theirs}.bias"),
    }


def _projection(ours: str, theirs: str, function: Any) -> dict[str, TensorSource]:
    return {
        f"{LAYER}{ours}.{kind}": Mapped(f"{HF_LAYER}{theirs}.{kind}", function, view=turned)
        for kind in ("weight", "bias")
    }


WEIGHTS: Mapping[str, TensorSource] = {
    "model.wte": Copy(WTE),
    LAYER + "input_layernorm.weight": Copy(HF_LAYER + "input_layernorm.weight"),
    **_projection("attention.query", "self_attn.q_proj", _query),
    **_projection("attention.key", "self_attn.k_proj", _key_or_value),
    **_projection("attention.value", "self_attn.v_proj", _key_or_value),
    **_linear("attention.dense", "self_attn.o_proj"),
    LAYER + "post_attention_layernorm.weight": Copy(HF_LAYER + "post_attention_layernorm.weight"),
    **_linear("mlp.dense_h_to_4h", "mlp.gate_proj"),
    **_linear("mlp.dense_h_to_4h_2", "mlp.up_proj"),
    **_linear("mlp.dense_4h_to_h", "mlp.down_proj"),
    "model.final_layernorm.weight": Copy("model.norm.weight"),
    "model.lm_head.weight": Copy(LM_HEAD),
}


def _warnings(facts: Facts, config: LlamaConfig) -> list[str]:
    # Llama and Mistral are served in fp16 everywhere; Qwen2's activations are known to overflow.
    if facts.config["model_type"] == "qwen2":
        return half_precision_warnings(facts, config, WTE)
    if facts.config["model_type"] == "llama" and facts.config.get("sliding_window") is not None:
        return [
            f"config.json: sliding_window = {facts.config['sliding_window']} is left out: a Llama "
            "has none in transformers"
        ]
    return []


LLAMA_HUGGINGFACE = SourceMapping(
    name="huggingface-llama",
    title="Hugging Face Llama, Mistral, Qwen2",
    family=LLAMA,
    format="huggingface",
    matches=lambda facts: facts.config.get("model_type") in _MODEL_TYPES,
    config=_config,
    written=_written,
    weights=lambda *_: WEIGHTS,
    ignored=("*rotary_emb.inv_freq",),
    copies=lambda _, config: (LM_HEAD,) if config.tie_word_embeddings else (),
    prefix="model.",
    warnings=_warnings,
)
