"""Random small mixtures of experts: saved by transformers, and in megatron-core's names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.tiny_huggingface import read_tensors

_ATTENTION = "decoder.layers.{}.self_attention."
_EXPERTS = "decoder.layers.{}.mlp.experts."
# In both models: 4 heads in 2 groups.
_GROUPS = 2

# Megatron-LM's arguments of the models in tests/tiny_transformers.py.
_ARGS: Mapping[str, Any] = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": _GROUPS, "kv_channels": 8,
    "max_position_embeddings": 40, "norm_epsilon": 1e-6, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "moe_router_pre_softmax": False,
    "moe_router_load_balancing_type": "aux_loss",
}  # fmt: skip
ARGS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {
        **_ARGS, "num_experts": 4, "moe_router_topk": 2, "norm_epsilon": 1e-5,
        "rotary_base": 1000000,
    },
    "qwen3-moe": {
        **_ARGS, "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 20,
        "qk_layernorm": True, "rotary_base": 10000,
    },
}  # fmt: skip


def core_mixture(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a Hugging Face mixture as megatron-core names them on one rank."""
    theirs = read_tensors(folder)
    state = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    for layer in range(2):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in theirs.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        attention, experts = _ATTENTION.format(layer), _EXPERTS.format(layer)
        rows = [
            own[f"self_attn.{part}_proj.weight"].unflatten(0, (_GROUPS, -1))
            for part in ("q", "k", "v")
        ]
        state |= {
            f"{attention}linear_qkv.weight": torch.cat(rows, 1).flatten(0, 1),
            f"{attention}linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            f"{attention}linear_proj.weight": own["self_attn.o_proj.weight"],
            f"decoder.layers.{layer}.pre_mlp_layernorm.weight": own[
                "post_attention_layernorm.weight"
            ],
        }
        mlp, gate, up, down = ("mlp", "gate_proj", "up_proj", "down_proj")
        if "block_sparse_moe.gate.weight" in own:
            mlp, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2")
        else:
            state |= {
                f"{attention}{part}_layernorm.weight": own[f"self_attn.{part}_norm.weight"]
                for part in ("q", "k")
            }
        router = own[f"{mlp}.gate.weight"]
        state[f"decoder.layers.{layer}.mlp.router.weight"] = router
        for expert in range(len(router)):
            one = f"{mlp}.experts.{expert}."
            halves = (own[f"{one}{gate}.weight"], own[f"{one}{up}.weight"])
            state |= {
                f"{experts}local_experts.{expert}.linear_fc1.weight": torch.cat(halves),
                f"{experts}local_experts.{expert}.linear_fc2.weight": own[f"{one}{down}.weight"],
            }
    return state


def with_stacked_experts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as a distributed checkpoint keeps them: one for all experts of a layer."""
    out = {}
    for name, tensor in state.items():
        before, found, after = name.partition("local_experts.")
        expert, _, what = after.partition(".")
        if not found:
            out[name] = tensor
        else:
            key = f"{before}experts.{what}"
            out[key] = torch.cat([out[key], tensor[None]]) if int(expert) else tensor[None]
    return out
