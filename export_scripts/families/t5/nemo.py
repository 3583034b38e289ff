"""The T5 layout from NeMo, with adapters, IA3 and prompt tables.

Names: NeMo 1.x, nlp/modules/common/megatron/token_level_encoder_decoder.py. FT derives biases,
norm and the scaling of attention scores from t5_with_bias alone; other behaviour of a model
is folded into its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.mapping.names import completed, named_sources
from export_scripts.families.mapping.prompts import PROMPT_SOURCES, prompt_fields
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Copy,
    TensorSource,
    split_qkv,
    transposed,
)
from export_scripts.families.mapping.tensors import constant
from export_scripts.families.t5.config import HEAD, T5Config
from export_scripts.families.t5.layout import (
    DECODER,
    ENCODER,
    LAYOUT,
    RELATIVE_BIAS,
    T5,
    t5_warnings,
)
from export_scripts.families.t5.nemo_traits import nemo_t5, not_t5
from export_scripts.families.t5.tuning import (
    adapter_fields,
    adapter_reasons,
    adapter_sources,
    find_scalers,
    ia3_in_place,
    ia3_reasons,
    ia3_sources,
    rank_reasons,
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
    start_id, end_id, pad_id = _special_ids(facts)
    vocab_size = facts.rows(_EMBEDDING)
    prompts = prompt_fields(facts, start_id=vocab_size)
    tasks = 0 if facts.ia3_in_place else len(facts.ia3)
    return T5Config(
        name_or_path="t5",
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
        vocab_size=vocab_size,
        d_model=traits.sizes["hidden_size"],
        d_kv=traits.size_per_head,
        d_ff=traits.sizes["ffn_hidden_size"],
        num_heads=traits.sizes["num_attention_heads"],
        num_layers=traits.sizes["num_layers"],
        num_decoder_layers=traits.decoder_layers,
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
        position_embedding_type=traits.position_embedding_type,
        ia3_num_tasks=tasks,
        ia3_adapted=True if facts.ia3_in_place and facts.ia3 else None,
        **prompts,
        **adapter_fields(facts.adapters),
    )


def _special_ids(facts: Facts) -> tuple[int, int, int | None]:
    """Return the decoder's first token, the last one, and padding's."""
    known = facts.special_ids()
    start, end, pad = map(facts.given_int, ("decoder_start_token_id", "eos_token_id", "pad_id"))
    pad = known.pad if pad is None else pad
    end = known.eos if end is None else end
    if start is None:
        start = pad if _starts_with_pad(facts) else known.bos
    if start is None or end is None:
        raise ValueError(
            "decoder_start_token_id and eos_token_id are unknown: the checkpoint lacks "
            "the tokenizer's files; name them (--vocab-path) or state the ids "
            "(--set decoder_start_token_id=.. --set eos_token_id=..)"
        )
    return start, end, pad


def _starts_with_pad(facts: Facts) -> bool:
    """Return whether the decoder's first token is padding, as in some p-tuned models."""
    found = (archive.config.get("data") for archive in facts.prompts)
    return any(isinstance(data, Mapping) and data.get("decoder_starts_with_pad") for data in found)


_QKV, _KEY_VALUE = "self_attention.query_key_value", "inter_attention.key_value"
_CROSS = DECODER + "layer.1.EncDecAttention"
_RELATIVE = _ROOT + "{side}_relative_position_embedding.relative_position_embedding.weight"

# Modules of a layer in the layout and in NeMo whose tensors are transposed or copied; {mlp} is the
# number of the MLP's part of the layer.
_LAYER_NAMES = {
    "layer.0.layer_norm": "input_layernorm",
    "layer.0.SelfAttention.o": "self_attention.dense",
    "layer.1.layer_norm": "post_attention_layernorm",
    "layer.{mlp}.DenseReluDense.wi": "mlp.dense_h_to_4h",
    "layer.{mlp}.DenseReluDense.wi2": "mlp.dense_h_to_4h_2",
    "layer.{mlp}.DenseReluDense.wo": "mlp.dense_4h_to_h",
}
_NAMES = {
    "encoder.final_layer_norm": _E + "final_layernorm",
    "decoder.final_layer_norm": _D + "final_layernorm",
    _CROSS + ".o": _DLAYER + "inter_attention.dense",
    DECODER + "layer.2.layer_norm": _DLAYER + "post_inter_attention_layernorm",
    **{
        ours + name.replace("{mlp}", mlp): theirs + module
        for ours, theirs, mlp in ((ENCODER, _ELAYER, "1"), (DECODER, _DLAYER, "2"))
        for name, module in _LAYER_NAMES.items()
    },
}


