"""Distributed checkpoints: every form gives the folder that the classic one gives."""

import pickle
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from export_scripts.checkpoints import open_checkpoint
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.ft.reader import FTReader
from export_scripts.inspect import describe
from tests.conversions import contents, folder_of, refusal
from tests.json_files import write_json
from tests.tiny import write_tar
from tests.tiny_distributed import megatron_common, sharded, write_distributed, write_state
from tests.tiny_megatron_core import CORE, core_state, write_core

Tensors = dict[str, torch.Tensor]

# By the end of a name: the axis on which two training ranks cut a tensor, and into how many chunks.
CUTS = {
    "word_embeddings.weight": (0, 2),
    "output_layer.weight": (0, 2),
    "linear_qkv.weight": (0, 2),
    "linear_proj.weight": (1, 2),
    "linear_fc1.weight": (0, 4),  # each rank has a chunk of either half
    "linear_fc2.weight": (1, 2),
}
ARGS = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8,
    "max_position_embeddings": 40, "norm_epsilon": 1e-5, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
}  # fmt: skip
CONTEXT = {
    "_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel",
    "config": {
        "_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B",
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 8, "seq_length": 40, "layernorm_epsilon": 1e-5,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "gated_linear_unit": True, "share_embeddings_and_output_weights": False,
        "tensor_model_parallel_size": 2, "rotary_base": 500000,
    },
    "tokenizer": {"_target_": "nemo...AutoTokenizer", "pretrained_model_name": "nemo_tokenizer"},
}  # fmt: skip


@pytest.fixture
def state() -> Tensors:
    """Return a model without what its wrapper puts before its names."""
    torch.manual_seed(3)
    return {name.removeprefix("model."): tensor for name, tensor in core_state().items()}


def cuts_of(tensors: Mapping[str, torch.Tensor], *, stacked: bool) -> dict[str, tuple[int, int]]:
    found = {n: cut for n in tensors for end, cut in CUTS.items() if n.endswith(end)}
    return {
        name: (axis + (stacked and ".layers." in name), count)
        for name, (axis, count) in found.items()
    }


def stack(state: Tensors) -> Tensors:
    out = {name: tensor for name, tensor in state.items() if ".layers." not in name}
    for name in state:
        if ".layers.0." in name:
            layers = [state[name.replace(".0.", f".{i}.")] for i in range(2)]
            out[name.replace(".layers.0.", ".layers.")] = torch.stack(layers)
    return out


def write(
    folder: Path,
    state: Tensors,
    *,
    stacked: bool = True,
    cut: bool = True,
    prefix: str = "",
    threads: int = 2,
    common: Mapping[str, Any] | None = None,
) -> Path:
    tensors = stack(state) if stacked else state
    cuts = cuts_of(tensors, stacked=stacked) if cut else {}
    return write_distributed(
        folder,
        {prefix + name: tensor for name, tensor in tensors.items()},
        common=megatron_common(**ARGS) if common is None else common,
        cuts={prefix + name: cut for name, cut in cuts.items()},
        threads=threads,
    )


def converted(source: Path, out: Path, tp_size: int = 1, **fields: Any) -> Path:
    return folder_of(source, out, tp_size=tp_size, **fields)


def classic(state: Tensors, tmp_path: Path, tp_size: int = 1) -> dict[str, bytes]:
    source = write_core(tmp_path / "classic.nemo", {f"model.{n}": t for n, t in state.items()})
    return contents(converted(source, tmp_path / "classic", tp_size))


@pytest.mark.parametrize(
    "form",
    [{"prefix": "module."}, {"stacked": False, "prefix": "model.module."}, {"cut": False}],
    ids=["stacked", "by layer", "uncut"],
)
def test_every_form_gives_the_classic_folder(state, tmp_path, form):
    source = write(tmp_path / "iter_0000007", state, **form)
    for tp_size in (1, 2):
        found = contents(converted(source, tmp_path / "out", tp_size))
        assert found == classic(state, tmp_path, tp_size)


