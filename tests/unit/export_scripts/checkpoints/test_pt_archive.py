"""torch.save files are indexed without torch, and nothing they name is run."""

import argparse
import collections
import datetime
import io
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.checkpoints.base import Region
from export_scripts.checkpoints.containers import open_container
from export_scripts.checkpoints.pt_archive import read_torch_file
from foundations.errors import CheckpointMismatchError
from tests.arrays import loaded


def save(path: Path, value: Any, *, legacy: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8],
)
def test_tensors_come_out_as_torch_loads_them(tmp_path, legacy, dtype):
    tensor = (torch.arange(35).reshape(5, 7) * 3).to(dtype)
    tree = read_torch_file(save(tmp_path / "x.pt", {"a": {"b": tensor}}, legacy=legacy))
    assert torch.equal(loaded(tree["a"]["b"]), tensor)
    assert loaded(tree["a"]["b"]).dtype == dtype


@pytest.mark.parametrize("legacy", [False, True])
def test_views_keep_their_strides_and_offsets(tmp_path, legacy):
    base = torch.arange(60.0).reshape(6, 10)
    views = {
        "t": base.t(),
        "slice": base[2:4, 3:9],
        "row": base[5],
        "one": base[1, 1],
        "whole": base,
    }
    tree = read_torch_file(save(tmp_path / "x.pt", views, legacy=legacy))
    for name, view in views.items():
        assert torch.equal(loaded(tree[name]), view), name