def _attention(order: str) -> dict[str, TensorSource]:
    encoder, decoder = ENCODER + "layer.0.SelfAttention", DECODER + "layer.0.SelfAttention"
    # Module of the layout -> module of NeMo, its parts, and the one to take of them.
    parts: dict[str, tuple[str, int, int | None]] = {
        f"{encoder}.q": (_ELAYER + _QKV, 3, 0),
        f"{encoder}.k": (_ELAYER + _QKV, 3, 1),
        f"{encoder}.v": (_ELAYER + _QKV, 3, 2),
        f"{decoder}.qkv": (_DLAYER + _QKV, 3, None),
        f"{_CROSS}.q": (_DLAYER + "inter_attention.query", 1, 0),
        f"{_CROSS}.k": (_DLAYER + _KEY_VALUE, 2, 0),
        f"{_CROSS}.v": (_DLAYER + _KEY_VALUE, 2, 1),
    }
    return {
        **{
            f"{ours}.{kind}": split_qkv(
                f"{theirs}.{kind}", order, parts=count, select=select, head_size="d_kv"
            )
            for ours, (theirs, count, select) in parts.items()
            for kind in ("weight", "bias")
        },
        **{
            RELATIVE_BIAS.format(side=side): transposed(_RELATIVE.format(side=side))
            for side in ("encoder", "decoder")
        },
    }


def _weights(facts: Facts, _: T5Config) -> Mapping[str, TensorSource]:
    traits = nemo_t5(facts.config)
    order = "knd" if traits.legacy else "nkd"
    table: dict[str, TensorSource] = {
        "shared.weight_T": Copy(_EMBEDDING, cut=0),
        "shared.ape": Copy(_POSITIONS),
        **named_sources(_NAMES, LAYOUT),
        **_attention(order),
        # Decided once for the whole model, not per stage.
        HEAD: Copy(_HEAD if facts.has(_HEAD) else _EMBEDDING, cut=0),
        "shared.bias": Copy(_HEAD_BIAS, cut=0),
    }
    table = _scaled_queries(table, traits.query_factor())
    if facts.ia3_in_place and facts.ia3:
        table = ia3_in_place(table, find_scalers(facts))
    table = completed(
        table,
        LAYOUT,
        facts,
        lacks=lambda name: "norm" not in name and (not traits.bias or name == "shared.bias"),
        is_one_plus=traits.normalization == "layernorm1p",
    )
    stored = {} if facts.ia3_in_place else ia3_sources(find_scalers(facts))
    return {**table, **stored, **adapter_sources(facts), **PROMPT_SOURCES}


def _scaled_queries(table: dict[str, TensorSource], factor: float) -> dict[str, TensorSource]:
    """Return the table with queries multiplied by the rest of FT's scaling of scores."""
    if factor == 1.0:
        return table

    def scale(part: Any, _: Any) -> Any:
        return part * factor

    def scale_first(part: Any, _: Any) -> Any:  # (..., 3, heads, size)
        return part * constant([factor, 1.0, 1.0]).reshape(3, 1, 1)

    out = dict(table)
    for kind in ("weight", "bias"):
        for name in (
            f"{ENCODER}layer.0.SelfAttention.q.{kind}",
            f"{DECODER}layer.1.EncDecAttention.q.{kind}",
        ):
            out[name] = Adjusted(table[name], scale)
        fused = f"{DECODER}layer.0.SelfAttention.qkv.{kind}"
        out[fused] = Adjusted(table[fused], scale_first)
    return out


T5_NEMO = SourceMapping(
    name="nemo-t5",
    title="NeMo T5 (.nemo, unpacked, checkpoint folder), with adapters, IA3 and prompt tables",
    family=T5,
    format="nemo",
    matches=lambda facts: facts.has(_EMBEDDING),
    config=_config,
    weights=_weights,
    unsupported=_reasons,
    ignored=(*_COPIES, "*._extra_state", "*.position_ids"),
    accepts=("prompt", "ia3", "adapter"),
    warnings=t5_warnings,
)
