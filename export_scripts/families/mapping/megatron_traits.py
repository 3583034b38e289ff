"""Traits of a Megatron-style decoder, from the configurations of NeMo, Megatron-LM and Bridge.

Key names: NeMo 1.x, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml; Megatron-LM,
megatron/training/arguments.py; NeMo 2, nemo/collections/llm/gpt/model/base.py;
NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/gpt_provider.py; megatron-core,
megatron/core/transformer/transformer_config.py.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import last_name
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts
from foundations.files.json_content import Table
from foundations.files.yaml_content import read_table

# NeMo's fused variants have the prefix "fast-" and compute the same.
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
# Names of activations, and of megatron-core's functions -> our names.
_PLAIN = {
    **dict.fromkeys(("gelu", "openai-gelu", "openai_gelu", "gelu_new", "fast_gelu"), "gelu"),
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("squared-relu", "squared_relu"), "relu2"),
}

_ZERO_CENTRED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
# YAML reads 1e-5, which has no point, as text.
_EXPONENT = re.compile(r"\d+(\.\d+)?e[+-]?\d+", re.IGNORECASE)


def megatron_settings(config: Table, label: str) -> Settings:
    """Return the settings of NeMo, Megatron-LM or megatron-core; null counts as absent."""
    numbers = {
        key: float(value)
        for key, value in config.items()
        if isinstance(value, str) and _EXPONENT.fullmatch(value)
    }
    return Settings({**config, **numbers}, label)


class MegatronTraits:
    """Traits of a Megatron-style decoder, from the configuration of any format.

    Sizes are 0 if the source does not state them.

    Raises:
        CheckpointMismatchError: Sizes or numbers are malformed; all are listed.
    """

    def __init__(self, source_format: str, config: Table) -> None:
        label, positions, activation_of = _FORMATS[source_format]
        if source_format in _SCALED:
            config = {**config, "use_rope_scaling": bool(config.get(_SCALED[source_format]))}
            bases = config.get("rotary_base")
            if isinstance(bases, list) and len(bases) == 2:  # layers with a window, and others
                config = {**config, "rotary_local_base": bases[0], "rotary_base": bases[1]}
        if source_format in _SCALED_BY_CORE:
            config = {**config, **dict.fromkeys(_SCALING_OF_NEMO)}
        settings = megatron_settings(config, label)
        self.settings = settings  # for settings that only one family reads
        self.source, self.get = settings.source, settings.get  # the configuration

        def size(*keys: str, default: int = 0) -> int:
            return settings.integer(_stated(config, *keys), default=default, least=0)

        def number(*keys: str, default: float) -> float:
            return settings.number(_stated(config, *keys), default=default)

        self.head_num = heads = size("num_attention_heads")
        self.hidden = hidden = size("hidden_size")
        self.inter_size = size("ffn_hidden_size", default=4 * hidden)
        self.num_layer = size("num_layers")
        self.max_pos_seq_len = size(*positions)
        self.size_per_head = size("kv_channels", default=hidden // heads if heads else 0)
        # Megatron-LM states a number of groups even if no heads share one.
        is_grouped = config.get("group_query_attention", True)
        groups = ("num_query_groups", "num_key_value_heads")  # the latter in Megatron-DeepSpeed
        self.query_groups = (size(*groups) if is_grouped else 0) or heads
        self.adapter_inter_size = size("project_size")
        self.layernorm_eps = number("layernorm_epsilon", "norm_epsilon", default=1e-5)
        # learned_absolute, rope, alibi, ...
        self.position = str(config.get("position_embedding_type") or "learned_absolute")
        if config.get("use_rotary_position_embeddings"):
            self.position = "rope"
        self.normalization = _normalization(config)  # layernorm, layernorm1p, rmsnorm, ...
        # The activation is gelu, relu, silu, or the source's word. A fused kernel adds the bias and
        # computes gelu in its tanh form.
        self.activation, self.gated, self.fused_gelu, by_erf = activation_of(config)
        self.exact_gelu = by_erf and not self.fused_gelu
        self.bias = bool(_first(config, "bias", "add_bias_linear", default=True))
        is_shared = _first(config, "share_embeddings_and_output_weights", default=True)
        self.tied = bool(is_shared) and not config.get("untie_embeddings_and_output_weights")
        # Megatron-DeepSpeed lists the experts of each layer.
        experts = _first(config, "num_moe_experts", "num_experts")
        if not isinstance(experts, list):
            experts = [size("num_moe_experts", "num_experts", default=1)]
        elif not all(type(each) is int for each in experts):
            settings.note(f"number of experts = {experts!r:.100}: expected one for each layer")
            experts = []
        self.expert_num = max(experts, default=1)
        self.rotary_base = number("rotary_base", default=10000)
        self.rotary_local_base = settings.optional("rotary_local_base")  # for layers with a window
        self.rotary_fraction = number("rotary_percentage", "rotary_percent", default=1.0)
        self.rotary_interpolation = number(
            "seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor", default=1.0
        )
        settings.finish()


def _stated(config: Table, *keys: str) -> str:
    return next((key for key in keys if config.get(key) is not None), keys[0])


def _first(config: Table, *keys: str, default: Any = None) -> Any:
    value = config.get(_stated(config, *keys))
    return default if value is None else value


def _normalization(config: Table) -> str:
    """Return the norm's name, with the suffix 1p if scales are stored as their distance from 1."""
    word = str(config.get("normalization") or "layernorm").lower()
    is_centred = any(config.get(key) for key in _ZERO_CENTRED)
    return word if word.endswith("1p") or not is_centred else f"{word}1p"


