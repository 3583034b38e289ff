"""Mixtures of experts, written only for other engines.

The decoder of `families.dense` with a router and experts in place of all or some MLPs, and with its
attention or DeepSeek's multi-latent attention. Neither our engine nor FasterTransformer serves
them: they are only written as Hugging Face folders and torch_dist checkpoints.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.dense import core
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.gpt.megatron import (
    CORE_LAYER,
    assumed_tokens_warning,
    core_names,
    core_traits,
    is_core,
)
from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.huggingface import Trait
from export_scripts.families.mapping.known_settings import megatron_obstacles
from export_scripts.families.mapping.megatron_traits import MegatronTraits
from export_scripts.families.mapping.rotary import rotary_fraction, yarn_growth
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Constant,
    Copy,
    Nesting,
    Rows,
    Sources,
)
from foundations.files.json_content import Fields, Table, is_count

EXPERT = "mlp.experts.{expert}."
CORRECTION = "mlp.router.correction"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The fields that a mixture has in addition to a decoder, in config and architecture.

    Sizes of multi-latent attention have Hugging Face's names; without it, they are None.
    """

    expert_num: int
    experts_per_token: int
    # The weights of a token's experts sum to 1; else they are shares of the scores of all experts.
    normalized_routing: bool = True
    router_scores: str = "softmax"  # softmax over all experts, or sigmoid
    has_router_correction: bool = False  # added to scores to choose experts, not to weight them
    routed_scale: float = 1.0  # factor of the weights of a token's experts
    # Experts are chosen from the `group_topk` best of `group_num` groups. A group's score is the
    # sum of its `group_score` best experts.
    group_num: int = 1
    group_topk: int = 1
    group_score: int = 0
    dense_layers: tuple[int, ...] = ()  # layers with an MLP instead of experts
    dense_inter_size: int = 0  # width of that MLP
    shared_inter_size: int = 0  # width of the shared expert, which reads every token; 0: none
    has_shared_gate: bool = False  # whether a sigmoid weights its output
    # Router and experts have biases, and the rows of an expert's two halves alternate.
    has_expert_bias: bool = False
    has_sinks: bool = False  # each head's softmax has a further score, of no position
    # An expert's gate is f x sigmoid(alpha x f) x (g + offset) of its halves f and g; the limit is
    # an upper bound of f, and bounds g on both sides.
    gate_alpha: float = 1.0
    gate_offset: float = 0.0
    gate_limit: float | None = None
    q_lora_rank: int | None = None  # None: queries are not compressed
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None  # dimensions of a head that are not rotated
    v_head_dim: int | None = None
    latent_eps: float | None = None  # epsilon of norms of compressed queries, keys and values
    mscale: float | None = None  # YaRN's
    mscale_all_dim: float | None = None  # YaRN's


