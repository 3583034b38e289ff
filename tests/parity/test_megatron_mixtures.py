"""Mixtures that megatron-core saves give its logits in transformers, or are refused by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.json_files import read_json
from tests.looks import relative_error
from tests.megatron_core_mixtures import LENGTH, MODELS, SIZES, Mixture, save_all
from tests.tiny_huggingface import read_tensors
from tests.unit.export_scripts.conversion.test_mixtures import problems, written

# Relative to the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5

# These have every kind of layer that is cut.
CUT_MODELS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
CUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "by_expert": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
# Without these, vLLM scores and chooses experts in another way than transformers.
READ_BY_VLLM: dict[str, dict[str, str]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
}
# Settings changed one at a time, and the model type that they become, or words of the refusal.
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"qk_layernorm": False, "moe_layer_freq": 1}, "mixtral"),
    ("qwen3_moe", {"moe_layer_freq": [1, 0, 1, 1]}, "qwen3_moe"),
    ("qwen3_moe", {"moe_router_pre_softmax": True}, "qwen3_moe"),
    ("qwen3_moe", {"moe_router_topk_scaling_factor": 2.0}, "routed_scale is 2.0"),
    ("qwen3_moe", {"rotary_base": 500}, "qwen3_moe"),
    ("qwen3_moe", {"rotary_percent": 0.5}, "rotary"),
    ("qwen2_moe", {"moe_router_pre_softmax": False}, "qwen2_moe"),
    ("qwen2_moe", {"moe_shared_expert_gate": False}, "has_shared_gate is False"),
    ("qwen2_moe", {"add_qkv_bias": False}, "qwen2_moe"),
    ("glm4_moe", {"qk_layernorm": False, "add_qkv_bias": False}, "glm4_moe"),
    ("glm4_moe", {"rotary_percent": 1.0}, "glm4_moe"),
    ("glm4_moe", {"moe_router_topk": 1}, "glm4_moe"),
    ("glm4_moe", {"moe_router_enable_expert_bias": False}, "glm4_moe"),
    ("glm4_moe", {"moe_shared_expert_intermediate_size": 30}, "shared_inter_size is 30"),
    ("glm4_moe", {"moe_layer_freq": [1, 0, 1, 1]}, "dense_layers is (1,)"),
    ("deepseek_v3", {"q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 6}, "deepseek_v3"),
    ("deepseek_v3", {"mscale": 0.7, "mscale_all_dim": 0.4}, "deepseek_v3"),
    ("deepseek_v3", {"mscale": 1.0, "mscale_all_dim": 0.0}, "deepseek_v3"),
    ("deepseek_v3", {"mscale": 0.7, "mscale_all_dim": 0.0}, "mscale = 0.7"),
    ("deepseek_v3", {"beta_fast": 8, "beta_slow": 2, "rotary_base": 700}, "deepseek_v3"),
    ("deepseek_v3", {"rope_type": "rope", "mscale_all_dim": 0.0}, "deepseek_v3"),
    ("deepseek_v3", {"rope_type": "rope"}, "mscale_all_dim = 1 with rope_type = rope"),
    ("deepseek_v3", {"layernorm_epsilon": 1e-3}, "latent_eps is 0.001"),
    ("deepseek_v3", {"moe_router_topk": 2}, "group_score is 1"),
    ("deepseek_v3", {"moe_router_num_groups": None, "moe_router_group_topk": None}, "deepseek_v3"),
    ("gpt_oss", {"softmax_type": "off-by-one", "yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.3},
     "gpt_oss"),
    ("gpt_oss", {"yarn_correction_range_round_to_int": True, "window_size": None}, "gpt_oss"),
    ("gpt_oss", {"position_embedding_type": "rope", "yarn_rotary_scaling_factor": None},
     "gpt_oss"),
    ("gpt_oss", {"position_embedding_type": "rope"}, "yarn_rotary_scaling_factor"),
    ("gpt_oss", {"softmax_type": "vanilla"}, "has_sinks is False"),
    ("gpt_oss", {"glu_linear_offset": 0.0}, "gate_offset is 0.0"),
    ("gpt_oss", {"activation_func_clamp_value": None}, "gate_limit is None"),
    ("gpt_oss", {"activation_func": "silu"}, "gpt_oss"),
    ("gpt_oss", {"moe_layer_freq": [0, 1, 1, 1]}, "layers.0.mlp.linear_fc1.bias"),
    ("gpt_oss", {"qk_layernorm": True}, "query_key_norm is head"),
    ("deepseek_v2", {"moe_router_topk": 4}, "group_score is 2"),
    ("deepseek_v2", {"moe_router_pre_softmax": False}, "normalized_routing is True"),
    ("deepseek_v2", {"moe_router_num_groups": None, "moe_router_group_topk": None}, "deepseek_v2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    saves = []
    for name in MODELS:
        whole = str(folder / name)
        saves.append(Mixture(whole, name))
        for cut, sizes in CUTS.items() if name in CUT_MODELS else ():
            # With biases, experts are not cut by tensors.
            own = {"expert_tensor_parallel_size": 1} if name == "gpt_oss" else {}
            apart = {"singleton_local_shards": True} if cut == "by_expert" else None
            saves.append(
                Mixture(f"{whole}-{cut}", name, {}, whole, {**sizes, **own}, metadata=apart)
            )
    for number, (name, changes, _) in enumerate(CHANGES):
        saves.append(Mixture(str(folder / str(number)), name, changes))
    save_all(saves, folder)
    return folder


def error(folder: Path, expected: Path) -> float:
    """Return the largest difference from megatron-core's logits, by the largest of these."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    with torch.no_grad():
        found = model.eval()(torch.arange(3, 3 + LENGTH)[None]).logits
    return relative_error(found, torch.load(expected, weights_only=True))


