"""Any training parallelism becomes any inference parallelism, with the same bytes."""

import shutil
from pathlib import Path

import pytest
import torch

from export_scripts.ft.reader import FTReader
from tests.conversions import folder_of
from tests.tiny import NEMO, TinyGPT, gpt_tensors, write_megatron, write_nemo


def folder(source: Path, output: Path, tp_size: int, data_type: str = "fp32") -> Path:
    return folder_of(source, output, tp_size=tp_size, weight_data_type=data_type, processes=2)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.bin")}


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
@pytest.mark.parametrize(("train_tp", "train_pp"), [(2, 1), (3, 1), (6, 1), (1, 2), (2, 2), (3, 4)])
def test_every_training_layout_gives_the_same_bytes(tmp_path, train_tp, train_pp, tp_size):
    whole = write_nemo(tmp_path / "whole.nemo")
    parts = write_nemo(tmp_path / "parts.nemo", tp=train_tp, pp=train_pp)
    expected = contents(folder(whole, tmp_path / "whole", tp_size))
    assert contents(folder(parts, tmp_path / "parts", tp_size)) == expected


@pytest.mark.parametrize("depths", [(1, 3), (3, 1), (1, 1, 2), (0, 2, 2)])
def test_stages_of_unequal_depth_are_joined_in_order(tmp_path, depths):
    whole = write_megatron(tmp_path / "whole", gpt_tensors())
    parts = write_megatron(tmp_path / "parts", gpt_tensors(), pp=4)
    _merge_stages(parts, depths)
    expected = contents(folder(whole, tmp_path / "a", 2))
    assert contents(folder(parts, tmp_path / "b", 2)) == expected


def _merge_stages(source: Path, depths: tuple[int, ...]) -> None:
    """Give a checkpoint of four stages with one layer each as many stages of these depths."""
    files = sorted(source.glob("mp_rank_*/model_optim_rng.pt"))
    trees = [torch.load(file, weights_only=False) for file in files]
    models = [tree["model"]["language_model"] for tree in trees]
    layers = [
        {k.removeprefix("layers.0."): v for k, v in model["encoder"].items() if "layers" in k}
        for model in models
    ]
    final = {k: v for k, v in models[-1]["encoder"].items() if "layers" not in k}
    first = models[0]["embedding"]
    for stage, depth in enumerate(depths):
        begin = sum(depths[:stage])
        stack = {
            f"layers.{i}.{k}": v
            for i, layer in enumerate(layers[begin : begin + depth])
            for k, v in layer.items()
        }
        last = stage == len(depths) - 1
        models[stage]["encoder"] = stack | (final if last else {})
        models[stage]["embedding"] = {} if stage else first
        trees[stage]["args"].pipeline_model_parallel_size = len(depths)
        torch.save(trees[stage], files[stage])
    for file in files[len(depths) :]:
        shutil.rmtree(file.parent)


def test_tensors_larger_than_a_chunk_keep_their_rows(tmp_path):
    """Rows of a large table go through several chunks and transposed tiles."""
    model = TinyGPT(head_num=4, size_per_head=32, inter_size=20_480, num_layer=1, vocab_size=40_000)
    tensors = gpt_tensors(model)
    source = write_nemo(tmp_path / "x.nemo", tensors, model, tp=2)
    reader = FTReader(folder(source, tmp_path / "out", 2))
    layer = NEMO + "encoder.layers.0.mlp."
    assert torch.equal(reader.read("model.wte"), tensors[NEMO + "embedding.word_embeddings.weight"])
    up = tensors[layer + "dense_h_to_4h.weight"].t().chunk(2, 1)
    down = tensors[layer + "dense_4h_to_h.weight"].t().chunk(2, 0)
    for rank in range(2):
        name = "model.layers.0.mlp.dense_h_to_4h.weight"
        assert torch.equal(reader.read(name, rank), up[rank])
        name = "model.layers.0.mlp.dense_4h_to_h.weight"
        assert torch.equal(reader.read(name, rank), down[rank])


@pytest.mark.parametrize("processes", [1, 3, 16])
def test_the_number_of_workers_changes_nothing(tmp_path, processes):
    source = write_nemo(tmp_path / "x.nemo")
    one = folder(source, tmp_path / "one", 2)
    assert contents(
        folder_of(source, tmp_path / "many", tp_size=2, processes=processes)
    ) == contents(one)


def test_a_gzip_archive_a_folder_and_a_plain_archive_agree(tmp_path):
    import tarfile

    plain = write_nemo(tmp_path / "plain.nemo", tp=2)
    zipped = write_nemo(tmp_path / "zipped.nemo", tp=2, gzip=True)
    unpacked = tmp_path / "unpacked"
    with tarfile.open(plain) as archive:
        archive.extractall(unpacked, filter="data")
    # As `tar` packs a folder by its name.
    with tarfile.open(tmp_path / "wrapped.nemo", "w") as archive:
        archive.add(unpacked, "run_7")
    expected = contents(folder(plain, tmp_path / "a", 3))
    assert contents(folder(zipped, tmp_path / "b", 3)) == expected
    assert contents(folder(unpacked, tmp_path / "c", 3)) == expected
    assert contents(folder(tmp_path / "wrapped.nemo", tmp_path / "d", 3)) == expected
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "3-gpu",
        "3-gpu.manifest.json",
    ]