@dataclass(frozen=True, kw_only=True)
class MixtureArchitecture(DecoderArchitecture, Experts):
    """A decoder with experts; no engine here computes it."""


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DenseConfig, Experts):
    """A mixture; `inter_size` is the width of an expert.

    With multi-latent attention, `size_per_head` is the number of rotated dimensions.
    """

    SECTION: ClassVar[str] = "mixture"
    INDICES: ClassVar[Mapping[str, str]] = {"layer": "num_layer", "expert": "expert_num"}
    ARCHITECTURE: ClassVar[type[DecoderArchitecture]] = MixtureArchitecture

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(number not in self.dense_layers for number in range(self.num_layer))

    @property
    def first_dense(self) -> int:
        """The number of layers before the first one with experts."""
        return (*self.expert_layers, True).index(True)

    @property
    def shared_expert_num(self) -> int:
        """The width of the shared expert in widths of the other experts."""
        return self.shared_inter_size // self.inter_size

    @property
    def attention_width(self) -> int:
        """The total width of all heads' values."""
        return self.head_num * (self.v_head_dim or self.size_per_head)

    @property
    def rotary_scaling(self) -> Fields:
        """Parameters of rotary scaling by Hugging Face's names."""
        scaling = super().rotary_scaling
        if self.kv_lora_rank and scaling:
            scaling.pop("attention_factor", None)
            scaling |= {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        return scaling


MIXTURE = ModelFamily(
    name="mixture",
    model_type="Mixture",
    config=MixtureConfig,
    layout=layout_table("mixture"),
    ft_backend=False,
    has_shards=False,
)


def _dense(settings: Settings, values: Fields, layers: Iterable[int]) -> Fields:
    """Return the layers without experts, and the shared expert of the others."""
    found = tuple(layers)
    width = settings.integer("intermediate_size") if found else 0
    shared = values.pop("shared_expert_num", 0) * values["inter_size"]
    return {
        "dense_layers": found,
        "dense_inter_size": width,
        **({"shared_inter_size": shared} if shared else {}),
    }


def _qwen_layers(settings: Settings, values: Fields) -> Fields:
    """Return the layers without experts: those listed, and all but every n-th."""
    listed = settings.get("mlp_only_layers") or []
    every = settings.integer("decoder_sparse_step", default=1)
    numbers = range(values["num_layer"])
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        settings.note(f"mlp_only_layers = {listed!r:.100}: expected a list of layer numbers")
        listed = []
    return _dense(settings, values, (n for n in numbers if n in listed or (n + 1) % every))


def _first_layers(settings: Settings, values: Fields) -> Fields:
    """Return the layers without experts: the first ones."""
    first = values.pop("first_dense", 0)
    return _dense(settings, values, range(min(first, values["num_layer"])))


_KINDS = ("dense", "sparse")


def _listed_layers(settings: Settings, values: Fields) -> Fields:
    """Return the layers without experts from a list; without a list, it is the first layer."""
    count = values["num_layer"]
    kinds = settings.value("mlp_layer_types", default=["dense", *["sparse"] * (count - 1)])
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in _KINDS for k in kinds):
        settings.note(
            f"mlp_layer_types = {kinds!r:.200}: expected dense or sparse for each of the {count} "
            "layers"
        )
        kinds = []
    return _dense(settings, values, (n for n, kind in enumerate(kinds) if kind == "dense"))


def best_of_groups(values: Table) -> Fields:
    """Return the field that the two best experts of a group make its score, if there are groups."""
    return {"group_score": 2} if values["group_num"] > 1 else {"group_topk": 1}


def _ernie_layers(settings: Settings, values: Fields) -> Fields:
    """Return the layers without experts: those outside of a range, and all but every n-th in it."""
    last = values["num_layer"] - 1
    first = settings.natural("moe_layer_start_index", default=1)
    stated = settings.value("moe_layer_end_index", default=-1)
    end = last if stated == -1 else settings.natural("moe_layer_end_index")
    every = settings.integer("moe_layer_interval", default=1)
    numbers = range(values["num_layer"])
    return _dense(
        settings, values, (n for n in numbers if not first <= n <= end or (n + 1) % every)
    )


def _softmax_groups(settings: Settings, _: Fields) -> Fields:
    """Return the fields of groups, scored by their best expert, if topk_method uses groups."""
    method = settings.get("topk_method") or "greedy"
    if method not in (known := ("greedy", "group_limited_greedy")):
        settings.note(f"topk_method = {method!r:.100}: known: {', '.join(known)}")
    groups = {"group_num": 1, "group_topk": 1}
    if method != "greedy":
        groups = {
            "group_num": settings.integer("n_group"),
            "group_topk": settings.integer("topk_group"),
            "group_score": 1,
        }
    return groups


def _written_groups(config: MixtureConfig) -> Fields:
    if config.group_num == 1:
        return {"topk_method": "greedy"}
    return {
        "topk_method": "group_limited_greedy",
        "n_group": config.group_num,
        "topk_group": config.group_topk,
    }


def _written_layers(config: MixtureConfig, **own: Any) -> Fields:
    """Return the width of layers without experts, and further settings."""
    return {"intermediate_size": config.dense_inter_size or config.inter_size, **own}


