"""Checkpoints of Megatron Bridge: weights by torch, settings as it writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from export_scripts.checkpoints import recognise_format
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.gpt.layout import GPTConfig
from export_scripts.ft.reader import FTReader
from foundations.errors import CheckpointMismatchError
from inference.backend.tokenizer import load_tokenizer
from tests.conversions import contents, folder_of, refusal
from tests.json_files import write_json
from tests.looks import assert_exact
from tests.tiny import tiktoken_list
from tests.tiny_distributed import write_distributed
from tests.unit.export_scripts.checkpoints.test_distributed import (
    Tensors,
    classic,
    converted,
    state,
    write,
)

__all__ = ["state"]

SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.llama.llama_provider.Llama31ModelProvider8B",
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "seq_length": 40, "layernorm_epsilon": 1e-5,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
    "activation_func": SILU, "gated_linear_unit": True, "rotary_base": 500000,
    "share_embeddings_and_output_weights": False, "vocab_size": 50, "should_pad_vocab": True,
    "tensor_model_parallel_size": 2, "window_size": None, "rope_scaling": False,
    "attention_backend": {
        "_target_": "megatron.core.transformer.enums.AttnBackend", "_call_": True, "_args_": [5],
    },
    "transformer_layer_spec": {
        "_target_": "megatron.bridge.models.gpt_provider.default_layer_spec", "_call_": False,
    },
}  # fmt: skip
# How versions since 0.6 write the same: megatron-core's own settings apart, functions by name.
_OUTER = {"seq_length", "position_embedding_type", "rotary_base", "vocab_size", "rope_scaling",
          "share_embeddings_and_output_weights", "should_pad_vocab"}  # fmt: skip


def nested(model: dict[str, Any]) -> dict[str, Any]:
    inner = {
        key: value for key, value in model.items() if key not in _OUTER and key != "_target_"
    } | {"activation_func": "silu", "_target_": "megatron.core...TransformerConfig"}
    return {key: value for key, value in model.items() if key in _OUTER} | {
        "_target_": "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig",
        "_builder_": "megatron.bridge.models.gpt.gpt_builder.GPTModelBuilder",
        "transformer": inner,
    }


def run_config(model: dict[str, Any], **sections: Any) -> str:
    return yaml.safe_dump(
        {
            "_target_": "megatron.bridge.training.config.ConfigContainer",
            "checkpoint": {"ckpt_format": "torch_dist"},
            "model": model,
            "tokenizer": {"tokenizer_type": "HuggingFaceTokenizer"},
            "peft": None,
        }
        | sections
    )


def write_bridge(
    run: Path,
    state: Tensors,
    model: dict[str, Any] = MODEL,
    step: int = 7,
    *,
    stacked: bool = True,
) -> Path:
    """Write the folder of a run; return its checkpoint."""
    folder = run / f"iter_{step:07d}"
    write(folder, state, stacked=stacked, common={"iteration": step, "checkpoint_version": 3.0})
    (folder / "run_config.yaml").write_text(run_config(model))
    (folder / "tokenizer").mkdir()
    tokens = [{"content": "<s>", "id": 50}, {"content": "</s>", "id": 51}]
    write_json(folder / "tokenizer" / "tokenizer.json", {"added_tokens": tokens})
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    write_json(folder / "tokenizer" / "tokenizer_config.json", settings)
    for name in (folder / "train_state.pt", run / "latest_train_state.pt"):
        torch.save({"step": torch.tensor(step, dtype=torch.int32), "do_train": True}, name)
    return folder


@pytest.mark.parametrize("form", ["provider", "config"])
@pytest.mark.parametrize("named", ["checkpoint", "run", "older run"])
def test_checkpoints_become_the_classic_folder(state, tmp_path, form, named):
    run = tmp_path / "run"
    source = write_bridge(run, state, MODEL if form == "provider" else nested(MODEL))
    write_bridge(run, {name: 0 * tensor for name, tensor in state.items()}, step=3)
    torch.save({"step": torch.tensor(7, dtype=torch.int32)}, run / "latest_train_state.pt")
    if named == "older run":
        (run / "latest_train_state.pt").unlink()
        (run / "latest_checkpointed_iteration.txt").write_text("7")
    path = source if named == "checkpoint" else run
    assert recognise_format(path) == "bridge"
    ft = FTReader(converted(path, tmp_path / "out", 2))
    config = ft.config
    assert isinstance(config, DenseConfig)
    assert (config.start_id, config.end_id, config.rotary_base) == (50, 51, 500000)
    assert config.rotary_scaling_type is None
    assert (ft.path / "tokenizer.json").is_file()
    expected = classic(state, tmp_path, 2)
    found = contents(ft.path)
    assert {n for n in found if n.endswith(".bin")} == {n for n in expected if n.endswith(".bin")}
    assert all(found[name] == data for name, data in expected.items() if name.endswith(".bin"))


def test_positions_are_scaled_by_a_stated_factor_alone(state, tmp_path):
    """Its default differs between Bridge's classes; the others' names are not Bridge's."""
    scaled = MODEL | {"rope_scaling": True, "scale_factor": 4.0, "low_freq_factor": 2.0}
    run = write_bridge(tmp_path / "lacking", state, scaled)
    with pytest.raises(CheckpointMismatchError, match="rope_scaling_factor"):
        converted(run, tmp_path / "out")
    run = write_bridge(tmp_path / "stated", state, scaled | {"rope_scaling_factor": 16.0})
    config = FTReader(converted(run, tmp_path / "out")).config
    assert isinstance(config, DenseConfig)
    assert (config.rotary_factor, config.rotary_low_freq_factor) == (16.0, 1.0)


