"""The hash of a checkpoint: the same for the same files, another where one of them differs."""

from export_scripts.ft.identity import checkpoint_hash, served_identity
from export_scripts.ft.layout import manifest_path
from foundations import __version__
from tests.ft_folders import write_gpt
from tests.json_files import write_json


def test_a_hash_follows_the_files_and_not_the_folders_name(tmp_path):
    folder = write_gpt(tmp_path / "a")
    assert checkpoint_hash(folder) == ""  # it has no manifest
    files = {"model.wte.bin": {"size_bytes": 4, "crc32": "00000001"}}
    found = []
    for crc in ("00000001", "00000002", "00000001"):
        files["model.wte.bin"]["crc32"] = crc
        write_json(manifest_path(folder), {"files": files, "made_at": crc})
        found.append(checkpoint_hash(folder))
    assert found[0] == found[2] != found[1]
    other = folder.rename(folder.with_name("b"))
    manifest_path(folder).rename(manifest_path(other))
    assert checkpoint_hash(other) == found[0]
    manifest_path(other).write_text("{")
    assert checkpoint_hash(other) == ""


def test_types_are_those_of_the_served_model():
    given = {"data_type": "bf16", "int8_mode": "1"}
    assert served_identity(None, given) == {
        "checkpoint": "", "data_type": "bf16", "quantization": "int8", "version": __version__
    }  # fmt: skip
    assert served_identity(None, {"fp8": "1"})["quantization"] == "fp8"
    kept = {"int8_mode": "1", "kv_cache_dtype": "fp8_e4m3"}
    assert served_identity(None, kept)["quantization"] == "int8+kv_fp8_e4m3"