def _latent(settings: Settings, values: Fields) -> Fields:
    """Return the fields of multi-latent attention: its epsilon, and YaRN's scales.

    transformers has a fixed epsilon for its norms.
    """
    fields = {"latent_eps": 1e-6}
    if values["kv_head_num"] != values["head_num"]:
        settings.note(f"num_key_value_heads = {values['kv_head_num']}: expected as many as heads")
    kind = values.get("rotary_scaling_type")
    if kind is None:
        return fields
    source = settings.source
    given = source.get("rope_scaling") or source.get("rope_parameters") or {}
    both = given.get("mscale"), given.get("mscale_all_dim")
    if kind != "yarn" or given.get("attention_factor") is not None:
        settings.note(f"rotary scaling {given!r:.300}: expected yarn without attention_factor")
    elif not all(both) and (both[1] or both[0] not in (None, 1)):
        settings.note(
            f"mscale = {both[0]!r:.100} and mscale_all_dim = {both[1]!r:.100}: transformers uses "
            "both or neither, vLLM each of them"
        )
    mscale, all_dim = both if all(both) else (1.0, 0.0)
    return {**fields, "mscale": mscale, "mscale_all_dim": all_dim}


_GPT_OSS_GATE = 1.702, 7.0


def _gate_warnings(config: MixtureConfig) -> list[str]:
    gate = config.gate_alpha, config.gate_limit
    if not config.has_expert_bias or gate == _GPT_OSS_GATE:
        return []
    return [
        f"swiglu_alpha and swiglu_limit are {gate}, but transformers 4 and vLLM compute every "
        f"gpt-oss with {_GPT_OSS_GATE}: load the folder with transformers 5"
    ]


# Operations that `decoders.yaml` names.
TRAITS = {
    "first_layers": Trait(_first_layers, _written_layers),
    "qwen_layers": Trait(
        _qwen_layers,
        lambda config: _written_layers(config, mlp_only_layers=list(config.dense_layers)),
    ),
    "ernie_layers": Trait(
        _ernie_layers,
        lambda config: _written_layers(
            config,
            moe_layer_start_index=config.first_dense,
            moe_layer_end_index=config.num_layer - 1,
        ),
    ),
    "listed_layers": Trait(
        _listed_layers,
        lambda config: _written_layers(
            config,
            mlp_layer_types=[_KINDS[has_experts] for has_experts in config.expert_layers],
        ),
    ),
    "sigmoid_groups": Trait(lambda _, values: best_of_groups(values)),
    "softmax_groups": Trait(_softmax_groups, _written_groups),
    "latent": Trait(_latent),
}
FUNCTIONS = {"gpt_oss_gate": lambda _, config: _gate_warnings(config)}

