"""Operations that `decoders.yaml` names: on settings, and for tensors without a plain name."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    FULL,
    SLIDING,
    Slides,
    chosen_layers,
    layer_flags,
)
from export_scripts.families.dense.layout import LAYOUT, DenseConfig
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.mapping.huggingface import SourcesOf, Trait
from export_scripts.families.mapping.names import named_sources, whole_names
from export_scripts.families.mapping.rotary import rotary_parameters
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import HeadScales, Sources
from foundations.files.json_content import Fields, Table, nested


def window_left_out(facts: Facts, _: DenseConfig) -> list[str]:
    """Return a warning about a window that transformers ignores."""
    window = facts.config.get("sliding_window")
    if window is None:
        return []
    return [
        f"config.json: sliding_window = {window} is left out: transformers' Llama has no window, "
        "but its cache drops earlier tokens during generation"
    ]


def _from_layer(first: int, count: int) -> list[bool]:
    return [number >= first for number in range(count)]


def _all_but_every(nth: int, count: int) -> list[bool]:
    return [(number + 1) % nth != 0 for number in range(count)]


def _rotating(settings: Settings, values: Table) -> list[bool]:
    count = values["num_layer"]
    every = settings.integer("no_rope_layer_interval", default=4)
    rotates = settings.get("no_rope_layers") or _all_but_every(every, count)
    if not isinstance(rotates, list) or len(rotates) < count:
        settings.note(
            f"no_rope_layers = {rotates!r}: expected an entry for each of the {count} layers"
        )
        return [True] * count
    return [bool(each) for each in rotates[:count]]


def window_rule(name: str, nth: int = 1) -> Slides:
    """Return the rule of a name, which decides whether each layer has the window."""
    rules = {
        "everywhere": lambda _, values: [True] * values["num_layer"],
        "all_but_every": lambda _, values: _all_but_every(nth, values["num_layer"]),
        "by_pattern": lambda settings, values: _all_but_every(
            settings.integer("sliding_window_pattern", default=nth), values["num_layer"]
        ),
        "all_but_every_first": lambda _, values: [n % nth != 0 for n in range(values["num_layer"])],
        "from_max_window_layers": lambda settings, values: _from_layer(
            settings.natural("max_window_layers", default=nth), values["num_layer"]
        ),
        "not_rotating": lambda *given: [not rotates for rotates in _rotating(*given)],
    }
    return rules[name]


def _check_phi3(settings: Settings, values: Table) -> Fields:
    if values.get("rotary_scaling_type") not in (None, "longrope"):
        settings.note(
            f"rotary scaling {values['rotary_scaling_type']!r} cannot be "
            "represented: transformers computes longrope for every Phi-3"
        )
    return {}


def _written_phi3(config: DenseConfig) -> Fields:
    original = config.rotary_original_max_position_embeddings
    return {"original_max_position_embeddings": original or config.max_pos_seq_len}


def _written_olmo3(config: DenseConfig) -> Fields:
    """Return the bases by kind of layer; without kinds, transformers 5 reads only one of them."""
    bases = {FULL: config.rotary_base, SLIDING: config.rotary_local_base}
    return {"rope_parameters": {kind: {"rope_theta": base} for kind, base in bases.items()}}


def _kinds(types: Any, most: int) -> list[Any]:
    """Return the kinds of at most `most` layers from attention_types: (kinds, repeats) pairs."""
    every = (kind for kinds, times in types for _ in range(times) for kind in kinds)
    return list(itertools.islice(every, most))


def _read_gpt_neo(settings: Settings, values: Table) -> Fields:
    count = values["num_layer"]
    types = settings.value("attention_types", default=[[["global", "local"], 12]])
    try:
        stated = _kinds(types, count + 1)
        kinds = settings.value("attention_layers", default=stated)
        is_known = kinds == stated and {"global", "local"}.issuperset(kinds)
    except (TypeError, ValueError):
        is_known = False
    if not is_known or len(kinds) != count:
        settings.note(
            f"attention_types = {types!r:.100}: expected global or local for each of the {count} "
            "layers, and attention_layers, if stated, the same"
        )
        return {}
    layers = chosen_layers([kind == "local" for kind in kinds])
    window = settings.integer("window_size", default=256)
    return {} if layers == () else {"sliding_window": window, "sliding_layers": layers}


def _written_gpt_neo(config: DenseConfig) -> Fields:
    slides = layer_flags(config.sliding_layers if config.sliding_window else (), config.num_layer)
    kinds = ["local" if each else "global" for each in slides]
    return {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": config.sliding_window,
    }


def _read_mpt(settings: Settings, _: Table) -> Fields:
    given = settings.value("attn_config", default={})
    if not isinstance(given, Mapping):
        settings.note(f"attn_config = {given!r:.100}: expected a table")
        given = {}
    attention = Settings(given, f"{settings.label}: attn_config", settings.problems)
    return {"attention_scale": attention.optional("softmax_scale")}


def _read_hyperclovax(settings: Settings, values: Table) -> Fields:
    scale = settings.optional("attention_multiplier")
    return {
        "attention_scale": None if scale == values["size_per_head"] ** -0.5 else scale,
        "logit_scale": settings.number("logits_scaling", default=1.0),
    }


def _read_granite_4(settings: Settings, _: Table) -> Fields:
    kinds = settings.value("layer_types", default=["mamba"])
    is_known = isinstance(kinds, list) and all(kind in ("attention", FULL) for kind in kinds)
    if not is_known or settings.natural("num_local_experts", default=8):
        settings.note(
            "a Granite 4 has to have attention in all of layer_types, and num_local_experts = 0"
        )
    rotates = settings.get("position_embedding_type") == "rope"
    return {} if rotates else {"rotary_embedding": 0}


def norms_of_heads(pattern: str) -> SourcesOf:
    """Return a function for the sources of norms of queries and keys with scales for each head.

    Their names are q or k followed by the pattern, in which # is the number of the head.
    """

    def sources(_: Facts, config: DenseConfig, __: Sources) -> Sources:
        counts = {"query": config.head_num, "key": config.kv_head_num}
        return {
            f"{LAYER}attention.{name}_norm.weight": HeadScales(
                tuple(
                    dict.fromkeys(
                        f"{LAYER}self_attn.{name[0]}{pattern.replace('#', str(head))}"
                        for head in range(count)
                    )
                ),
                part,
                "#" not in pattern,
            )
            for part, (name, count) in enumerate(counts.items())
        }

    return sources


def _read_cohere(settings: Settings, _: Table) -> Fields:
    source = settings.source
    if source.get("rope_theta", nested(rotary_parameters(source), "rope_theta")) is None:
        settings.note("no rope_theta: transformers 4 uses 10000 and 5 uses 500000; state it")
    return {}


def _read_cohere2(settings: Settings, values: Table) -> Fields:
    if "sliding_window" not in values and "sliding_window" in settings.source:
        settings.note("sliding_window = null: no layer would rotate")
    return {}


def _rotary_field(settings: Settings, given: Table, name: str) -> Fields:
    """Return the field of a further parameter of rotary positions."""
    inner = Settings(given, f"{settings.label}: rotary scaling", settings.problems)
    return {f"rotary_{name}": inner.number(name)}


def _alpha(settings: Settings, values: Table) -> Fields:
    """Return the alpha of a HunYuan, from which dynamic scaling computes a fixed base.

    transformers, modeling_hunyuan_v1_dense.py, compute_ntk_alpha_rope_parameters
    """
    given = rotary_parameters(settings.source)
    if values.get("rotary_scaling_type") != "dynamic" or not given.get("alpha"):
        return {}
    if values["size_per_head"] < 4:
        settings.note(f"alpha with heads of {values['size_per_head']}: expected at least 4")
    return _rotary_field(settings, given, "alpha")


def _growth(settings: Settings, values: Table) -> Fields:
    """Return the factor by which a Ministral 3's queries grow with their position."""
    name, given = "llama_4_scaling_beta", rotary_parameters(settings.source)
    if not given:
        return {f"rotary_{name}": 0.1}  # the library's default
    if values.get("rotary_scaling_type") not in ("yarn", "llama3", "longrope"):
        settings.note(
            f"rotary positions {given!r:.200}: expected yarn, llama3 or longrope, as queries grow "
            "with its original_max_position_embeddings"
        )
        return {}
    return _rotary_field(settings, given, name)


