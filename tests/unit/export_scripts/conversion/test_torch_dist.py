"""torch_dist checkpoints: what torch reads of them, what comes back, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from export_scripts.checkpoints import open_checkpoint
from export_scripts.conversion.convert import (
    ConversionRequest,
    check_conversion,
    convert,
    folder_problems,
)
from foundations.errors import CheckpointMismatchError
from tests.json_files import read_json
from tests.looks import assert_exact, mentions
from tests.tiny_transformers import write_model

# Those whose names come back: others are Llamas in Megatron-LM.
SAME = (
    "llama", "llama-tied", "llama-biases", "llama-no-groups", "llama-linear", "mistral", "qwen2",
    "qwen3", "starcoder2", "nemotron-plain", "gpt2", "gpt2-untied", "gpt2-exact-gelu",
    "mixtral", "qwen3-moe", "qwen2_moe", "glm4_moe", "deepseek_v3", "deepseek_v2", "glm",
    "ernie4_5",
)  # fmt: skip
HYBRID = ("llama", "llama-tied", "llama-biases", "mistral", "qwen2", "starcoder2", "gpt2",
          "mixtral", "qwen2_moe")  # fmt: skip


def write(name: str, folder: Path) -> Path:
    if name == "nemotron-plain":
        return write_model("nemotron", folder, attention_bias=False)
    return write_model(name, folder)


def request(
    source: Path, output: Path, form: str = "torch_dist", **fields: Any
) -> ConversionRequest:
    return ConversionRequest(source, output, 1, "fp32", output_format=form, **fields)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "gpt") for name in SAME), *((name, "hybrid") for name in HYBRID)],
)
def test_a_model_comes_back_to_the_byte(name, form, tmp_path):
    source = write(name, tmp_path / name)
    there = convert(request(source, tmp_path / "out", megatron_model=form)).ft_dir
    assert there.name == "torch_dist"
    assert folder_problems(there) == []
    back = convert(request(there, tmp_path / "out", "huggingface")).ft_dir
    one, other = tensors(source), tensors(back)
    assert_exact(one, other)
    settings = [read_json(folder / "config.json") for folder in (source, back)]
    assert settings[0]["model_type"] == settings[1]["model_type"]
    assert settings[0]["eos_token_id"] == settings[1]["eos_token_id"]


@pytest.mark.parametrize("form", ["gpt", "hybrid"])
def test_torch_reads_every_tensor(form, tmp_path):
    source = write_model("llama", tmp_path / "llama")
    options: dict[str, Any] = {"megatron_model": form, "max_shard_bytes": 20_000}
    folder = convert(request(source, tmp_path / "out", **options)).ft_dir / "release"
    files = list(folder.glob("*.distcp"))
    assert len(files) > 2
    reader = FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(each.size) for name, each in described.items() if hasattr(each, "size")
    }
    load(state, storage_reader=reader, no_dist=True)
    own = tensors(source)
    up = [own[f"model.layers.1.mlp.{half}_proj.weight"] for half in ("gate", "up")]
    found = (
        state["decoder.layers.mlp.linear_fc1.weight"][1]
        if form == "gpt"
        else state["decoder.layers.3.mlp.linear_fc1.weight"]
    )
    assert torch.equal(found, torch.cat(up))
    norm = "decoder.final_layernorm.weight" if form == "gpt" else "decoder.final_norm.weight"
    assert torch.equal(state[norm], own["model.norm.weight"])
    states = [name for name in described if "._extra_state/" in name]
    ends = {name.rpartition("/")[2] for name in states if ".core_attention." in name}
    assert ends == ({"shard_0_2", "shard_1_2"} if form == "gpt" else {"shard_0_1"})


def test_experts_are_stacked_as_grouped_layers_read_them(tmp_path):
    source = write_model("mixtral", tmp_path / "mixtral")
    folder = convert(request(source, tmp_path / "out")).ft_dir / "release"
    described: Any = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert described["decoder.layers.mlp.experts.experts.linear_fc2.weight"].size == (2, 4, 24, 56)
    name = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4"
    assert name in described


def test_layers_of_two_kinds_have_a_tensor_each(tmp_path):
    """Norms are where Transformer Engine's layers read them."""
    source = write_model("deepseek_v3", tmp_path / "deepseek")
    folder = convert(request(source, tmp_path / "out")).ft_dir
    described = FileSystemReader(folder / "release").read_metadata().state_dict_metadata
    shapes = {name: tuple(each.size) for name, each in described.items() if hasattr(each, "size")}
    assert shapes["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] == (24,)
    assert shapes["decoder.layers.1.pre_mlp_layernorm.weight"] == (24,)
    assert shapes["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"] == (8, 24, 20)
    assert shapes["decoder.layers.0.input_layernorm.weight"] == (24,)
    assert shapes["decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight"] == (24,)
    stated = (folder / "megatron_arguments.txt").read_text().splitlines()
    assert {"--multi-latent-attention", "--moe-layer-freq [0,1,1,1]", "--rope-type yarn"} <= {
        *stated
    }


def test_arguments_are_those_of_the_model(tmp_path):
    source = write_model("qwen2", tmp_path / "qwen2")
    folder = convert(request(source, tmp_path / "out", megatron_model="hybrid")).ft_dir
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    stated = dict.fromkeys((folder / "megatron_arguments.txt").read_text().splitlines())
    assert "--hybrid-layer-pattern *-*-" in stated
    assert "--add-qkv-bias" in stated
    assert "--disable-bias-linear" in stated
    assert "--padded-vocab-size 53" in stated
    read = open_checkpoint(folder).config
    assert read["num_query_groups"] == 2
    common = torch.load(folder / "release" / "common.pt", weights_only=False)
    assert common["args"].hybrid_layer_pattern == "*-*-"
    assert common["iteration"] == 0


@pytest.mark.parametrize(
    ("name", "form", "named"),
    [
        ("gemma", "gpt", "embedding_scale"),
        ("granite", "gpt", "residual_scale"),
        ("olmo2", "gpt", "only Megatron Bridge has norms"),
        ("falcon", "gpt", "residual is parallel_shared"),
        ("smollm3", "gpt", "add_bias_linear"),
        ("llama-llama3", "gpt", "original_max_position_embeddings"),
        ("llama-yarn", "gpt", "yarn"),
        ("gpt2-relu", "gpt", "activation is relu"),
        ("bloom", "gpt", "position is alibi"),
        ("gptj", "gpt", "what a gptj does"),
        ("qwen3", "hybrid", "no norms of queries and keys"),
        ("deepseek_v3", "hybrid", "no norms of queries and keys"),
        ("glm", "hybrid", "rotary_interleaved"),
        ("llama-linear", "hybrid", "rotary_seq_len_interpolation_factor"),
    ],
)
def test_a_model_that_megatron_lm_lacks_is_refused_by_name(name, form, named, tmp_path):
    wanted = request(write_model(name, tmp_path / name), tmp_path / "out", megatron_model=form)
    problems = check_conversion(wanted)
    assert mentions(problems, named), problems
    with pytest.raises(CheckpointMismatchError):
        convert(wanted)
    assert not list((tmp_path / "out").glob("torch_dist*"))


def test_shards_and_another_release_become_a_checkpoint_too(tmp_path):
    source = write_model("llama", tmp_path / "llama")
    shards = convert(
        dataclasses.replace(request(source, tmp_path), output_format="fastertransformer")
    )
    first = convert(request(shards.ft_dir, tmp_path / "of_shards")).ft_dir
    second = convert(request(first, tmp_path / "again", megatron_model="hybrid")).ft_dir
    back = convert(request(second, tmp_path, "huggingface")).ft_dir
    assert_exact(tensors(back), tensors(source))


def test_a_layout_without_a_checkpoint_of_its_kind_is_refused(tmp_path):
    wanted = request(tmp_path, tmp_path / "out", "huggingface", megatron_model="hybrid")
    assert mentions(check_conversion(wanted), "--megatron-model=hybrid")


def test_a_damaged_file_is_named(tmp_path):
    source = write_model("llama", tmp_path / "llama")
    folder = convert(request(source, tmp_path / "out")).ft_dir
    file = folder / "release" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    place = data.rindex(tensors(source)["model.norm.weight"].numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert mentions(folder_problems(folder), "__0_0.distcp")
    with pytest.raises(CheckpointMismatchError, match=r"final_layernorm\.weight"):
        convert(request(folder, tmp_path / "back", "huggingface"))
