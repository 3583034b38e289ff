"""Mixtures of experts saved by megatron-core itself, by gloo processes on the CPU, with logits."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.megatron_ranks import be_ranks, run_ranks

VOCABULARY = 56
LENGTH = 40

SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 56,
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "layernorm_epsilon": 1e-6, "num_moe_experts": 8, "moe_ffn_hidden_size": 20,
    "moe_router_topk": 3, "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_layer_freq": [0, 1, 1, 1],
}  # fmt: skip
_GROUPED = {"num_query_groups": 2, "kv_channels": 8}
_LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8, "v_head_dim": 10, "qk_layernorm": True, "rope_type": "yarn",
    "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "apply_rope_fusion": False,
}  # fmt: skip
_SIGMOID = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
_GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
_YARN = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 4.0, "yarn_beta_slow": 1.0,
    "yarn_mscale": None, "yarn_mscale_all_dim": None, "yarn_correction_range_round_to_int": False,
}  # fmt: skip

# model type of transformers -> settings of TransformerConfig
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {**_GROUPED, "qk_layernorm": True},
    "qwen2_moe": {
        **_GROUPED, "add_qkv_bias": True, "moe_shared_expert_intermediate_size": 28,
        "moe_shared_expert_gate": True, "moe_router_pre_softmax": True, "moe_layer_freq": 2,
    },
    "glm4_moe": {
        **_GROUPED, **_SIGMOID, "add_qkv_bias": True, "qk_layernorm": True,
        "moe_shared_expert_intermediate_size": 20, "rotary_percent": 0.5,
    },
    "deepseek_v3": {
        **_LATENT, **_SIGMOID, **_GROUPS, "moe_shared_expert_intermediate_size": 40,
    },
    "deepseek_v2": {
        **_LATENT, **_GROUPS, "moe_shared_expert_intermediate_size": 40,
        "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5,
    },
    "gpt_oss": {
        **_GROUPED, "add_bias_linear": True, "moe_layer_freq": 1, "softmax_type": "learnable",
        "activation_func": "quick_gelu", "activation_func_clamp_value": 0.4,
        "glu_linear_offset": 1.0, "window_size": [4, 0], "window_attn_skip_freq": 2,
        "rotary_base": 150000, **_YARN,
    },
}  # fmt: skip
# Arguments of GPTModel, and attributes of the settings that TransformerConfig does not declare;
# Megatron Bridge states all of them among the settings.
_OF_MODEL = ("rotary_percent", "rotary_base", "position_embedding_type")
_ADDED = "yarn_"


@dataclass(frozen=True)
class Mixture:
    """One checkpoint to save.

    Attributes:
        folder: Where it goes.
        model: One of MODELS.
        changes: Of its settings.
        whole: The folder of the same model as one rank has saved it; without, the weights are
            random, and logits are saved as `logits.pt`.
        sizes: Parallel sizes of `initialize_model_parallel`.
        metadata: How megatron-core names and cuts tensors.
    """

    folder: str
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    whole: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, bool] | None = None

    @property
    def ranks(self) -> int:
        """The number of processes that save it."""
        return math.prod(self.sizes.values())


def save_all(saves: Sequence[Mixture], work_dir: Path) -> None:
    """Save checkpoints in processes of their own, which end when all is saved."""
    run_ranks("tests.megatron_core_mixtures", saves, work_dir)


class PlainAttention(torch.nn.Module):
    """Attention with values of another width than keys, which megatron-core has on GPUs alone."""

    def __init__(self, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> torch.Tensor:
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
        weights = scores.masked_fill(mask, -10000.0).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)


def _window_mask(queries: int, keys: int, window: Sequence[int]) -> torch.Tensor:
    """Return where attention in a window does not reach, which megatron-core computes on a GPU."""
    ones = torch.ones(queries, keys, dtype=torch.bool)
    return ~ones.triu(keys - queries - window[0]).tril(keys - queries + window[1])


def _model(save: Mixture, settings: Mapping[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    is_latent = settings.get("multi_latent_attention")
    of_model = {"position_embedding_type": "rope"}
    of_model |= {key: settings[key] for key in _OF_MODEL if key in settings}
    added = {key: value for key, value in settings.items() if key.startswith(_ADDED)}
    of_config = {
        key: value
        for key, value in settings.items()
        if key not in added and (is_latent or key not in _OF_MODEL)
    }
    is_quick = of_config.pop("activation_func", None) == "quick_gelu"
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        activation_func=quick_gelu if is_quick else torch.nn.functional.silu,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="allgather",
        **of_config,
        **save.sizes,
    )
    if added.get("yarn_rotary_scaling_factor"):  # else Megatron Bridge hides that it is there
        vars(config).update(added)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs if is_latent else ():
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **of_model,
    ).eval()


def _args(settings: Mapping[str, Any]) -> argparse.Namespace:
    """Return what Megatron-LM would have called the settings."""
    renamed = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon"}
    args = {renamed.get(key, key): value for key, value in settings.items()}
    args.pop("gated_linear_unit")
    is_quick = args.pop("activation_func", None) == "quick_gelu"
    groups = settings.get("num_query_groups")
    return argparse.Namespace(
        **{"position_embedding_type": "rope", **args, "num_query_groups": groups or 1},
        group_query_attention=groups is not None,
        swiglu=not is_quick,
        quick_geglu=is_quick,
        max_position_embeddings=64,
        untie_embeddings_and_output_weights=True,
    )


def _save(save: Mixture) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    settings = {**SIZES, **MODELS[save.model], **save.changes}
    parallel_state.initialize_model_parallel(**save.sizes)
    torch.manual_seed(1)
    model = _model(save, settings)
    state = model.sharded_state_dict()
    if torch.distributed.get_rank() == 0:
        Path(save.folder).mkdir(parents=True)
    torch.distributed.barrier()
    if save.whole:
        state = dist_checkpointing.load({"model": state}, save.whole)["model"]
        model.load_state_dict(state, strict=False)
    else:
        biases = [each for name, each in model.named_buffers() if name.endswith("expert_bias")]
        with torch.no_grad():
            for tensor in (*model.parameters(), *biases):
                tensor.add_(torch.randn_like(tensor) * 0.15)
            places, tokens = torch.arange(LENGTH)[None], torch.arange(3, 3 + LENGTH)[None]
            mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
            logits = model(tokens, places, mask)
        torch.save(logits, Path(save.folder).with_suffix(".pt"))
    state = {
        "model": model.sharded_state_dict(metadata=save.metadata), "args": _args(settings),
        "checkpoint_version": 3.0, "iteration": 1,
    }  # fmt: skip
    dist_checkpointing.save(state, save.folder)
    parallel_state.destroy_model_parallel()


def compute_on_cpus() -> None:
    """Let megatron-core build and run its models without a GPU and Transformer Engine."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer import multi_latent_attention as latent

    vars(fused_softmax)["get_sliding_window_causal_mask"] = _window_mask
    # Up to 0.16 these are None without Transformer Engine.
    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        if not isinstance(vars(latent)[name], type):
            vars(latent)[name] = type(name, (), {})


def main(plan: Path) -> int:
    """Save the checkpoints of a plan."""
    compute_on_cpus()
    return be_ranks(plan, lambda item: _save(Mixture(**item)))
