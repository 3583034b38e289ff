"""Hugging Face models in torch's distributed checkpoints, as trainers save them."""

import argparse
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch
import yaml
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from export_scripts.checkpoints import open_checkpoint, recognise_format
from export_scripts.checkpoints.base import FileMaps
from export_scripts.checkpoints.rank_files import rank_tensors, zero_tensors
from export_scripts.conversion.convert import check_conversion, convert
from export_scripts.inspect import describe
from foundations.errors import CheckpointMismatchError
from tests.conftest import ROOT
from tests.conversions import contents, folder_of, refusal, request_of, written
from tests.json_files import read_json, write_json
from tests.looks import assert_exact, mentions
from tests.tiny_distributed import sharded, write_state
from tests.tiny_huggingface import read_tensors, renamed
from tests.tiny_transformers import model_of, write_model
from tests.unit.export_scripts.checkpoints.test_distributed import Tensors
from tests.unit.export_scripts.checkpoints.test_distributed import converted as converted_to

GIVEN = (("start_id", "1"), ("end_id", "2"))
SHARD = "shard-0000{}-model-00001-of-00001.safetensors"


@pytest.fixture
def model(tmp_path) -> Path:
    """Return the folder of a small Llama."""
    return write_model("llama", tmp_path / "model")


def converted(source: Path, out: Path) -> dict[str, bytes]:
    return contents(converted_to(source, out, 2, given=GIVEN))


def copy_settings(model: Path, folder: Path) -> None:
    for file in model.glob("*.json"):
        shutil.copy(file, folder)


def save_alone(folder: Path, state: dict[str, Any]) -> None:
    save(state, checkpoint_id=folder, no_dist=True)


def test_settings_may_lie_elsewhere(model, tmp_path):
    folder = tmp_path / "run"
    save_alone(folder, {"model": read_tensors(model)})
    expected = converted(model, tmp_path / "expected")
    for place in (model, model / "config.json"):
        out = tmp_path / place.name
        found = converted_to(folder, out, 2, given=GIVEN, model_config=place)
        assert contents(found) == expected
    with pytest.raises(ValueError, match="leave --model-config out"):
        converted_to(model, tmp_path / "out", model_config=model)
    with pytest.raises(ValueError, match=r"--model-config=.*absent does not exist"):
        converted_to(folder, tmp_path / "out", model_config=tmp_path / "absent")


def optimizer(tensors: Tensors) -> dict[str, Any]:
    return {"state": {name: {"exp_avg": torch.ones(2)} for name in tensors}}


def accelerate(folder: Path, tensors: Tensors, model: Path) -> Path:
    save_alone(folder / "pytorch_model_fsdp_0", {"model": tensors})
    save_alone(folder / "optimizer_0", {"optimizer": optimizer(tensors)})
    copy_settings(model, folder)
    return folder


def accelerate_weights(folder: Path, tensors: Tensors, model: Path) -> Path:
    return accelerate(folder, tensors, model) / "pytorch_model_fsdp_0"


def app_state(folder: Path, tensors: Tensors, model: Path) -> Path:
    """As torch's own tutorial has it, with a counter of steps."""
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    state = {"model": compiled, "optim": optimizer(tensors)}
    save_alone(folder, {"app": state, "step": torch.tensor(3), "epoch": 1})
    copy_settings(model, folder)
    return folder


def nemo_rl(folder: Path, tensors: Tensors, model: Path) -> Path:
    """Settings that no trainer leaves are put where the message says."""
    save_alone(folder / "policy" / "weights" / "model", {"model": tensors})
    save_alone(folder / "policy" / "optimizer" / "optim", {"optim": optimizer(tensors)})
    with pytest.raises(ValueError, match=r"copy the config\.json .* into .*"):
        open_checkpoint(folder)
    copy_settings(model, folder)
    return folder


def nemo_rl_policy(folder: Path, tensors: Tensors, model: Path) -> Path:
    """Without a folder for the model in its weights, as NeMo-RL's first worker saves them."""
    policy = folder / "policy"
    save_alone(policy / "weights", {"model": tensors})
    copy_settings(model, policy)
    return policy


