"""The GPT layout from NeMo and Megatron-LM, with megatron-core's names or older ones.

megatron-core's names: NVIDIA/Megatron-LM, megatron/core/models/gpt/gpt_model.py and layer specs.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from export_scripts.families.gpt.layout import GPT, LAYOUT, GPTConfig
from export_scripts.families.layout.architecture import activation_choice
from export_scripts.families.mapping.known_settings import megatron_obstacles
from export_scripts.families.mapping.megatron_traits import (
    MegatronTraits,
    beyond,
    missing_sizes,
    unknown_model,
)
from export_scripts.families.mapping.names import (
    KNOWN_NAMES,
    completed,
    named_sources,
    whole_names,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Sources
from foundations.files.json_content import Fields

# GPT-2's end of text, which Megatron's converters assume if there is no vocabulary.
_GPT2_END_OF_TEXT = 50256
_GPT2_TOKENIZER = "GPT2BPETokenizer"

_ACTIVATIONS = {"gelu": "Gelu", "relu": "Relu", "silu": "Silu"}
_ROOTS = {"nemo": "model.language_model.", "megatron": "language_model."}
_POSITIONS = "language_model.embedding.position_embeddings.weight"

# Row order of the fused QKV projection by checkpoint version.
# Layout: NVIDIA/Megatron-LM, megatron/checkpointing.py fix_query_key_value_ordering.
_QKV_ORDER = {0: "knd", 1: "ndk", 2: "nkd", 3: "nkd"}


def gpt_reasons(traits: MegatronTraits) -> list[str]:
    """Return every reason why FT's GPT layout cannot hold a model."""
    width = traits.size_per_head * traits.head_num
    known = {
        "position_embedding_type": (traits.position, ("learned_absolute",)),
        "normalization": (traits.normalization, ("layernorm", "layernorm1p")),
        "num_query_groups": (traits.query_groups, (traits.head_num,)),
    }
    reasons = beyond(known, ": FT's GPT has only")
    if traits.gated or traits.activation not in _ACTIVATIONS:
        word = traits.get("activation") or traits.activation
        reasons.append(
            f"activation = {word}: FT's GPT has {', '.join(_ACTIVATIONS)}, without a gate"
        )
    if traits.expert_num > 1:
        reasons.append(f"{traits.expert_num} experts: FT's GPT has no mixture of experts")
    if traits.head_num > 0 and width != traits.hidden:
        reasons.append(
            f"{traits.head_num} heads of {traits.size_per_head} do not make hidden_size = "
            f"{traits.hidden}: FT's GPT needs kv_channels x num_attention_heads = hidden_size"
        )
    return reasons + missing_sizes(traits)


def common_fields(facts: Facts, traits: MegatronTraits) -> Fields:
    """Return the fields that the configs of all Megatron-style decoders have.

    Raises:
        ValueError: The special tokens are unknown.
    """
    start_id, end_id = start_and_end(facts)
    names = (
        "head_num", "size_per_head", "inter_size", "num_layer", "max_pos_seq_len", "layernorm_eps",
        "exact_gelu",
    )  # fmt: skip
    return {
        **{name: getattr(traits, name) for name in names},
        "start_id": start_id,
        "end_id": end_id,
    }


def gpt_config(facts: Facts, traits: MegatronTraits, **own: Any) -> GPTConfig:
    """Return the config of a supported Megatron-style GPT; `own` are further fields.

    Raises:
        ValueError: The special tokens are unknown, or an added archive contradicts itself.
    """
    return traits.settings.build_config(
        GPTConfig,
        facts,
        model_name="gpt",
        **common_fields(facts, traits),
        **own,
        activation_type=_ACTIVATIONS[traits.activation],
        has_adapters=traits.adapter_inter_size > 0,
        adapter_inter_size=traits.adapter_inter_size,
    )


def start_and_end(facts: Facts) -> tuple[int, int]:
    """Return start_id and end_id: stated, the tokenizer's, or GPT-2's if that is the tokenizer.

    Raises:
        ValueError: The tokenizer is another one, and its files are missing.
    """
    known, tokenizer = facts.special_ids(), facts.config.get("tokenizer")
    if isinstance(tokenizer, Mapping):
        is_gpt2 = tokenizer.get("type") == _GPT2_TOKENIZER
    else:
        is_gpt2 = facts.config.get("tokenizer_type") in (_GPT2_TOKENIZER, None)
    end = facts.token("end_id", known.eos, _GPT2_END_OF_TEXT if is_gpt2 else None)
    start = facts.token("start_id", known.bos, end)
    if start is None or end is None:
        raise ValueError(
            "start_id and end_id are unknown: the checkpoint lacks the tokenizer's files; "
            "name them (--vocab-path) or state the IDs (--set start_id=.. --set end_id=..)"
        )
    return start, end