def falcon_sources(_: Facts, config: DenseConfig, __: Sources) -> Sources:
    """Return the sources of a layer's two norms of the same input, which have other names."""
    names = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    whole = whole_names("transformer.h.{layer}.", names)
    return named_sources(whole, LAYOUT) if config.residual == "parallel" else {}


def _read_falcon(settings: Settings, values: Table) -> Fields:
    is_new = settings.flag("new_decoder_architecture", default=False)
    is_parallel = settings.flag("parallel_attn", default=True)
    norms = settings.integer("num_ln_in_parallel_attn", default=2 if is_new else 1)
    kv_heads, heads = values["head_num"], values["head_num"]
    if is_new:
        kv_heads = settings.integer("num_kv_heads", default=heads)
        settings.divide(heads, kv_heads, "num_attention_heads by num_kv_heads")
    elif settings.flag("multi_query", default=True):
        kv_heads = 1
    if is_new and not is_parallel:
        settings.note(
            "parallel_attn = false with new_decoder_architecture = true: "
            "transformers has no such model"
        )
    residual = ("parallel_shared", "parallel")[is_new and norms == 2]
    biases = ("has_mlp_bias", "has_attention_dense_bias", "has_qkv_bias")
    return {
        "kv_head_num": kv_heads,
        "residual": residual if is_new or is_parallel else "sequential",
        **dict.fromkeys(biases, settings.flag("bias", default=False)),
    }