# (activation, whether it is gated, whether a kernel fuses gelu with the bias, whether gelu is by
# erf without such a kernel).
_Activation = tuple[str, bool, bool, bool]


def nemo_activation(config: Table) -> _Activation:
    """Return the activation that NeMo computes; openai_gelu overrides `activation`.

    NeMo 1.x, nlp/modules/common/megatron/mlp.py. The fused kernels, there and in megatron-core
    (megatron/core/fusions), compute the tanh form, with a gate and without.
    """
    word = str(config.get("activation") or "gelu")
    bare = word.lower().removeprefix("fast-").removeprefix("fast_")
    kind, gated = _GATED.get(bare) or _PLAIN.get(bare), bare in _GATED
    kind = "gelu" if kind and config.get("openai_gelu") else kind or word
    # Without a gate the fused kernel needs a bias to add.
    has_kernel = kind == "gelu" and (gated or _first(config, "bias", default=True))
    fused = bool(has_kernel) and nemo_fuses_activation(config)
    by_erf = bare in ("gelu", "geglu") and not config.get("openai_gelu")
    return kind, gated, fused, by_erf


def nemo_fuses_activation(config: Table) -> bool:
    """Return whether a NeMo configuration selects the kernel that fuses bias and activation."""
    return bool(_first(config, "bias_activation_fusion", "bias_gelu_fusion", default=True))


# Settings with which Transformer Engine computes the activation; its gelu is the tanh form.
# NVIDIA/TransformerEngine, transformer_engine/pytorch/ops/basic/activation.py
_BY_TE = ("use_te_activation_func", "use_transformer_engine_op_fuser")


def _megatron_activation(args: Table) -> _Activation:
    flags = {"squared_relu": "relu2", "quick_geglu": "quick_gelu", "swiglu": "silu"}
    kind = next((word for flag, word in flags.items() if args.get(flag)), "gelu")
    fuses = ("add_bias_linear", "bias_gelu_fusion")
    has_kernel = all(_first(args, each, default=True) for each in fuses)
    fused = kind == "gelu" and (has_kernel or any(args.get(each) for each in _BY_TE))
    gated = bool(args.get("swiglu") or args.get("quick_geglu"))
    return kind, gated, fused, kind == "gelu" and not args.get("openai_gelu")


def _core_activation(config: Table) -> _Activation:
    word = last_name(config.get("activation_func")) or "gelu"
    fused = word == "gelu" and any(config.get(each) for each in ("bias_activation_fusion", *_BY_TE))
    gated = bool(config.get("gated_linear_unit"))
    return _PLAIN.get(word, word), gated, fused, word == "gelu"  # only torch's gelu is by erf


# Format -> (name of its configuration in messages, keys of the longest sequence, activation).
_FORMATS = {
    "nemo": (
        "model_config.yaml", ("max_position_embeddings", "encoder_seq_length"), nemo_activation
    ),
    "megatron": ("the checkpoint's args", ("max_position_embeddings",), _megatron_activation),
    "nemo2": ("context/model.yaml", ("seq_length",), _core_activation),
    "bridge": ("run_config.yaml", ("seq_length",), _core_activation),
}  # fmt: skip
# Format -> the key that is set if positions are scaled like Llama 3.1's.
_SCALED = {"nemo2": "scale_factor", "bridge": "rope_scaling"}
# Formats whose positions megatron-core scales, which reads only rope_scaling_factor; and parameters
# that only NeMo reads.
_SCALED_BY_CORE = ("megatron", "bridge")
_SCALING_OF_NEMO = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")


def beyond(known: Mapping[str, tuple[Any, Collection[Any]]], limit: str) -> list[str]:
    """Return a reason for each key whose value is not known; `limit` comes before the known ones.

    `known` has the value of each key, and the known ones.
    """
    return [
        f"{key} = {value}{limit} {', '.join(map(str, values))}"
        for key, (value, values) in known.items()
        if value not in values
    ]


def missing_sizes(traits: MegatronTraits) -> list[str]:
    """Return a reason for each size that a folder needs and a model's configuration lacks."""
    sizes = {
        "num_attention_heads": traits.head_num,
        "hidden_size": traits.hidden,
        "num_layers": traits.num_layer,
        "ffn_hidden_size": traits.inter_size,
        "max_position_embeddings": traits.max_pos_seq_len,
    }
    return [
        f"{key} = {traits.get(key)!r}: a folder needs {key}"
        for key, value in sizes.items()
        if not value
    ]


# The size in Qwen2ModelProvider1P5B, MixtralModelProvider8x7B, Qwen3MoEModelProvider30B_A3B.
_SIZE_OF_NAME = re.compile(r"(?:\d+x)?\d+(?:P\d+)?[MB](?:_A\d+B)?$")


_KNOWN: Table = read_table(Path(__file__).with_name("megatron_models.yaml"))


def unknown_model(facts: Facts) -> list[str]:
    """Return every reason why it is unknown what a class of models computes."""
    name = _SIZE_OF_NAME.sub("", str(facts.config.get("model_class") or ""))
    known = _KNOWN["models"].get(facts.reader.format, ())
    reasons = []
    if known and name and name not in known:
        reasons.append(
            f"its class is {name}, which may compute more than the configuration states; known: "
            f"{', '.join(known)}"
        )
    layers = last_name(facts.config.get("transformer_layer_spec"))
    known_layers = _KNOWN["own_layers"].get(name, _KNOWN["layers"])
    if layers and layers not in known_layers:
        reasons.append(
            f"transformer_layer_spec = {layers}: custom layers, which may compute something else; "
            f"known: {', '.join(known_layers)}"
        )
    return reasons
