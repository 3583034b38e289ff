"""Hugging Face folders: single and indexed files, tied tensors, damage."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from export_scripts.checkpoints import open_checkpoint
from foundations.errors import CheckpointMismatchError
from tests.arrays import loaded
from tests.json_files import write_json
from tests.looks import assert_exact

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b.c": torch.ones(5, dtype=torch.bfloat16)}


def folder(path: Path, files: dict[str, Any], config: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    write_json(path / "config.json", config or {"model_type": "gpt2"})
    for name, content in files.items():
        if name.endswith(".safetensors"):
            safetensors.torch.save_file(content, path / name)
        elif name.endswith(".bin"):
            torch.save(content, path / name)
        else:
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def index_of(shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {"weight_map": {key: name for name, tensors in shards.items() for key in tensors}}


def values(path: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(path)
    return {key: loaded(reader.tensors[key][0]) for key in reader.tensors}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("indexed", [False, True])
def test_single_and_indexed_files_read_alike(tmp_path, suffix, indexed):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = {f"{stem}.{suffix}": TENSORS}
    if indexed:
        files = {
            f"{stem}-0000{i + 1}-of-00002.{suffix}": {key: TENSORS[key]}
            for i, key in enumerate(TENSORS)
        }
        files |= {f"{stem}.{suffix}.index.json": index_of(files)}
    found = values(folder(tmp_path / "m", files))
    assert_exact(found, TENSORS)


def test_safetensors_is_preferred(tmp_path):
    files = {"model.safetensors": TENSORS, "pytorch_model.bin": {"other": torch.ones(1)}}
    assert values(folder(tmp_path / "m", files)).keys() == TENSORS.keys()


def test_shards_without_an_index_are_all_taken(tmp_path):
    files = {
        "model-00001-of-00002.safetensors": {"a": TENSORS["a"]},
        "model-00002-of-00002.safetensors": {"b.c": TENSORS["b.c"]},
    }
    assert values(folder(tmp_path / "m", files)).keys() == TENSORS.keys()


def indexed(path: Path, weight_map: Any) -> Path:
    """Return a folder whose index lists tensors a and b.c of two shards as it likes."""
    files = {
        "model-1.safetensors": {"a": TENSORS["a"]},
        "model-2.safetensors": {"b.c": TENSORS["b.c"]},
    }
    return folder(path, {**files, "model.safetensors.index.json": {"weight_map": weight_map}})


BOTH = {"a": "model-1.safetensors", "b.c": "model-2.safetensors"}


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["model-3.safetensors"], "'model-3.safetensors'"),
        (["../x.safetensors", "/etc/passwd"], "'../x.safetensors', '/etc/passwd'"),
        (["", ".", ".."], "'', '.', '..'"),
        ([5, None, ["m"]], "5, None, ['m']"),
        (["m" * 5000], f"'{'m' * 99}"),
        (["a\0b", "\ud800"], r"'\ud800', 'a\x00b'"),
        ([f"m{i}" for i in range(50_000)], "'m0', 'm1', 'm10', 'm100', 'm1000', 'm10000', "
         "'m10001', 'm10002' and 49992 more"),
    ],
)  # fmt: skip
def test_every_name_of_an_index_that_is_no_shard_is_refused(tmp_path, names, shown):
    path = indexed(tmp_path / "m", {**BOTH, **{f"t{i}": name for i, name in enumerate(names)}})
    with pytest.raises(CheckpointMismatchError) as caught:
        values(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}/model.safetensors.index.json: weight_map names")
    assert f"next to it: {shown}; copy" in problem


@pytest.mark.parametrize("weight_map", [{}, ["model-1.safetensors"], None])
def test_an_index_without_tensors_is_refused(tmp_path, weight_map):
    with pytest.raises(CheckpointMismatchError, match="has no weight_map of tensors; copy it"):
        values(indexed(tmp_path / "m", weight_map))


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    path = indexed(
        tmp_path / "m",
        {"a": "model-2.safetensors", "b.c": "model-2.safetensors", "d": "model-1.safetensors"},
    )
    with pytest.raises(CheckpointMismatchError) as caught:
        values(path)
    moved, lost = caught.value.problems
    assert f"{path}: a is in model-1.safetensors, and not in model-2.safetensors" in moved
    assert f"{path}: no file holds d" in lost


def test_an_index_may_omit_tensors_and_list_tied_ones(tmp_path):
    """The first as transformers, the second as safetensors' converter of torch files leaves it."""
    weight_map = {"b.c": BOTH["b.c"], "lm_head.weight": "model-1.safetensors"}
    assert values(indexed(tmp_path / "m", weight_map)).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    "wrapped",
    [
        "module.b.c", "_orig_mod.b.c", "module._orig_mod.b.c", "_fsdp_wrapped_module.b.c",
        "b._checkpoint_wrapped_module._orig_mod.c",
    ],
)  # fmt: skip
@pytest.mark.parametrize("indexed", [False, True])
def test_what_wrapped_the_model_or_a_layer_is_not_a_part_of_names(tmp_path, wrapped, indexed):
    files = {"model-1.safetensors": {wrapped: TENSORS["b.c"]}}
    if indexed:
        files |= {"model.safetensors.index.json": index_of(files)}
    assert values(folder(tmp_path / "m", files)).keys() == {"b.c"}