def test_biased_decoders_with_learned_positions_are_gpts(tmp_path):
    shapes = {
        "embedding.word_embeddings.weight": (40, 16),
        "embedding.position_embeddings.weight": (12, 16),
        "decoder.final_layernorm.weight": (16,),
        "decoder.final_layernorm.bias": (16,),
    }
    for name, rows, columns in (
        ("self_attention.linear_qkv", 48, 16),
        ("self_attention.linear_proj", 16, 16),
        ("mlp.linear_fc1", 64, 16),
        ("mlp.linear_fc2", 16, 64),
    ):
        shapes |= {
            f"decoder.layers.{name}.weight": (1, rows, columns),
            f"decoder.layers.{name}.bias": (1, rows),
        }
    for name in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        shapes |= {f"decoder.layers.{name}.layer_norm_{p}": (1, 16) for p in ("weight", "bias")}
    folder = tmp_path / "iter_0000001"
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_distributed(folder, tensors, common={"iteration": 1})
    model = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTProvider126M",
        "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 64, "num_attention_heads": 2,
        "seq_length": 12, "add_bias_linear": True, "normalization": "LayerNorm",
        "activation_func": {"_target_": "torch._C._nn.gelu", "_call_": False},
        "bias_activation_fusion": False, "share_embeddings_and_output_weights": True,
    }  # fmt: skip
    (folder / "run_config.yaml").write_text(
        run_config(model, tokenizer={"tokenizer_type": "NullTokenizer"})
    )
    given = (("start_id", "1"), ("end_id", "2"))
    ft = FTReader(converted(folder, tmp_path / "out", given=given))
    assert isinstance(ft.config, GPTConfig)
    assert ft.config.exact_gelu
    assert_exact(
        ft.read("model.layers.0.mlp.dense_h_to_4h.weight"),
        tensors["decoder.layers.mlp.linear_fc1.weight"][0].T,
    )


