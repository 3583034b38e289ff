"""Mixtures of experts in the style of Mixtral and Qwen3-MoE, which pass through to other engines.

The decoder of `families.llama` with a router and experts in place of each MLP. Neither our engine
nor FasterTransformer serves them: they are written as Hugging Face folders alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.gpt.core import core_traits, is_core
from export_scripts.families.gpt.megatron import assumed_tokens_warning
from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.families.layout.spec import ModelFamily, WeightSpec
from export_scripts.families.llama import core, huggingface
from export_scripts.families.llama.layout import (
    GATED,
    LAYER,
    LAYOUT,
    LlamaConfig,
    llama_architecture,
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
from export_scripts.families.mapping.settings import head_is_tied, huggingface_settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, TensorSource, Transpose

EXPERT = "mlp.experts.{expert}."


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    """A mixture; `inter_size` is the width of one expert."""

    SECTION: ClassVar[str] = "mixture"
    INDICES: ClassVar[Mapping[str, str]] = {"layer": "num_layer", "expert": "expert_num"}

    expert_num: int
    experts_per_token: int
    # The weights of a token's experts sum to 1; else they are parts of the softmax over all.
    normalized_routing: bool = True
    query_key_norm: bool = False  # RMSNorm of each head's queries and keys


@dataclass(frozen=True, kw_only=True)
class MixtureArchitecture(DecoderArchitecture):
    """A decoder whose MLPs are experts behind a router."""

    expert_num: int
    experts_per_token: int
    normalized_routing: bool


def _architecture(config: MixtureConfig) -> MixtureArchitecture:
    return MixtureArchitecture(
        **vars(llama_architecture(config))
        | {"query_key_norm": "head" if config.query_key_norm else None},
        expert_num=config.expert_num,
        experts_per_token=config.experts_per_token,
        normalized_routing=config.normalized_routing,
    )


MIXTURE = ModelFamily(
    name="mixture",
    model_type="Mixture",
    config=MixtureConfig,
    architecture=_architecture,
    layout=(
        *(spec for spec in LAYOUT if ".mlp." not in spec.name),
        *(
            WeightSpec(f"{LAYER}attention.{part}_norm.weight", ("size_per_head",),
                       when=("query_key_norm",))
            for part in ("query", "key")
        ),
        WeightSpec(LAYER + "mlp.router.weight", ("expert_num", "hidden")),
        WeightSpec(LAYER + EXPERT + "dense_h_to_4h.weight", ("hidden", "inter_size")),
        WeightSpec(LAYER + EXPERT + "dense_h_to_4h_2.weight", ("hidden", "inter_size")),
        WeightSpec(LAYER + EXPERT + "dense_4h_to_h.weight", ("inter_size", "hidden")),
    ),
    ft_backend=False,
    has_shards=False,
)  # fmt: skip

_KEYS = (
    *(each for each in huggingface.KEYS if each.field != "inter_size"),
    key("experts_per_token", "num_experts_per_tok"),
)
# Model type in transformers -> its class, its names of what differs, and of an expert's matrices.
_KINDS = {
    "mixtral": (
        "MixtralForCausalLM",
        (key("inter_size", "intermediate_size"), key("expert_num", "num_local_experts")),
        "block_sparse_moe.",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        (key("inter_size", "moe_intermediate_size"),
         key("expert_num", "num_experts", "num_local_experts")),
        "mlp.",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}  # fmt: skip
_MATRICES = ("dense_h_to_4h", "dense_h_to_4h_2", "dense_4h_to_h")


def _config(facts: Facts) -> MixtureConfig:
    """Return the config of a Hugging Face Mixtral or Qwen3-MoE.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    kind = str(facts.config["model_type"])
    is_qwen = kind == "qwen3_moe"
    values = decoder_values(
        facts, settings, (*_KEYS, *_KINDS[kind][1]), name=kind, head_dim=True,
        **({} if is_qwen else {"bos": 1, "eos": 2}),
    )  # fmt: skip
    settings.divide(
        values["head_num"], values["kv_head_num"], "num_attention_heads by num_key_value_heads"
    )
    activation, exact_gelu = settings.activation("hidden_act", default="silu")
    why = "every layer has experts in this mapping"
    settings.expect("decoder_sparse_step", 1, why=why)
    settings.expect("mlp_only_layers", [], None, why=why)
    has_bias = is_qwen and settings.flag("attention_bias", default=False)
    has_window = facts.config.get("sliding_window") is not None and (
        not is_qwen or settings.flag("use_sliding_window", default=False)
    )
    config = MixtureConfig(
        **values,
        hidden_size=settings.integer("hidden_size"),
        activation_type=GATED[activation.lower()],
        exact_gelu=exact_gelu,
        tie_word_embeddings=head_is_tied(
            facts, settings, huggingface.LM_HEAD, huggingface.WTE, default=False
        ),
        has_qkv_bias=has_bias,
        has_attention_dense_bias=has_bias,
        sliding_window=settings.integer("sliding_window") if has_window else None,
        normalized_routing=not is_qwen or settings.flag("norm_topk_prob", default=False),
        query_key_norm=is_qwen,
        **rotary_fields(rotary_settings(settings), values["size_per_head"]),
    )
    settings.finish()
    return config