@pytest.mark.parametrize("place", ["header", "index"])
def test_a_tensor_left_out_for_its_twin_is_read_from_it(tmp_path, place):
    """save_model names tied tensors that it leaves out in the header; in shards, the index does."""
    aliases = {"format": "pt", "tied": "a"}
    path = folder(tmp_path / "m", {})
    safetensors.torch.save_file(
        TENSORS, path / "model-1.safetensors", aliases if place == "header" else None
    )
    if place == "index":
        index = index_of({"model-1.safetensors": TENSORS}) | {"metadata": aliases}
        write_json(path / "model.safetensors.index.json", index)
    found = values(path)
    assert found.keys() == {*TENSORS, "tied"}
    assert torch.equal(found["tied"], TENSORS["a"])


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    files = {"model-1.safetensors": TENSORS, "model-2.safetensors": {"a": TENSORS["a"]}}
    with pytest.raises(CheckpointMismatchError, match="tensor a is in both model-1"):
        values(folder(tmp_path / "m", files))


def test_every_damaged_shard_is_named(tmp_path):
    path = folder(
        tmp_path / "m", {f"model-{i}.safetensors": {f"t{i}": TENSORS["a"]} for i in "123"}
    )
    for name in ("model-1.safetensors", "model-3.safetensors"):
        (path / name).write_bytes((path / name).read_bytes()[:-1])
    with pytest.raises(CheckpointMismatchError) as caught:
        values(path)
    assert [problem.split(" is ")[0] for problem in caught.value.problems] == [
        str(path / "model-1.safetensors"), str(path / "model-3.safetensors")
    ]  # fmt: skip


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path):
    path = folder(tmp_path / "m", {"model.safetensors": TENSORS})
    (path / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "gpt2", "n": "\xc3\xa9"}')
    assert open_checkpoint(path).config == {"model_type": "gpt2", "n": "\u00e9"}


def test_a_folder_without_weights_is_reported(tmp_path):
    with pytest.raises(CheckpointMismatchError, match="but no weights; expected one of"):
        values(folder(tmp_path / "m", {}))


ENTRY = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
_TEXT = json.dumps({"a": ENTRY})


def entries(**offsets: tuple[int, int]) -> bytes:
    """Return a header of tensors of one number each."""
    one = {"dtype": "F32", "shape": [1]}
    return json.dumps({k: one | {"data_offsets": v} for k, v in offsets.items()}).encode()


def framed(header: bytes, size: int = 12) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"abc", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"nope", framed(b"[]", 0),
        framed(b'{"a": ["F32", [1], [0, 4]]}', 4),
        framed(entries(a=(0, 4), b=(4, 8), c=(12, 16)), 16),
        framed(entries(a=(0, 4), b=(0, 4), c=(12, 16)), 16),
        framed(_TEXT.encode("utf-16")), framed(_TEXT.encode("utf-16-le")),
        framed(_TEXT.encode("utf-8-sig")),
        framed(b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [3]}}'),
        framed(b'{"__metadata__": {"format": NaN}}'), framed(b'{"__metadata__": {"format": 1}}'),
        framed(b'{"__metadata__": "pt"}'),
        *(
            framed(json.dumps({"a": ENTRY | changes}).encode())
            for changes in (
                {"shape": [2]}, {"shape": [2.9]}, {"shape": ["3"]}, {"shape": [True, 3]},
                {"shape": [10**400]}, {"shape": 3}, {"data_offsets": [0.0, 12.0]},
                {"data_offsets": ["0", "12"]}, {"data_offsets": [-12, 0]},
                {"data_offsets": [12, 0]}, {"data_offsets": [12]}, {"dtype": ["F32"]},
                {"dtype": "F99"},
            )
        ),
    ],
)  # fmt: skip
def test_a_file_that_safetensors_refuses_is_refused(tmp_path, data):
    path = folder(tmp_path / "m", {}) / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointMismatchError, match=rf"^{path} is truncated or damaged"):
        values(path.parent)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-3],
        lambda data: data[:-1] + bytes(2) + data[-1:],
        lambda data: data[:-20] + bytes(2) + data[-20:],
    ],
    ids=["cut off", "more at the end", "more in between"],
)
def test_a_file_of_another_length_is_reported(tmp_path, change):
    path = folder(tmp_path / "m", {"model.safetensors": TENSORS}) / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointMismatchError, match=r"m/model\.safetensors is truncated"):
        values(path.parent)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tf_model.h5", "tf_model.h5 is TensorFlow weights: load it"),
        ("model.Q4_K_M.gguf", "weights of llama.cpp"),
        ("consolidated.00.pth", "the publisher's own layout"),
        ("adapter_model.safetensors", r"convert its model, and name it"),
    ],
)
@pytest.mark.parametrize("configured", [True, False])
def test_weights_in_another_form_are_named_with_the_remedy(tmp_path, name, words, configured):
    path = folder(tmp_path / "m", {})
    (path / name).write_bytes(b"x")
    if not configured:
        (path / "config.json").unlink()
    with pytest.raises(ValueError, match=words):
        open_checkpoint(path)


