"""The T5 layout from NeMo, with adapters, IA3 and prompt tables.

Names: NeMo 1.x, nlp/modules/common/megatron/token_level_encoder_decoder.py; keys of its
configuration: examples/nlp/language_modeling/conf/megatron_t5_config.yaml and
megatron_model_base_config.yaml. FT derives biases, norm and the scaling of attention scores only
from t5_with_bias; if a model combines them differently, its weights are changed accordingly.
"""

import math
from collections.abc import Collection, Mapping

from export_scripts.families.mapping.known_settings import megatron_obstacles
from export_scripts.families.mapping.megatron_traits import (
    beyond,
    megatron_settings,
    nemo_activation,
    nemo_fuses_activation,
)
from export_scripts.families.mapping.names import (
    KNOWN_NAMES,
    completed,
    named_sources,
    whole_names,
)
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Copy,
    Sources,
    split_qkv,
    transposed,
)
from export_scripts.families.mapping.tensors import constant
from export_scripts.families.t5.layout import (
    CROSS,
    DECODER_SELF,
    ENCODER_SELF,
    FT_MAX_DISTANCE,
    FT_NORM_EPS,
    HEAD,
    LAYOUT,
    RELATIVE_BIAS,
    T5,
    T5Config,
    t5_warnings,
)
from export_scripts.families.t5.tuning import (
    BLOCKS,
    adapter_sources,
    ia3_in_place,
    ia3_sources,
    scale,
    tuning_kind,
    tuning_reasons,
)
from foundations.errors import Reasons
from foundations.files.json_content import Fields, Table, nested

# NeMo's activation -> the loader's spelling. The fast- variants fuse both halves of a gate into one
# matrix with the name of the plain one.
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "geglu": "geglu", "reglu": "reglu",
                "swiglu": "gated-silu"}  # fmt: skip
_POSITION_KINDS = {"learned_absolute": "absolute", "relative": "relative"}
# Key whose value is a word -> (default, values that FT's T5 supports).
_WORDS: Mapping[str, tuple[str, Collection[str]]] = {
    "activation": ("gelu", _ACTIVATIONS),
    "position_embedding_type": ("learned_absolute", _POSITION_KINDS),
    "normalization": (
        "layernorm", ("layernorm", "layernorm1p", "low_precision_layernorm", "rmsnorm")
    ),
}  # fmt: skip

# Size in the source -> field of the config.
_SIZES = {
    "hidden_size": "d_model",
    "ffn_hidden_size": "d_ff",
    "num_attention_heads": "num_heads",
    "num_layers": "num_layers",
}
# Settings that FT's T5 stores once for both stacks.
_COMMON = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "activation", "bias",
    "normalization", "position_embedding_type", "transformer_block_type",
    "normalize_attention_scores", "layernorm_epsilon", "megatron_legacy",
    "relative_attention_num_buckets", "relative_attention_max_distance", "max_position_embeddings",
    "bias_activation_fusion", "bias_gelu_fusion", "openai_gelu",
)  # fmt: skip


