"""Hybrids of Mamba-2, attention, MLPs and experts, written only for other engines.

megatron-core's HybridModel with Mamba layers is Hugging Face's Nemotron-H. Each layer has one norm
and one mixer. Neither our engine nor FasterTransformer serves them: they are only written as
Hugging Face folders.

Sources: NVIDIA/Megatron-LM, megatron/core/ssm/mamba_mixer.py and megatron/core/models/hybrid;
NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/nemotronh; transformers 5.24,
models/nemotron_h.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.dense import core
from export_scripts.families.gpt.megatron import (
    CORE_HEAD,
    CORE_LAYER,
    CORE_WTE,
    core_names,
    core_traits,
)
from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.families.layout.decoder import HEAD, LAYER
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.huggingface import Trait
from export_scripts.families.mapping.known_settings import megatron_obstacles
from export_scripts.families.mapping.megatron_traits import MegatronTraits, beyond
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Constant,
    Copy,
    Nesting,
    Rows,
    Sources,
    transposed,
)
from export_scripts.families.mixture import (
    CORRECTION,
    Experts,
    MixtureArchitecture,
    MixtureConfig,
    balancing_reasons,
    best_of_groups,
    core_experts,
    core_warnings,
)
from foundations.files.json_content import Fields

_PATTERN = "hybrid_layer_pattern"
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M*-E"
# transformers' names of the layers, in older and newer releases.
_KINDS = {
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mlp": _MLP,
    "moe": _EXPERTS,
}
# Parts of a Mamba layer's first projection, in order of rows -> their widths; x, B and C are
# convolved.
_PARTS = {
    "z": "mamba_head_num*mamba_head_dim",
    "x": "mamba_head_num*mamba_head_dim",
    "B": "mamba_group_num*mamba_state",
    "C": "mamba_group_num*mamba_state",
    "dt": "mamba_head_num",
}
_CONVOLVED = ("x", "B", "C")


@dataclass(frozen=True, kw_only=True)
class _Mamba:
    """Sizes of Mamba layers; all are 0 in a model without such layers."""

    mamba_head_num: int = 0
    mamba_head_dim: int = 0
    mamba_group_num: int = 0  # heads of a group share B, C and a norm
    mamba_state: int = 0
    conv_kernel: int = 0
    mamba_eps: float = 0.0  # epsilon of the norm before the last projection
    least_step: float = 0.0  # lower bound of time steps


@dataclass(frozen=True, kw_only=True)
class HybridArchitecture(MixtureArchitecture, _Mamba):
    """A decoder with several kinds of layers; no engine here computes it."""

    pattern: str


@dataclass(frozen=True, kw_only=True)
class HybridConfig(MixtureConfig, _Mamba):
    """A hybrid; `pattern` has Megatron's letter of each layer."""

    SECTION: ClassVar[str] = "hybrid"
    ARCHITECTURE: ClassVar[type[DecoderArchitecture]] = HybridArchitecture

    pattern: str
    inter_size: int = 0
    expert_num: int = 0
    experts_per_token: int = 0
    expert_latent: int | None = None  # width of experts' inputs and outputs, if not hidden_size

    @property
    def kinds(self) -> tuple[str, ...]:
        """The letter of each layer."""
        return tuple(self.pattern)

    @property
    def expert_width(self) -> int:
        """The width of experts' inputs and outputs."""
        return self.expert_latent or self.hidden_size


HYBRID = ModelFamily(
    name="hybrid",
    model_type="Hybrid",
    config=HybridConfig,
    layout=layout_table("hybrid"),
    ft_backend=False,
    has_shards=False,
)

# Letter -> fields that only concern layers of this kind.
_OWN_FIELDS = {
    _MAMBA: [each.name for each in dataclasses.fields(_Mamba)],
    _MLP: ["dense_inter_size"],
    _EXPERTS: [
        "inter_size",
        "expert_latent",
        *(each.name for each in dataclasses.fields(Experts) if not each.name.startswith("dense_")),
    ],
}


def _relevant(fields: Fields) -> Fields:
    """Return the fields, with defaults for those of layers that the pattern lacks."""
    usual = {each.name: each.default for each in dataclasses.fields(HybridConfig)}
    absent = {
        name: usual[name]
        for letter, names in _OWN_FIELDS.items()
        if letter not in fields["pattern"]
        for name in names
    }
    return {**fields, "num_layer": len(fields["pattern"]), **absent}