def _written_falcon(config: DenseConfig) -> Fields:
    is_sequential = config.residual == "sequential"
    is_new = config.residual == "parallel" or (not is_sequential and config.kv_head_num > 1)
    return {
        "head_dim": None,
        "new_decoder_architecture": is_new,
        "num_kv_heads": config.kv_head_num,
        "multi_query": config.kv_head_num == 1,
        "parallel_attn": not is_sequential,
        "num_ln_in_parallel_attn": (1 + (config.residual == "parallel")) if is_new else None,
        "bias": config.has_qkv_bias,
    }


TRAITS = {
    "alpha": Trait(_alpha),
    "cohere": Trait(_read_cohere),
    "cohere2": Trait(_read_cohere2),
    "falcon": Trait(_read_falcon, _written_falcon),
    "gpt_neo": Trait(_read_gpt_neo, _written_gpt_neo),
    "granite_4": Trait(
        _read_granite_4,
        lambda config: {
            "layer_types": ["attention"] * config.num_layer,
            "position_embedding_type": "rope" if config.rotary_embedding else None,
        },
    ),
    "growth": Trait(_growth),
    "hyperclovax": Trait(
        _read_hyperclovax,
        lambda config: {
            "attention_multiplier": config.attention_scale,
            "logits_scaling": config.logit_scale,
        },
    ),
    "mpt": Trait(
        _read_mpt,
        lambda config: {"attn_config": {"alibi": True, "softmax_scale": config.attention_scale}},
    ),
    "olmo3": Trait(written=_written_olmo3),
    # The library's default may exceed the vocabulary.
    "padding": Trait(
        written=lambda config: {"pad_token_id": min(config.end_id, config.vocab_size - 1)}
    ),
    "phi3": Trait(_check_phi3, _written_phi3),
    "root_of_width": Trait(lambda _, values: {"embedding_scale": math.sqrt(values["hidden_size"])}),
    "rotating_layers": Trait(
        lambda *given: {"rotary_layers": chosen_layers(_rotating(*given))},
        lambda config: {
            "no_rope_layers": [*map(int, layer_flags(config.rotary_layers, config.num_layer))]
        },
    ),
}
