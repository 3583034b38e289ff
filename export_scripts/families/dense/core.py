"""Dense decoders from megatron-core checkpoints with rotary positions.

NeMo and Megatron-LM save the same tensors, with different configurations.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from export_scripts.families.dense.huggingface import GATED, chosen_layers
from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.families.gpt.megatron import (
    CORE_LAYER,
    GPT_CORE_MAPPINGS,
    common_fields,
    core_args,
    core_embedding,
    core_names,
    core_traits,
    is_core,
)
from export_scripts.families.layout.config import ConfigT, Layers
from export_scripts.families.layout.spec import Layout
from export_scripts.families.mapping.known_settings import megatron_obstacles
from export_scripts.families.mapping.megatron_traits import (
    MegatronTraits,
    beyond,
    missing_sizes,
    unknown_model,
)
from export_scripts.families.mapping.names import completed, named_sources
from export_scripts.families.mapping.rotary import rotary_fraction, scaling_fields, yarn_growth
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import Sources, TensorSource
from foundations.errors import refuse
from foundations.files.json_content import Fields

# Fields that depend on whether the first layer has a tensor.
_FIRST_LAYER = CORE_LAYER.format(layer=0)
_PRESENT = {
    "has_qkv_bias": "self_attention.linear_qkv.bias",
    "has_attention_dense_bias": "self_attention.linear_proj.bias",
    "has_mlp_bias": "mlp.linear_fc1.bias",
    "has_output_norms": "mlp.linear_fc2.post_layernorm.weight",
}

_ROTARY = ("rope", "yarn")
# Activations that are silu with a factor in the sigmoid.
_SIGMOID_GATED = {"quick_gelu": "silu"}

# NeMo's scale_positional_embedding and Megatron-LM's use_rope_scaling are Llama 3.1's scaling:
# (parameter, its keys in the libraries, default).
# NeMo 1.x, megatron_gpt_model.py, mcore_model_customize;
# megatron/core/models/common/embeddings/rotary_pos_embedding.py, _apply_scaling
_LLAMA31 = (
    ("factor", ("scale_factor", "rope_scaling_factor"), 8.0),
    ("low_freq_factor", ("low_freq_factor",), 1.0),
    ("high_freq_factor", ("high_freq_factor",), 4.0),
    ("original_max_position_embeddings", ("old_context_len",), 8192),
)


def core_reasons(facts: Facts, *, is_mixture: bool = False) -> list[str]:
    """Return every reason why the layout, or that of mixtures, cannot hold a model."""
    traits = core_traits(facts)
    norm = traits.normalization.removesuffix("1p")
    known = {
        "activation": (traits.activation, (*GATED, "quick_gelu") if is_mixture else GATED),
        "normalization": (norm, ("rmsnorm",) if is_mixture else ("rmsnorm", "layernorm")),
    }
    if is_mixture:
        known["position_embedding_type"] = (traits.position, _ROTARY)
    reasons = beyond(known, " cannot be represented; known:")
    if is_mixture and not traits.gated:
        reasons.append(f"activation = {traits.activation}: mixtures are only written with a gate")
    return reasons + missing_sizes(traits) + unknown_model(facts)


def core_config(
    facts: Facts,
    kind: Callable[..., ConfigT],
    own: Callable[[MegatronTraits], Fields] = lambda _: {},
) -> ConfigT:
    """Return the config, of class `kind`, of a megatron-core checkpoint with rotary positions.

    `own` returns fields that the class adds or replaces.

    Raises:
        CheckpointMismatchError: Settings are malformed; all are listed.
        ValueError: The special tokens are not known.
    """
    traits = core_traits(facts)
    settings = traits.settings
    activation = _SIGMOID_GATED.get(traits.activation, traits.activation)
    is_scaled = _is_gemma(traits) or traits.get("apply_embedding_scaling")
    rotary_layers = _layers(traits, "no_rope_freq")
    if rotary_layers == () and not settings.problems:
        settings.note("no_rope_freq: no layer would have rotary positions")
    fields = {
        **common_fields(facts, traits),
        **core_embedding(facts),
        **{field: facts.has(_FIRST_LAYER + name) for field, name in _PRESENT.items()},
        **_core_windows(traits),
        **_core_rotary(traits),
        "rotary_interleaved": bool(traits.get("rotary_interleaved")),
        "rotary_layers": rotary_layers,
        **_scales(traits, math.sqrt(traits.hidden) if is_scaled else 1.0),
        "attention_softcap": settings.nonzero("attn_logit_softcapping"),
        "logit_softcap": settings.nonzero("final_logit_softcapping"),
        "model_name": "llama",
        "kv_head_num": traits.query_groups,
        "hidden_size": traits.hidden,
        "norm_type": traits.normalization.removesuffix("1p"),
        "norm_one_plus": _keeps_one_plus(traits),
        "query_key_norm": "head" if traits.get("qk_layernorm") else None,
        "activation_type": GATED[activation] if traits.gated else activation,
    }
    return settings.build_config(kind, facts, **{**fields, **own(traits)})


def _is_gemma(traits: MegatronTraits) -> bool:
    """Return whether a model is a Gemma of Megatron Bridge, which computes more than it states.

    NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/gemma
    """
    return str(traits.get("model_class")).startswith("Gemma")


def _keeps_one_plus(traits: MegatronTraits) -> bool:
    """Return whether a folder stores a norm's scales as their distance from 1.

    It does so if transformers' model does: with layernorms, and of RMSNorm models for Gemmas.
    """
    return traits.normalization == "layernorm1p" or (
        _is_gemma(traits) and traits.normalization == "rmsnorm1p"
    )


def _scales(traits: MegatronTraits, embedding_scale: float) -> Fields:
    """Return the factors of scores, logits and the embedding (`embedding_scale` without muP).

    muP: megatron/core/transformer/transformer_config.py, __post_init__, since 0.17.
    """
    settings = traits.settings
    width = settings.nonzero("query_pre_attn_scalar")
    scale = settings.nonzero("softmax_scale")
    if width is None and _is_gemma(traits) and scale:
        width = round(scale**-2)  # the scale was computed from it
    if width is not None:
        scale = width**-0.5
    if not traits.get("use_mup"):
        return {"attention_scale": scale, "embedding_scale": embedding_scale}
    if scale is None:
        head = settings.number("mup_base_head_dim", default=1)
        power = settings.get("mup_attn_scale_power", 1.0)
        scale = head**0.5 / traits.size_per_head**power
    logit_scale = settings.number("mup_output_mult", default=1.0)
    if logit_scale == 1:
        base = settings.integer("mup_base_hidden_size", default=traits.hidden)
        logit_scale = base / traits.hidden
    return {
        "attention_scale": scale,
        "embedding_scale": embedding_scale * settings.number("mup_embedding_mult", default=1.0),
        "logit_scale": logit_scale,
    }


def dense_args(config: DenseConfig, _: bool) -> list[Fields]:
    """Return candidate arguments of Megatron-LM for a dense decoder; `core_config` checks them.

    Raises:
        CheckpointMismatchError: Megatron-LM lacks a trait of the model that its tensors show.
    """
    biases = config.has_qkv_bias, config.has_attention_dense_bias, config.has_mlp_bias
    problems = []
    if any(biases[1:]) and not all(biases):
        problems.append(
            "its biases are neither in all matrices (add_bias_linear) nor only in queries, keys "
            "and values (add_qkv_bias)"
        )
    if config.has_output_norms:
        problems.append("only Megatron Bridge has norms of the outputs of attention and MLP")
    refuse(problems)
    kind, scaling = config.rotary_scaling_type, config.rotary_scaling
    return [
        {
            **core_args(config),
            "position_embedding_type": "rope",
            "use_rotary_position_embeddings": True,
            "rotary_base": int(config.rotary_base),
            "rotary_percent": rotary_fraction(config.rotary_embedding, config.size_per_head),
            "rotary_interleaved": config.rotary_interleaved,
            "use_rope_scaling": kind == "llama3",
            "rope_scaling_factor": scaling.get("factor", 8.0),
            "rotary_seq_len_interpolation_factor": (
                int(scaling["factor"]) if kind == "linear" else None
            ),
            "normalization": "RMSNorm" if config.norm_type == "rmsnorm" else "LayerNorm",
            "apply_layernorm_1p": config.norm_one_plus,
            "qk_layernorm": config.query_key_norm == "head",
            "group_query_attention": config.kv_head_num != config.head_num,
            "num_query_groups": config.kv_head_num,
            "add_bias_linear": all(biases),
            "add_qkv_bias": biases[0],
            "window_size": config.sliding_window and (config.sliding_window - 1, 0),
            "window_attn_skip_freq": _flags(config, config.sliding_layers),
            "no_rope_freq": _flags(config, config.rotary_layers, without=True),
        }
    ]


def _flags(config: DenseConfig, layers: Layers, *, without: bool = False) -> list[int] | None:
    """Return 1 for each layer that is in `layers` (`without`: is not), else 0; None for all."""
    if layers is None:
        return None
    return [int((number in layers) is not without) for number in range(config.num_layer)]


def _layers(traits: MegatronTraits, key: str, *, skipped: bool = True) -> Layers:
    """Return the layers that a pattern does not skip; None for all.

    A number n skips every n-th layer. A list has an entry per layer, which skips it if its truth
    value is `skipped`. megatron/core/transformer/transformer_config.py; transformer/utils.py
    """
    pattern, count = traits.get(key), traits.num_layer
    if not pattern:
        return None
    if not isinstance(pattern, list):
        every = traits.settings.integer(key)
        return chosen_layers([(number + 1) % every != 0 for number in range(count)])
    if len(pattern) != count:
        traits.settings.note(f"{key} = {pattern!r:.100}: expected an entry for each layer")
        return None
    return chosen_layers([bool(each) is not skipped for each in pattern])


def _core_windows(traits: MegatronTraits) -> Fields:
    """Return the fields of the window and its layers.

    Transformer Engine states (positions before the current one, 0); Gemma 3 states one number.
    """
    window, count = traits.get("window_size") or 0, traits.num_layer
    pattern: Any = traits.get("interleaved_attn_pattern")
    layers: Layers
    if _is_list_of(str, pattern, count):
        layers = tuple(n for n, kind in enumerate(pattern) if kind == "sliding_attention")
    elif _is_list_of(int, pattern, 2) and sum(pattern) > 0:
        local, others = pattern
        layers = tuple(n for n in range(count) if n % (local + others) < local)
    elif pattern:
        traits.settings.note(
            f"interleaved_attn_pattern = {pattern!r:.100}: expected two numbers of layers, or the "
            "kind of each layer"
        )
        layers = None
    elif _is_gemma(traits):
        layers = tuple(range(0, count, 2))
    else:
        layers = _layers(traits, "window_attn_skip_freq", skipped=False)
    if type(window) is not int and not _is_list_of(int, window, 2):
        traits.settings.note(f"window_size = {window!r:.100}: expected a number, or two")
        return {}
    if not isinstance(window, int) and window[1] != 0:
        traits.settings.note(
            f"window_size = {list(window)}: expected 0 as the second, as attention is causal"
        )
    size = window if isinstance(window, int) else window[0] + 1
    if size < 1 or layers == ():
        return {}
    return {"sliding_window": size, "sliding_layers": layers}


def _is_list_of(kind: type, values: Any, count: int) -> bool:
    return (
        isinstance(values, (list, tuple))
        and len(values) == count
        and all(type(each) is kind for each in values)
    )


def _core_rotary(traits: MegatronTraits) -> Fields:
    settings = traits.settings
    if traits.rotary_fraction > 1:
        settings.note(f"rotary_percent = {traits.rotary_fraction}: expected at most 1")
    fields = {
        "rotary_embedding": int(traits.size_per_head * min(traits.rotary_fraction, 1.0)),
        "rotary_base": traits.rotary_base,
    }
    yarn = "yarn_rotary_scaling_factor"
    if traits.position == "yarn":  # rotates whole heads, whatever rotary_percent is
        names = "yarn_mscale", "yarn_mscale_all_dim"
        is_plain = any(traits.get(name) is None for name in names)
        weights = (1.0, 0.0) if is_plain else tuple(settings.nonzero(each) or 0.0 for each in names)
        return {
            **fields,
            "rotary_embedding": traits.size_per_head,
            **yarn_fields(
                settings,
                "yarn_original_max_position_embeddings",
                weights,
                prefix="yarn_",
                truncate=bool(traits.get("yarn_correction_range_round_to_int")),
            ),
        }
    if traits.get(yarn) is not None:
        settings.note(
            f"{yarn} = {traits.get(yarn)!r:.100} with position_embedding_type = rope: some "
            "releases scale sine and cosine by it, and others do not"
        )
    factor, scaled = traits.rotary_interpolation, None
    if traits.rotary_local_base is not None:
        fields["rotary_local_base"] = traits.rotary_local_base
        scaled = scaling_fields(
            "linear", {"factor": settings.nonzero("rope_scaling_factor") or 1.0}
        )
    elif traits.get("scale_positional_embedding") or traits.get("use_rope_scaling"):
        if traits.get("rope_scaling") and traits.get("rope_scaling_factor") is None:
            settings.note(
                "rope_scaling = true without rope_scaling_factor, whose default is 1 or 8 in "
                "Megatron Bridge, depending on the class: state the one used in training"
            )
        scaling = {
            name: type(usual)(settings.nonzero(*keys) or usual) for name, keys, usual in _LLAMA31
        }
        scaled = scaling_fields("llama3", scaling)
    if scaled is not None and factor != 1:
        settings.note(
            f"positions are divided by {factor:g} (seq_len_interpolation_factor) and also scaled "
            "in another way: no layout can hold both"
        )
    if scaled is None:
        scaled = scaling_fields("linear", {"factor": factor})
    return fields if scaled.get("rotary_factor") == 1 else {**fields, **scaled}


def yarn_fields(
    settings: Settings,
    original: str,
    weights: tuple[float, ...],
    *,
    prefix: str = "",
    truncate: bool = True,
) -> Fields:
    """Return the fields of YaRN; its keys begin with `prefix`.

    `original` is the key of the original length, `weights` are (mscale, mscale_all_dim).
    megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py
    """
    factor = settings.number(f"{prefix}rotary_scaling_factor")
    growth, growth_of_all = (yarn_growth(factor, weight) for weight in weights)
    return scaling_fields(
        "yarn",
        {
            "factor": factor,
            "original_max_position_embeddings": settings.integer(original),
            "beta_fast": settings.number(f"{prefix}beta_fast", default=32.0),
            "beta_slow": settings.number(f"{prefix}beta_slow", default=1.0),
            "attention_factor": growth / growth_of_all,
            "truncate": truncate,
        },
    )


def core_sources(
    facts: Facts,
    names: Mapping[str, str],
    layout: Layout = DENSE.layout,
    own: Mapping[str, TensorSource] = MappingProxyType({}),
) -> Sources:
    """Return the source of each tensor of a layout; `own` adds or replaces some."""
    # A distributed checkpoint has whole tensors.
    per_rank = not facts.reader.is_distributed
    table = {**named_sources(names, layout, rows="groups", halves_per_rank=per_rank), **own}
    traits = core_traits(facts)
    one_plus = traits.normalization.endswith("1p") and not _keeps_one_plus(traits)
    return completed(table, layout, facts, lacks=lambda _: False, is_one_plus=one_plus)


DENSE_CORE_MAPPINGS = tuple(
    dataclasses.replace(
        gpt,
        name=f"{gpt.format}-core-dense",
        title=gpt.title.replace("GPT", "Llama-style decoder"),
        family=DENSE,
        matches=lambda facts: is_core(facts) and core_traits(facts).position in _ROTARY,
        config=lambda facts: core_config(facts, DenseConfig),
        weights=lambda facts, _: core_sources(facts, core_names(facts)),
        unsupported=core_reasons,
        obstacles=lambda facts: megatron_obstacles(core_traits(facts).source, "dense"),
        accepts=(),
        written=dense_args if gpt.written else None,
    )
    for gpt in GPT_CORE_MAPPINGS
)