def assumed_tokens_warning(facts: Facts, config: Any) -> list[str]:
    """Return a warning if the special tokens were assumed, not read."""
    if facts.special_ids().eos is not None or "end_id" in facts.given:
        return []
    return [
        f"no tokenizer files came with the checkpoint; start_id and end_id are set to GPT-2's "
        f"{config.end_id}: name the vocabulary (--vocab-path) if it is another"
    ]


def gpt_sources(
    facts: Facts, traits: MegatronTraits, names: Mapping[str, str], *, order: str = "nkd"
) -> Sources:
    """Return the source of each tensor of a GPT."""
    return completed(
        named_sources(names, LAYOUT, order=order),
        LAYOUT,
        facts,
        lacks=lambda _: not traits.bias,
        is_one_plus=traits.normalization == "layernorm1p",
    )


def _names(facts: Facts) -> dict[str, str]:
    """Return module of the layout -> module of Megatron before megatron-core."""
    root = _ROOTS[facts.reader.format]
    own = "self_" if facts.has_any("*.self_attention.*") else ""
    stack = _stack(facts)
    layer = {
        ours: re.sub(r"^attention\.", rf"{own}\g<0>", theirs)
        for ours, theirs in KNOWN_NAMES["megatron"].items()
    }
    return whole_names(f"{stack}layers.{{layer}}.", layer) | {
        "model.wte": f"{root}embedding.word_embeddings",
        "model.wpe": f"{root}embedding.position_embeddings",
        "model.final_layernorm": f"{stack}final_layernorm",
        "model.lm_head": f"{root}output_layer",
    }


def _stack(facts: Facts) -> str:
    root = _ROOTS[facts.reader.format]
    return f"{root}transformer." if facts.has_any(f"{root}transformer.*") else f"{root}encoder."


def _embedding(facts: Facts) -> str:
    return f"{_ROOTS[facts.reader.format]}embedding.word_embeddings.weight"


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


def _traits(facts: Facts) -> MegatronTraits:
    """Return the traits; for Megatron-LM's version 0, from tensors and the user's values."""
    source_format = facts.reader.format
    if source_format == "nemo" or facts.config.get("num_layers") is not None:
        return MegatronTraits(source_format, facts.config)
    layer = f"{_stack(facts)}layers."
    keys = facts.keys()
    numbers = [int(m[1]) for k in keys if (m := re.match(rf"{layer}(\d+)\.", k))]
    return MegatronTraits(
        source_format,
        {
            "num_attention_heads": facts.given_int("head_num"),
            "hidden_size": facts.size(_embedding(facts), 1),
            "ffn_hidden_size": facts.rows(f"{layer}0.mlp.dense_h_to_4h.weight") or None,
            "num_layers": max(numbers, default=-1) + 1 or None,
            "max_position_embeddings": facts.size(_POSITIONS, 0),
            "layernorm_epsilon": 1e-6,
        },
    )


def _order(facts: Facts) -> str | None:
    """Return the nesting of the fused projection's rows; None for an unknown version."""
    if facts.reader.format == "nemo":
        return "knd" if facts.config.get("megatron_legacy") else "nkd"
    return _QKV_ORDER.get(facts.config.get("checkpoint_version", 0))


def _reasons(facts: Facts) -> list[str]:
    reasons = []
    traits = _traits(facts)
    if facts.reader.format == "megatron" and not traits.head_num:
        reasons.append("the checkpoint does not state its number of heads: state --set head_num=..")
        traits.head_num = traits.query_groups = 1
        traits.size_per_head = traits.hidden
    if _order(facts) is None:
        known = ", ".join(map(str, _QKV_ORDER))
        version = facts.config["checkpoint_version"]
        reasons.append(f"checkpoint_version = {version}; known versions: {known}")
    return reasons + gpt_reasons(traits) + tuned_keys(facts)


def _config(facts: Facts) -> GPTConfig:
    padded = facts.config.get("padded_vocab_size")
    rows = padded if isinstance(padded, int) else facts.rows(_embedding(facts))
    traits = _traits(facts)
    # A head that is neither stored nor tied is reported as missing later.
    tied = traits.tied and not facts.has(f"{_names(facts)['model.lm_head']}.weight")
    return gpt_config(facts, traits, vocab_size=rows, tie_word_embeddings=tied)


GPT_MEGATRON_MAPPINGS = tuple(
    SourceMapping(
        name=f"{source_format}-gpt",
        title=title,
        family=GPT,
        format=source_format,
        matches=lambda facts: facts.has(_embedding(facts)),
        config=_config,
        weights=lambda facts, _: gpt_sources(
            facts, _traits(facts), _names(facts), order=_order(facts) or ""
        ),
        unsupported=_reasons,
        obstacles=lambda facts: megatron_obstacles(_traits(facts).source),
        # The last pipeline stage's copy of the tied embedding.
        ignored=(
            "model.word_embeddings.weight",
            "word_embeddings_for_head.weight",
            "*._extra_state",
        ),
        accepts=("prompt",),
        warnings=assumed_tokens_warning,
    )
    for source_format, title in (
        ("nemo", "NeMo 1.x GPT (.nemo, unpacked, checkpoint folder)"),
        ("megatron", "Megatron-LM GPT, checkpoint versions 0 to 3"),
    )
)

