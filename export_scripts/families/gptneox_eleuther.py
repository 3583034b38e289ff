"""The GPT-NeoX layout from EleutherAI's layer files.

Each training rank has separate norms and output biases: the norms are averaged, the biases are
summed over all ranks. How: FasterTransformer, examples/pytorch/gptneox/utils/
eleutherai_gpt_neox_convert.py, which sums over some of the ranks only.
"""

# Shapes: S training ranks, h hidden

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

from export_scripts.families.gptneox import GPTNEOX, LAYER_MODULES, GPTNeoXConfig, divided_bias_sum
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.mapping.names import in_layers, named_sources
from export_scripts.families.mapping.prompts import PROMPT_SOURCES, prompt_fields
from export_scripts.families.mapping.rotary import FT_BASE
from export_scripts.families.mapping.settings import Settings, half_precision_warnings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Compute, Copy, TensorSource
from export_scripts.families.mapping.tensors import float32

WTE = "embedding.word_embeddings.weight"
HEAD = "final.final_linear.weight"
_FREQUENCIES = "layers.0.attention.rotary_emb.inv_freq"
_L = "layers.{layer}."

# Tokens of GPT-NeoX-20B, which every release so far shares.
_START_ID, _END_ID = 0, 2


def _config(facts: Facts) -> GPTNeoXConfig:
    """Return the config of a release: sizes from its tensors, the rest from configs/*.yml."""
    settings = Settings(facts.config, label="configs/*.yml")
    for name, (value, why) in _EXPECTED.items():
        settings.expect(name, value, why=why)
    stated_heads = settings.source.get("num-attention-heads")
    settings.expect("num-kv-heads", None, stated_heads, why="FT has one key/value head per head")
    assumed = not _is_whole(settings.source)
    hidden = facts.size(WTE, 1)
    vocab_size = facts.rows(WTE)
    given_heads = facts.given_int("head_num")
    heads = given_heads if given_heads is not None else settings.integer("num-attention-heads")
    size_per_head = settings.divide(hidden, heads, "hidden size by heads")
    ids, keys = facts.special_ids(), facts.keys()
    return settings.built(
        GPTNeoXConfig,
        model_name="gptneox",
        head_num=heads,
        size_per_head=size_per_head,
        inter_size=facts.rows("layers.0.mlp.dense_h_to_4h.bias"),
        num_layer=sum(key.endswith(".input_layernorm.weight") for key in keys),
        vocab_size=vocab_size,
        rotary_embedding=_rotary_dims(facts, settings, size_per_head),
        start_id=_START_ID if ids.bos is None else ids.bos,
        end_id=_END_ID if ids.eos is None else ids.eos,
        use_gptj_residual=settings.flag("gpt-j-residual", default=assumed),
        layernorm_eps=settings.number("layernorm-epsilon", default=1e-5),
        # The fused kernel computes the tanh form.
        exact_gelu=not settings.flag("bias-gelu-fusion", default=assumed),
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
        **prompt_fields(facts, start_id=vocab_size),
    )


