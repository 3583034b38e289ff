"""A random small Llama-style model in megatron-core's names, as a NeMo archive."""

from pathlib import Path
from typing import Any

import torch

from tests.tiny import write_archive

CORE: dict[str, Any] = {
    "mcore_gpt": True, "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56,
    "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
    "max_position_embeddings": 40, "layernorm_epsilon": 1e-5, "normalization": "rmsnorm",
    "position_embedding_type": "rope", "activation": "fast-swiglu", "bias": False,
    "share_embeddings_and_output_weights": False, "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
}  # fmt: skip


def core_state(*, fused_norms: bool = False, layers: int = 2) -> dict[str, torch.Tensor]:
    """Return megatron-core's names; Transformer Engine fuses norms into the next linear."""
    norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    if fused_norms:
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    shapes = {
        "model.embedding.word_embeddings.weight": (53, 24),
        "model.output_layer.weight": (53, 24),
        "model.decoder.final_layernorm.weight": (24,),
    }
    for layer in range(layers):
        prefix = f"model.decoder.layers.{layer}."
        shapes |= {
            prefix + norms[0]: (24,),
            prefix + norms[1]: (24,),
            prefix + "self_attention.linear_qkv.weight": (2 * (2 + 2) * 8, 24),
            prefix + "self_attention.linear_proj.weight": (24, 32),
            prefix + "mlp.linear_fc1.weight": (112, 24),
            prefix + "mlp.linear_fc2.weight": (24, 56),
        }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_core(path: Path, state: dict[str, torch.Tensor], **changes: Any) -> Path:
    return write_archive(path, CORE | changes, state)