def test_a_source_has_more_files_than_may_be_open_at_first(state, tmp_path):
    source = write(tmp_path / "iter_0000007", state, stacked=False, threads=30)
    assert sum(file.is_file() for file in source.rglob("*")) > 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 10, hard))
    try:
        found = contents(converted(source, tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == classic(state, tmp_path)


def test_arguments_may_lie_in_the_index(state, tmp_path):
    """Newer versions of megatron-core write no common.pt."""
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    tensors = {n: sharded(n, [(t, (0,) * t.ndim)]) for n, t in state.items()}
    write_state(folder, tensors | {"common_state/shard_0_1": [megatron_common(**ARGS)]})
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert contents(converted(folder, tmp_path / "out")) == classic(state, tmp_path)


@pytest.mark.parametrize("common", [True, False])
def test_torch_may_have_saved_it_alone(state, tmp_path, common):
    """As Megatron-FSDP does: arguments are objects of the index, and metadata.json is not there."""
    apart = dict(state)
    for layer in range(2):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        apart[f"{name}_w"], apart[f"{name}_v"] = apart.pop(name).chunk(2)
    training = {"optimizer.state.module.decoder.layers.0.mlp.x": {"exp_avg": torch.ones(2)}}
    saved = {"model": {f"module.{name}": tensor for name, tensor in apart.items()}}
    found = megatron_common(**ARGS)
    folder = tmp_path / "iter_0000007"
    content = {**saved, **training} if common else {**saved, **training, **found}
    save(content, checkpoint_id=folder, no_dist=True)
    if common:
        torch.save(found, folder / "common.pt")
    assert contents(converted(folder, tmp_path / "out", 2)) == classic(state, tmp_path, 2)


def test_the_index_may_be_of_megatron_core_s_own_class(state, tmp_path):
    folder = write(tmp_path / "iter_0000007", state)
    from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata

    index = MCoreMetadata()
    index.__dict__ |= vars(pickle.loads((folder / ".metadata").read_bytes()))
    index.__dict__["mcore_data"] = {"optimizer.x": {"nd_reformulated_orig_global_shape": (2, 3)}}
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert contents(converted(folder, tmp_path / "out")) == classic(state, tmp_path)


def test_the_latest_iteration_of_a_run_is_taken(state, tmp_path):
    write(tmp_path / "run" / "iter_0000007", state)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7\n")
    facts = describe(tmp_path / "run")
    assert facts["kind"] == "megatron checkpoint"
    assert (facts["tensor parallel"], facts["pipeline parallel"]) == (2, 2)
    assert facts["family"] == "llama"
    assert facts["inference tensor parallel"] == [1, 2, 4]
    assert "took iter_0000007" in facts["notes"][0]
    assert contents(converted(tmp_path / "run", tmp_path / "out")) == classic(state, tmp_path)


@pytest.mark.parametrize("kind", ["tar", "gzip", "folder", "weights of the folder"])
def test_nemo_archives_hold_distributed_weights(state, tmp_path, kind):
    folder = tmp_path / "unpacked"
    write(folder / "model_weights", state, prefix="model.", common={"step": 1})
    write_json(folder / "model_config.yaml", CORE)
    source = folder / ("model_weights" if kind.startswith("weights") else "")
    if kind in ("tar", "gzip"):
        files = [file for file in folder.rglob("*") if file.is_file()]
        members = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
        source = write_tar(tmp_path / "model.nemo", members, gzip=kind == "gzip")
    assert contents(converted(source, tmp_path / "out", 2)) == classic(state, tmp_path, 2)


def test_the_newest_last_checkpoint_of_a_nemo_run_is_taken(state, tmp_path):
    run = tmp_path / "checkpoints"
    common = {"hyper_parameters": {"cfg": CORE}, "global_step": 1}
    older = {name: tensor + 1 for name, tensor in state.items()}
    write(run / "gpt--val_loss=2.1-step=90-last", older, prefix="model.", common=common)
    write(run / "gpt--val_loss=2.0-step=100-last", state, prefix="model.", common=common)
    write(run / "gpt--val_loss=1.9-step=110-last", older, prefix="model.", common=common)
    (run / "gpt--val_loss=1.9-step=110-last-unfinished").touch()
    notes = open_checkpoint(run).remarks
    assert "took gpt--val_loss=2.0-step=100-last" in notes[0]
    assert contents(converted(run, tmp_path / "out")) == classic(state, tmp_path)


def write_nemo2(folder: Path, state: Tensors, *, stacked: bool = True, **changes: Any) -> Path:
    weights = folder / "weights"
    write(weights, state, stacked=stacked, prefix="module.", common={"state_dict": {}})
    context = folder / "context"
    (context / "nemo_tokenizer").mkdir(parents=True)
    model = CONTEXT | {"config": {**CONTEXT["config"], **changes}}  # type: ignore[dict-item]
    (context / "model.yaml").write_text(yaml.safe_dump(model))
    tokens = [{"content": "<s>", "id": 50}, {"content": "</s>", "id": 51}]
    write_json(context / "nemo_tokenizer" / "tokenizer.json", {"added_tokens": tokens})
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    write_json(context / "nemo_tokenizer" / "tokenizer_config.json", settings)
    return folder


@pytest.mark.parametrize("named", ["", "weights"])
def test_nemo_2_checkpoints_become_folders(state, tmp_path, named):
    source = write_nemo2(tmp_path / "model-last", state) / named
    ft = FTReader(converted(source, tmp_path / "out", 2))
    config = ft.config
    assert isinstance(config, DenseConfig)
    assert (config.start_id, config.end_id) == (50, 51)
    assert config.rotary_base == 500000
    assert config.rotary_scaling_type is None
    assert (ft.path / "tokenizer.json").is_file()
    expected = classic(state, tmp_path, 2)
    found = contents(ft.path)
    assert {n: d for n, d in found.items() if n.endswith(".bin")} == {
        n: d for n, d in expected.items() if n.endswith(".bin")
    }


def test_llama_31_scaling_of_nemo_2_is_carried(state, tmp_path):
    scaling: dict[str, Any] = {"scale_factor": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = write_nemo2(tmp_path / "model", state, old_context_len=4096, **scaling)
    config = FTReader(converted(source, tmp_path / "out")).config
    assert isinstance(config, DenseConfig)
    assert config.rotary_scaling_type == "llama3"
    assert config.rotary_factor == 32
    assert config.rotary_original_max_position_embeddings == 4096


def test_nemo_2_models_that_compute_more_are_refused(state, tmp_path):
    source = write_nemo2(tmp_path / "model", state)
    path = source / "context" / "model.yaml"
    path.write_text(path.read_text().replace("LlamaModel", "GemmaModel"))
    assert "GemmaModel" in refusal(source, tmp_path)
    path.unlink()
    assert "lacks context/model.yaml" in refusal(source, tmp_path)


def test_tokens_of_an_absent_tokenizer_are_asked_for(state, tmp_path):
    args = megatron_common(**ARGS, tokenizer_type="HuggingFaceTokenizer")
    source = write(tmp_path / "iter_0000007", state, common=args)
    assert "start_id and end_id are unknown" in refusal(source, tmp_path)
    given = (("start_id", "1"), ("end_id", "2"))
    config = FTReader(converted(source, tmp_path / "out", given=given)).config
    assert isinstance(config, DenseConfig)
    assert (config.start_id, config.end_id) == (1, 2)


def test_a_checkpoint_without_sizes_is_refused(state, tmp_path):
    source = write(tmp_path / "iter_0000007", state, common={"iteration": 7})
    assert "does not state its model's sizes" in refusal(source, tmp_path)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_1.distcp", None, "lacks __0_1.distcp, which holds"),
        ("__0_1.distcp", lambda data: data[:-100], "__0_1.distcp is truncated"),
        (".metadata", None, "lacks .metadata"),
        ("common.pt", None, "lacks common.pt"),
        (
            "metadata.json",
            lambda data: data.replace(b"torch_dist", b"tensorstore"),
            "sharded_backend = 'tensorstore'; expected torch_dist",
        ),
        (
            "metadata.json",
            lambda data: data.replace(b"torch_dist", b"zarr"),
            "--ckpt-convert-format torch_dist",
        ),
        (".metadata", lambda data: data[:-40], "is not a readable pickle"),
        (
            ".metadata",
            lambda _: b"\x80\x04cposix\nsystem\n(X\x04\x00\x00\x00truetR.",
            "names posix.system",
        ),
        (
            ".metadata",
            lambda data: data.replace(b"__0_1.distcp", b"../../../x/y"),
            "lacks ../../../x/y",
        ),
    ],
)
def test_damaged_torch_dist_folders_are_refused(state, tmp_path, name, damage, words):
    source = write(tmp_path / "iter_0000007", state)
    file = source / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert words in refusal(source, tmp_path)


def test_chunks_that_do_not_fit_together_are_refused(state, tmp_path):
    head, table = "output_layer.weight", "embedding.word_embeddings.weight"
    norm = "decoder.final_layernorm.weight"
    folder = write_distributed(
        tmp_path / "iter_0000007",
        state,
        common=megatron_common(**ARGS),
        cuts={head: (0, 2), table: (0, 2)},
    )
    index = pickle.loads((folder / ".metadata").read_bytes())
    shapes, places = index.state_dict_metadata, index.storage_data
    for name, old, new in ((head, (27, 0), (25, 0)), (norm, (0,), (5,))):
        shapes[name].chunks[-1].offsets = torch.Size(new)
        places[MetadataIndex(name, new)] = places.pop(MetadataIndex(name, old))
    shapes[table].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    text = refusal(folder, tmp_path)
    assert f"{head}: chunks of [27, 24] at [0, 0] and of [26, 24] at [25, 0] overlap" in text
    assert f"{table}: its chunks hold 648 of its 1272 values: some are missing" in text
    assert f"{norm}: a chunk of [24] at [5] reaches beyond [24]" in text


def test_missing_unknown_and_misshaped_tensors_are_reported_together(state, tmp_path):
    del state["decoder.layers.1.mlp.linear_fc2.weight"]
    state["decoder.layers.0.mlp.router.weight"] = torch.ones(3)
    state["decoder.final_layernorm.weight"] = torch.ones(25)
    text = refusal(write(tmp_path / "iter_0000007", state, stacked=False), tmp_path)
    assert "decoder.layers.1.mlp.linear_fc2.weight is missing" in text
    assert "decoder.layers.0.mlp.router.weight [[3]] is not a tensor of" in text
    assert "decoder.final_layernorm.weight [25] does not make model.final_layernorm" in text


def test_bytes_that_changed_since_they_were_saved_are_refused(state, tmp_path):
    source = write(tmp_path / "iter_0000007", state)
    value = struct.pack("<f", float(np.float32(state["output_layer.weight"][40, 7])))
    changed = 0
    for file in source.glob("*.distcp"):
        data = file.read_bytes()
        changed += data.count(value)
        file.write_bytes(data.replace(value, struct.pack("<f", 0.25)))
    assert changed == 1
    text = refusal(source, tmp_path)
    assert "output_layer.weight in" in text
    assert "does not match its checksum" in text
