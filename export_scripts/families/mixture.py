"""Mixtures of experts in the style of Mixtral and Qwen3-MoE, which pass through to other engines.

The decoder of `families.dense` with a router and experts in place of each MLP. Neither our engine
nor FasterTransformer serves them: they are written as Hugging Face folders alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from export_scripts.families.dense import core
from export_scripts.families.dense.huggingface import (
    LLAMA_KEYS,
    LLAMA_NAMES,
    DenseDecoder,
    Window,
)
from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.families.gpt.megatron import (
    CORE_LAYER,
    assumed_tokens_warning,
    core_names,
    core_traits,
    is_core,
)
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.known_settings import megatron_obstacles
from export_scripts.families.mapping.names import Names, whole_names
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Sources

EXPERT = "mlp.experts.{expert}."


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DenseConfig):
    """A mixture; `inter_size` is the width of one expert."""

    SECTION: ClassVar[str] = "mixture"
    INDICES: ClassVar[Mapping[str, str]] = {"layer": "num_layer", "expert": "expert_num"}

    expert_num: int
    experts_per_token: int
    # The weights of a token's experts sum to 1; else they are parts of the softmax over all.
    normalized_routing: bool = True


MIXTURE = ModelFamily(
    name="mixture",
    model_type="Mixture",
    config=MixtureConfig,
    layout=(
        *(spec for spec in DENSE.layout if ".mlp." not in spec.name),
        *layout_table("mixture"),
    ),
    ft_backend=False,
    has_shards=False,
)


_KEYS = tuple(name for name in LLAMA_KEYS if name != "intermediate_size")


def _names(mlp: str, *matrices: str) -> Names:
    ours = ("dense_h_to_4h", "dense_h_to_4h_2", "dense_4h_to_h")
    experts = {
        EXPERT + name: f"{mlp}.experts.{{expert}}.{theirs}"
        for name, theirs in zip(ours, matrices, strict=True)
    }
    return {**LLAMA_NAMES, "mlp.router": f"{mlp}.gate", **experts}


_DECODERS = (
    DenseDecoder(
        model_type="mixtral",
        model="MixtralForCausalLM",
        title="Mixtral",
        family=MIXTURE,
        keys=(*_KEYS, "intermediate_size", "num_local_experts", "num_experts_per_tok"),
        names=_names("block_sparse_moe", "w1", "w3", "w2"),
        window=Window(),
        rotary_base=1e6,
        bos=1,
        eos=2,
        warnings=lambda *_: [],
    ),
    DenseDecoder(
        model_type="qwen3_moe",
        model="Qwen3MoeForCausalLM",
        title="Qwen3-MoE",
        family=MIXTURE,
        keys=(
            *_KEYS,
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "attention_bias",
            "norm_topk_prob",
        ),
        fixed={"query_key_norm": "head"},
        names=_names("mlp", "gate_proj", "up_proj", "down_proj"),
        window=Window(has_switch=True),
        written=lambda config: {
            "intermediate_size": config.inter_size,  # of layers without experts: there is none
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        warnings=lambda *_: [],
    ),
)

MIXTURE_HUGGINGFACE = tuple(decoder.mapping() for decoder in _DECODERS)

_CORE_EXPERT = "mlp.experts.local_experts.{expert}."


def _core_reasons(facts: Facts) -> list[str]:
    traits = core_traits(facts)
    source = traits.source
    reasons = []
    balancing = source.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        reasons.append("moe_router_load_balancing_type = sinkhorn: it decides the routing too")
    layers = source.get("moe_layer_freq")
    if layers not in (None, 1) and set(layers if isinstance(layers, list) else [layers]) != {1}:
        reasons.append(f"moe_layer_freq = {layers}: some layers have no experts")
    if traits.bias:
        reasons.append("add_bias_linear = true: experts with biases")
    return core.core_reasons(facts, is_mixture=True) + reasons


def _core_config(facts: Facts) -> MixtureConfig:
    traits = core_traits(facts)
    source = traits.source
    dense, settings = vars(core.core_config(facts)), traits.settings
    inter_size = settings.integer("moe_ffn_hidden_size", default=traits.inter_size)
    per_token = settings.integer("moe_router_topk", default=2)
    settings.finish()
    return MixtureConfig(
        **dense | {"model_name": "mixture", "inter_size": inter_size, "has_mlp_bias": False},
        expert_num=traits.expert_num,
        experts_per_token=per_token,
        normalized_routing=not source.get("moe_router_pre_softmax"),
    )


def _core_weights(facts: Facts, _: MixtureConfig) -> Sources:
    # Not fused, as the router reads its output too; megatron-core's own layers still name it so.
    norm = "pre_mlp_layernorm"
    if not facts.has(f"{CORE_LAYER}{norm}.weight".format(layer=0)):
        norm = "mlp.linear_fc1.layer_norm_"
    names = core_names(facts) | whole_names(
        CORE_LAYER,
        {
            "post_attention_layernorm": norm,
            "mlp.router": "mlp.router",
            EXPERT + "dense_h_to_4h": _CORE_EXPERT + "linear_fc1",
            EXPERT + "dense_h_to_4h_2": _CORE_EXPERT + "linear_fc1",
            EXPERT + "dense_4h_to_h": _CORE_EXPERT + "linear_fc2",
        },
    )
    return core.core_sources(facts, names, MIXTURE.layout)


def _core_warnings(facts: Facts, config: MixtureConfig) -> list[str]:
    factor = facts.config.get("moe_expert_capacity_factor")
    dropped = [
        f"moe_expert_capacity_factor = {factor}: training dropped tokens beyond an expert's "
        "capacity; engines that load the folder drop none"
    ]
    return assumed_tokens_warning(facts, config) + (dropped if factor else [])


MIXTURE_CORE_MAPPINGS: tuple[SourceMapping, ...] = tuple(
    dataclasses.replace(
        dense,
        name=f"{dense.format}-core-mixture",
        title=f"{dense.title}, with experts",
        family=MIXTURE,
        matches=lambda facts: is_core(facts) and core_traits(facts).expert_num > 1,
        config=_core_config,
        weights=_core_weights,
        unsupported=_core_reasons,
        obstacles=lambda facts: megatron_obstacles(
            core_traits(facts).source, "dense", has_experts=True
        ),
        ignored=(*dense.ignored, "*.router.local_tokens_per_expert"),
        warnings=_core_warnings,
    )
    for dense in core.DENSE_CORE_MAPPINGS
)
