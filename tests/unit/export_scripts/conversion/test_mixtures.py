"""Mixtures of experts: from every form of megatron-core to what transformers computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from export_scripts.conversion.convert import folder_problems
from export_scripts.ft.config_ini import read_config
from tests.conversions import folder_of, problems_of, remarks_of
from tests.json_files import read_json, write_json
from tests.looks import assert_exact
from tests.tiny_distributed import megatron_common, write_distributed
from tests.tiny_huggingface import read_tensors, renamed
from tests.tiny_megatron_core import write_core
from tests.tiny_mixtures import ARGS, core_mixture, with_stacked_experts
from tests.tiny_transformers import (
    MIXTURES,
    OTHER_MIXTURES,
    SHARED_EXPERTS,
    model_of,
    write_model,
)

Tensors = Mapping[str, torch.Tensor]
GIVEN = (("start_id", "1"), ("end_id", "2"))
HUGGING_FACE: Mapping[str, Any] = {"output_format": "huggingface", "given": GIVEN}
# By the end of a name: the axis, counted from the last, that 2 ranks cut, and into how many chunks.
CUTS = {
    "word_embeddings.weight": (-2, 2), "linear_qkv.weight": (-2, 2), "linear_proj.weight": (-1, 2),
    "linear_fc1.weight": (-2, 4), "linear_fc2.weight": (-1, 2),
}  # fmt: skip


def written(source: Path, output: Path, **fields: Any) -> Path:
    return folder_of(source, output, **{**HUGGING_FACE, **fields})


def problems(source: Path, output: Path) -> str:
    return problems_of(source, output, **HUGGING_FACE)


def logits(folder: Path) -> torch.Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.arange(3, 23)[None]).logits


def write(folder: Path, tensors: Tensors, args: Mapping[str, Any], *, cut: bool = True) -> Path:
    cuts = {
        name: (tensor.ndim + axis, count)
        for name, tensor in tensors.items()
        for end, (axis, count) in CUTS.items()
        if cut and name.endswith(end)
    }
    return write_distributed(folder, tensors, common=megatron_common(**args), cuts=cuts)


def by_expert(state: Tensors) -> dict[str, torch.Tensor]:
    """As megatron-core writes with `singleton_local_shards`: the halves of a gate apart, too."""
    out = {}
    for name, tensor in state.items():
        name = name.replace("local_experts", "experts")
        if "experts" in name and name.endswith("linear_fc1.weight"):
            out[f"{name}_w"], out[f"{name}_v"] = tensor.chunk(2)
        else:
            out[name] = tensor
    return out


def stacked_layers(state: Tensors) -> dict[str, torch.Tensor]:
    out = {name: tensor for name, tensor in state.items() if ".layers." not in name}
    for name, tensor in state.items():
        if ".layers.0." in name:
            second = state[name.replace(".0.", ".1.", 1)]
            out[name.replace(".layers.0.", ".layers.")] = torch.stack([tensor, second])
    return out


FORMS = {
    "layers stacked": lambda state: stacked_layers(with_stacked_experts(state)),
    "experts stacked": with_stacked_experts,
    "each apart": by_expert,
}


@pytest.mark.parametrize("name", list(MIXTURES))
@pytest.mark.parametrize("form", list(FORMS))
def test_transformers_computes_the_same(name, form, tmp_path):
    original = write_model(name, tmp_path / "original")
    source = write(tmp_path / "source", FORMS[form](core_mixture(original)), ARGS[name])
    folder = written(source, tmp_path)
    assert folder_problems(folder) == []
    assert_exact(logits(folder), logits(original))
    again = written(folder, tmp_path / "again")
    assert_exact(logits(again), logits(original))


def test_what_megatron_core_does_with_experts_alone_is_a_remark(tmp_path):
    original = write_model("mixtral", tmp_path / "original")
    args = {**ARGS["mixtral"], "moe_input_jitter_eps": 0.1, "moe_expert_capacity_factor": 1.5}
    source = write(tmp_path / "source", FORMS["each apart"](core_mixture(original)), args)
    remarks = remarks_of(source, tmp_path, **HUGGING_FACE)
    assert "moe_input_jitter_eps = 0.1: megatron-core multiplies" in remarks
    assert "moe_expert_capacity_factor = 1.5: megatron-core drops" in remarks


@pytest.mark.parametrize("name", sorted({*OTHER_MIXTURES, *SHARED_EXPERTS} - {"nemotron_h"}))
def test_a_mixture_of_transformers_comes_back(name, tmp_path):
    source = write_model(name, tmp_path / "source")
    folder = written(source, tmp_path / "out")
    assert folder_problems(folder) == []
    assert_exact(logits(folder), logits(source))


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen3-moe", "deepseek_v3", "ernie4_5-moe", "granitemoe", "nemotron_h", "exaone3"],
)
def test_names_that_transformers_has_in_memory_are_read(name, tmp_path):
    """As trainers save a state, which since transformers 5 is not what save_pretrained writes."""
    model = model_of(name)
    model.save_pretrained(tmp_path / "files")
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "trainer", no_dist=True)
    expected = read_tensors(written(tmp_path / "files", tmp_path / "out"))
    for source, settings in (("memory", None), ("trainer", tmp_path / "files")):
        folder = written(tmp_path / source, tmp_path / f"{source}-out", model_config=settings)
        found = read_tensors(folder)
        assert_exact(found, expected)


def test_a_mixtral_in_the_names_of_gptqmodel_is_read(tmp_path):
    source = write_model("mixtral", tmp_path / "source")
    theirs = {
        "block_sparse_moe": "mlp",
        ".w1": ".gate_proj",
        ".w2": ".down_proj",
        ".w3": ".up_proj",
    }
    tensors = renamed(read_tensors(source), theirs)
    expected = read_tensors(written(source, tmp_path / "out"))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    found = read_tensors(written(source, tmp_path / "again"))
    assert_exact(found, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_layer_interval": 2, "tie_word_embeddings": True},
        {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_num_shared_experts": 0},
    ],
    ids=str,
)
def test_ernie_comes_back_as_it_is(changes, tmp_path):
    source = write_model("ernie4_5-moe", tmp_path / "source", **changes)
    tensors = read_tensors(source)
    for name in (each for each in tensors if each.endswith("correction_bias")):
        tensors[name] = torch.linspace(-0.3, 0.3, 6)[None]  # not a parameter, which are random
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder = written(source, tmp_path / "out")
    found = read_tensors(folder)
    assert_exact(found, tensors)
    assert_exact(logits(folder), logits(source))


def test_ernie_with_biases_is_refused(tmp_path):
    source = write_model("ernie4_5-moe", tmp_path / "source", use_bias=True)
    assert "use_bias = True" in problems(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_layer_types": ["dense"]}, "expected dense or sparse for each of the 4 layers"),
        ({"mlp_layer_types": [{}, [], 1, None]}, "expected dense or sparse for each"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "expected yarn without"),
        ({"attention_chunk_size": 8}, "forgets the tokens before a chunk"),
        ({"sliding_window": 8}, "forgets the tokens before a window"),
    ],
    ids=str,
)
def test_what_no_model_computes_is_refused_by_name(changes, words, tmp_path):
    source = write_model("glm4_moe_lite", tmp_path / "source")
    config = source / "config.json"
    write_json(config, read_json(config) | changes)
    assert words in problems(source, tmp_path / "out")


CONFIG: Mapping[str, Any] = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "seq_length": 40, "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "gated_linear_unit": True, "share_embeddings_and_output_weights": False,
    "num_moe_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 20, "qk_layernorm": True,
    "moe_layer_freq": 1, "rotary_base": 10000.0,
}  # fmt: skip


def write_nemo_2(source: Path, original: Path, changes: Mapping[str, Any] = {}) -> Path:
    state = stacked_layers(with_stacked_experts(core_mixture(original)))
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    write(source / "weights", wrapped, {}, cut=False)
    (source / "context").mkdir()
    target = "nemo.collections.llm.gpt.model.qwen3.Qwen3Model"
    model = {"_target_": target, "config": {**CONFIG, **changes}}
    (source / "context" / "model.yaml").write_text(yaml.safe_dump(model))
    return source


@pytest.mark.parametrize("kind", ["nemo2", "bridge"])
def test_nemo_2_and_bridge_state_the_same(kind, tmp_path):
    original = write_model("qwen3-moe", tmp_path / "original")
    source = tmp_path / "source"
    if kind == "nemo2":
        write_nemo_2(source, original)
    else:
        write(source, stacked_layers(with_stacked_experts(core_mixture(original))), {})
        provider = "megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider30B_A3B"
        run = {"model": {"_target_": provider, **CONFIG}, "tokenizer": {}}
        (source / "run_config.yaml").write_text(yaml.safe_dump(run))
    folder = written(source, tmp_path, model_type="mixture")
    assert_exact(logits(folder), logits(original))


@pytest.mark.parametrize("name", list(MIXTURES))
def test_an_archive_of_nemo_1_is_read(name, tmp_path):
    args, original = ARGS[name], write_model(name, tmp_path / "original", vocab_size=54)
    # megatron-core's own layers, without Transformer Engine, keep the norm apart.
    end = "self_attention.linear_qkv.layer_norm_weight"
    state = {
        f"model.{key.replace(end, 'input_layernorm.weight')}": tensor
        for key, tensor in core_mixture(original).items()
    }
    settings = {key: value for key, value in args.items() if key.startswith("moe_")}
    source = write_core(
        tmp_path / "model.nemo", state, **settings, num_moe_experts=args["num_experts"],
        qk_layernorm=args.get("qk_layernorm", False), rotary_base=args["rotary_base"],
        layernorm_epsilon=args["norm_epsilon"],
    )  # fmt: skip
    folder = written(source, tmp_path / "out")
    assert_exact(logits(folder), logits(original))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"moe_shared_expert_intermediate_size": 12},
            "shared_experts.linear_fc1.weight is missing",
        ),
        ({"moe_router_score_function": "sqrtsoftplus"}, "known: softmax, sigmoid"),
        ({"moe_router_score_function": "sigmoid"}, "router_scores is sigmoid in the model"),
        ({"moe_router_topk_scaling_factor": 2.5}, "routed_scale is 2.5 in the model"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "it affects the routing, too"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "affects the routing, too"),
        ({"moe_layer_freq": [0, 1]}, "layers.0.mlp.linear_fc1.weight is missing"),
        ({"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq = [0, 1, 1]"),
        ({"multi_latent_attention": True, "num_query_groups": 4}, "has no mscale_all_dim"),
        ({"moe_router_pre_softmax": True}, "normalized_routing is False in the model"),
        ({"add_bias_linear": True}, "mlp.router.bias is missing"),
        ({"normalization": "LayerNorm"}, "known: rmsnorm"),
        ({"position_embedding_type": "learned_absolute"}, "known: rope"),
        ({"swiglu": False}, "only written with a gate"),
    ],
)
def test_what_no_mixture_of_transformers_computes_is_refused(changes, words, tmp_path):
    state = core_mixture(write_model("mixtral", tmp_path / "original"))
    source = write(tmp_path / "source", with_stacked_experts(state), {**ARGS["mixtral"], **changes})
    assert words in problems(source, tmp_path / "out")


def test_routing_is_written_as_the_user_states_it(tmp_path):
    original = write_model("mixtral", tmp_path / "original")
    args = {**ARGS["mixtral"], "moe_router_pre_softmax": True}
    source = write(tmp_path / "source", with_stacked_experts(core_mixture(original)), args)
    stated = (*GIVEN, ("normalized_routing", "True"))
    folder = written(source, tmp_path, given=stated)
    assert_exact(logits(folder), logits(original))


def test_files_of_expert_ranks_are_refused_with_the_way_that_works(tmp_path):
    run = tmp_path / "run"
    for expert in range(2):
        rank = run / "iter_0000007" / f"mp_rank_00_000_{expert:03d}"
        rank.mkdir(parents=True)
        (rank / "model_optim_rng.pt").touch()
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    assert "--ckpt-format torch_dist" in problems(run, tmp_path / "out")


def test_a_missing_expert_is_named(tmp_path):
    state = by_expert(core_mixture(write_model("mixtral", tmp_path / "original")))
    del state["decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"]
    source = write(tmp_path / "source", state, ARGS["mixtral"], cut=False)
    lost = "layers.1.mlp.experts.local_experts.2.linear_fc2.weight"
    assert f"{lost} is missing" in problems(source, tmp_path / "out")


def test_shards_of_a_mixture_are_refused_with_the_way_that_works(tmp_path):
    original = write_model("mixtral", tmp_path / "original")
    problem = problems_of(original, tmp_path / "out")
    assert "--output-format=huggingface" in problem
    assert "deploy.engine=vllm" in problem


def test_ft_folders_of_mixtures_are_refused_with_the_way_that_works(tmp_path):
    folder = tmp_path / "1-gpu"
    folder.mkdir()
    (folder / "config.ini").write_text("[gpt]\nhead_num = 4\n[structure]\nexpert_num = 8\n")
    with pytest.raises(ValueError, match=r"expert_num = 8: .*convert\.format=huggingface"):
        read_config(folder)