def test_a_git_lfs_pointer_is_reported(tmp_path):
    path = folder(tmp_path / "m", {}) / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n")
    with pytest.raises(CheckpointMismatchError, match=r"Git LFS pointer .* git lfs pull"):
        values(path.parent)


def test_a_configuration_nested_without_end_is_refused(tmp_path):
    path = folder(tmp_path / "m", {"model.safetensors": TENSORS})
    (path / "config.json").write_text('{"x":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointMismatchError, match=r"config\.json is not a JSON object"):
        values(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_table_that_is_far_too_large_is_not_read(tmp_path, name):
    path = folder(tmp_path / "m", {"part.safetensors": TENSORS})
    with (path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointMismatchError, match="has more than 64 MiB"):
        values(path)


def with_header(path: Path, header: bytes) -> Path:
    file = folder(path, {}) / "model.safetensors"
    file.write_bytes(framed(header))
    return file


def test_all_tensors_of_unknown_types_are_named(tmp_path):
    entries = {
        name: {"dtype": kind, "shape": [4], "data_offsets": [at, at + 4]}
        for at, name, kind in ((0, "a", "F8_E5M2"), (4, "b", "U8"), (8, "c", "F8_E8M0"))
    }
    file = with_header(tmp_path / "m", json.dumps(entries).encode())
    with pytest.raises(CheckpointMismatchError) as caught:
        values(file.parent)
    assert [each.split("; ")[0] for each in caught.value.problems] == [
        f"{file}: tensor a is stored as F8_E5M2",
        f"{file}: tensor c is stored as F8_E8M0",
    ]


def test_a_tensor_named_twice_is_refused(tmp_path):
    """By the format's description; safetensors itself takes the last."""
    file = with_header(tmp_path / "m", f'{_TEXT[:-1]}, "a": {json.dumps(ENTRY)}}}'.encode())
    with pytest.raises(CheckpointMismatchError, match="it names 'a' twice"):
        values(file.parent)


def test_tokenizer_files_are_found_under_their_target_names(tmp_path):
    files = {"model.safetensors": TENSORS, "spiece.model": "x", "tokenizer_config.json": {}}
    names = list(open_checkpoint(folder(tmp_path / "m", files)).tokenizer)
    assert sorted(names) == ["tokenizer.model", "tokenizer_config.json"]


def cache(root: Path, *names: str, main: str | None = None) -> Path:
    for name in names:
        (root / "snapshots" / name).mkdir(parents=True)
        folder(root / "snapshots" / name, {"model.safetensors": {name: torch.ones(1)}})
    if main is not None:
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(main)
    return root


@pytest.mark.parametrize(
    ("names", "main", "taken"),
    [(("a",), None, "a"), (("a",), "gone", "a"), (("a", "b"), "b", "b"), (("a", "b"), "a\n", "a")],
)
def test_root_of_a_cache_stands_for_its_main_or_only_snapshot(tmp_path, names, main, taken):
    assert set(values(cache(tmp_path / "models--org--name", *names, main=main))) == {taken}


@pytest.mark.parametrize("main", [None, "gone", "../../elsewhere"])
def test_root_of_a_cache_with_several_snapshots_names_them(tmp_path, main):
    root = cache(tmp_path / "models--org--name", "a", "b", main=main)
    with pytest.raises(ValueError, match="give a snapshot in it") as caught:
        open_checkpoint(root)
    assert f"{root}/snapshots/a, {root}/snapshots/b" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [torch.nn.Linear(2, 3), {"model": torch.nn.Linear(2, 3), "step": 1}, [torch.ones(2)]],
    ids=["module", "module in a state", "list"],
)
def test_a_whole_module_is_refused_with_the_remedy(tmp_path, content):
    path = folder(tmp_path / "m", {"pytorch_model.bin": content})
    with pytest.raises(CheckpointMismatchError, match=r"bin holds no tensors by name.*state_dict"):
        values(path)


def test_a_negated_view_is_not_read_with_its_stored_signs(tmp_path):
    negated = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
    assert negated.is_neg()
    path = folder(tmp_path / "m", {"pytorch_model.bin": {"a": negated}})
    with pytest.raises(CheckpointMismatchError, match="resolve_neg"):
        values(path)


def test_an_adapter_next_to_a_model_is_left_out_with_a_remark(tmp_path):
    adapter = {"base_model.model.a.lora_A.weight": torch.ones(1, 3)}
    files = {"model.safetensors": TENSORS, "adapter_model.safetensors": adapter}
    reader = open_checkpoint(folder(tmp_path / "m", files))
    assert reader.tensors.keys() == TENSORS.keys()
    assert [remark for remark in reader.remarks if "adapter_model.safetensors" in remark]