def automodel(folder: Path, tensors: Tensors, model: Path) -> Path:
    """Shards of safetensors with their places, written by hand as torch's writer does."""
    weights = folder / "model"
    (weights / ".hf_metadata").mkdir(parents=True)
    copy_settings(model, weights / ".hf_metadata")
    for rank in range(2):
        parts, places = {}, {}
        for name, tensor in tensors.items():
            half = -(-len(tensor) // 2)
            parts[name] = tensor[:half].clone() if rank == 0 else tensor[half:].clone()
            places[name] = {"saved_offsets": [rank * half, *[0] * (tensor.ndim - 1)]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        file = weights / SHARD.format(rank + 1)
        safetensors.torch.save_file(parts, file, metadata)
    save_alone(folder / "optim", {"optim": optimizer(tensors)})
    return folder


def automodel_run(folder: Path, tensors: Tensors, model: Path) -> Path:
    """A run of several checkpoints, whose last a link names, as AutoModel 0.7 leaves it."""
    folder.mkdir()
    for step in (1, 2):
        automodel(folder / f"epoch_0_step_{step}", tensors, model)
    (folder / "LATEST").symlink_to("epoch_0_step_2")
    return folder


def slime(folder: Path, tensors: Tensors, model: Path) -> Path:
    """As slime's FSDP backend numbers its checkpoints."""
    for step in (1, 20):
        save_alone(folder / f"iter_{step:07}" / "model", {"model_state": {"model": tensors}})
        copy_settings(model, folder / f"iter_{step:07}")
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    return folder


def areal(folder: Path, tensors: Tensors, model: Path) -> Path:
    save_alone(folder, {"dcp": {"model": tensors, "optim": optimizer(tensors)}})
    copy_settings(model, folder)
    return folder


def lightning(folder: Path, tensors: Tensors, model: Path) -> Path:
    """A folder that is called like the file of a checkpoint, as Lightning's strategies save it."""
    wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_alone(folder / "last.ckpt", {"state_dict": wrapped, "optimizer_0": optimizer(tensors)})
    torch.save({"epoch": 0}, folder / "last.ckpt" / "meta.pt")
    copy_settings(model, folder)
    return folder


def chunks(folder: Path, tensors: Tensors, model: Path) -> Path:
    """Parts of unequal size, the last of them empty, as fully sharded training leaves them."""
    pieces = {}
    for name, tensor in tensors.items():
        third, rest = len(tensor) // 3, (0,) * (tensor.ndim - 1)
        parts = [(tensor[:third], (0, *rest)), (tensor[third:], (third, *rest))]
        pieces[f"model.{name}"] = sharded(f"model.{name}", parts)
    write_state(folder, pieces)
    copy_settings(model, folder)
    return folder


def composer(folder: Path, tensors: Tensors, model: Path) -> Path:
    """With everything else that Composer saves, and moments below the model's names."""
    wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    state = {"model": wrapped, "optimizers": {"AdamW": optimizer(wrapped)}, "rank_zero_seed": 17}
    save_alone(folder / "ep0-ba10", {"state": state, "rng": [{"torch": torch.get_rng_state()}]})
    (folder / "ep0-ba10" / "huggingface").mkdir()
    copy_settings(model, folder / "ep0-ba10" / "huggingface")
    return folder


def verl_megatron(folder: Path, tensors: Tensors, model: Path) -> Path:
    """megatron-core's names, the optimizer apart, and the run's last step, without arguments."""
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("20\n")
    for step in (10, 20):
        actor = folder / f"global_step_{step}" / "actor"
        core_without_arguments(model, actor / "model" / "dist_ckpt")
        (actor / "model" / "huggingface").mkdir()
        copy_settings(model, actor / "model" / "huggingface")
        moments = actor / "optimizer" / "dist_ckpt"
        save_alone(moments, {"optimizer.state.exp_avg.output_layer.weight": torch.ones(2)})
        torch.save({"lr_scheduler": {"num_steps": step}}, moments / "common.pt")
        (moments / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def core_without_arguments(model: Path, folder: Path) -> None:
    shutil.move(
        folder_of(model, folder.parent / "written", output_format="torch_dist") / "release", folder
    )
    torch.save({"content_metadata": {"singleton_local_shards": False}}, folder / "common.pt")


@pytest.mark.parametrize(
    "trainer",
    [
        accelerate,
        accelerate_weights,
        app_state,
        nemo_rl,
        nemo_rl_policy,
        automodel,
        automodel_run,
        slime,
        areal,
        lightning,
        composer,
        chunks,
        verl_megatron,
    ],
)
def test_every_trainer_s_folder_becomes_the_model_s(model, tmp_path, trainer):
    source = trainer(tmp_path / "run", read_tensors(model), model)
    expected = converted(model, tmp_path / "expected")
    assert converted(source, tmp_path / "out") == expected
    notes = " ".join(describe(source)["notes"])
    assert "took the weights in" in notes


def test_weights_may_lie_without_settings(model, tmp_path):
    """As accelerate's save_state and Lightning leave them."""
    tensors = read_tensors(model)
    alone, lightning, indexed = (tmp_path / name for name in ("alone", "lightning", "indexed"))
    alone.mkdir()
    lightning.mkdir()
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(indexed)), no_dist=True)
    shutil.copy(model / "model.safetensors", alone)
    wrapped = {f"_forward_module.model.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"epoch": 1, "state_dict": wrapped, "loops": {}}, lightning / "last.ckpt")
    with pytest.raises(ValueError, match=r"name the file, and its model.s config\.json"):
        open_checkpoint(lightning)
    expected = converted(model, tmp_path / "expected")
    paths = alone, alone / "model.safetensors", indexed, lightning / "last.ckpt"
    for number, path in enumerate(paths):
        folder = path if path.is_dir() else path.parent
        with pytest.raises(ValueError, match=f"copy the config.json .* into {folder}, or name it"):
            open_checkpoint(path)
        out = tmp_path / f"out{number}"
        assert contents(converted_to(path, out, 2, given=GIVEN, model_config=model)) == expected
        facts = describe(path, settings=model)
        assert facts["path"] == str(path)
        assert not mentions(facts["can be"], "as it is")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "consolidated.00.pth").touch()
    with pytest.raises(ValueError, match="publisher's own layout"):
        open_checkpoint(tmp_path / "other" / "consolidated.00.pth")


# torchtitan, models/llama3/state_dict_adapter.py, and what its names were before.
TITAN = {
    "model.embed_tokens.": "tok_embeddings.", "model.norm.": "norm.",
    "model.layers.": "layers.", "self_attn.o_proj": "attention.wo",
    "self_attn.q_proj": "attention.qkv_linear.wq", "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "ffn_norm", "input_layernorm": "attention_norm",
}  # fmt: skip
OLDER = {"qkv_linear.": "", "lm_head.": "output."}


def titan(tensors: Tensors, heads: dict[str, int], *, older: bool) -> Tensors:
    """Return a Llama's tensors as torchtitan keeps them."""
    return renamed(dict(turned_rows(tensors, heads)), TITAN | (OLDER if older else {}))


def turned_rows(tensors: Tensors, heads: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as of a model that rotates neighbouring dimensions together."""
    for name, tensor in tensors.items():
        for part, count in heads.items():
            if f"self_attn.{part}_proj" in name:
                halves = tensor.view(count, 2, -1, tensor.shape[1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        yield name, tensor


@pytest.mark.parametrize(
    ("kind", "older"), [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)]
)
def test_names_and_rows_of_torchtitan_become_the_model_s(tmp_path, kind, older):
    model = write_model(kind, tmp_path / "model")
    config = read_json(model / "config.json")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = titan(read_tensors(model), heads if kind == "llama" else {}, older=older)
    folder = tmp_path / "step-1000"
    save_alone(folder, {**tensors, "optimizer": optimizer(tensors), "freqs_cis": torch.ones(4)})
    copy_settings(model, folder)
    assert converted(folder, tmp_path / "out") == converted(model, tmp_path / "expected")


@pytest.mark.parametrize("form", ["routed_experts.inner_experts.{}_EFD", "experts.{}"])
def test_torchtitan_s_stacked_experts_are_taken_apart(form, tmp_path):
    model = write_model("qwen3-moe", tmp_path / "model")
    whole = read_tensors(model)
    state = {
        name: tensor
        for name, tensor in titan(whole, {}, older=False).items()
        if ".mlp.experts." not in name
    }
    for layer in range(2):
        gate = state.pop(f"layers.{layer}.mlp.gate.weight")
        state[f"layers.{layer}.moe.router.gate.weight"] = gate
        state[f"layers.{layer}.moe.expert_bias_E"] = torch.zeros(len(gate))
        for part, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj.weight"
            stacked = torch.stack([whole[name.format(n)] for n in range(len(gate))])
            state[f"layers.{layer}.moe.{form.format(theirs)}"] = stacked
    folder = tmp_path / "step-5"
    save_alone(folder, state)
    copy_settings(model, folder)
    request = request_of(folder, tmp_path / "out", output_format="huggingface")
    found = read_tensors(convert(request).ft_dir)
    assert_exact(found, whole)
    biased = tmp_path / "step-6"
    save_alone(biased, {**state, "layers.0.moe.expert_bias_E": torch.ones(6)})
    copy_settings(model, biased)
    problems = check_conversion(dataclasses.replace(request, checkpoint_path=biased))
    assert mentions(problems, "layers.0.moe.expert_bias_E is not zero"), problems
    router = torch.ones(whole["model.layers.0.mlp.gate.weight"].shape)
    save_alone(tmp_path / "twice", {**whole, "model.layers.0.mlp.router.gate.weight": router})
    copy_settings(model, tmp_path / "twice")
    said = "router.gate.weight is layers.0.mlp.gate.weight, as another tensor is"
    assert said in refusal(tmp_path / "twice", tmp_path / "refused")


def test_torchtitan_s_names_of_other_models_are_refused(model, tmp_path):
    folder = tmp_path / "step-1000"
    save_alone(folder, dict(titan(read_tensors(model), {}, older=False)))
    config = read_json(model / "config.json")
    write_json(folder / "config.json", config | {"model_type": "mistral"})
    assert "model_type = 'mistral'" in refusal(folder, tmp_path)
    write_json(folder / "config.json", config | {"num_attention_heads": 5})
    assert "which 5 heads do not divide" in refusal(folder, tmp_path)


def test_torchtune_s_gemma_2_is_refused_as_another_model(tmp_path):
    model = write_model("gemma2", tmp_path / "model")
    tensors = renamed(read_tensors(model), TUNE | {"norm.scale": "norm.rms_norm.scale"})
    folder = tmp_path / "epoch_0"
    save_alone(folder, tensors)
    copy_settings(model, folder)
    assert "it exchanges the norms before and after the MLP" in refusal(folder, tmp_path)


# torchtune, models/convert_weights.py.
TUNE = {
    "model.embed_tokens.": "tok_embeddings.", "model.norm.weight": "norm.scale",
    "lm_head.": "output.", "model.layers.": "layers.", "self_attn.o_proj": "attn.output_proj",
    "self_attn.": "attn.", "mlp.gate_proj": "mlp.w1", "mlp.up_proj": "mlp.w3",
    "mlp.down_proj": "mlp.w2", "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}  # fmt: skip
# LitGPT, scripts/convert_hf_checkpoint.py. A Gemma 2 has two norms more.
LIT = {
    "model.embed_tokens.": "transformer.wte.", "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.", "self_attn.o_proj": "attn.proj", "self_attn.": "attn.",
    "mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj",
    "block_sparse_moe": "mlp", ".w1.": ".fc_1.", ".w2.": ".proj.", ".w3.": ".fc_2.",
    "input_layernorm": "norm_1",
}  # fmt: skip
LIT_NORMS = {"post_attention_layernorm": "norm_2"}
LIT_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "norm_2",
    "post_feedforward_layernorm": "post_mlp_norm",
}  # fmt: skip
# OLMo-core, nn/hf/convert.py; of an OLMo 2, whose norms come after.
OLMO = {
    "model.embed_tokens.": "embeddings.", "model.norm.": "lm_head.norm.",
    "lm_head.weight": "lm_head.w_out.weight", "model.layers.": "blocks.",
    "self_attn.q_proj": "attention.w_q", "self_attn.k_proj": "attention.w_k",
    "self_attn.v_proj": "attention.w_v", "self_attn.o_proj": "attention.w_out",
    "self_attn.": "attention.", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "feed_forward_norm",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "form"), [("llama", "distributed"), ("qwen2", "whole")])
def test_names_and_rows_of_torchtune_become_the_model_s(kind, form, tmp_path):
    model = write_model(kind, tmp_path / "model")
    heads = {"q": 4, "k": 2} if kind == "llama" else {}
    turned = {name: each.contiguous() for name, each in turned_rows(read_tensors(model), heads)}
    tensors = renamed(turned, TUNE)
    folder = tmp_path / "epoch_0"
    if form == "whole":
        folder.mkdir()
        torch.save(tensors, folder / "model-00001-of-00001.bin")
    else:
        save_alone(folder, {"model": tensors, "optimizer": optimizer(tensors), "seed": 3})
    copy_settings(model, folder)
    assert converted(folder, tmp_path / "out") == converted(model, tmp_path / "expected")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "mixtral"])
def test_names_and_joined_rows_of_litgpt_become_the_model_s(kind, tmp_path):
    """Its settings must be those of config.json, which it copies from where the tokenizer was."""
    model = write_model(kind, tmp_path / "model")
    whole = read_tensors(model)
    config = read_json(model / "config.json")
    joined = {}
    for name, tensor in whole.items():
        if "self_attn.q_proj" in name:
            parts = [whole[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            joined[name.replace("q_proj", "qkv")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            joined[name] = tensor
    norms = LIT_GEMMA_NORMS if kind == "gemma2" else LIT_NORMS
    tensors = renamed(joined, LIT | norms)
    tensors.setdefault("lm_head.weight", tensors["transformer.wte.weight"])
    folder = tmp_path / "final"
    folder.mkdir()
    torch.save({"model": tensors, "step_count": 3}, folder / "lit_model.pth")
    copy_settings(model, folder)
    settings = {
        "n_head": 4, "norm_eps": config["rms_norm_eps"], "rotary_percentage": 1.0,
        "rope_base": int(config["rope_parameters"]["rope_theta"]), "rope_adjustments": None,
        "rope_condense_ratio": 1, "parallel_residual": False, "norm_class_name": "RMSNorm",
        "attention_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention_scores_scalar": config.get("query_pre_attn_scalar"),
        "n_expert_per_token": config.get("num_experts_per_tok", 0),
    }  # fmt: skip
    own = folder / "model_config.yaml"
    own.write_text(yaml.safe_dump(settings))

    def contents_of(source: Path, out: str) -> dict[str, bytes]:
        return contents(written(source, tmp_path / out))

    assert contents_of(folder, "out") == contents_of(model, "expected")
    assert not mentions(describe(folder)["can be"], "as it is")
    settings |= {"rope_base": 7, "rope_adjustments": {"factor": 8.0}}
    own.write_text(yaml.safe_dump(settings))
    text = refusal(folder, tmp_path / "refused")
    assert "rope_base = 7; expected " in text
    assert "rope_adjustments.factor = 8.0; expected None, rope_scaling.factor of " in text
    write_json(folder / "config.json", config | {"model_type": "gpt_neox"})
    text = refusal(folder, tmp_path / "refused")
    assert "convert it with `litgpt convert_from_litgpt" in text
    (folder / "config.json").unlink()
    assert "or name it in --model-config" in refusal(folder, tmp_path / "refused")


def test_names_of_olmo_core_become_the_model_s(tmp_path, monkeypatch):
    """Its folder has a config.json of its own, and its index names its own class."""
    model = write_model("olmo2", tmp_path / "model")
    tensors = renamed(read_tensors(model), OLMO)
    folder = tmp_path / "step100"
    own = "olmo_core.distributed.checkpoint.filesystem"
    for number in range(len(parts := own.split("."))):
        name = ".".join(parts[: number + 1])
        monkeypatch.setitem(sys.modules, name, torch.distributed.checkpoint.filesystem)
    monkeypatch.setattr(torch.distributed.checkpoint.filesystem._StorageInfo, "__module__", own)
    save_alone(folder / "model_and_optim", {"model": tensors, "optim": optimizer(tensors)})
    (folder / "config.json").write_text('{"model": {"d_model": 24}}')
    with pytest.raises(ValueError, match=r"copy the config\.json of the Hugging Face"):
        open_checkpoint(folder)
    found = converted_to(folder, tmp_path / "out", 2, given=GIVEN, model_config=model)
    assert contents(found) == converted(model, tmp_path / "expected")


def test_values_in_another_form_are_named(model, tmp_path):
    folder = tmp_path / "run"
    extension = SimpleNamespace(transform_to=lambda out: out, get_descriptor=lambda: "mine/1")
    for reason, more in (
        ("(['mine/1']), which is not undone here", {"_extensions": cast(Any, [extension])}),
        ("it holds safetensors", {"serialization_format": SerializationFormat.SAFETENSORS}),
    ):
        writer = FileSystemWriter(folder, **more)
        save({"model": read_tensors(model)}, storage_writer=writer, no_dist=True)
        copy_settings(model, folder)
        assert reason in refusal(folder, tmp_path)


def test_several_models_are_named(model, tmp_path):
    run = tmp_path / "run"
    for name in ("checkpoint-1", "checkpoint-2"):
        accelerate(run / name, {"a": torch.ones(2)}, model)
    copy_settings(model, run)
    text = refusal(run, tmp_path)
    assert "several distributed checkpoints" in text
    assert "checkpoint-1/pytorch_model_fsdp_0" in text
    assert "checkpoint-2/pytorch_model_fsdp_0" in text


def test_a_checkpoint_of_training_alone_is_refused(model, tmp_path):
    save_alone(tmp_path / "run" / "optim", {"optim": optimizer({"a": torch.ones(2)})})
    copy_settings(model, tmp_path / "run")
    assert "no distributed checkpoint of a model" in refusal(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("place", ["", "pytorch_model_fsdp_0"])
def test_a_lost_index_is_named(model, tmp_path, place):
    source = accelerate(tmp_path / "run", read_tensors(model), model)
    (source / "optimizer_0" / ".metadata").unlink()
    assert converted(source, tmp_path / "first") == converted(model, tmp_path / "expected")
    (source / "pytorch_model_fsdp_0" / ".metadata").unlink()
    text = refusal(source / place, tmp_path)
    assert "pytorch_model_fsdp_0 lacks .metadata" in text
    assert "copy this hidden file, too" in text


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(file)).unlink()


def copied(name: str, old: int = 0, new: int = 1) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / name.format(old), folder / name.format(new))


def lose_the_places(weights: Path) -> None:
    first = weights / SHARD.format(1)
    safetensors.torch.save_file(safetensors.torch.load_file(first), first)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without(SHARD.format(2)), "does not make"),
        (without(SHARD.format(1)), "some are missing"),
        (copied(SHARD, 1, 3), "contradicts another shard"),
        (lose_the_places, "does not say where"),
    ],
)
def test_shards_that_do_not_make_the_model_are_refused(model, tmp_path, damage, words):
    source = automodel(tmp_path / "run", read_tensors(model), model)
    damage(source / "model")
    assert words in refusal(source, tmp_path)


def test_the_settings_belong_to_what_was_converted(model, tmp_path):
    """A folder is not taken for done when the config.json above the weights has changed."""
    source = accelerate_weights(tmp_path / "run", read_tensors(model), model)
    assert recognise_format(source) == "torch_dcp"
    converted(source, tmp_path / "out")
    path = tmp_path / "run" / "config.json"
    write_json(path, read_json(path) | {"rope_theta": 5e5})
    with pytest.raises(ValueError, match="holds another conversion"):
        converted(source, tmp_path / "out")


# The parts of two tensor-parallel ranks, each cut again for two data-parallel ones; its placements
# are those that fully_shard gives after parallelize_module.
TWICE = (_StridedShard(0, split_factor=2), Shard(0))
CUTS: dict[str, tuple[Any, ...]] = {
    "q_proj": TWICE, "k_proj": TWICE, "gate_proj": TWICE, "o_proj": (Shard(0), Shard(1)),
    "down_proj": (Shard(1), Shard(1)), "norm": (Shard(0), Replicate()),
    "embed": (Shard(0), Shard(0)),
}  # fmt: skip


def write_two_dimensions(folder: Path, tensors: Tensors, **changed: tuple[Any, ...]) -> Path:
    """Write the files of a mesh of 2 x 2 ranks, one after the other, without communication."""
    folder.mkdir(parents=True)
    for rank in range(4):
        torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh, at = init_device_mesh("cpu", (2, 2)), divmod(rank, 2)
        state = {}
        for name, whole in tensors.items():
            cuts = next((each for part, each in CUTS.items() if part in name), (Shard(0), Shard(1)))
            part = whole
            # The outer dimension's cut of a strided part comes second.
            for axis in (1, 0) if cuts == TWICE else (0, 1):
                if isinstance(cuts[axis], (Shard, _StridedShard)):
                    part = part.chunk(2, cuts[axis].dim)[at[axis]]
            stated = next((each for part, each in changed.items() if part in name), cuts)
            state[name] = DTensor.from_local(
                part.clone(),
                mesh,
                stated,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        torch.save(state, folder / f"model_world_size_4_rank_{rank}.pt")
        torch.distributed.destroy_process_group()
    return folder


def test_two_dimensions_of_a_mesh_may_cut_one_axis(model, tmp_path):
    whole = read_tensors(model)
    found = rank_tensors(write_two_dimensions(tmp_path / "actor", whole))
    loaded = {name: torch.from_numpy(each.load(FileMaps())) for name, each in found.items()}
    assert_exact(loaded, whole)
    strided, odd = _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)
    for number, (cuts, words) in enumerate(
        (
            ((strided, strided), "DTensor that is cut"),
            ((Shard(0), strided), "DTensor that is cut"),
            ((odd, Shard(0)), "cut into 3 parts"),
        )
    ):
        other = write_two_dimensions(tmp_path / f"odd{number}", whole, q_proj=cuts)
        with pytest.raises(CheckpointMismatchError, match=words):
            rank_tensors(other)


DEEPSPEED = ROOT / "tests" / "reference" / "deepspeed"
STAGE_3 = DEEPSPEED / "stage3" / "global_step1"


@pytest.mark.parametrize("name", ["stage2", "stage3", "universal1", "universal3", "tp1", "tp3"])
def test_what_deepspeed_has_saved_is_the_model(name, tmp_path):
    """Three ranks saved a frozen layer, two groups of parameters and shares with padding.

    Those of tp1 and tp3 are two of tensor parallelism.
    """
    expected = converted(DEEPSPEED / "model", tmp_path / "expected")
    assert converted(DEEPSPEED / name, tmp_path / "out") == expected


def test_experts_of_stage_3_are_read_one_by_one(tmp_path):
    """As transformers 5 has them in memory: all of a layer in one tensor, and the ranks' shares."""
    model = model_of("qwen3-moe")
    model.save_pretrained(tmp_path / "model")
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    folder = tmp_path / "global_step1"
    folder.mkdir()
    for rank in range(3):
        shares = []
        for tensor in state.values():
            share = -(-tensor.numel() // 3)
            flat = torch.nn.functional.pad(tensor.flatten(), (0, 3 * share - tensor.numel()))
            shares.append(flat[rank * share : (rank + 1) * share])
        name = f"zero_pp_rank_{rank}_mp_rank_00_"
        shapes = [{key: tensor.shape for key, tensor in state.items()}]
        states = {"module": {}, "param_shapes": shapes, "buffer_names": []}
        torch.save(states, folder / f"{name}model_states.pt")
        kept = {"partition_count": 3, "fp32_flat_groups": [torch.cat(shares)]}
        torch.save({"optimizer_state_dict": kept}, folder / f"{name}optim_states.pt")
    found = zero_tensors(folder)
    gates = "model.layers.0.mlp.experts.gate_up_proj"
    expert = found[gates].select(4)
    assert sum(part.span_bytes for part in expert.stored) == 4 * state[gates][4].numel()
    assert torch.equal(torch.from_numpy(expert.load(FileMaps())), state[gates][4])
    made = [
        written(source, tmp_path / name, given=GIVEN, model_config=settings)
        for name, source, settings in (
            ("expected", tmp_path / "model", None), ("out", folder, tmp_path / "model"),
        )
    ]  # fmt: skip
    whole, again = map(read_tensors, made)
    assert_exact(whole, again)


# prime-rl, trainer/models/glm4_moe/converting_glm4_moe.py.
PRIME = {
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.gate_proj.weight": "mlp.shared_expert.w1",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_expert.w2",
    "mlp.shared_experts.up_proj.weight": "mlp.shared_expert.w3",
}


def stacked_mixture(kind: str) -> tuple[Tensors, Tensors]:
    """Return a mixture's dense tensors and its stacked experts, as w1 to w3."""
    dense = {}
    experts: Tensors = {}
    for name, values in model_of(kind).state_dict().items():
        layer = name.partition(".mlp.")[0]
        if name.endswith("gate_up_proj"):
            experts |= dict(zip((f"{layer}.mlp.experts.w1", f"{layer}.mlp.experts.w3"),
                                values.chunk(2, dim=1), strict=True))  # fmt: skip
        elif name.endswith("experts.down_proj"):
            experts[f"{layer}.mlp.experts.w2"] = values
        else:
            dense[name.replace(".mlp.gate.weight", ".mlp.router.gate.weight")] = values
    return dense, experts


def write_autoep(model: Path, kind: str, folder: Path, *, is_universal: bool) -> None:
    """Write a mixture as DeepSpeed's AutoEP saves it, and as ds_to_universal writes that."""
    found, experts = stacked_mixture(kind)
    dense = {}
    for name, values in found.items():
        theirs = name.replace(".mlp.gate.", ".mlp.router.")
        dense[re.sub(r"\.shared_expert(?=[._])", ".shared_experts", theirs)] = values
        if ".router." in name:  # under a second name, which ds_to_universal rounds
            dense[name.replace(".router.", ".gate.")] = values.bfloat16().float()
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    count = len(next(iter(experts.values())))
    local = {name: values[: count // 2].shape for name, values in experts.items()}
    shapes = [{name: values.shape for name, values in dense.items()}, local]
    states = {"module": dense, "param_shapes": shapes, "ds_autoep_layers": [{"ep_size": 2}]}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    if is_universal:
        for name, values in {**dense, **experts}.items():
            (folder / "zero" / name).mkdir(parents=True)
            torch.save({"param": values.clone()}, folder / "zero" / name / "fp32.pt")
        return
    layers = sorted({name.rpartition(".")[0] for name in experts})
    for number, layer in enumerate(layers):
        for expert in range(count):
            held = {f"{layer}.{w}.{expert}": experts[f"{layer}.{w}"][expert].clone()
                    for w in ("w1", "w2", "w3")}  # fmt: skip
            name = f"layer_{number}_expert_{expert}_mp_rank_00_model_states.pt"
            torch.save(held, folder / name)


def check_equal_folders(model: Path, run: Path, tmp_path: Path) -> None:
    """Check that a mixture's trained form is converted to the folder of the model itself."""
    expected, found = (
        read_tensors(
            converted_to(source, tmp_path / name, output_format="huggingface", given=GIVEN)
        )
        for name, source in (("expected", model), ("out", run))
    )
    assert_exact(found, expected)


@pytest.mark.parametrize(
    ("kind", "is_universal"),
    [
        ("qwen3-moe", False), ("qwen2_moe", False), ("deepseek_v3", False), ("mixtral", False),
        ("qwen2_moe", True), ("deepseek_v3", True),
    ],
)  # fmt: skip
def test_experts_that_deepspeed_has_distributed_are_read(kind, is_universal, tmp_path):
    model, run = write_model(kind, tmp_path / "model"), tmp_path / "run"
    write_autoep(model, kind, run, is_universal=is_universal)
    check_equal_folders(model, run, tmp_path)
    for file in run.glob("layer_1_expert_0_*"):
        shutil.copy(file, run / file.name.replace("expert_0", "expert_1"))
        assert "and so does another file" in refusal(run, tmp_path / "refused")


@pytest.mark.parametrize("kind", ["qwen3-moe", "glm4_moe"])
def test_prime_rl_s_mixtures_become_the_model_s(kind, tmp_path):
    model, run = write_model(kind, tmp_path / "model"), tmp_path / "step_5" / "trainer"
    dense, experts = stacked_mixture(kind)
    state = renamed({**dense, **experts}, PRIME)
    counts = {
        name.replace("router.gate.weight", "tokens_per_expert"): torch.ones(8)
        for name in state
        if ".router." in name
    }
    save_alone(run, {"app": {"model": state | counts, "optimizers": optimizer(state)}})
    copy_settings(model, run)
    check_equal_folders(model, run, tmp_path)


def test_a_frozen_norm_is_not_taken_for_a_copied_file(tmp_path):
    """Its values are ones: two ranks hold the same, and the last one padding."""
    for rank in range(3):
        name = f"zero_pp_rank_{rank}_mp_rank_00_"
        share = torch.tensor([1.0] * 6 if rank < 2 else [1.0] * 4 + [0.0] * 2)
        states = {"module": {}, "param_shapes": [{"a": (3,)}], "frozen_param_shapes": {"b": (16,)},
                  "frozen_param_fragments": {"b": share}}  # fmt: skip
        torch.save(states, tmp_path / f"{name}model_states.pt")
        kept = {"partition_count": 3, "fp32_flat_groups": [torch.ones(1) + rank]}
        torch.save({"optimizer_state_dict": kept}, tmp_path / f"{name}optim_states.pt")
    frozen = zero_tensors(tmp_path)["b"].load(FileMaps())
    assert frozen.tolist() == [1.0] * 16


def lose_the_shares(folder: Path) -> None:
    state = {"optimizer_state_dict": {"partition_count": 3}}
    torch.save(state, next(folder.glob("*_1_*optim*")))


def edited(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes a file of all ranks' states."""

    def edit(folder: Path) -> None:
        for path in folder.glob(file):
            state = torch.load(path, weights_only=False)
            change(state)
            torch.save(state, path)

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("*_1_*optim*"), "lacks the *_optim_states.pt of ranks 1"),
        (without("*_2_*optim*"), "partition_count = 3 with 3"),
        (without("*_0_*model*"), "_model_states.pt of ranks 0"),
        (
            edited("*_model_*", lambda state: state["param_shapes"][0].popitem()),
            "its files are of different models",
        ),
        (lose_the_shares, "values of"),
        (copied("zero_pp_rank_{}_mp_rank_00_optim_states.pt"), "rank 1 holds the values of rank 0"),
        (copied("zero_pp_rank_{}_mp_rank_00_model_states.pt"), "rank 1 holds the values of rank 0"),
        (edited("*_model_*", lambda state: state.update(param_shapes=3)), "expected sizes"),
        (
            edited("*_model_*", lambda state: state.update(ds_autoep_layers=[{"ep_size": 3}])),
            "make its universal form (ds_to_universal)",
        ),
        (edited("*_model_*", lambda state: state.update(module=None)), "has None as module"),
        (edited("*_model_*", lambda state: state.update(shared_params=3)), "3 as shared_params"),
    ],
)
def test_deepspeed_s_ranks_that_do_not_make_the_model_are_refused(tmp_path, damage, words):
    source = shutil.copytree(STAGE_3, tmp_path / "run")
    shutil.copy(DEEPSPEED / "model" / "config.json", source)
    damage(source)
    assert words in refusal(source, tmp_path)


def parts(change: Callable[[dict[int, Any]], object]) -> Callable[[Path], None]:
    """Return what changes where tensor-parallel ranks say that their parts of a matrix lie."""

    def edit(state: dict[str, Any]) -> None:
        stated = state["universal_checkpoint_info"]["affine_map"]["params"]
        change(stated[r"^model\.layers\.0\.mlp\.up_proj\.weight$"]["ranks"])

    return edited("*_model_*", edit)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("mp_rank_00*"), "lacks the *mp_rank_*_model_states.pt of tensor-parallel ranks"),
        (copied("mp_rank_0{}_model_states.pt"), "rank 1 holds the values of rank 0"),
        (edited("*_model_*", lambda state: state.pop("universal_checkpoint_info")), "affine_map"),
        (parts(lambda ranks: ranks.pop(1)), "is not cut into one box for each"),
        (parts(lambda ranks: ranks[1]["pieces"].clear()), "is not cut into one box for each"),
        (
            parts(lambda ranks: ranks[1]["pieces"][0].update(scale=0.5)),
            "is not cut into one box for each",
        ),
        (
            parts(lambda ranks: ranks[0]["pieces"][0].update(source=[0, [1, 16]])),
            "is not cut into one box for each",
        ),
        (
            parts(lambda ranks: ranks[0]["pieces"][0].update(dest=[16, [16, 1]])),
            "is not cut into one box for each",
        ),
        (parts(lambda ranks: ranks[0]["pieces"][0].update(source=[16, [16, 1]])), "overlap"),
    ],
)
def test_deepspeed_s_tensor_parallel_ranks_have_to_make_the_whole(tmp_path, damage, words):
    source = shutil.copytree(DEEPSPEED / "tp1" / "global_step1", tmp_path / "run")
    shutil.copy(DEEPSPEED / "model" / "config.json", source)
    damage(source)
    assert words in refusal(source, tmp_path)