def test_every_setting_that_does_not_fit_is_named(state, tmp_path):
    changed = MODEL | {
        "_target_": "megatron.bridge.models.glm.glm45_provider.GLMMoEModelProvider",
        "qk_layernorm": True,
        "num_moe_experts": 8,
        "linear_attention_freq": 2,
        "multi_latent_attention": True,
        "apply_residual_connection_post_layernorm": True,
        "transformer_layer_spec": {"_target_": "mine.my_spec", "_call_": False},
    }
    text = refusal(write_bridge(tmp_path / "run", state, changed), tmp_path)
    for named in (
        "GLMMoEModelProvider", "mixture, which has no folder", "linear_attention_freq", "my_spec",
        "multi_latent_attention", "apply_residual_connection_post_layernorm = True",
    ):  # fmt: skip
        assert named in text, text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("window_size", "x"),
        ("window_size", 1.5),
        ("window_size", [1]),
        ("softmax_scale", "x"),
        ("query_pre_attn_scalar", [1]),
        ("attn_logit_softcapping", "x"),
        ("final_logit_softcapping", -1),
        ("interleaved_attn_pattern", 3),
        ("interleaved_attn_pattern", ["sliding_attention"]),
        ("window_attn_skip_freq", {"a": 1}),
        ("window_attn_skip_freq", [1]),
        ("no_rope_freq", float("inf")),
        ("no_rope_freq", 1),
        ("rotary_percent", 1e308),
        ("seq_len_interpolation_factor", "x"),
        ("num_moe_experts", ["x"]),
    ],
)
def test_a_malformed_setting_is_named(state, tmp_path, key, value):
    source = write_bridge(tmp_path / "run", state, MODEL | {key: value})
    (problem,) = refusal(source, tmp_path).split("\n")
    word = "number of experts" if key == "num_moe_experts" else key
    assert f"{source}: run_config.yaml: {word}" in problem


@pytest.mark.parametrize(
    ("provider", "layers"),
    [("Gemma2ModelProvider9B", "default_layer_spec"), ("GPTModelProvider", "gemma2_layer_spec")],
)
def test_layers_of_another_class_of_models_are_refused(state, tmp_path, provider, layers):
    changed = MODEL | {
        "_target_": f"x.{provider}",
        "transformer_layer_spec": {"_target_": f"x.{layers}", "_call_": False},
    }
    text = refusal(write_bridge(tmp_path / "run", state, changed), tmp_path)
    assert f"transformer_layer_spec = {layers}: custom layers" in text


def test_nothing_that_the_settings_name_is_run(state, tmp_path):
    mark = tmp_path / "ran"
    evil = {"_target_": "os.system", "_args_": [f"touch {mark}"], "_call_": True}
    source = write_bridge(tmp_path / "run", state, MODEL | {"init_method": evil})
    converted(source, tmp_path / "harmless")
    settings = source / "run_config.yaml"
    settings.write_text(f"model: !!python/object/apply:os.system ['touch {mark}']\n")
    assert "run_config.yaml is not YAML" in refusal(source, tmp_path)
    settings.write_text(run_config(evil))
    assert "system" in refusal(source, tmp_path)
    assert not mark.exists()


def test_unfinished_runs_are_refused(state, tmp_path):
    run = tmp_path / "run"
    source = write_bridge(run, state)
    (source / ".metadata").rename(source / "kept")
    assert "lacks .metadata" in refusal(source, tmp_path)
    (source / "kept").rename(source / ".metadata")
    (source / "run_config.yaml").write_text("model: 3\n")
    assert "has no model" in refusal(source, tmp_path)
    (source / "run_config.yaml").unlink()
    assert "lacks iter_0000007/run_config.yaml" in refusal(run, tmp_path)
    torch.save({"step": "7; ls"}, run / "latest_train_state.pt")
    assert "does not say how many steps" in refusal(run, tmp_path)


def test_tiktoken_s_vocabulary_becomes_a_tokenizer(state, tmp_path):
    source = write_bridge(tmp_path / "run", state)
    tokenizer = {"tokenizer_type": "TikTokenizer", "vocab_size": 264}
    settings = {**tokenizer, "tiktoken_num_special_tokens": 8}
    (source / "run_config.yaml").write_text(run_config(MODEL, tokenizer=settings))
    (source / "tokenizer").mkdir(exist_ok=True)
    (source / "tokenizer" / "tokenizer.json").write_bytes(tiktoken_list())
    (source / "tokenizer" / "tokenizer_config.json").unlink(missing_ok=True)
    folder = folder_of(source, tmp_path / "shards")
    ours = load_tokenizer(folder)
    assert ours.encode("a</s>") == [8 + ord("a"), 2]
    assert (ours.special_ids, ours.vocab_size) == (frozenset(range(8)), 264)
    (source / "tokenizer" / "tokenizer.json").write_text('[{"rank": 1}]')
    assert "entry 0 is not the token of that rank" in refusal(source, tmp_path)
