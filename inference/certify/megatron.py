"""Run a megatron-core checkpoint with megatron-core's own GPTModel, in fp32 on the CPU.

The shards of all training ranks are joined first, so that one process computes the model.
"""

# Shapes: N tokens, H hidden, V vocabulary; megatron-core's layers use (N, 1, H)

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional

from export_scripts.conversion.plan import ConversionPlan
from export_scripts.families.gpt.megatron import core_traits
from export_scripts.families.mapping.megatron_traits import MegatronTraits
from export_scripts.numeric.arrays import to_float32
from inference.certify.activations import (
    LOGITS,
    Activations,
    ModelInputs,
    Source,
    record_layers,
)

# Norm that Transformer Engine fuses into the next linear layer -> its module without fusion.
_UNFUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Low and high frequency factor and original length, which GPTModel hard-codes.
_LLAMA31 = [1.0, 4.0, 8192]
_SCALINGS = (None, "linear", "llama3")
_ACTIVATIONS = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda values: functional.relu(values).square(),
}
# Fields of a family's config that `_config` and `_model` pass on, or that do not affect the
# computation. All others must have their default.
_SUPPORTED_FIELDS = frozenset({
    "activation_type", "attention_scale", "exact_gelu", "has_attention_dense_bias",
    "has_mlp_bias", "has_qkv_bias", "layernorm_eps", "max_pos_seq_len", "norm_one_plus",
    "norm_type", "query_key_norm", "rotary_base", "rotary_factor", "rotary_high_freq_factor",
    "rotary_interleaved", "rotary_layers", "rotary_low_freq_factor",
    "rotary_original_max_position_embeddings", "rotary_scaling_type", "tensor_para_size",
    "tie_word_embeddings",
})  # fmt: skip


def _compute(
    title: str,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    inputs: ModelInputs,
) -> Activations:
    """Run GPTModel with the arguments of its TransformerConfig, its own, and its tensors."""
    activations: Activations = {}
    count = len(inputs.ids)
    with _one_rank():
        network = _network(title, config, model, state)
        record_layers(network.decoder.layers, activations)
        mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
        logits = network(torch.tensor([inputs.ids]), torch.arange(count)[None], mask)
    activations[LOGITS] = logits[0].float()
    return activations


def _network(
    title: str,
    options: Mapping[str, Any],
    model: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
) -> Any:
    try:
        gpt = importlib.import_module("megatron.core.models.gpt")
        specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        configs = importlib.import_module("megatron.core.transformer.transformer_config")
        config = configs.TransformerConfig(**options)
        layer = specs.get_gpt_layer_local_spec(
            normalization=config.normalization, qk_layernorm=config.qk_layernorm
        )
        network = gpt.GPTModel(config, layer, **model).eval()
    except ImportError as error:  # 0.19 imports triton also on a CPU, and does not require it
        raise ValueError(f"{title} needs {error.name}: pip install {error.name}") from error
    except TypeError as error:
        raise ValueError(
            f"{title} is not compatible, unlike releases 0.12 to 0.19: {error}"
        ) from error
    found = network.load_state_dict(dict(state), strict=False)
    missing = [key for key in found.missing_keys if not key.endswith("_extra_state")]
    if missing or found.unexpected_keys:
        raise ValueError(
            f"{title}: GPTModel expects tensors {missing}, which the checkpoint lacks, and has no "
            f"place for {found.unexpected_keys}"
        )
    return network


@contextmanager
def _one_rank() -> Iterator[None]:
    """Set up megatron-core for one rank on the CPU."""
    parallel = importlib.import_module("megatron.core.parallel_state")
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True)  # the training tracker needs CUDA
    # megatron-core allocates scratch memory and rotary tables on the current CUDA device, even if
    # the weights are elsewhere.
    cuda: Any = torch.cuda
    current_device = cuda.current_device
    cuda.current_device = lambda: "cpu"
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        parallel.initialize_model_parallel()
        yield
    finally:
        parallel.destroy_model_parallel()
        destroy_process_group()
        cuda.current_device = current_device


def load_megatron(plan: ConversionPlan) -> Source:
    """Load a checkpoint of megatron-core's layout from all training ranks.

    Raises:
        ValueError: megatron-core's own modules cannot compute such a model.
    """
    traits = core_traits(plan.facts)
    if reasons := _unsupported_traits(plan.config, traits):
        raise ValueError(f"megatron-core's own modules are not computed with {', '.join(reasons)}")
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = [getattr(plan.config, f"rotary_{name}", None) for name in names]
    if getattr(plan.config, "rotary_scaling_type", None) == "llama3" and scaling != _LLAMA31:
        raise ValueError(f"megatron-core scales rotary positions by {_LLAMA31}, not by {scaling}")
    state, model = _state(plan, traits), _model(plan, traits)
    title = f"megatron-core {importlib.import_module('megatron.core').__version__}, GPTModel"
    compute = partial(_compute, title, _config(plan.config, traits, state), model, state)
    return Source(title, model["vocab_size"], model["max_sequence_length"], compute)