def _written(config: MixtureConfig, is_tied: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    window = config.sliding_window
    own = {
        "head_dim": config.size_per_head,
        "hidden_act": activation_name(config.activation_type, exact_gelu=config.exact_gelu),
        "tie_word_embeddings": config.tie_word_embeddings,
        **written_rotary(config),
    }
    further: Mapping[str, dict[str, Any]] = {
        "mixtral": {"sliding_window": window},
        "qwen3_moe": {
            "intermediate_size": config.inter_size,  # of layers without experts: there is none
            "attention_bias": config.has_qkv_bias,
            "norm_topk_prob": config.normalized_routing,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": window is not None,
            "sliding_window": window,
        },
    }
    return [
        written_decoder(kind, model, (*_KEYS, *keys), config) | own | further[kind]
        for kind, (model, keys, _, _) in _KINDS.items()
    ]


def _weights(facts: Facts, config: MixtureConfig) -> Mapping[str, TensorSource]:  # noqa: ARG001
    _, _, mlp, matrices = _KINDS[str(facts.config["model_type"])]
    table = {name: source for name, source in huggingface.WEIGHTS.items() if ".mlp." not in name}
    layer = huggingface.HF_LAYER
    return {
        **table,
        **{
            f"{LAYER}attention.{ours}_norm.weight": Copy(f"{layer}self_attn.{theirs}_norm.weight")
            for ours, theirs in (("query", "q"), ("key", "k"))
        },
        LAYER + "mlp.router.weight": Copy(f"{layer}{mlp}gate.weight"),
        **{
            f"{LAYER}{EXPERT}{ours}.weight": Transpose(
                f"{layer}{mlp}experts.{{expert}}.{theirs}.weight"
            )
            for ours, theirs in zip(_MATRICES, matrices, strict=True)
        },
    }


MIXTURE_HUGGINGFACE = dataclasses.replace(
    huggingface.LLAMA_HUGGINGFACE,
    name="huggingface-mixture",
    title="Hugging Face Mixtral, Qwen3-MoE",
    family=MIXTURE,
    matches=lambda facts: facts.config.get("model_type") in _KINDS,
    config=_config,
    written=_written,
    weights=_weights,
    warnings=lambda *_: [],
)

_CORE = core.CORE_LAYER + "mlp."
_CORE_EXPERT = _CORE + "experts.local_experts.{expert}."
# Settings of megatron-core's router and experts that no transformers mixture has, and the values
# that leave them off. megatron/core/transformer/transformer_config.py, transformer/moe/router.py
_OFF: Mapping[str, tuple[Any, ...]] = {
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": (None, "softmax"),
    "moe_router_topk_scaling_factor": (None, 1, 1.0),
    "moe_router_num_groups": (None, 0, 1),
    "moe_router_topk_limited_devices": (None, 0),
    "moe_router_enable_expert_bias": (None, False),
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None, 0),
}


def _core_reasons(facts: Facts) -> list[str]:
    """Return every reason that no mixture of transformers holds a model."""
    traits = core_traits(facts)
    source = traits.source
    reasons = [
        f"{name} = {source[name]!r}: no mixture that is written has it"
        for name, off in _OFF.items()
        if source.get(name) not in off
    ]
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
    """Return the config of a mixture of megatron-core.

    Raises:
        ValueError: The special tokens are not known.
    """
    traits = core_traits(facts)
    source = traits.source
    dense = vars(core.config_from_core(facts))
    return MixtureConfig(
        **dense
        | {
            "model_name": "mixture",
            "inter_size": source.get("moe_ffn_hidden_size") or traits.inter_size,
            "has_mlp_bias": False,
        },
        expert_num=traits.expert_num,
        experts_per_token=source.get("moe_router_topk") or 2,
        normalized_routing=not source.get("moe_router_pre_softmax"),
        query_key_norm=traits.qk_norm,
    )


def _core_weights(facts: Facts, config: MixtureConfig) -> Mapping[str, TensorSource]:
    table = core.weights_from_core(facts, config)
    attention = core.CORE_LAYER + "self_attention."
    # Not fused, as the router reads its output too; megatron-core's own layers still name it so.
    norm = core.CORE_LAYER + "pre_mlp_layernorm.weight"
    if not facts.has(norm.format(layer=0)):
        norm = _CORE + "linear_fc1.layer_norm_weight"
    return {
        **{name: source for name, source in table.items() if ".mlp." not in name},
        **{
            f"{LAYER}attention.{ours}_norm.weight": core.core_norm(
                facts, f"{attention}{theirs}_layernorm.weight"
            )
            for ours, theirs in (("query", "q"), ("key", "k"))
        },
        LAYER + "post_attention_layernorm.weight": core.core_norm(facts, norm),
        LAYER + "mlp.router.weight": Copy(_CORE + "router.weight"),
        **core.gated_sources(facts, EXPERT, _CORE_EXPERT + "linear_fc1."),
        LAYER + EXPERT + "dense_4h_to_h.weight": Transpose(
            _CORE_EXPERT + "linear_fc2.weight", cut=1
        ),
    }


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
        ignored=(*dense.ignored, "*.router.local_tokens_per_expert"),
        warnings=_core_warnings,
    )
    for dense in core.LLAMA_CORE_MAPPINGS
)
