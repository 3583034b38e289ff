"""Settings of megatron-core, alone and in pairs: what its own GPTModel computes with each.

Run as a program with a plan, by any interpreter that has torch and megatron-core, it builds models,
and saves each as Megatron-LM and as Megatron Bridge state theirs, next to its logits. Where
megatron-core builds no such model, it leaves the reason.
"""

import argparse
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.megatron_ranks import be_ranks

IDS = (3, 17, 41, 5, 5, 29, 11, 50, 2, 8, 33, 19, 44, 7, 1, 23)
ROWS, LAYERS = 53, 4

# In the names of Megatron Bridge, which has megatron-core's where both have one.
BASE: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "normalization": "RMSNorm", "add_bias_linear": False,
    "gated_linear_unit": True, "activation_func": "silu", "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False, "seq_length": 32, "layernorm_epsilon": 1e-5,
    "bias_activation_fusion": False,
}  # fmt: skip

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
# Settings by group; pairs are tried within a group.
GROUPS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "rotary": {
        "percent": {"rotary_percent": 0.5},
        "base": {"rotary_base": 500},
        "interpolation": {"seq_len_interpolation_factor": 2.0},
        "llama 3": {"rope_scaling": True, "rope_scaling_factor": 8.0},
        "llama 3 by 2": {"rope_scaling": True, "rope_scaling_factor": 2.0},
        "every second without": {"no_rope_freq": 2},
        "layers without": {"no_rope_freq": [0, 1, 1, 0]},
        "interleaved": {"rotary_interleaved": True},
        "fused": {"apply_rope_fusion": False},
        "multimodal sections": {"mrope_section": [1, 1, 2]},
    },
    "windows": {
        "window": {"window_size": (4, 0)},
        "window of 1": {"window_size": (0, 0)},
        "every second": {"window_size": (4, 0), "window_attn_skip_freq": 2},
        "layers": {"window_size": (3, 0), "window_attn_skip_freq": [1, 0, 0, 1]},
        "skipped without a window": {"window_attn_skip_freq": 2},
        "every second without positions": {"no_rope_freq": 2},
        "open on the right": {"window_size": (4, -1)},
    },
    "norms": {
        "LayerNorm": {"normalization": "LayerNorm"},
        "epsilon": {"layernorm_epsilon": 0.1},
        "around zero": {"layernorm_zero_centered_gamma": True},
        "of heads": {"qk_layernorm": True},
        "of heads, LayerNorm": {"qk_layernorm": True, "normalization": "LayerNorm"},
        "of heads, L2": {"qk_l2_norm": True},
        "after": {"apply_residual_connection_post_layernorm": True},
        "residual in fp32": {"fp32_residual_connection": True},
        "persistent": {"persist_layer_norm": False, "memory_efficient_layer_norm": False},
    },
    "scaling": {
        "scores": {"softmax_scale": 0.3},
        "by layers": {"apply_query_key_layer_scaling": True},
        "muP": {"use_mup": True},
        "muP of width 2": {"use_mup": True, "mup_base_hidden_size": 16},
        "muP embedding": {"use_mup": True, "mup_embedding_mult": 2.5},
        "muP logits": {"use_mup": True, "mup_output_mult": 0.3},
        "muP of heads": {"use_mup": True, "mup_base_head_dim": 16},
        "muP power": {"use_mup": True, "mup_attn_scale_power": 0.75},
        "muP factors alone": {"mup_embedding_mult": 2.5, "mup_output_mult": 0.3},
        "softmax": {"softmax_type": "off-by-one"},
        "clamped": {"activation_func_clamp_value": 0.1},
        "offset": {"glu_linear_offset": 1.0},
        "tied": {"share_embeddings_and_output_weights": True},
    },
    "heads": {
        "all grouped": {"num_query_groups": 1},
        "none grouped": {"num_query_groups": 4},
        "wide": {"kv_channels": 16},
        "odd": {"kv_channels": 6},
        "gated": {"attention_output_gate": True},
        "biases": {"add_qkv_bias": True},
        "all biases": {"add_bias_linear": True},
        "half rotary": {"rotary_percent": 0.5},
        "of heads": {"qk_layernorm": True},
        "tied": {"share_embeddings_and_output_weights": True},
        "scores": {"softmax_scale": 0.3},
    },
    "mlp": {
        "gelu": {"activation_func": "gelu"},
        "plain gelu": {"activation_func": "gelu", "gated_linear_unit": False},
        "plain relu": {"activation_func": "relu", "gated_linear_unit": False},
        "squared relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
        "plain silu": {"gated_linear_unit": False},
        "fused": {"bias_activation_fusion": True},
        "all biases": {"add_bias_linear": True},
        "width": {"ffn_hidden_size": 40},
        "offset": {"glu_linear_offset": 1.0},
        "fp8 input": {"activation_func_fp8_input_store": False},
    },
    "experts": {
        "four": EXPERTS,
        "of one": EXPERTS | {"moe_router_topk": 1},
        "softmax first": EXPERTS | {"moe_router_pre_softmax": True},
        "sigmoid": EXPERTS | {"moe_router_score_function": "sigmoid"},
        "scaled": EXPERTS | {"moe_router_topk_scaling_factor": 2.5},
        "in groups": EXPERTS | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        "weighted input": EXPERTS | {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
        "one for all": EXPERTS | {"moe_shared_expert_intermediate_size": 16},
        "every second layer": EXPERTS | {"moe_layer_freq": 2},
        "losses": EXPERTS | {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
        "in fp32": EXPERTS | {"moe_router_dtype": "fp32"},
        "rows in blocks": EXPERTS | {"moe_mlp_glu_interleave_size": 8},
        "of heads": EXPERTS | {"qk_layernorm": True},
        "gelu": EXPERTS | {"activation_func": "gelu"},
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One model to save, in a new folder; its weights depend on the seed."""

    folder: str
    settings: Mapping[str, Any]
    seed: int
    ranks: int = 1


def singles() -> list[tuple[str, dict[str, Any]]]:
    """Return a name and the settings of each case of one."""
    return [
        (f"{group}: {name}", settings)
        for group, cases in GROUPS.items()
        for name, settings in cases.items()
    ]


def pairs() -> list[tuple[str, dict[str, Any]]]:
    """Return the same of each two of a group that do not contradict each other."""
    return [
        (f"{group}: {one} + {other}", {**cases[one], **cases[other]})
        for group, cases in GROUPS.items()
        for one, other in itertools.combinations(cases, 2)
        if all(cases[one].get(name, value) == value for name, value in cases[other].items())
    ]


# Arguments of Megatron-LM where they are called something else.
_ARGUMENTS = {
    "layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "rope_scaling": "use_rope_scaling", "seq_length": "max_position_embeddings",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}  # fmt: skip


def arguments(settings: Mapping[str, Any]) -> argparse.Namespace | None:
    """Return Megatron-LM's arguments for settings; None where it has none for them."""
    out = {_ARGUMENTS.get(name, name): value for name, value in settings.items()}
    kind, gated = out.pop("activation_func"), out.pop("gated_linear_unit")
    out["num_experts"] = out.pop("num_moe_experts", None)
    flags = {
        ("silu", True): {"swiglu": True},
        ("gelu", False): {},
        ("squared_relu", False): {"squared_relu": True},
    }
    if (kind, gated) not in flags:
        return None
    out |= flags[kind, gated]
    out["bias_gelu_fusion"] = out.pop("bias_activation_fusion")
    out["untie_embeddings_and_output_weights"] = not out.pop("share_embeddings_and_output_weights")
    return argparse.Namespace(
        **out, group_query_attention=True, padded_vocab_size=ROWS, tensor_model_parallel_size=1
    )


def _function(name: str) -> Any:
    if name != "squared_relu":
        return getattr(torch.nn.functional, name)
    from megatron.core.activations import squared_relu  # since 0.13

    return squared_relu


def build(settings: Mapping[str, Any], seed: int) -> Any:
    """Return megatron-core's model, all of whose weights are random."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = dict(settings) | {"activation_func": _function(settings["activation_func"])}
    of_model = inspect.signature(GPTModel).parameters.keys() & values.keys()
    of_layers = {field.name for field in dataclasses.fields(TransformerConfig)}
    if unknown := values.keys() - of_model - of_layers - {"seq_length"}:
        raise NotImplementedError(f"this megatron-core has no {', '.join(sorted(unknown))}")
    config = TransformerConfig(
        **{name: value for name, value in values.items() if name in of_layers - of_model},
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    if any(name.startswith("moe_layer") for name in values):
        raise NotImplementedError("the layers of this block are alike")
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        **({"qk_l2_norm": True} if values.get("qk_l2_norm") else {}),
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=ROWS,
        max_sequence_length=values["seq_length"],
        **{name: values[name] for name in of_model},
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(noise / value.shape[-1] ** 0.5 if value.ndim > 1 else value + 0.2 * noise)
    return model.eval()


def _save(case: Case) -> None:
    """Save a model, or in `unbuilt` why megatron-core builds none."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    folder = Path(case.folder)
    folder.mkdir(parents=True)
    try:
        model = build(case.settings, case.seed)
        ids = torch.tensor([IDS])
        mask = torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool).triu(1)
        with torch.no_grad():
            logits = model(ids, torch.arange(len(IDS))[None], mask)[0]
    except Exception as error:  # of any kind, in any of its releases
        (folder / "unbuilt").write_text(f"{type(error).__name__}: {error}")
        return
    state = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    torch.save(logits.float(), folder / "logits.pt")
    torch.save(state, folder / "state.pt")
    if (args := arguments(case.settings)) is not None:
        (folder / "megatron" / "mp_rank_00").mkdir(parents=True)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": state}
        torch.save(content, folder / "megatron" / "mp_rank_00" / "model_optim_rng.pt")


def main(plan: Path) -> int:
    """Save every model of a plan."""
    # The masks of windows are made on CUDA's device whatever the model's is.
    made = torch.ones

    def on_cpu(*sizes: Any, **more: Any) -> Any:
        return made(*sizes, **{**more, "device": "cpu"})

    torch.ones = on_cpu
    return be_ranks(plan, lambda item: _save(Case(**item)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
