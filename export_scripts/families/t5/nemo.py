"""The T5 layout from NeMo, with adapters, IA3 and prompt tables.

Names: NeMo 1.x, nlp/modules/common/megatron/token_level_encoder_decoder.py. FT derives biases,
norm and the scaling of attention scores from t5_with_bias alone; other behaviour of a model
is folded into its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.mapping.prompts import PROMPT_SOURCES, prompt_fields
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Constant,
    Copy,
    SplitQKV,
    TensorSource,
    Transpose,
)
from export_scripts.families.t5.config import HEAD, T5Config
from export_scripts.families.t5.layout import (
    DECODER,
    ENCODER,
    LAYOUT,
    RELATIVE_BIAS,
    T5,
    t5_warnings,
)
from export_scripts.families.t5.nemo_traits import NemoT5, nemo_t5, not_t5
from export_scripts.families.t5.tuning import (
    Scaled,
    adapter_fields,
    adapter_reasons,
    adapter_sources,
    find_scalers,
    ia3_in_place,
    ia3_reasons,
    ia3_sources,
    rank_reasons,
    scale_queries,
)

_ROOT = "enc_dec_model."
_EMBEDDING = _ROOT + "encoder_embedding.word_embeddings.weight"
_POSITIONS = _ROOT + "encoder_embedding.position_embeddings.weight"
_HEAD = _ROOT + "tokens_head.weight"
_HEAD_BIAS = _ROOT + "tokens_head.bias"
_GATE = "*.mlp.dense_h_to_4h_2.weight"

_E = _ROOT + "enc_dec_model.encoder.model."
_D = _ROOT + "enc_dec_model.decoder.model."
_ELAYER = _E + "layers.{encoder_layer}."
_DLAYER = _D + "layers.{decoder_layer}."

# The decoder's copies of tables that FT stores once.
_COPIES = {
    _ROOT + "decoder_embedding.word_embeddings.weight": _EMBEDDING,
    _ROOT + "decoder_embedding.position_embeddings.weight": _POSITIONS,
}


def _is_nemo_t5(facts: Facts) -> bool:
    return facts.has(_EMBEDDING)


def _reasons(facts: Facts) -> list[str]:
    traits = nemo_t5(facts.config)
    reasons = not_t5(traits)
    reasons += [
        f"{copy} differs from {whole}: FT's T5 has one table for both stacks"
        for copy, whole in _COPIES.items()
        if facts.has(copy) and facts.has(whole) and not facts.same_values(copy, whole)
    ]
    if not traits.with_bias and facts.has(_HEAD_BIAS):
        reasons.append(
            f"{_HEAD_BIAS} with normalization = rmsnorm: FT's T5 without biases adds none to "
            "its logits"
        )
    gated = facts.has_any(_GATE)
    if gated != traits.activation.endswith("glu"):
        reasons.append(
            f"activation = {traits.activation}, but the checkpoint has "
            f"{'a' if gated else 'no'} second matrix ({_GATE.removeprefix('*.')})"
        )
    reasons += ia3_reasons(facts.ia3, in_place=facts.ia3_in_place)
    return [*reasons, *adapter_reasons(facts.adapters), *rank_reasons(facts)]


def _config(facts: Facts) -> T5Config:
    traits = nemo_t5(facts.config)
    encoder = traits.encoder
    start_id, end_id, pad_id = _special_ids(facts)
    vocab_size = facts.rows(_EMBEDDING)
    prompts = prompt_fields(facts, start_id=vocab_size)
    assert traits.positions is not None
    tasks = 0 if facts.ia3_in_place else len(facts.ia3)
    return T5Config(
        name_or_path="t5",
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
        vocab_size=vocab_size,
        d_model=_size(encoder.size("hidden_size")),
        d_kv=_size(encoder.head_size),
        d_ff=_size(encoder.size("ffn_hidden_size")),
        num_heads=_size(encoder.size("num_attention_heads")),
        num_layers=_size(encoder.size("num_layers")),
        num_decoder_layers=_size(traits.decoder.size("num_layers")),
        feed_forward_proj=traits.feed_forward_proj,
        exact_gelu=traits.exact_gelu,
        relative_attention_num_buckets_or_max_pos_seq_len=traits.positions,
        relative_attention_max_distance=traits.max_distance,
        layer_norm_epsilon=traits.norm_eps,
        decoder_start_token_id=start_id,
        eos_token_id=end_id,
        pad_id=pad_id,
        # True would make FT divide the logits by sqrt(d_model), which Megatron does not.
        tie_word_embeddings=False,
        t5_with_bias=traits.with_bias,
        use_gated_activation=facts.has_any(_GATE),
        position_embedding_type=traits.position,
        ia3_num_tasks=tasks,
        ia3_adapted=True if facts.ia3_in_place and facts.ia3 else None,
        **prompts,
        **adapter_fields(facts.adapters),
    )


def _size(value: int | None) -> int:
    assert value is not None, "not_t5 refused sources without a size"
    return value


def _special_ids(facts: Facts) -> tuple[int, int, int | None]:
    """Return the decoder's first token, the last one, and padding's.

    Raises:
        ValueError: Neither the tokenizer's files nor the user state them.
    """
    known = facts.special_ids()
    start = facts.given_int("decoder_start_token_id")
    end = facts.given_int("eos_token_id")
    pad = facts.given_int("pad_id")
    pad = known.pad if pad is None and known else pad
    if start is None:
        start = pad if _starts_with_pad(facts) else known.bos if known else None
    end = known.eos if end is None and known else end
    if start is None or end is None:
        raise ValueError(
            "decoder_start_token_id and eos_token_id are unknown: the checkpoint lacks "
            "the tokenizer's files; name them (--vocab-path) or state the ids "
            "(--set decoder_start_token_id=.. --set eos_token_id=..)"
        )
    return start, end, pad


def _starts_with_pad(facts: Facts) -> bool:
    """Return whether the decoder's first token is padding, as in some p-tuned models."""
    for archive in facts.prompts:
        data = archive.config().get("data")
        if isinstance(data, Mapping) and data.get("decoder_starts_with_pad"):
            return True
    return False