class _Traits:
    """Traits of a NeMo T5, whose model_config is flat or has a section for each stack.

    Raises:
        CheckpointMismatchError: Sizes or numbers are malformed; all are listed.
    """

    def __init__(self, config: Table) -> None:
        flat = {key: value for key, value in config.items() if key not in ("encoder", "decoder")}

        def side(name: str) -> Settings:
            own = config.get(name)
            own = own if isinstance(own, Mapping) else {}
            return megatron_settings({**flat, **own}, f"model_config.yaml, {name}")

        self.encoder, self.decoder = encoder, decoder = side("encoder"), side("decoder")
        # Fields of the config; sizes are 0 if absent.
        self.fields: Fields = {
            field: encoder.integer(name, default=0, least=0) for name, field in _SIZES.items()
        }
        # Key of _WORDS -> the source's value.
        self.words = {
            key: str(encoder.value(key, default=usual)).lower()
            for key, (usual, _) in _WORDS.items()
        }
        heads, hidden = self.fields["num_heads"], self.fields["d_model"]
        size_per_head = encoder.integer("kv_channels", default=hidden // heads if heads else 1)
        distance = encoder.integer("relative_attention_max_distance", default=FT_MAX_DISTANCE)
        buckets = encoder.integer("relative_attention_num_buckets", default=32)
        rows = encoder.integer("max_position_embeddings", default=0, least=0)
        is_relative = self.words["position_embedding_type"] == "relative"
        *_, by_erf = nemo_activation(encoder.source)
        # FT has biases, LayerNorm and scaled attention, or none of them.
        with_bias = self.words["normalization"] != "rmsnorm"
        self.fields |= {
            "d_kv": size_per_head,
            "num_decoder_layers": decoder.integer("num_layers", default=0, least=0),
            "feed_forward_proj": _ACTIVATIONS.get(self.words["activation"]),
            # Every archive of NeMo states whether its activation is fused.
            "exact_gelu": by_erf and not nemo_fuses_activation(encoder.source),
            "relative_attention_num_buckets_or_max_pos_seq_len": buckets if is_relative else rows,
            "relative_attention_max_distance": distance,
            "layer_norm_epsilon": encoder.number("layernorm_epsilon", default=FT_NORM_EPS),
            "t5_with_bias": with_bias,
            "position_embedding_type": _POSITION_KINDS.get(self.words["position_embedding_type"]),
        }
        # Pipeline stages: (all, those before the decoder).
        self.stages = (
            encoder.integer("pipeline_model_parallel_size", default=1),
            encoder.integer("pipeline_model_parallel_split_rank", default=0, least=0),
        )
        self.bias = bool(encoder.value("bias", default=True))  # whether linear layers have biases
        # Corrects the scaling of scores that FT derives from t5_with_bias.
        root = math.sqrt(size_per_head)
        is_scaled = bool(encoder.value("normalize_attention_scores", default=True))
        self.query_factor = 1.0 if is_scaled == with_bias else root if with_bias else 1 / root
        encoder.problems += decoder.problems
        encoder.finish()


def _beyond_layout(traits: _Traits) -> list[str]:
    encoder, decoder = traits.encoder, traits.decoder
    reasons = [
        f"{side.label} has no {key}: a T5 folder needs it"
        for side in (encoder, decoder)
        for key in _SIZES
        if not side.get(key)
    ]
    reasons += [
        f"{key} = {encoder.get(key)!r} in the encoder and {decoder.get(key)!r} in "
        "the decoder: FT's T5 has one value for both"
        for key in _COMMON
        if encoder.get(key) != decoder.get(key)
    ]
    reasons += beyond(
        {key: (traits.words[key], known) for key, (_, known) in _WORDS.items()}, ": FT's T5 has"
    )
    activation, (stages, split) = traits.words["activation"], traits.stages
    experts = encoder.get("num_moe_experts") or decoder.get("num_moe_experts")
    checks = {
        f"num_moe_experts = {experts}: the model is a mixture of experts": experts
        not in (None, 0, 1),
        f"openai_gelu = true overrides activation = {activation}": (
            bool(encoder.get("openai_gelu")) and activation not in ("gelu", "geglu")
        ),
        "max_position_embeddings is missing: the table of positions needs its size": (
            not traits.fields["relative_attention_num_buckets_or_max_pos_seq_len"]
        ),
        "bias = true with normalization = rmsnorm: FT's T5 with biases has layernorm": (
            traits.words["normalization"] == "rmsnorm" and traits.bias
        ),
        f"pipeline_model_parallel_split_rank = {split} with pipeline_model_parallel_size = "
        f"{stages}: expected a stage in between, at which the decoder begins": (
            stages > 1 and not 0 < split < stages
        ),
    }
    return reasons + [text for text, applies in checks.items() if applies]


_ROOT = "enc_dec_model."
_EMBEDDING = _ROOT + "encoder_embedding.word_embeddings.weight"
_POSITIONS = _ROOT + "encoder_embedding.position_embeddings.weight"
_HEAD = _ROOT + "tokens_head.weight"
_HEAD_BIAS = _ROOT + "tokens_head.bias"
_GATE = "*.mlp.dense_h_to_4h_2.weight"

# The decoder's copies of tables that FT stores once.
_COPIES = {
    _ROOT + "decoder_embedding.word_embeddings.weight": _EMBEDDING,
    _ROOT + "decoder_embedding.position_embeddings.weight": _POSITIONS,
}


def _reasons(facts: Facts) -> list[str]:
    traits = _Traits(facts.config)
    reasons = _beyond_layout(traits)
    reasons += [
        f"{copy} differs from {whole}: FT's T5 has one table for both stacks"
        for copy, whole in _COPIES.items()
        if facts.has(copy) and facts.has(whole) and not facts.same_values(copy, whole)
    ]
    if not traits.fields["t5_with_bias"] and facts.has(_HEAD_BIAS):
        reasons.append(
            f"{_HEAD_BIAS} with normalization = rmsnorm: FT's T5 without biases adds none to "
            "its logits"
        )
    gated, activation = facts.has_any(_GATE), traits.words["activation"]
    if gated != activation.endswith("glu"):
        reasons.append(
            f"activation = {activation}, but the checkpoint has "
            f"{'a' if gated else 'no'} second matrix ({_GATE.removeprefix('*.')})"
        )
    return reasons + tuning_reasons(facts)


def _config(facts: Facts) -> T5Config:
    start_id, end_id, pad_id = _special_ids(facts)
    traits = _Traits(facts.config)
    adapter = {}
    if facts.adapters:
        width = int(tuning_kind(facts.adapters[0])["adapter_dim"])
        adapter = {"has_adapter": True, "adapter_inter_size": width, "adapter_norm_position": "pre"}
    return traits.encoder.build_config(
        T5Config,
        facts,
        name_or_path="t5",
        vocab_size=facts.rows(_EMBEDDING),
        **traits.fields,
        decoder_start_token_id=start_id,
        eos_token_id=end_id,
        pad_id=pad_id,
        # True would make FT divide the logits by sqrt(d_model), which Megatron does not.
        tie_word_embeddings=False,
        use_gated_activation=facts.has_any(_GATE),
        ia3_num_tasks=0 if facts.ia3_in_place else len(facts.ia3),
        ia3_adapted=True if facts.ia3_in_place and facts.ia3 else None,
        **adapter,
    )


def _special_ids(facts: Facts) -> tuple[int, int, int | None]:
    """Return the decoder's first token, the end token and the padding token."""
    known = facts.special_ids()
    pad, end = facts.token("pad_id", known.pad), facts.token("eos_token_id", known.eos)
    # Some p-tuned models start with padding.
    is_padding = any(
        nested(archive.config, "data", "decoder_starts_with_pad") for archive in facts.prompts
    )
    start = facts.token("decoder_start_token_id", pad if is_padding else known.bos)
    if start is None or end is None:
        raise ValueError(
            "decoder_start_token_id and eos_token_id are unknown: the checkpoint lacks "
            "the tokenizer's files; name them (--vocab-path) or state the IDs "
            "(--set decoder_start_token_id=.. --set eos_token_id=..)"
        )
    return start, end, pad


_RELATIVE = _ROOT + "{side}_relative_position_embedding.relative_position_embedding.weight"


def _stacks(order: str) -> Sources:
    """Return the sources of both stacks' layers; `order` is that of fused projections."""
    known = KNOWN_NAMES
    names: Fields = {}
    table: Sources = {}
    for side, ours in BLOCKS.items():
        root = f"{_ROOT}enc_dec_model.{side}.model."
        layer = f"{root}layers.{{{side}_layer}}."
        names |= whole_names(layer, known[f"nemo_t5_{side}"], ours)
        names[f"{side}.final_layer_norm"] = f"{root}final_layernorm"
        table |= {
            f"{ours}{module}.{kind}": split_qkv(
                f"{layer}{theirs}.{kind}", order, parts=count, select=select, head_size="d_kv"
            )
            for module, (theirs, count, select) in known[f"nemo_t5_{side}_attention"].items()
            for kind in ("weight", "bias")
        }
        table[RELATIVE_BIAS.format(side=side)] = transposed(_RELATIVE.format(side=side))
    return {**named_sources(names, LAYOUT), **table}


def _weights(facts: Facts, _: T5Config) -> Sources:
    traits = _Traits(facts.config)
    table = {
        "shared.weight_T": Copy(_EMBEDDING, cut=0),
        "shared.ape": Copy(_POSITIONS),
        # Rows are grouped by part in a legacy model, else by head.
        **_stacks("knd" if traits.encoder.get("megatron_legacy") else "nkd"),
        # The same decision for the whole model, not for each stage.
        HEAD: Copy(_HEAD if facts.has(_HEAD) else _EMBEDDING, cut=0),
        "shared.bias": Copy(_HEAD_BIAS, cut=0),
    }
    if traits.query_factor != 1.0:
        _scale_queries(table, traits.query_factor)
    if facts.ia3_in_place and facts.ia3:
        ia3_in_place(table)
    table = completed(
        table,
        LAYOUT,
        facts,
        lacks=lambda name: "norm" not in name and (not traits.bias or name == "shared.bias"),
        is_one_plus=traits.words["normalization"] == "layernorm1p",
    )
    stored = {} if facts.ia3_in_place else ia3_sources(facts)
    return {**table, **stored, **adapter_sources(facts)}


def _scale_queries(table: Sources, factor: float) -> None:
    """Multiply a correction of FT's scaling of scores into the queries."""
    first = constant([factor, 1.0, 1.0]).reshape(3, 1, 1)  # for (..., 3, heads, size)
    for kind in ("weight", "bias"):
        for module in (f"{ENCODER_SELF}.q", f"{CROSS}.q"):
            scale(table, f"{module}.{kind}", lambda _: factor)
        scale(table, f"{DECODER_SELF}.qkv.{kind}", lambda _: first)


def _obstacles(facts: Facts) -> Reasons:
    traits = _Traits(facts.config)
    return megatron_obstacles(traits.encoder.source, "t5") | megatron_obstacles(
        traits.decoder.source, "t5"
    )


T5_NEMO = SourceMapping(
    name="nemo-t5",
    title="NeMo T5 (.nemo, unpacked, checkpoint folder), with adapters, IA3 and prompt tables",
    family=T5,
    format="nemo",
    matches=lambda facts: facts.has(_EMBEDDING),
    config=_config,
    weights=_weights,
    unsupported=_reasons,
    obstacles=_obstacles,
    ignored=(*_COPIES, "*._extra_state", "*.position_ids"),
    accepts=("prompt", "ia3", "adapter"),
    warnings=t5_warnings,
)