def test_parameters_namespaces_and_ordered_dicts_are_plain_data(tmp_path):
    value = {
        "args": argparse.Namespace(heads=4, nested=argparse.Namespace(eps=1e-5)),
        "ordered": collections.OrderedDict(a=1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "defaults": collections.defaultdict(list, {"x": [1]}),
    }
    tree = read_torch_file(save(tmp_path / "x.pt", value))
    assert tree["args"] == {"heads": 4, "nested": {"eps": 1e-5}}
    assert tree["ordered"] == {"a": 1}
    assert torch.equal(loaded(tree["parameter"]), torch.ones(2))
    assert (tree["dtype"], tree["size"], tree["defaults"]) == ("bf16", [2, 3], {"x": [1]})


def test_omegaconf_containers_are_plain_data(tmp_path):
    from omegaconf import OmegaConf

    config = {"a": 1, "list": [1, None, {"deep": "x"}], "none": None, "tokenizer": {"type": "T"}}
    tree = read_torch_file(save(tmp_path / "x.pt", {"cfg": OmegaConf.create(config)}))
    assert tree["cfg"] == config


def test_tensors_saved_on_a_gpu_need_none(tmp_path):
    """The location is a word in the pickle: rewrite it to a device that is not there."""
    source = zipfile.ZipFile(save(tmp_path / "cpu.pt", torch.ones(3)))
    with zipfile.ZipFile(tmp_path / "gpu.pt", "w") as target:
        for info in source.infolist():
            data = source.read(info)
            if info.filename.endswith("data.pkl"):
                assert b"\x03\x00\x00\x00cpu" in data
                data = data.replace(b"\x03\x00\x00\x00cpu", b"\x06\x00\x00\x00cuda:7")
            target.writestr(info.filename, data)
    assert torch.equal(loaded(read_torch_file(tmp_path / "gpu.pt")), torch.ones(3))


def test_a_file_inside_a_tar_is_read_in_place(tmp_path):
    inner = save(tmp_path / "model_weights.ckpt", {"w": torch.arange(1000.0)})
    with tarfile.open(tmp_path / "x.nemo", "w") as archive:
        archive.add(inner, "./model_weights.ckpt")
    region = open_container(tmp_path / "x.nemo").members["model_weights.ckpt"]
    stored = read_torch_file(region)["w"]
    assert stored.path == tmp_path / "x.nemo"
    assert torch.equal(loaded(stored), torch.arange(1000.0))


class Reduced:
    """An object that is pickled as a call of a function, and a state that it is given."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("touch {}/ran",), ".system"),
        (eval, ("1",), ".eval"),
        (exec, ("1",), ".exec"),
        (getattr, (1, "real"), ".getattr"),
        (__import__, ("os",), ".__import__"),
        (open, ("{}/ran", "w"), ".open"),
        (pickle.loads, (b"N.",), ".loads"),
    ],
)
def test_a_pickle_that_names_a_function_is_refused_by_name(tmp_path, legacy, function, args, name):
    filled = tuple(a.format(tmp_path) if isinstance(a, str) else a for a in args)
    path = save(
        tmp_path / "x.pt", {"w": torch.ones(1), "e": Reduced(function, filled)}, legacy=legacy
    )
    with pytest.raises(CheckpointMismatchError, match="is refused: its pickle names") as caught:
        read_torch_file(path)
    assert name in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_random_states_and_enums_of_a_training_run_do_no_harm(tmp_path):
    value = {
        "rng": [
            {"numpy": np.random.default_rng(0).integers(9, size=3), "torch": torch.get_rng_state()}
        ],
        "scalar": np.float64(3.5),
        "when": datetime.timedelta(seconds=3),
        "w": torch.ones(2),
    }
    tree = read_torch_file(save(tmp_path / "x.pt", value))
    assert torch.equal(loaded(tree["w"]), torch.ones(2))
    assert torch.equal(loaded(tree["rng"][0]["torch"]), torch.get_rng_state())


def test_an_object_with_a_pair_for_its_state_does_no_harm(tmp_path):
    """A pair of values, which is not (attributes, slots)."""
    pair = Reduced(datetime.timedelta, (), (1, 2))
    path = save(tmp_path / "x.pt", {"w": torch.ones(2), "pair": pair})
    assert torch.equal(loaded(read_torch_file(path)["w"]), torch.ones(2))


def test_objects_with_slots_keep_their_own_values(tmp_path):
    """Their state is (attributes, slots)."""
    value = {
        "slots": [Reduced(datetime.timedelta, (), (None, {"x": i})) for i in range(4)],
        "both": [Reduced(datetime.timedelta, (), ({"a": i}, {"x": i})) for i in range(4)],
    }
    tree = read_torch_file(save(tmp_path / "x.pt", value))
    assert tree["slots"] == [{"x": i} for i in range(4)]
    assert tree["both"] == [[{"a": i}, {"x": i}] for i in range(4)]


@pytest.mark.parametrize("state", [b"h\x00", b"h\x00h\x01\x86"])
def test_objects_that_share_large_attributes_cost_no_more_than_they_unfold_to(tmp_path, state):
    """Each of 50,000 objects has the same 10,000 attributes, or as many slots, too."""
    table = b"}(" + b"".join(b"J%sN" % struct.pack("<I", i) for i in range(10_000)) + b"u"
    tables = table + b"q\x000" + table.replace(b"N", b"\x88") + b"q\x010"
    each = b"cdatetime\ntimedelta\nq\x020](" + (b"h\x02)R" + state + b"b") * 50_000 + b"e."
    with pytest.raises(CheckpointMismatchError, match="unfold to more than"):
        read_torch_file(zip_with(tmp_path / "x.pt", b"\x80\x02" + tables + each))


@pytest.mark.parametrize(
    "target",
    [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n", b"]", b"ctorch\nFloatStorage\n"],
)
def test_a_pickle_that_changes_our_own_objects_is_refused(tmp_path, target):
    """BUILD with a dict sets attributes of whatever lies on the stack."""
    change = b"}U\x0c__defaults__Nsb."
    with pytest.raises(CheckpointMismatchError, match="is refused: its pickle changes a"):
        read_torch_file(zip_with(tmp_path / "x.pt", b"\x80\x02" + target + change))


def test_framework_functions_are_named_but_never_run(tmp_path):
    """torch.load of another file, or numpy's, is data like any other object of a framework."""
    path = save(tmp_path / "x.pt", {"e": Reduced(torch.save, ({"a": 1}, str(tmp_path / "ran")))})
    read_torch_file(path)
    assert not (tmp_path / "ran").exists()


def zip_with(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        for name, data in members.items():
            archive.writestr(f"x/data/{name.removeprefix('_')}", data)
    return path


def test_a_pickle_whose_memo_would_take_gigabytes_costs_nothing(tmp_path):
    huge_memo_index = b"\x80\x02N" + b"r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    assert read_torch_file(zip_with(tmp_path / "x.pt", huge_memo_index)) is None


def test_a_pickle_that_asks_for_a_huge_buffer_is_refused(tmp_path):
    bomb = b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."
    with pytest.raises(CheckpointMismatchError, match="not a readable pickle"):
        read_torch_file(zip_with(tmp_path / "x.pt", bomb))


def test_objects_may_be_shared(tmp_path):
    shared = [1, 2]
    tree = read_torch_file(zip_with(tmp_path / "x.pt", pickle.dumps([shared, shared], protocol=2)))
    assert tree == [[1, 2], [1, 2]]
    assert tree[0] is tree[1]


def test_sharing_that_unfolds_without_end_is_refused(tmp_path):
    """Sixty lists, each holding the next twice: 2**60 leaves for whoever walks over them."""
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CheckpointMismatchError, match="unfold to more than"):
        read_torch_file(zip_with(tmp_path / "x.pt", pickle.dumps(value, protocol=2)))


def test_deep_nesting_is_refused(tmp_path):
    deep = b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b"."
    with pytest.raises(CheckpointMismatchError, match="nest too deep"):
        read_torch_file(zip_with(tmp_path / "x.pt", deep))


def test_a_compressed_member_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(CheckpointMismatchError, match="compressed or encrypted"):
        read_torch_file(tmp_path / "x.pt")


def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path):
    pickled = io.BytesIO()

    class StoragePickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if obj == "S" else None

    pickler = StoragePickler(pickled, protocol=2)
    rebuild = torch._utils._rebuild_tensor_v2
    pickler.dump(Reduced(rebuild, ("S", 2, (3,), (1,), False, collections.OrderedDict())))
    path = zip_with(tmp_path / "x.pt", pickled.getvalue(), _0=bytes(16))
    with pytest.raises(CheckpointMismatchError, match="reaches beyond its storage"):
        read_torch_file(path)