def _is_whole(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is a training run's, in which absent keys have defaults.

    Rotary positions have no default: a run must name them. A shorter file is a release's, which
    leaves out what GPT-NeoX-20B has. Defaults: EleutherAI/gpt-neox,
    megatron/neox_arguments/neox_args.py.
    """
    return "pos-emb" in config


# Settings -> the value that FT's GPT-NeoX has, and why no other.
_EXPECTED: Mapping[str, tuple[Any, str]] = {
    "pos-emb": ("rotary", "FT's GPT-NeoX has rotary positions"),
    "norm": ("layernorm", "FT's GPT-NeoX has layernorm"),
    "activation": ("gelu", "FT computes GPT-NeoX with gelu"),
    "rotary-emb-base": (FT_BASE, f"FT's rotary base is {FT_BASE:g}"),
    "gpt-j-tied": (False, "FT's GPT-NeoX has a norm for attention and one for MLP"),
    "use-qk-layernorm": (False, "FT does not normalise queries and keys"),
}


def _rotary_dims(facts: Facts, settings: Settings, size_per_head: int) -> int:
    """Return the rotated dimensions: stated, from the stored frequencies, or a fraction."""
    given = facts.given_int("rotary_embedding")
    if given is not None:
        return given
    if facts.has(_FREQUENCIES):
        return 2 * facts.size(_FREQUENCIES, 0)
    if "rotary-pct" not in settings.source and not _is_whole(settings.source):
        settings.problems.append(
            f"{settings.label} has no rotary-pct and the layers hold no rotary_emb.inv_freq: "
            "state --set rotary_embedding=.."
        )
        return 1
    return int(size_per_head * settings.number("rotary-pct", default=1.0))


def _sum(config: GPTNeoXConfig, joined: Any) -> Any:
    """Return the sum (h,) of the vectors of all training ranks, joined to (S * h,)."""
    ranks = float32(joined).reshape(-1, config.hidden)  # (S, h)
    return functools.reduce(operator.add, (ranks[rank] for rank in range(ranks.shape[0])))


def _output_bias(config: GPTNeoXConfig, joined: Any) -> Any:
    """Return the sum over training ranks, or the share of an inference rank that adds it."""
    whole = _sum(config, joined)
    return divided_bias_sum(config, whole) if config.use_gptj_residual else whole


def _everywhere(function: Any, *keys: str) -> TensorSource:
    return Compute(function, keys, cuts=(0,) * len(keys))


_ATTENTION_BIAS = _L + "attention.dense.bias"
_MLP_BIAS = _L + "mlp.dense_4h_to_h.bias"
_NAMES = {
    "model.wte": WTE.removesuffix(".weight"),
    "model.final_layernorm": "final.norm",
    "model.lm_head": HEAD.removesuffix(".weight"),
    **in_layers(_L, LAYER_MODULES),
}

WEIGHTS: Mapping[str, TensorSource] = {
    **{
        name: _everywhere(
            lambda config, joined: _sum(config, joined) / (joined.shape[0] // config.hidden),
            source.reads[0][0],
        )
        if "layernorm" in name
        else source
        for name, source in named_sources(_NAMES, GPTNEOX.layout).items()
    },
    LAYER + "attention.dense.bias": _everywhere(_output_bias, _ATTENTION_BIAS),
    LAYER + "mlp.dense_4h_to_h.bias": _everywhere(_output_bias, _MLP_BIAS),
    LAYER + "mlp.attention.bias.sum": _everywhere(
        lambda config, *joined: divided_bias_sum(config, *(_sum(config, each) for each in joined)),
        _ATTENTION_BIAS,
        _MLP_BIAS,
    ),
    **PROMPT_SOURCES,
}


def _weights(facts: Facts, _: GPTNeoXConfig) -> Mapping[str, TensorSource]:
    """Return each tensor's source; a model with tied weights has no separate head."""
    untied = facts.config.get("no-weight-tying", not _is_whole(facts.config))
    if facts.has(HEAD) or untied is not False:
        return WEIGHTS
    return {**WEIGHTS, "model.lm_head.weight": Copy(WTE, cut=0)}


def _warnings(facts: Facts, config: GPTNeoXConfig) -> list[str]:
    """Return warnings about assumptions and the limits of fp16."""
    assumed = []
    if "gpt-j-residual" not in facts.config and not _is_whole(facts.config):
        assumed.append(
            "configs/*.yml does not set gpt-j-residual; the parallel residual of GPT-NeoX-20B is "
            "assumed (--set use_gptj_residual=0 for the other)"
        )
    return assumed + half_precision_warnings(facts, config, WTE)


GPTNEOX_ELEUTHER = SourceMapping(
    name="eleuther-gptneox",
    title="GPT-NeoX, EleutherAI layer files (layer_*-model_*-model_states.pt)",
    family=GPTNEOX,
    format="eleuther",
    matches=lambda facts: facts.has(WTE),
    config=_config,
    weights=_weights,
    ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
    accepts=("prompt",),
    warnings=_warnings,
)
