"""Logits of megatron-core's own models, loaded from torch_dist checkpoints by gloo processes.

Run as a program with a plan, by any interpreter that has torch and megatron-core.
"""

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.megatron_core_mixtures import PlainAttention, compute_on_cpus
from tests.megatron_ranks import be_ranks, run_ranks


@dataclass(frozen=True)
class Load:
    """One checkpoint to load.

    Attributes:
        folder: The checkpoint's.
        logits: File for the logits, (tokens, vocabulary).
        ids: The tokens.
        tp_size: Tensor-parallel ranks that load it.
        pp_size: Pipeline stages that load it.
    """

    folder: str
    logits: str
    ids: Sequence[int]
    tp_size: int = 1
    pp_size: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes that load it."""
        return self.tp_size * self.pp_size


def load_all(loads: Sequence[Load], work_dir: Path, *, python: str = sys.executable) -> None:
    """Load checkpoints in processes of their own, as many as each needs; they end with it."""
    run_ranks("tests.megatron_core_models", loads, work_dir, python=python)


def _settings(args: argparse.Namespace, load: Load) -> Any:
    """Return megatron-core's settings of Megatron-LM's arguments, as its training makes them."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    given, functional = vars(args), torch.nn.functional
    same: tuple[str, ...] = (
        "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
        "normalization", "add_bias_linear", "num_query_groups", "qk_layernorm", "add_qkv_bias",
        "no_rope_freq", "window_size", "window_attn_skip_freq",
        "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_layer_freq",
        "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_num_groups",
        "moe_router_topk_scaling_factor", "moe_router_group_topk", "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size", "rotary_interleaved",
    )  # fmt: skip
    latent = (
        "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim",
        "qk_pos_emb_head_dim", "rope_type", "rotary_scaling_factor", "beta_fast", "beta_slow",
        "original_max_position_embeddings", "mscale", "mscale_all_dim",
    )  # fmt: skip
    kind: Any = TransformerConfig
    if given.get("multi_latent_attention"):
        kind, same = MLATransformerConfig, same + latent
    usual = functional.silu if args.swiglu else functional.gelu
    return kind(
        **{name: given[name] for name in same if given.get(name) is not None},
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=squared_relu if args.squared_relu else usual,
        bias_activation_fusion=args.bias_gelu_fusion,
        num_moe_experts=given.get("num_experts"),
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=load.tp_size,
        pipeline_model_parallel_size=load.pp_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _model(args: argparse.Namespace, load: Load) -> Any:
    """Return this rank's share of the model that the arguments are of, with its own layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    settings, given = _settings(args, load), vars(args)
    is_uneven = isinstance(settings.moe_layer_freq, list)
    if is_uneven:
        layers = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
        for layer in layers.layer_specs if given.get("multi_latent_attention") else ():
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    else:
        layers = get_gpt_layer_local_spec(
            num_experts=settings.num_moe_experts,
            qk_layernorm=settings.qk_layernorm,
            normalization=settings.normalization,
        )
    facts = {
        # Megatron-LM pads the vocabulary where the ranks do not divide it.
        "vocab_size": -(-args.padded_vocab_size // load.tp_size) * load.tp_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "position_embedding_type": args.position_embedding_type,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "rotary_percent": given.get("rotary_percent", 1.0),
        "rotary_base": given.get("rotary_base", 10000),
        "parallel_output": False,
    }
    pattern = given.get("hybrid_layer_pattern")
    if pattern:
        return _hybrid_model(settings, layers.submodules, pattern, facts)
    return GPTModel(
        settings,
        layers,
        seq_len_interpolation_factor=given.get("rotary_seq_len_interpolation_factor"),
        rope_scaling=given.get("use_rope_scaling", False),
        rope_scaling_factor=given.get("rope_scaling_factor", 8.0),
        **facts,
    )


def _hybrid_model(settings: Any, layer: Any, pattern: str, facts: dict[str, Any]) -> Any:
    """Return a HybridModel of the parts of a GPTModel's layer; older releases call it a Mamba."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    is_new = importlib.util.find_spec("megatron.core.models.hybrid") is not None
    places = ("ssm.mamba_block", "models.mamba.mamba_model")
    places = ("models.hybrid.hybrid_block", "models.hybrid.hybrid_model") if is_new else places
    block, model = (importlib.import_module(f"megatron.core.{place}") for place in places)
    setattr(block, "TENorm", WrappedTorchNorm)  # noqa: B010 - a module's
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=get_bias_dropout_add
    )
    stack = block.HybridStack if is_new else block.MambaStack
    parts = block.HybridStackSubmodules if is_new else block.MambaStackSubmodules
    spec = ModuleSpec(
        module=stack,
        submodules=parts(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
        ),
    )
    if is_new:
        return model.HybridModel(settings, spec, hybrid_layer_pattern=pattern, **facts)
    return model.MambaModel(settings, spec, hybrid_override_pattern=pattern, **facts)


def _in_transformer_engine(key: str, args: argparse.Namespace) -> str:
    """Return the name of a norm of megatron-core's own layers in those of Transformer Engine."""
    given, attention = vars(args), "self_attention."
    number = next(iter(re.findall(r"layers\.(\d+)\.", key)), None)
    has_experts = given.get("num_experts") is not None
    if number is not None and isinstance(given.get("moe_layer_freq"), list):
        has_experts = bool(given["moe_layer_freq"][int(number)])
    if given.get("hybrid_layer_pattern") is not None:
        key = key.replace("input_layernorm.", f"{attention}linear_qkv.layer_norm_")
    if given.get("multi_latent_attention"):
        key = key.replace(f"{attention}linear_qkv.layer_norm_", "input_layernorm.")
        for part in ("q", "kv"):
            norm = f"{attention}linear_{part}_up_proj.layer_norm_"
            key = key.replace(f"{attention}{part}_layernorm.", norm)
    fused, apart = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    return key.replace(fused, apart) if has_experts else key.replace(apart, fused)


def _logits(load: Load) -> torch.Tensor | None:
    """Return the logits of the last pipeline stage, None from others."""
    from megatron.core import dist_checkpointing, parallel_state

    args = dist_checkpointing.load_common_state_dict(load.folder)["args"]
    model = _model(args, load).eval()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter.data, 7.0)
    wanted = model.sharded_state_dict()
    for each in wanted.values():
        if hasattr(each, "key"):
            each.key = _in_transformer_engine(each.key, args)
    loaded = dist_checkpointing.load({"model": wanted}, load.folder)
    model.load_state_dict(loaded["model"])
    ids = torch.tensor([load.ids])
    count = ids.shape[1]
    mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(count, 1, args.hidden_size)
        torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad():
        out = model(ids, torch.arange(count)[None], mask)
    if parallel_state.is_pipeline_last_stage():
        return out[0, :, : args.padded_vocab_size].clone()
    torch.distributed.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def _load(load: Load) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(load.tp_size, load.pp_size)
    logits = _logits(load)
    if (
        logits is not None
        and torch.distributed.get_rank() + 1 == torch.distributed.get_world_size()
    ):
        torch.save(logits, load.logits)
    parallel_state.destroy_model_parallel()


def main(plan: Path) -> int:
    """Load the checkpoints of a plan."""
    compute_on_cpus()
    torch.serialization.add_safe_globals([argparse.Namespace])
    return be_ranks(plan, lambda item: _load(Load(**item)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
