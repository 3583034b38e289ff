"""A folder is loadable only if it is exactly what its config.ini and manifest say."""

import shutil
from pathlib import Path

import pytest

from export_scripts.ft.reader import FTReader
from export_scripts.ft.validation import validate_directory
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of
from tests.looks import mentions
from tests.tiny import write_nemo

QKV = "model.layers.0.attention.query_key_value.weight.1.bin"


@pytest.fixture
def folder(tmp_path) -> Path:
    source = write_nemo(tmp_path / "x.nemo")
    return folder_of(source, tmp_path / "out", tp_size=2, weight_data_type="fp16")


def test_a_converted_folder_is_sound(folder):
    assert validate_directory(folder) == []


def test_a_path_in_an_ascii_locale_is_read(folder, tmp_path):
    # Bytes above 127 are then surrogates, which torch refuses.
    folder.rename(tmp_path / "mod\u00e8le")
    name = "mod\u00e8le".encode().decode("ascii", "surrogateescape")
    assert FTReader(tmp_path / name).read("model.final_layernorm.bias").isfinite().all()


def test_every_difference_is_listed(folder):
    (folder / QKV).unlink()
    (folder / "model.wpe.bin").write_bytes(b"short")
    (folder / "model.layers.0.attention.query_key_value.weight.7.bin").write_bytes(b"")
    (folder / "model.final_layernorm.bias.bin").unlink()
    (folder / "model.final_layernorm.bias.bin").mkdir()
    text = "\n".join(validate_directory(folder, checksums=False))
    assert f"{QKV} is missing (expected 2700 bytes)" in text
    assert "model.wpe.bin has 5 bytes, expected 1200" in text
    assert "weight.7.bin is not expected in a gpt folder of 2 ranks" in text
    assert "model.final_layernorm.bias.bin is not a regular file" in text


def test_a_folder_that_is_not_there_is_reported(tmp_path):
    assert "is not a folder" in validate_directory(tmp_path / "none")[0]


def test_changed_contents_are_found_by_checksum_only(folder):
    data = bytearray((folder / QKV).read_bytes())
    data[7] ^= 1
    (folder / QKV).write_bytes(data)
    assert validate_directory(folder, checksums=False) == []
    assert validate_directory(folder) == [
        f"{QKV} differs from the checksum in the manifest (crc32)"
    ]


def test_a_folder_without_a_manifest_is_judged_by_its_config(folder, tmp_path):
    moved = tmp_path / "moved" / "2-gpu"
    shutil.copytree(folder, moved)
    assert validate_directory(moved) == []


def test_a_damaged_manifest_is_reported(folder):
    (folder.parent / "2-gpu.manifest.json").write_text("{")
    assert "not a readable manifest" in validate_directory(folder)[0]


def test_a_changed_config_changes_the_expected_files(folder):
    config = folder / "config.ini"
    config.write_text(config.read_text().replace("fp16", "fp32"))
    problems = validate_directory(folder, checksums=False)
    assert mentions(problems, "has 1200 bytes, expected 2400")


def test_a_reader_refuses_damaged_folders(folder):
    (folder / QKV).unlink()
    with pytest.raises(CheckpointMismatchError, match=f"{QKV} is missing"):
        FTReader(folder)


def test_each_damaged_file_is_reported_once(folder):
    (folder / QKV).unlink()
    (folder / "model.wpe.bin").write_bytes(b"short")
    problems = validate_directory(folder)
    assert len(problems) == 2
    assert sum(QKV in text for text in problems) == 1