# Kinds of softmax with a further score of no position, which the first fixes at 0.
# megatron/core/transformer/dot_product_attention.py
_SINKS = ("off-by-one", "learnable")
_QUICK_GELU = 1.702  # x sigmoid(1.702 x); megatron/core/fusions/fused_bias_geglu.py
_BALANCING = (None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def _core_reasons(facts: Facts) -> list[str]:
    traits = core_traits(facts)
    reasons = balancing_reasons(traits)
    if traits.query_groups != traits.head_num and traits.get("multi_latent_attention"):
        reasons.append(
            f"num_query_groups = {traits.query_groups} with multi_latent_attention: expected none"
        )
    return core.core_reasons(facts, is_mixture=True) + reasons


def balancing_reasons(traits: MegatronTraits) -> list[str]:
    """Return a reason for each kind of load balancing that affects the choice of experts."""
    balancing = traits.get("moe_router_load_balancing_type")
    return [
        f"moe_router_load_balancing_type = {kind!s:.100}: it affects the routing, too"
        for kind in (balancing if isinstance(balancing, list) else [balancing])
        if kind not in _BALANCING
    ]


def _core_dense_layers(traits: MegatronTraits) -> tuple[int, ...]:
    """Return the layers without experts: from a list, or all but every n-th from the first."""
    stated, count = traits.get("moe_layer_freq", 1), traits.num_layer
    if is_count(stated, 1):
        return tuple(number for number in range(count) if number % stated)
    if isinstance(stated, list) and len(stated) == count and set(stated) <= {0, 1}:
        return tuple(number for number, has_experts in enumerate(stated) if not has_experts)
    traits.settings.note(
        f"moe_layer_freq = {stated!r:.100}: expected a number, or 0 or 1 for each layer"
    )
    return ()


def core_experts(traits: MegatronTraits) -> Fields:
    """Return the fields of experts: sizes, and how they are chosen and weighted.

    megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function
    """
    settings = traits.settings
    per_token = settings.integer("moe_router_topk", default=2)
    scores = traits.get("moe_router_score_function") or "softmax"
    if scores not in ("softmax", "sigmoid"):
        settings.note(f"moe_router_score_function = {scores!r:.100}: known: softmax, sigmoid")
    is_softmax = scores == "softmax"
    groups = {}
    if traits.get("moe_router_group_topk"):
        best = settings.integer("moe_router_group_topk")
        number = settings.integer("moe_router_num_groups")
        groups = {"group_num": number, "group_topk": best, "group_score": per_token // best}
    return {
        "inter_size": settings.integer("moe_ffn_hidden_size", default=traits.inter_size),
        "expert_num": traits.expert_num,
        "shared_inter_size": settings.natural("moe_shared_expert_intermediate_size", default=0),
        "experts_per_token": per_token,
        "normalized_routing": not traits.get("moe_router_pre_softmax")
        if is_softmax
        else per_token > 1,
        "router_scores": scores,
        "has_router_correction": not is_softmax,
        "routed_scale": settings.nonzero("moe_router_topk_scaling_factor") or 1.0,
        **(groups if groups.get("group_num", 1) > 1 else {}),
    }


def _core_latent(traits: MegatronTraits) -> Fields:
    """Return the fields of multi-latent attention: sizes and rotary positions.

    YaRN's parameters must be stated, as defaults differ between releases.
    megatron/core/transformer/multi_latent_attention.py
    """
    settings = traits.settings
    if not traits.get("multi_latent_attention"):
        return {}
    kind = traits.get("rope_type") or "yarn"
    rope = settings.integer("qk_pos_emb_head_dim")
    has_rank = traits.get("q_lora_rank") is not None
    factor = settings.number("rotary_scaling_factor")
    for name in ("mscale", "mscale_all_dim"):
        settings.value(name)
    mscale, all_dim = (settings.nonzero(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    # Overrides what settings of plain attention may have set.
    scaling = dict.fromkeys(("rotary_scaling_type", "rotary_factor"))
    if kind == "yarn":
        original = "original_max_position_embeddings"
        if traits.get(original) is None:  # before megatron-core 0.13
            original = "max_position_embeddings"
        if (mscale == 0) != (all_dim == 0) and (mscale, all_dim) != (1, 0):
            settings.note(
                f"mscale = {mscale:g}, mscale_all_dim = {all_dim:g}: transformers uses both, or "
                "1 and 0"
            )
        scaling = core.yarn_fields(settings, original, (mscale, all_dim)) | {
            "mscale": mscale,
            "mscale_all_dim": all_dim,
        }
    elif kind != "rope":
        settings.note(f"rope_type = {kind!r:.100}: known: rope, yarn")
    elif yarn_growth(factor, all_dim) != 1:
        settings.note(
            f"mscale_all_dim = {all_dim:g} with rope_type = rope: scores are scaled without YaRN, "
            "which no model in transformers does"
        )
    fraction = traits.rotary_fraction if kind == "rope" else 1.0
    return {
        **scaling,
        "size_per_head": rope,
        "rotary_embedding": int(rope * min(fraction, 1.0)),
        "rotary_base": traits.rotary_base,
        "query_key_norm": None,
        "q_lora_rank": settings.integer("q_lora_rank") if has_rank else None,
        "kv_lora_rank": settings.integer("kv_lora_rank"),
        "qk_nope_head_dim": settings.integer("qk_head_dim"),
        "v_head_dim": settings.integer("v_head_dim"),
        "latent_eps": traits.layernorm_eps,
    }


def _core_config(facts: Facts) -> MixtureConfig:
    def own(traits: MegatronTraits) -> Fields:
        settings = traits.settings
        dense = _core_dense_layers(traits)
        experts = core_experts(traits)
        first = next((n for n in range(traits.num_layer) if n not in dense), 0)
        gate = f"{CORE_LAYER}mlp.shared_experts.gate_weight".format(layer=first)
        return {
            "model_name": "mixture",
            "has_mlp_bias": False,
            "has_expert_bias": traits.bias,
            "has_sinks": traits.get("softmax_type") in _SINKS,
            "gate_alpha": _QUICK_GELU if traits.activation == "quick_gelu" else 1.0,
            "gate_offset": settings.nonzero("glu_linear_offset") or 0.0,
            "gate_limit": settings.nonzero("activation_func_clamp_value"),
            "dense_layers": dense,
            "dense_inter_size": traits.inter_size if dense else 0,
            "has_shared_gate": facts.has(gate)
            or bool(experts["shared_inter_size"] and traits.get("moe_shared_expert_gate")),
            **experts,
            **_core_latent(traits),
        }

    return core.core_config(facts, MixtureConfig, own)


def _core_args(config: MixtureConfig, is_tied: bool) -> list[Fields]:
    is_softmax = config.router_scores == "softmax"
    own = {
        "num_experts": config.expert_num,
        "ffn_hidden_size": config.dense_inter_size or config.inter_size,
        "moe_ffn_hidden_size": config.inter_size,
        "moe_router_topk": config.experts_per_token,
        "moe_router_pre_softmax": is_softmax and not config.normalized_routing,
        "moe_router_score_function": config.router_scores,
        "moe_router_enable_expert_bias": config.has_router_correction,
        "moe_router_topk_scaling_factor": config.routed_scale if config.routed_scale != 1 else None,
        "moe_shared_expert_intermediate_size": config.shared_inter_size or None,
        "moe_shared_expert_gate": config.has_shared_gate,
    }
    if config.dense_layers:
        own["moe_layer_freq"] = [*map(int, config.expert_layers)]
    if config.group_num > 1:
        own["moe_router_num_groups"] = config.group_num
        own["moe_router_group_topk"] = config.group_topk
    return [{**args, **own, **_latent_args(config)} for args in core.dense_args(config, is_tied)]


def _latent_args(config: MixtureConfig) -> Fields:
    """Return the arguments of multi-latent attention; qk_layernorm stands for its norms."""
    if config.kv_lora_rank is None:
        return {}
    scaling = config.rotary_scaling
    yarn = (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    )
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "kv_channels": config.v_head_dim,
        "num_query_groups": config.head_num,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.size_per_head,
        "v_head_dim": config.v_head_dim,
        "rotary_percent": rotary_fraction(config.rotary_embedding, config.size_per_head),
        "rotary_interleaved": False,  # multi-latent attention always rotates neighbours
        "rope_type": "yarn" if scaling else "rope",
        "rotary_scaling_factor": scaling.get("factor", 1.0),
        **{name: scaling[name] for name in yarn if name in scaling},
    }


def _core_weights(facts: Facts, config: MixtureConfig) -> Sources:
    shown = {
        "post_attention_layernorm": config.first_dense % config.num_layer,
        "dense_layernorm": (*config.dense_layers, 0)[0],
    }
    names = core_names(facts, shown)
    table = core.core_sources(facts, names, MIXTURE.layout)
    halves = Nesting("hf", ("f", "h"), {"h": 2})
    table |= {
        f"{LAYER}{EXPERT}gate_up.{kind}": Rows(
            f"{names[f'{LAYER}{EXPERT}dense_h_to_4h']}.{kind}", 0, lambda _: halves
        )
        for kind in ("weight", "bias")
    }
    table[f"{LAYER}attention.sinks"] = (
        Copy(f"{CORE_LAYER}self_attention.core_attention.softmax_offset", cut=0)
        if facts.config.get("softmax_type") == "learnable"
        else Constant(("head_num",))
    )
    if not facts.config.get("moe_router_enable_expert_bias"):
        table[f"{LAYER}{CORRECTION}.bias"] = Constant(("expert_num",))
    return table


# Setting -> what only megatron-core does.
# megatron/core/transformer/moe/router.py, apply_input_jitter
_ONLY_CORE = {
    "moe_expert_capacity_factor": "megatron-core drops tokens beyond an expert's capacity",
    "moe_input_jitter_eps": "megatron-core multiplies a router's input by noise, also in inference",
}


def core_warnings(facts: Facts, config: MixtureConfig) -> list[str]:
    """Return warnings about tokens, a gate, and what only megatron-core does with experts."""
    own = [
        f"{key} = {facts.config[key]}: {what}; engines that load the folder do not"
        for key, what in _ONLY_CORE.items()
        if facts.config.get(key)
    ]
    return assumed_tokens_warning(facts, config) + _gate_warnings(config) + own


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
        obstacles=lambda facts: megatron_obstacles(core_traits(facts).source, "dense", "mixture"),
        ignored=(*dense.ignored, "*.router.local_tokens_per_expert"),
        warnings=core_warnings,
        written=_core_args if dense.written else None,
    )
    for dense in core.DENSE_CORE_MAPPINGS
)