def rank_files(folder: Path, whole: torch.Tensor, counts: Sequence[int], world: int) -> Path:
    """Write verl's files of one tensor, of which ranks hold as many rows as `counts` says."""
    folder.mkdir()
    begin = 0
    for rank, count in enumerate(counts):
        rows = whole[begin : begin + count].clone()
        shard = {"tensor": rows, "metadata": {"shard_offsets": [begin, 0]}}
        begin += count
        held = Wrapped(whole.shape, [[shard], {"shards_metadata": []}])
        torch.save({"model.a": held}, folder / f"model_world_size_{world}_rank_{rank}.pt")
    return folder


class Wrapped:
    """A tensor of a class of its own, as torch pickles ShardedTensor without a process group."""

    def __init__(self, shape: torch.Size, state: Any) -> None:
        self.shape, self.state = shape, state

    def __reduce__(self) -> Any:
        from torch._tensor import _rebuild_from_type_v2
        from torch._utils import _rebuild_wrapper_subclass
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor

        args = (ShardedTensor, torch.float32, tuple(self.shape))
        return _rebuild_from_type_v2, (_rebuild_wrapper_subclass, ShardedTensor, args, self.state)


@pytest.mark.parametrize(
    ("counts", "world", "words"),
    [
        ((3, 2), 2, ""),
        ((3, 2), 3, "lacks the files of ranks 2 of 3"),
        ((3, 1), 2, "some are missing"),
    ],
)
def test_files_of_ranks_make_the_whole(tmp_path, counts, world, words):
    whole = torch.arange(10.0).view(5, 2)
    folder = rank_files(tmp_path / "run", whole, counts, world)
    if words:
        with pytest.raises(ValueError, match=words):
            rank_tensors(folder)
        return
    (found,) = rank_tensors(folder).values()
    assert found.load(FileMaps()).tolist() == whole.tolist()
    torch.save({}, folder / "model_world_size_3_rank_0.pt")
    with pytest.raises(ValueError, match="several runs"):
        rank_tensors(folder)