def _norm(target: str, source: str) -> dict[str, TensorSource]:
    return {f"{target}.{part}": Copy(f"{source}.{part}") for part in ("weight", "bias")}


def _column(target: str, source: str) -> dict[str, TensorSource]:
    return {
        f"{target}.weight": Transpose(f"{source}.weight", cut=0),
        f"{target}.bias": Copy(f"{source}.bias", cut=0),
    }


def _row(target: str, source: str) -> dict[str, TensorSource]:
    return {
        f"{target}.weight": Transpose(f"{source}.weight", cut=1),
        f"{target}.bias": Copy(f"{source}.bias"),
    }


def _fused(
    target: str, source: str, order: str, *, parts: int = 3, select: int | None = None
) -> dict[str, TensorSource]:
    """Return one part of a fused projection, or all of it."""
    return {
        f"{target}.{kind}": SplitQKV(
            f"{source}.{kind}", order, parts=parts, select=select, head_size="d_kv"
        )
        for kind in ("weight", "bias")
    }


def _mlp(target: str, layer: str) -> dict[str, TensorSource]:
    return {
        **_column(f"{target}.wi", layer + "mlp.dense_h_to_4h"),
        **_column(f"{target}.wi2", layer + "mlp.dense_h_to_4h_2"),
        **_row(f"{target}.wo", layer + "mlp.dense_4h_to_h"),
    }


def _relative_bias(side: str) -> dict[str, TensorSource]:
    key = f"{_ROOT}{side}_relative_position_embedding.relative_position_embedding.weight"
    return {RELATIVE_BIAS.format(side=side): Transpose(key)}


def _encoder_table(order: str) -> dict[str, TensorSource]:
    attention, qkv = ENCODER + "layer.0.SelfAttention", _ELAYER + "self_attention.query_key_value"
    return {
        **_relative_bias("encoder"),
        **_norm(ENCODER + "layer.0.layer_norm", _ELAYER + "input_layernorm"),
        **_fused(f"{attention}.q", qkv, order, select=0),
        **_fused(f"{attention}.k", qkv, order, select=1),
        **_fused(f"{attention}.v", qkv, order, select=2),
        **_row(f"{attention}.o", _ELAYER + "self_attention.dense"),
        **_norm(ENCODER + "layer.1.layer_norm", _ELAYER + "post_attention_layernorm"),
        **_mlp(ENCODER + "layer.1.DenseReluDense", _ELAYER),
        **_norm("encoder.final_layer_norm", _E + "final_layernorm"),
    }