def _mixer(root: str, conv: str = "conv1d.", *, parts_apart: bool = False) -> Sources:
    """Return the sources of Mamba layers, whose modules are below `root`.

    The parts of a projection, and of its convolution, are in one tensor (of each training rank), or
    with `parts_apart` in separate tensors.
    """
    table: Sources = {
        f"{LAYER}mamba.{ours}": Copy(f"{root}{theirs}", cut=0)
        for ours, theirs in (
            ("A_log", "A_log"),
            ("D", "D"),
            ("dt_bias", "dt_bias"),
            ("scales", "norm.weight"),
        )
    }
    table[f"{LAYER}mamba.dense.weight"] = transposed(f"{root}out_proj.weight", cut=1)
    for module, kind, parts, key in (
        ("in_proj", "weight", tuple(_PARTS), "in_proj.weight"),
        ("conv1d", "weight", _CONVOLVED, f"{conv}weight"),
        ("conv1d", "bias", _CONVOLVED, f"{conv}bias"),
    ):
        table |= {
            f"{LAYER}mamba.{module}_{part}.{kind}": transposed(f"{root}{key}.{part}", 0)
            if parts_apart
            else _part(f"{root}{key}", parts, place)
            for place, part in enumerate(parts)
        }
    return table


def _part(key: str, parts: Sequence[str], place: int) -> Rows:
    """Return the source of one of the parts that make up the rows of a tensor."""

    def nesting(config: Any) -> Nesting:
        widths = [config.dim(_PARTS[part], {}) for part in parts]
        # Ranks divide each part, and therefore their greatest common divisor.
        ends = [sum(widths[:n]) // math.gcd(*widths) for n in range(len(widths) + 1)]
        return Nesting("mf", ("mf",), {"m": ends[-1]}, ("m", ends[place], ends[place + 1]))

    return Rows(key, 0, nesting, place=place)


def _pattern(settings: Settings) -> str:
    """Return the letters of the layers, from a pattern or a list of names."""
    listed = settings.get("layers_block_type") or settings.get("layer_types")
    stated = settings.value("hybrid_override_pattern", default="ME*-")
    if isinstance(listed, list):
        stated = "".join(_KINDS.get(str(kind), "?") for kind in listed)
    if isinstance(stated, str) and stated and not set(stated) - set(_KINDS.values()):
        return stated
    settings.note(
        f"hybrid_override_pattern = {stated!r:.200}: expected M (Mamba), * (attention), - (an MLP) "
        "or E (experts) for each layer"
    )
    return _ATTENTION


# Letter -> settings that are only written for a model with layers of this kind.
_OWN_KEYS = {
    _MAMBA: "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel time_step_min",
    _EXPERTS: "n_routed_experts num_experts_per_tok moe_intermediate_size n_group topk_group "
    "moe_shared_expert_intermediate_size moe_latent_size routed_scaling_factor norm_topk_prob",
}


def _read(settings: Settings, values: Fields) -> Fields:
    return _relevant(
        {
            **values,
            **best_of_groups(values),
            "pattern": _pattern(settings),
            "dense_inter_size": settings.integer("intermediate_size", default=21504),
            "mamba_eps": values["layernorm_eps"],
        }
    )


def _written(config: HybridConfig) -> Fields:
    """Return the settings of layers, with those that only transformers 5 or vLLM reads."""
    absent = [
        name
        for kind, names in _OWN_KEYS.items()
        if kind not in config.pattern
        for name in names.split()
    ]
    return {
        "hybrid_override_pattern": config.pattern,
        "num_hidden_layers": config.num_layer,
        "head_dim": config.size_per_head,
        "intermediate_size": config.dense_inter_size or None,
        **dict.fromkeys(absent),
        "n_shared_experts": 1 if _EXPERTS in config.pattern else None,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,  # transformers 5.24 ties nothing here
    }


def _warnings(_: Facts, config: HybridConfig) -> list[str]:
    activation = config.activation_type.lower()
    if _MLP not in config.pattern or activation == "relu2":
        return []
    return [f"mlp_hidden_act is {activation}: vLLM computes MLPs of every Nemotron-H with relu2"]


SETTINGS = Trait(_read, _written)
FUNCTIONS = {
    "nemotron_h": lambda *_: _mixer("backbone.layers.{layer}.mixer."),
    "nemotron_h_activation": _warnings,
}

# Constants of megatron/core/ssm/mamba_mixer.py. The bound is not 0, as transformers takes its
# logarithm.
_CORE_KERNEL, _CORE_EPS, _NO_BOUND = 4, 1e-5, 1e-30
# Names of a layer's only norm, separate or fused with the module that reads it.
_CORE_NORMS = (
    "norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight",
    "mixer.in_proj.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight",
)  # fmt: skip


def _core_reasons(facts: Facts) -> list[str]:
    traits = core_traits(facts)
    known = {
        "position_embedding_type": (traits.position, ("none",)),
        "add_bias_linear": (traits.bias, (False,)),
        "a gate of MLPs (swiglu, gated_linear_unit)": (traits.gated, (False,)),
    }
    reasons = core.core_reasons(facts) + balancing_reasons(traits)
    return reasons + beyond(known, ": Nemotron-H only has")


def _core_config(facts: Facts) -> HybridConfig:
    def own(traits: MegatronTraits) -> Fields:
        settings = traits.settings
        size = settings.integer("mamba_head_dim", default=64)
        has_latent = traits.get("moe_latent_size") is not None
        return _relevant(
            {
                **core_experts(traits),
                "model_name": "hybrid",
                "pattern": traits.source[_PATTERN],
                "tie_word_embeddings": False,
                "rotary_embedding": 0,
                "dense_inter_size": traits.inter_size,
                "expert_latent": settings.integer("moe_latent_size") if has_latent else None,
                "mamba_head_num": settings.integer(
                    "mamba_num_heads", default=2 * traits.hidden // size
                ),
                "mamba_head_dim": size,
                "mamba_group_num": settings.integer("mamba_num_groups", default=8),
                "mamba_state": settings.integer("mamba_state_dim", default=128),
                "conv_kernel": _CORE_KERNEL,
                "mamba_eps": _CORE_EPS,
                "least_step": _NO_BOUND,
            }
        )

    return core.core_config(facts, HybridConfig, own)


def _core_weights(facts: Facts, config: HybridConfig) -> Sources:
    first = f"{CORE_LAYER}mixer.".format(layer=config.pattern.find(_MAMBA))
    # Since megatron-core 0.19 they are parameters of the mixer, except in distributed checkpoints.
    conv = "conv1d_" if facts.has(f"{first}conv1d_weight") else "conv1d."
    own = _mixer(f"{CORE_LAYER}mixer.", conv, parts_apart=facts.has(f"{first}in_proj.weight.z"))
    for number in range(config.num_layer):
        keys = [CORE_LAYER.format(layer=number) + norm for norm in _CORE_NORMS]
        own[f"{LAYER}mixer_norm.weight".format(layer=number)] = Copy(
            next(filter(facts.has, keys), keys[0])
        )
    if core_traits(facts).tied and not facts.has(CORE_HEAD):
        own[HEAD] = Copy(CORE_WTE, cut=0)
    if not facts.config.get("moe_router_enable_expert_bias"):
        own[f"{LAYER}{CORRECTION}.bias"] = Constant(("expert_num",))
    return core.core_sources(facts, core_names(facts), HYBRID.layout, own)


HYBRID_CORE_MAPPINGS: tuple[SourceMapping, ...] = tuple(
    dataclasses.replace(
        dense,
        name=f"{dense.format}-core-hybrid",
        title=dense.title.replace("Llama-style decoder", "HybridModel with Mamba layers"),
        family=HYBRID,
        matches=lambda facts: bool(facts.config.get(_PATTERN)) and facts.has(CORE_WTE),
        config=_core_config,
        weights=_core_weights,
        unsupported=_core_reasons,
        obstacles=lambda facts: megatron_obstacles(
            {**core_traits(facts).source, _PATTERN: None, "moe_latent_size": None},
            "dense",
            "",
        ),
        ignored=(*dense.ignored, "*.router.local_tokens_per_expert"),
        warnings=core_warnings,
        written=None,
    )
    for dense in core.DENSE_CORE_MAPPINGS
    if dense.format in ("megatron", "nemo2", "bridge")
)