def test_replicas_of_other_values_are_of_different_steps(tmp_path):
    for rank, values in enumerate((torch.zeros(3), torch.ones(3))):
        torch.save(
            {"a": values, "b": torch.ones(2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt"
        )
    with pytest.raises(ValueError, match="ranks hold different values of a at one place") as caught:
        rank_tensors(tmp_path)
    assert " of b " not in str(caught.value)


def test_what_is_no_part_of_a_tensor_is_named(tmp_path):
    folder = rank_files(tmp_path / "run", torch.ones(2, 2), (2,), 1)
    torch.save({"model.a": 3}, folder / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=r"model\.a is 3: expected a tensor"):
        rank_tensors(folder)


@pytest.mark.parametrize("named", ["..", "../other", "/", ".", ""])
def test_a_run_s_file_leads_to_no_folder_outside(model, tmp_path, named):
    for name in ("run", "other"):
        save_alone(tmp_path / name / "weights", {"model": read_tensors(model)})
        copy_settings(model, tmp_path / name)
    (tmp_path / "run" / "latest").write_text(named)
    (note,) = open_checkpoint(tmp_path / "run").remarks
    assert f"took the weights in {tmp_path / 'run' / 'weights'}" in note


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_megatron_core_s_tensors_become_the_model_of_a_config(name, tmp_path):
    """The second has arguments of a trainer, as ms-swift saves them, without the model's sizes."""
    model = write_model(name, tmp_path / "model")
    source = tmp_path / "actor" / "dist_ckpt"
    core_without_arguments(model, source)
    if name == "qwen3-moe":
        own = argparse.Namespace(tuner_type="full", model="Qwen/Qwen3-30B-A3B")
        torch.save({"args": own, "iteration": 7}, source / "common.pt")
    folder = written(source, tmp_path / "out", model_config=model)
    expected = read_tensors(model)
    found = read_tensors(folder)
    assert_exact(found, expected)
    settings = [read_json(each / "config.json") for each in (model, folder)]
    both = settings[0].keys() & settings[1].keys() - {"dtype", "transformers_version"}
    assert {key: settings[0][key] for key in both} == {key: settings[1][key] for key in both}


def test_a_config_of_another_model_is_refused(tmp_path):
    source = tmp_path / "actor" / "dist_ckpt"
    core_without_arguments(write_model("qwen2", tmp_path / "model"), source)
    with pytest.raises(ValueError, match="--model-config"):
        open_checkpoint(source)
    others = {
        "llama": "has_qkv_bias is False by config.json, and True by the tensors",
        "olmo2": "only Megatron Bridge has norms",
    }
    for name, reason in others.items():
        other = write_model(name, tmp_path / name)
        assert reason in refusal(source, tmp_path, model_config=other)
    other = write_model("qwen2", tmp_path / "unknown")
    text = read_json(other / "config.json") | {"logit_twist": 2.0}
    write_json(other / "config.json", text)
    assert "logit_twist = 2.0 is not known" in refusal(source, tmp_path, model_config=other)
