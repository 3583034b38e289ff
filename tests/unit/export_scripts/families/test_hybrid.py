"""Nemotron-H: from megatron-core's HybridModel and from Hugging Face to what transformers computes.

Models that megatron-core itself has saved are in tests/parity/test_hybrid_checkpoints.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from export_scripts.conversion.convert import folder_problems
from export_scripts.inspect import describe
from tests.json_files import read_json, write_json
from tests.looks import assert_exact
from tests.tiny_distributed import megatron_common, write_distributed
from tests.tiny_huggingface import read_tensors
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.checkpoints.test_bridge import write_bridge
from tests.unit.export_scripts.checkpoints.test_distributed import write_nemo2
from tests.unit.export_scripts.conversion.test_mixtures import logits, problems, written

PATTERN = "M*-EM-"
# Megatron-LM's arguments of the model in tests/tiny_transformers.py.
ARGS: Mapping[str, Any] = {
    "num_layers": 6, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8,
    "max_position_embeddings": 40, "norm_epsilon": 1e-5, "normalization": "RMSNorm",
    "position_embedding_type": "none", "squared_relu": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "hybrid_layer_pattern": PATTERN,
    "is_hybrid_model": True, "mamba_state_dim": 5, "mamba_num_heads": 8, "mamba_head_dim": 6,
    "mamba_num_groups": 2, "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 28, "moe_latent_size": 16,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss",
}  # fmt: skip
PARTS = {"z": 48, "x": 48, "B": 10, "C": 10, "dt": 8}
# Modules of layers with an MLP, experts or attention, in transformers and in megatron-core.
NAMES = {
    "o_proj": "self_attention.linear_proj", "up_proj": "mlp.linear_fc1",
    "down_proj": "mlp.linear_fc2", "gate": "mlp.router",
    "gate.e_score_correction_bias": "mlp.router.expert_bias",
    "fc1_latent_proj": "mlp.fc1_latent_proj", "fc2_latent_proj": "mlp.fc2_latent_proj",
    "shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    **{
        f"experts.{n}.{theirs}": f"mlp.experts.local_experts.{n}.{ours}"
        for n in range(6)
        for theirs, ours in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2"))
    },
}  # fmt: skip
NORMS = {
    "M": "mixer.in_proj.layer_norm_weight", "E": "pre_mlp_layernorm.weight",
    "*": "self_attention.linear_qkv.layer_norm_weight", "-": "mlp.linear_fc1.layer_norm_weight",
}  # fmt: skip


def core_hybrid(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a Nemotron-H as megatron-core's distributed checkpoints have them."""
    state = {}
    theirs = read_tensors(folder)
    for name, tensor in theirs.items():
        _, layers, rest = name.partition("backbone.layers.")
        number, _, own = rest.partition(".")
        if not layers:
            continue
        root, own = f"decoder.layers.{number}.", own.removeprefix("mixer.")
        if own == "norm.weight" and "mixer" not in name:
            state[root + NORMS[PATTERN[int(number)]]] = tensor
        elif own.startswith(("in_proj", "conv1d")):
            parts = PARTS if own.startswith("in_proj") else dict([*PARTS.items()][1:4])
            cut = tensor.split([*parts.values()])
            state |= {
                f"{root}mixer.{own}.{part}": each for part, each in zip(parts, cut, strict=True)
            }
        elif own == "q_proj.weight":
            rows = [theirs[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            rows = [each.unflatten(0, (2, -1)) for each in rows]
            state[f"{root}self_attention.linear_qkv.weight"] = torch.cat(rows, 1).flatten(0, 1)
        elif (module := own.removesuffix(".weight")) in NAMES:
            end = own.removeprefix(module)
            state[f"{root}{NAMES[module]}{end}"] = tensor
        elif own[:1] not in "kv":
            state[f"{root}mixer.{own}"] = tensor
    return state | {
        "embedding.word_embeddings.weight": theirs["backbone.embeddings.weight"],
        "decoder.final_norm.weight": theirs["backbone.norm_f.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }


def original(tmp_path: Path, **changes: Any) -> Path:
    """Save a model, of which the correction of the router is not zeros."""
    folder = write_model("nemotron_h", tmp_path / "original", **changes)
    tensors = read_tensors(folder)
    for name in (each for each in tensors if each.endswith("correction_bias")):
        tensors[name] = torch.linspace(-0.3, 0.3, 6)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_core(tmp_path: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    common = megatron_common(**{**ARGS, **changes})
    return write_distributed(tmp_path / "source", tensors, common=common, cuts={})


def test_a_hybrid_model_is_what_transformers_computes(tmp_path):
    folder = original(tmp_path)
    pattern = "M*-|EM-/*E/*E"
    source = write_core(tmp_path, core_hybrid(folder), hybrid_layer_pattern=pattern)
    made = written(source, tmp_path)
    assert folder_problems(made) == []
    assert_exact(logits(made), logits(folder))
    facts = describe(source)
    assert (facts["family"], facts["source"]) == (
        "hybrid", "Megatron-LM HybridModel with Mamba layers in megatron-core layout",
    )  # fmt: skip
    assert f"HybridModel, 6 layers: {pattern}" in facts["notes"]
    assert "model type nemotron_h" in " ".join(facts["can be"])
    again = written(made, tmp_path / "again")
    found, expected = read_tensors(again), read_tensors(folder)
    assert_exact(found, expected)


def test_what_megatron_core_keeps_in_fp32_stays_so(tmp_path):
    source = write_core(tmp_path, core_hybrid(original(tmp_path)))
    tensors = read_tensors(written(source, tmp_path, weight_data_type="bf16"))
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    root = "backbone.layers."
    assert wide == {f"{root}{n}.mixer.{own}" for n in (0, 4) for own in ("A_log", "D")} | {
        f"{root}3.mixer.gate.e_score_correction_bias"
    }


@pytest.mark.parametrize("form", ["bridge", "nemo2"])
def test_nemo_2_and_megatron_bridge_state_the_same(form, tmp_path):
    folder = original(tmp_path)
    renamed = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon",
               "max_position_embeddings": "seq_length"}  # fmt: skip
    left = ("squared_relu", "group_query_attention", "untie_embeddings_and_output_weights")
    provider = "megatron.bridge.models.nemotronh.nemotron_h_provider."
    model = {
        **{renamed.get(key, key): value for key, value in ARGS.items() if key not in left},
        "_target_": f"{provider}NemotronHModelProvider8B", "mamba_chunk_size": 64,
        "activation_func": {"_target_": "megatron.core.activations.squared_relu", "_call_": False},
        "share_embeddings_and_output_weights": False,
    }  # fmt: skip
    if form == "bridge":
        source = write_bridge(tmp_path / "run", core_hybrid(folder), model, stacked=False)
    else:
        own = {"gated_linear_unit": False, "_target_": "nemo.collections.llm.gpt.model.ssm.Mine"}
        state = core_hybrid(folder)
        source = write_nemo2(tmp_path / "run", state, stacked=False, **model | own)
        context = source / "context" / "model.yaml"
        context.write_text(context.read_text().replace("LlamaModel", "MambaModel"))
    made = written(source, tmp_path, allow=("tokenizer",))
    assert_exact(logits(made), logits(folder))


@pytest.mark.parametrize("where", ["embedding", "a head of its own"])
def test_a_tied_head_is_written(where, tmp_path):
    folder = original(tmp_path)
    tensors = core_hybrid(folder)
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"].clone()
    if where == "embedding":
        del tensors["output_layer.weight"]
    source = write_core(tmp_path, tensors, untie_embeddings_and_output_weights=False)
    made = written(source, tmp_path)
    found = read_tensors(made)
    assert torch.equal(found["lm_head.weight"], found["backbone.embeddings.weight"])
    assert logits(made).shape[-1] == 53


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "rope"}, "position_embedding_type = rope"),
        ({"add_bias_linear": True}, "add_bias_linear = True"),
        ({"norm_epsilon": 1e-6}, "mamba_eps is 1e-05 in the model, and can only be 1e-06"),
        ({"normalization": "LayerNorm"}, "norm is layernorm"),
        (
            {"swiglu": True, "squared_relu": False},
            "a gate of MLPs (swiglu, gated_linear_unit) = True",
        ),
        ({"moe_router_score_function": "softmax"}, "router_scores is softmax"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "group_score is 3"),
        ({"softmax_scale": 0.5}, "attention_scale is 0.5"),
        ({"softmax_type": "off-by-one"}, "softmax_type = 'off-by-one'"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value = 7.0"),
        ({"moe_token_dropping": True}, "moe_token_dropping = True"),
        ({"window_size": [4, 0]}, "sliding_window is 5"),
        ({"qk_layernorm": True}, "query_key_norm is head"),
        ({"mamba_state_dim": 6}, "in_proj.weight.B"),
        ({"hybrid_layer_pattern": "M*-EMG"}, "G is a gated delta network"),
        (
            {"hybrid_layer_pattern": "M-*EM-"},
            "self_attention.linear_qkv.weight is in",
        ),
        ({"hybrid_layer_pattern": "M*-EM"}, "num_layers = 6"),
        ({"of_next_year": 3}, "of_next_year = 3"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_transformers_does_not_compute_is_refused_by_name(changes, words, tmp_path):
    source = write_core(tmp_path, core_hybrid(original(tmp_path)), **changes)
    assert words in problems(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_override_pattern": "MM*"}, {"hybrid_override_pattern": "MM*"}),
        ({"hybrid_override_pattern": "*-"}, {"intermediate_size": 56}),
        ({"n_group": 2, "topk_group": 1, "moe_latent_size": None}, {"n_group": 2}),
        ({"norm_topk_prob": False, "mlp_hidden_act": "silu"}, {"mlp_hidden_act": "silu"}),
        ({"time_step_min": 0.01, "layer_norm_epsilon": 1e-3}, {"time_step_min": 0.01}),
    ],
    ids=str,
)
def test_settings_of_transformers_come_back(changes, expected, tmp_path):
    folder = original(tmp_path, **changes)
    made = written(folder, tmp_path)
    config = read_json(made / "config.json")
    assert expected.items() <= config.items()
    assert_exact(logits(made), logits(folder))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("time_step_limit", [0.0, 0.1]), ("n_shared_experts", 2), ("use_conv_bias", False),
     ("hybrid_override_pattern", "M*x"), ("mamba_hidden_act", "gelu")],
)  # fmt: skip
def test_settings_that_change_the_function_are_refused_by_name(setting, value, tmp_path):
    folder = original(tmp_path)
    file = folder / "config.json"
    config = read_json(file) | {setting: value}
    if setting == "hybrid_override_pattern":
        del config["layers_block_type"]
    write_json(file, config)
    text = problems(folder, tmp_path / "out")
    assert f"{setting} = {value!r}" in text