def test_a_storage_shorter_than_stated_is_reported(tmp_path):
    source = zipfile.ZipFile(save(tmp_path / "x.pt", torch.ones(100)))
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as target:
        for info in source.infolist():
            data = source.read(info)
            target.writestr(info.filename, data[:-4] if info.filename.endswith("/0") else data)
    with pytest.raises(CheckpointMismatchError, match="storage 0 has 396 bytes, needs 400"):
        read_torch_file(tmp_path / "y.pt")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_a_truncated_file_is_reported(tmp_path, legacy, kept):
    path = save(tmp_path / "x.pt", {"w": torch.ones(5000)}, legacy=legacy)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointMismatchError, match=r"x\.pt is (truncated|not a readable)"):
        read_torch_file(path)


def test_a_damaged_name_in_the_directory_names_the_file(tmp_path):
    path = save(tmp_path / "x.pt", {"w": torch.ones(5)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # the directory's last entry
    data[entry + 9] |= 8  # its name is UTF-8
    data[entry + 46] = 0xFF
    path.write_bytes(data)
    with pytest.raises(CheckpointMismatchError, match=r"x\.pt is truncated or damaged"):
        read_torch_file(path)


def test_tensors_of_few_bits_are_refused_by_their_type(tmp_path):
    path = save(tmp_path / "x.pt", {"w": torch.ones(5).to(torch.float8_e5m2)})
    with pytest.raises(CheckpointMismatchError, match=r"torch\.float8_e5m2; convert"):
        read_torch_file(path)


def test_a_stream_of_pickles_without_a_list_of_storages_is_reported(tmp_path):
    parts: tuple[Any, ...] = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, None)
    (tmp_path / "x.pt").write_bytes(b"".join(pickle.dumps(each, protocol=2) for each in parts))
    with pytest.raises(CheckpointMismatchError, match=r"a pickle, but not of torch\.save"):
        read_torch_file(tmp_path / "x.pt")


def test_a_git_lfs_pointer_is_reported(tmp_path):
    (tmp_path / "x.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointMismatchError, match="Git LFS pointer"):
        read_torch_file(Region(tmp_path / "x.pt"))


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    import gzip

    monkeypatch.setattr("export_scripts.checkpoints.containers._BOMB_FLOOR_BYTES", 1 << 20)
    with gzip.open(tmp_path / "x.nemo", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    with pytest.raises(CheckpointMismatchError, match="decompression bomb"):
        open_container(tmp_path / "x.nemo", scratch_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.nemo"]


# A tuple that holds itself twice, and so on: 2 ** 24 values, of which 24 are stored.
NESTED = b")" + b"2\x86" * 24


@pytest.mark.parametrize(
    ("data", "reported"),
    [
        (b"\x80\x02}" + NESTED + b"K\x01s.", "a key nests tuples"),
        (b"\x80\x02}(" + NESTED + b"K\x01u.", "a key nests tuples"),
        (b"\x80\x02(" + NESTED + b"K\x01d.", "a key nests tuples"),
        (b"\x80\x04\x8f(" + NESTED + b"\x90.", "a key nests tuples"),
        (b"\x80\x04(" + NESTED + b"\x91.", "a key nests tuples"),
        (b"\x80\x02ccollections\nOrderedDict\n](" + NESTED + b"K\x01\x86e\x85R.", "a key nests"),
        (b"\x80\x02" + NESTED + b"Q.", "unknown persistent id"),
        (b"\x80\x02}K\x01" + NESTED + b"s.", "is refused: its objects unfold to more than"),
        (b"\x80\x02(K\x01i.", "opcode 105 is not one"),
        (b"\x80\x02", "EOFError"),
    ],
)  # fmt: skip
def test_a_pickle_that_would_keep_its_reader_busy_is_refused(tmp_path, data, reported):
    path = zip_with(tmp_path / "x.pt", data)
    with pytest.raises(CheckpointMismatchError, match=reported) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500