def _unsupported_traits(config: Any, traits: MegatronTraits) -> list[str]:
    """Return each trait that this module does not pass to GPTModel, with its value."""
    reasons = [
        f"{field.name} = {value!s:.100}"
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING and field.name not in _SUPPORTED_FIELDS
        if (value := getattr(config, field.name)) != field.default
    ]
    if experts := getattr(config, "expert_num", 0):
        reasons.append(f"expert_num = {experts}")
    scaling = getattr(config, "rotary_scaling_type", None)
    reasons += [] if scaling in _SCALINGS else [f"rotary_scaling_type = {scaling}"]
    is_known = traits.activation in _ACTIVATIONS
    return reasons + ([] if is_known else [f"activation = {traits.activation}"])


def _state(plan: ConversionPlan, traits: MegatronTraits) -> dict[str, torch.Tensor]:
    """Return every tensor that the conversion reads, joined from all training ranks, in fp32."""
    axes = {
        key.format(**item.index): axis for item in plan.tensors for key, axis in item.source.reads
    }
    state = {}
    for key, axis in axes.items():
        name = key.removeprefix(plan.mapping.prefix)
        for fused, unfused in _UNFUSED.items():
            name = name.replace(fused, unfused)
        pieces = [
            torch.from_numpy(np.array(to_float32(piece.load(plan.facts.maps))))
            for piece in plan.facts.pieces(key)
        ]
        if ".linear_fc1." in name and traits.gated:
            # Each training rank holds its share of the gate, then its share of the other half.
            pieces = [half for rank in zip(*(p.chunk(2) for p in pieces), strict=True)
                      for half in rank]  # fmt: skip
        state[name] = pieces[0] if axis is None else torch.cat(pieces, axis)
        if traits.normalization.endswith("1p") and "layernorm.weight" in name:
            state[name] += 1
    return state


def _config(
    config: Any, traits: MegatronTraits, state: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the arguments of TransformerConfig; older releases lack some, set only if needed."""
    layer = "decoder.layers.0."
    # megatron-core uses its fused kernel only if the activation is functional.gelu itself.
    is_plain = traits.fused_gelu or traits.exact_gelu
    tanh = partial(functional.gelu, approximate="tanh")
    is_tanh = traits.activation == "gelu" and not is_plain
    optional = {
        "no_rope_freq": traits.source.get("no_rope_freq"),
        "softmax_scale": getattr(config, "attention_scale", None),
        "qk_layernorm": getattr(config, "query_key_norm", None) and True,
    }
    return {
        **{name: value for name, value in optional.items() if value},
        "num_layers": traits.num_layer,
        "hidden_size": traits.hidden,
        "num_attention_heads": traits.head_num,
        "num_query_groups": traits.query_groups,
        "kv_channels": traits.size_per_head,
        "ffn_hidden_size": traits.inter_size,
        "layernorm_epsilon": traits.layernorm_eps,
        "normalization": "RMSNorm" if traits.normalization.startswith("rmsnorm") else "LayerNorm",
        "gated_linear_unit": traits.gated,
        "activation_func": tanh if is_tanh else _ACTIVATIONS[traits.activation],
        "rotary_interleaved": bool(traits.source.get("rotary_interleaved")),
        "add_bias_linear": layer + "self_attention.linear_proj.bias" in state,
        "add_qkv_bias": layer + "self_attention.linear_qkv.bias" in state,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": traits.fused_gelu,
        "persist_layer_norm": False,
    }


def _model(plan: ConversionPlan, traits: MegatronTraits) -> dict[str, Any]:
    """Return the arguments of GPTModel other than its config and layers."""
    config: Any = plan.config
    source = traits.source
    scaled = source.get("scale_positional_embedding") or source.get("use_rope_scaling")
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": traits.max_pos_seq_len,
        "position_embedding_type": traits.position,
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "rotary_percent": traits.rotary_fraction,
        "rotary_base": traits.rotary_base,
        "rope_scaling": bool(scaled),
        "rope_scaling_factor": getattr(config, "rotary_factor", None) or 8.0,
        "seq_len_interpolation_factor": traits.rotary_interpolation,
    }
