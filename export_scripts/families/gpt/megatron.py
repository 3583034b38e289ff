"""The GPT layout from NeMo 1.x and Megatron-LM, in the names before megatron-core.

Each table maps a layout record's name to the tensor's source.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.layout import GPT, LAYOUT, GPTConfig
from export_scripts.families.gpt.limits import not_gpt
from export_scripts.families.mapping.megatron_traits import (
    MegatronTraits,
    megatron_traits,
    nemo_traits,
)
from export_scripts.families.mapping.names import in_layers, named_sources
from export_scripts.families.mapping.prompts import PROMPT_SOURCES, prompt_fields
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Constant,
    TensorSource,
)

# GPT-2's end of text, which Megatron's converters assume without a vocabulary.
_GPT2_END_OF_TEXT = 50256
_GPT2_TOKENIZER = "GPT2BPETokenizer"

_ACTIVATIONS = {"gelu": "Gelu", "relu": "Relu", "silu": "Silu"}
_NORM_SCALES = ("layernorm.weight",)

# Row order of the fused QKV projection by checkpoint version.
# Layout: NVIDIA/Megatron-LM, megatron/checkpointing.py fix_query_key_value_ordering.
_QKV_ORDER = {0: "knd", 1: "ndk", 2: "nkd", 3: "nkd"}


def gpt_config(facts: Facts, traits: MegatronTraits, *, vocab_size: int, tied: bool) -> GPTConfig:
    """Return the config of a Megatron-style GPT that passed `unsupported`.

    Raises:
        ValueError: The special tokens are unknown, or an added archive contradicts itself.
    """
    heads, hidden, width = traits.head_num, traits.hidden, traits.inter_size
    depth = traits.num_layer
    assert heads is not None
    assert hidden is not None
    assert width is not None
    assert depth is not None
    start_id, end_id = start_and_end(facts)
    return GPTConfig(
        model_name="gpt",
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
        head_num=heads,
        size_per_head=hidden // heads,
        inter_size=width,
        num_layer=depth,
        max_pos_seq_len=traits.max_positions,
        vocab_size=vocab_size,
        start_id=start_id,
        end_id=end_id,
        layernorm_eps=traits.norm_eps,
        activation_type=_ACTIVATIONS[traits.activation],
        exact_gelu=traits.exact_gelu,
        has_adapters=traits.project_size > 0,
        adapter_inter_size=traits.project_size,
        tie_word_embeddings=tied,
        **prompt_fields(facts, start_id=vocab_size),
    )


def start_and_end(facts: Facts) -> tuple[int, int]:
    """Return start_id and end_id: stated, the tokenizer's, or GPT-2's for its tokenizer.

    Raises:
        ValueError: The tokenizer is another one and its files are missing.
    """
    given = facts.given_int("start_id"), facts.given_int("end_id")
    known = facts.special_ids()
    start = given[0] if given[0] is not None else known.bos if known else None
    end = given[1] if given[1] is not None else known.eos if known else None
    if end is None and _assumes_gpt2(facts):
        end = _GPT2_END_OF_TEXT
    start = end if start is None else start
    if start is None or end is None:
        raise ValueError(
            "start_id and end_id are unknown: the checkpoint lacks the tokenizer's files; "
            "name them (--vocab-path) or state the ids (--set start_id=.. --set end_id=..)"
        )
    return start, end


def _assumes_gpt2(facts: Facts) -> bool:
    settings = facts.config.get("tokenizer")
    if isinstance(settings, Mapping):
        return settings.get("type") == _GPT2_TOKENIZER
    return facts.config.get("tokenizer_type") in (_GPT2_TOKENIZER, None)


def assumed_tokens_warning(facts: Facts, config: Any) -> list[str]:
    """Return a warning when the special tokens were assumed rather than read."""
    if facts.special_ids() is not None or "end_id" in facts.given:
        return []
    return [
        f"no tokenizer files came with the checkpoint; start_id and end_id are set to GPT-2's "
        f"{config.end_id}: name the vocabulary (--vocab-path) if it is another"
    ]


def with_bias_and_norm(
    table: Mapping[str, TensorSource], traits: MegatronTraits, facts: Facts
) -> dict[str, TensorSource]:
    """Return the table with zeros for absent biases and 1 added to layernorm1p scales."""
    shapes = {spec.name: spec.shape for spec in LAYOUT}
    out: dict[str, TensorSource] = {}
    for name, source in table.items():
        key = source.reads[0][0].format(layer=0, task="")
        if name.endswith(".bias") and not traits.bias and not facts.has(key):
            source = Constant(shapes[name])
        elif traits.normalization == "layernorm1p" and name.endswith(_NORM_SCALES):
            source = Adjusted(source, lambda part, _: part + 1)
        out[name] = source
    return out | dict(PROMPT_SOURCES)


def _names(root: str, stack: str, attention: str) -> dict[str, str]:
    """Return the modules of the layout and of Megatron before megatron-core.

    Adapters are NVIDIA's own, of Megatron-LM alone.
    """
    layer = {
        "input_layernorm": "input_layernorm",
        "attention.query_key_value": f"{attention}.query_key_value",
        "attention.dense": f"{attention}.dense",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
        "after_attention_adapter.dense_h_to_4h": "adaptor1.dense_h_to_4h",
        "after_attention_adapter.dense_4h_to_h": "adaptor1.dense_4h_to_h",
        "after_ffn_adapter.dense_h_to_4h": "adaptor2.dense_h_to_4h",
        "after_ffn_adapter.dense_4h_to_h": "adaptor2.dense_4h_to_h",
    }
    return {
        "model.wte": f"{root}embedding.word_embeddings",
        "model.wpe": f"{root}embedding.position_embeddings",
        "model.final_layernorm": f"{root}{stack}.final_layernorm",
        "model.lm_head": f"{root}output_layer",
        **in_layers(f"{root}{stack}.layers.{{layer}}.", layer),
    }


_NEMO = "model.language_model."
_NEMO_WTE = _NEMO + "embedding.word_embeddings.weight"
_NEMO_HEAD = _NEMO + "output_layer.weight"


def _is_nemo_gpt(facts: Facts) -> bool:
    return facts.has(_NEMO_WTE)


def tuned_keys(facts: Facts) -> list[str]:
    """Return a reason if a checkpoint holds tensors of parameter-efficient tuning."""
    keys = facts.keys()
    found = [key for key in keys if re.search(r"lora|adapter|ia3|ptuning", key)]
    if not found:
        return []
    return [
        f"{len(found)} tensors of parameter-efficient tuning, such as {found[0]}: merge them into "
        "the base model first"
    ]


def _nemo_reasons(facts: Facts) -> list[str]:
    return not_gpt(nemo_traits(facts.config)) + tuned_keys(facts)


def _nemo_config(facts: Facts) -> GPTConfig:
    traits, rows = nemo_traits(facts.config), facts.rows(_NEMO_WTE)
    # A head that is neither stored nor tied is reported as missing later.
    tied = traits.tied and not facts.has(_NEMO_HEAD)
    return gpt_config(facts, traits, vocab_size=rows, tied=tied)


def _nemo_weights(facts: Facts, config: GPTConfig) -> Mapping[str, TensorSource]:  # noqa: ARG001
    table = named_sources(_names(_NEMO, "encoder", "self_attention"), LAYOUT)
    return with_bias_and_norm(table, nemo_traits(facts.config), facts)


NEMO_GPT = SourceMapping(
    name="nemo-gpt",
    title="NeMo 1.x GPT (.nemo, unpacked, checkpoint folder)",
    family=GPT,
    format="nemo",
    matches=_is_nemo_gpt,
    config=_nemo_config,
    weights=_nemo_weights,
    unsupported=_nemo_reasons,
    # The last pipeline stage's copy of the tied embedding.
    ignored=("model.word_embeddings.weight", "*._extra_state"),
    accepts=("prompt",),
    warnings=assumed_tokens_warning,
)

_LM = "language_model."
_LM_WTE = _LM + "embedding.word_embeddings.weight"
_LM_HEAD = _LM + "output_layer.weight"


def _is_megatron_gpt(facts: Facts) -> bool:
    return facts.has(_LM_WTE)


def _stack_name(facts: Facts) -> str:
    return "encoder" if facts.has_any(_LM + "encoder.*") else "transformer"


def _attention_name(facts: Facts) -> str:
    return "self_attention" if facts.has_any("*.self_attention.*") else "attention"


def _lm_traits(facts: Facts) -> MegatronTraits:
    """Return the traits from the arguments, or for version 0 from the tensors and the user."""
    if facts.config.get("num_layers") is not None:
        return megatron_traits(facts.config)
    layer = f"{_LM}{_stack_name(facts)}.layers."
    keys = facts.keys()
    numbers = [int(m[1]) for k in keys if (m := re.match(rf"{layer}(\d+)\.", k))]
    wte = facts.pieces(_LM_WTE)[0].shape
    traits = megatron_traits({"hidden_size": wte[1] if len(wte) == 2 else None})
    return dataclasses.replace(
        traits,
        head_num=facts.given_int("head_num"),
        inter_size=facts.rows(f"{layer}0.mlp.dense_h_to_4h.weight") or None,
        num_layer=max(numbers, default=-1) + 1 or None,
        max_positions=facts.pieces(_LM + "embedding.position_embeddings.weight")[0].shape[0],
        norm_eps=1e-6,
    )


def _lm_version(facts: Facts) -> Any:
    return facts.config.get("checkpoint_version", 0)


def _lm_reasons(facts: Facts) -> list[str]:
    reasons = []
    traits = _lm_traits(facts)
    if facts.config.get("num_attention_heads") is None and traits.head_num is None:
        reasons.append("the checkpoint does not state its number of heads: state --set head_num=..")
        traits = dataclasses.replace(traits, head_num=1)
    version = _lm_version(facts)
    if version not in _QKV_ORDER:
        known = ", ".join(map(str, _QKV_ORDER))
        reasons.append(f"checkpoint_version = {version}; known versions: {known}")
    return reasons + not_gpt(traits)


def _lm_config(facts: Facts) -> GPTConfig:
    padded = facts.config.get("padded_vocab_size")
    rows = padded if isinstance(padded, int) else facts.rows(_LM_WTE)
    traits = _lm_traits(facts)
    tied = traits.tied and not facts.has(_LM_HEAD)
    return gpt_config(facts, traits, vocab_size=rows, tied=tied)


def _lm_weights(facts: Facts, config: GPTConfig) -> Mapping[str, TensorSource]:  # noqa: ARG001
    names = _names(_LM, _stack_name(facts), _attention_name(facts))
    table = named_sources(names, LAYOUT, order=_QKV_ORDER[_lm_version(facts)])
    return with_bias_and_norm(table, _lm_traits(facts), facts)


MEGATRON_GPT = SourceMapping(
    name="megatron-gpt",
    title="Megatron-LM GPT, checkpoint versions 0 to 3",
    family=GPT,
    format="megatron",
    matches=_is_megatron_gpt,
    config=_lm_config,
    weights=_lm_weights,
    unsupported=_lm_reasons,
    ignored=("word_embeddings_for_head.weight", "*._extra_state"),
    accepts=("prompt",),
    warnings=assumed_tokens_warning,
)

GPT_MEGATRON_MAPPINGS: tuple[SourceMapping, ...] = (NEMO_GPT, MEGATRON_GPT)