CORE_LAYER = "model.decoder.layers.{layer}."
CORE_WTE = "model.embedding.word_embeddings.weight"
CORE_HEAD = "model.output_layer.weight"


def core_names(facts: Facts, shown: Mapping[str, int] = MappingProxyType({})) -> Fields:
    """Return module of a layout -> module of megatron-core, whose norms may be fused.

    `shown` maps a norm to the layer that shows whether it is fused, if that is not the first.
    """
    table, traits = KNOWN_NAMES, core_traits(facts)
    names = {**table["core"], **({} if traits.gated else table["core_plain"])}
    # A checkpoint to write has no tensors yet; it will have Transformer Engine's modules.
    written = {
        "input_layernorm": facts.config.get("multi_latent_attention"),
        "post_attention_layernorm": traits.expert_num > 1,  # the router reads it, too
    }
    for ours, theirs in table["core_norms"].items():
        key = f"{CORE_LAYER}{theirs}.weight".format(layer=shown.get(ours, 0))
        if facts.has(key) if facts.reader.tensors else written.get(ours):
            names[ours] = theirs
    return whole_names(CORE_LAYER, names)


def is_core(facts: Facts) -> bool:
    """Return whether a checkpoint has megatron-core's names."""
    attention = f"{CORE_LAYER.format(layer=0)}self_attention.linear_"
    return facts.has(CORE_WTE) and any(
        facts.has(f"{attention}{part}.weight") for part in ("qkv", "kv_down_proj")
    )


def core_traits(facts: Facts) -> MegatronTraits:
    """Return the traits of a megatron-core checkpoint of any format."""
    config = facts.config
    if facts.reader.is_distributed:
        # Layers are numbered over all pipeline stages.
        config = {**config, "virtual_pipeline_model_parallel_size": None}
    if facts.reader.format == "megatron":
        # Only Megatron-LM's models before megatron-core read it.
        config = {**config, "openai_gelu": None}
    return MegatronTraits(facts.reader.format, config)


def core_args(config: Any) -> Fields:
    """Return Megatron-LM's arguments for the common fields of its decoders, with all biases.

    NVIDIA/Megatron-LM, megatron/training/arguments.py
    """
    activation, gated = activation_choice(config.activation_type)
    return {
        "num_layers": config.num_layer,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.inter_size,
        "num_attention_heads": config.head_num,
        "kv_channels": config.size_per_head,
        "max_position_embeddings": config.max_pos_seq_len,
        "seq_length": config.max_pos_seq_len,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.layernorm_eps,
        "add_bias_linear": True,
        "swiglu": gated,
        "squared_relu": activation == "relu2",
        "bias_gelu_fusion": activation == "gelu" and not config.exact_gelu,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 128,
    }


def core_embedding(facts: Facts) -> Fields:
    """Return the fields of the vocabulary's size and of a tied head.

    Pipeline stages may store a copy of the embedding as head.
    """
    is_tied = core_traits(facts).tied and (
        not facts.has(CORE_HEAD) or facts.same_values(CORE_HEAD, CORE_WTE)
    )
    return {"vocab_size": facts.rows(CORE_WTE), "tie_word_embeddings": is_tied}


GPT_CORE_MAPPINGS = tuple(
    SourceMapping(
        name=f"{source_format}-core-gpt",
        title=title,
        family=GPT,
        format=source_format,
        matches=is_core,
        config=lambda facts: gpt_config(facts, core_traits(facts), **core_embedding(facts)),
        weights=lambda facts, _: gpt_sources(facts, core_traits(facts), core_names(facts)),
        unsupported=lambda facts: (
            gpt_reasons(core_traits(facts)) + tuned_keys(facts) + unknown_model(facts)
        ),
        obstacles=lambda facts: megatron_obstacles(core_traits(facts).source),
        ignored=("*._extra_state", "*rotary_pos_emb.inv_freq"),
        copies=lambda _, config: (CORE_HEAD,) if config.tie_word_embeddings else (),
        prefix="model.",
        accepts=("prompt",),
        warnings=assumed_tokens_warning,
        written=((lambda config, _: [core_args(config)]) if source_format == "megatron" else None),
    )
    for source_format, title in (
        ("nemo", "NeMo GPT in megatron-core layout"),
        ("megatron", "Megatron-LM GPT in megatron-core layout"),
        ("nemo2", "NeMo 2 GPT"),
        ("bridge", "Megatron Bridge GPT"),
    )
)