def _decoder_table(order: str) -> dict[str, TensorSource]:
    attention, cross = DECODER + "layer.0.SelfAttention", DECODER + "layer.1.EncDecAttention"
    key_value = _DLAYER + "inter_attention.key_value"
    return {
        **_relative_bias("decoder"),
        **_norm(DECODER + "layer.0.layer_norm", _DLAYER + "input_layernorm"),
        **_fused(f"{attention}.qkv", _DLAYER + "self_attention.query_key_value", order),
        **_row(f"{attention}.o", _DLAYER + "self_attention.dense"),
        **_norm(DECODER + "layer.1.layer_norm", _DLAYER + "post_attention_layernorm"),
        **_fused(f"{cross}.q", _DLAYER + "inter_attention.query", order, parts=1, select=0),
        **_fused(f"{cross}.k", key_value, order, parts=2, select=0),
        **_fused(f"{cross}.v", key_value, order, parts=2, select=1),
        **_row(f"{cross}.o", _DLAYER + "inter_attention.dense"),
        **_norm(DECODER + "layer.2.layer_norm", _DLAYER + "post_inter_attention_layernorm"),
        **_mlp(DECODER + "layer.2.DenseReluDense", _DLAYER),
        **_norm("decoder.final_layer_norm", _D + "final_layernorm"),
    }


def _weights(facts: Facts, config: T5Config) -> Mapping[str, TensorSource]:
    traits = nemo_t5(facts.config)
    order = "knd" if traits.legacy else "nkd"
    table: dict[str, TensorSource] = {
        "shared.weight_T": Copy(_EMBEDDING, cut=0),
        "shared.ape": Copy(_POSITIONS),
        **_encoder_table(order),
        **_decoder_table(order),
        # Decided once for the whole model, not per stage.
        HEAD: Copy(_HEAD if facts.has(_HEAD) else _EMBEDDING, cut=0),
        "shared.bias": Copy(_HEAD_BIAS, cut=0),
    }
    table = _scaled_queries(table, traits, config)
    if facts.ia3_in_place and facts.ia3:
        table = ia3_in_place(table, find_scalers(facts))
    table = _with_bias_and_norm(table, traits, facts)
    stored = {} if facts.ia3_in_place else ia3_sources(find_scalers(facts))
    return {**table, **stored, **adapter_sources(facts), **PROMPT_SOURCES}


def _scaled_queries(
    table: dict[str, TensorSource], traits: NemoT5, config: T5Config
) -> dict[str, TensorSource]:
    """Return the table with queries multiplied by the rest of FT's scaling of scores."""
    factor = traits.query_factor(config.d_kv)
    if factor == 1.0:
        return table

    def scale(part: Any, _: Any) -> Any:
        return part * factor

    out = dict(table)
    for kind in ("weight", "bias"):
        for name in (
            f"{ENCODER}layer.0.SelfAttention.q.{kind}",
            f"{DECODER}layer.1.EncDecAttention.q.{kind}",
        ):
            out[name] = Adjusted(table[name], scale)
        fused = f"{DECODER}layer.0.SelfAttention.qkv.{kind}"
        out[fused] = Scaled(table[fused], scale_queries(factor))
    return out


def _with_bias_and_norm(
    table: Mapping[str, TensorSource], traits: NemoT5, facts: Facts
) -> dict[str, TensorSource]:
    """Return the table with zeros for absent biases and 1 added to layernorm1p scales."""
    shapes = {spec.name: spec.shape for spec in LAYOUT}
    out: dict[str, TensorSource] = {}
    for name, source in table.items():
        key = source.reads[0][0].format(encoder_layer=0, decoder_layer=0)
        absent = name.endswith(".bias") and not facts.has(key)
        if absent and ("norm" not in name) and (not traits.bias or name == "shared.bias"):
            out[name] = Constant(shapes[name])
        elif traits.normalization == "layernorm1p" and name.endswith("layer_norm.weight"):
            out[name] = Adjusted(source, lambda part, _: part + 1)
        else:
            out[name] = source
    return out


T5_NEMO = SourceMapping(
    name="nemo-t5",
    title="NeMo T5 (.nemo, unpacked, checkpoint folder), with adapters, IA3 and prompt tables",
    family=T5,
    format="nemo",
    matches=_is_nemo_t5,
    config=_config,
    weights=_weights,
    unsupported=_reasons,
    ignored=(*_COPIES, "*._extra_state", "*.position_ids"),
    accepts=("prompt", "ia3", "adapter"),
    warnings=t5_warnings,
)