@pytest.mark.parametrize("name", list(MODELS))
def test_every_way_of_cutting_gives_the_logits(name, saved, tmp_path):
    folder = written(saved / name, tmp_path / "whole")
    config = read_json(folder / "config.json")
    assert config["model_type"] == name
    assert READ_BY_VLLM.get(name, {}).items() <= config.items()
    assert error(folder, saved / f"{name}.pt") < TOLERANCE
    for cut in CUTS if name in CUT_MODELS else ():
        again = written(saved / f"{name}-{cut}", tmp_path / cut)
        weights = "model.safetensors"
        assert (again / weights).read_bytes() == (folder / weights).read_bytes(), cut
    copied = written(folder, tmp_path / "copied")
    assert error(copied, saved / f"{name}.pt") < TOLERANCE


@pytest.mark.parametrize(
    ("name", "activation", "provider"),
    [
        ("deepseek_v3", "torch.nn.functional.silu", "mla_provider.MLAModelProvider"),
        ("gpt_oss", "megatron.core.fusions.fused_bias_geglu.quick_gelu",
         "gpt_provider.GPTModelProvider"),
    ],
)  # fmt: skip
def test_megatron_bridge_states_the_same(name, activation, provider, saved, tmp_path):
    source = shutil.copytree(saved / name, tmp_path / "source")
    settings = {
        "position_embedding_type": "rope", **SIZES, **MODELS[name], "seq_length": 64,
        "activation_func": {"_target_": activation, "_call_": False},
        "share_embeddings_and_output_weights": False,
        "transformer_layer_spec": {
            "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
            "_partial_": True, "use_transformer_engine": True,
        },
    }  # fmt: skip
    run = {
        "model": {"_target_": f"megatron.bridge.models.{provider}", **settings},
        "tokenizer": {},
    }
    (source / "run_config.yaml").write_text(yaml.safe_dump(run))
    folder = written(source, tmp_path / "out")
    assert error(folder, saved / f"{name}.pt") < TOLERANCE


def test_a_correction_of_scores_stays_in_fp32(saved, tmp_path):
    tensors = read_tensors(written(saved / "glm4_moe", tmp_path, weight_data_type="bf16"))
    kinds = {name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16}
    assert kinds == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2, 3)}
    whole = read_tensors(written(saved / "glm4_moe", tmp_path / "whole"))
    assert all(torch.equal(tensors[name], whole[name]) for name in kinds)


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=lambda n: str(CHANGES[n][:2]))
def test_each_setting_is_written_or_refused(number, saved, tmp_path):
    _, _, words = CHANGES[number]
    source, out = saved / str(number), tmp_path / "out"
    if words not in {*MODELS, "mixtral"}:
        assert words in problems(source, out)
        return
    folder = written(source, out)
    assert read_json(folder / "config.json")["model_type"] == words
    assert error(folder, saved / f"{number}.pt") < TOLERANCE
