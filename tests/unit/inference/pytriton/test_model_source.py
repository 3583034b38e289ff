"""From a name to weights: local paths, a stand-in for the Hub, and without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.validation import validate_directory
from inference.pytriton.model_source import parse_model_name, prepare_weights
from tests.conftest import ROOT
from tests.tiny_text_gpt2 import standing_in_for_the_hub, write_tiny_gpt2

UNREACHABLE = "http://127.0.0.1:9"  # the discard port, where nothing listens


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gpt2(tmp_path_factory.mktemp("tiny") / "my-gpt.2")


def prepared(source: Path, output_dir: Path, *, stored: str | None = None, **more: Any) -> Path:
    name = parse_model_name(str(source))
    fields: dict[str, Any] = {"tp_size": 2, "weight_data_type": "fp32"} | more
    request = ConversionRequest(source, output_dir / name.key, **fields)
    return prepare_weights(name, request, stored_type=stored)


@pytest.mark.parametrize(
    ("text", "repository", "file", "key"),
    [
        ("gpt2", "gpt2", None, "gpt2"),
        ("facebook/opt-125m", "facebook/opt-125m", None, "facebook_opt_125m"),
        (
            "nvidia/gpt-1.3B:a_fp16.nemo",
            "nvidia/gpt-1.3B",
            "a_fp16.nemo",
            "nvidia_gpt_1_3B_a_fp16_nemo",
        ),
    ],
)
def test_names_of_repositories(text, repository, file, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = parse_model_name(text)
    assert (name.repository, name.file, name.key, name.path) == (repository, file, key, None)


def test_a_path_is_served_under_the_name_of_its_last_part(source):
    assert parse_model_name(str(source)).key == "my_gpt_2"
    assert parse_model_name(f"{source}/").key == "my_gpt_2"


@pytest.mark.parametrize("text", ["/no/such/folder", "./none", "a/b/c", "with blank"])
def test_names_that_are_neither_path_nor_repository_are_refused(text):
    with pytest.raises(ValueError, match=f"--hf-model-name={text}"):
        parse_model_name(text)


def test_local_folder_is_converted_once(source, tmp_path):
    ft_dir = prepared(source, tmp_path)
    assert ft_dir == tmp_path / "my_gpt_2" / "2-gpu"
    assert not validate_directory(ft_dir)
    assert read_config(ft_dir)[1].weight_data_type == "fp32"
    written = (ft_dir / "config.ini").stat().st_mtime_ns
    assert prepared(source, tmp_path) == ft_dir
    assert (ft_dir / "config.ini").stat().st_mtime_ns == written


def test_another_model_of_the_same_name_is_not_served_in_its_place(source, tmp_path):
    prepared(source, tmp_path)
    other = write_tiny_gpt2(tmp_path / "other" / "my-gpt.2", seed=1)
    with pytest.raises(ValueError, match=r"--output-dir: .*holds another conversion.*--overwrite"):
        prepared(other, tmp_path)
    prepared(other, tmp_path, overwrite=True)


def test_converted_folder_is_used_as_it_is(source, tmp_path):
    request = ConversionRequest(source, tmp_path, tp_size=2, weight_data_type="fp16")
    ft_dir = convert(request).ft_dir
    assert prepared(ft_dir, tmp_path / "unused") == ft_dir
    assert not (tmp_path / "unused").exists()
    with pytest.raises(ValueError, match="split for 2 ranks") as caught:
        prepared(ft_dir, tmp_path, tp_size=4, stored="fp32")
    assert "holds fp16 weights, not --weight-data-type=fp32" in str(caught.value)


def test_sizes_that_do_not_divide_are_reported_in_the_words_of_the_command(source, tmp_path):
    with pytest.raises(ValueError, match="--tp=3"):
        prepared(source, tmp_path, tp_size=3)
    with pytest.raises(ValueError, match="--pp=3"):
        prepared(source, tmp_path, pp_size=3)


def run_download(
    name: str, tmp_path: Path, *, endpoint: str, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """Prepare in a process of its own: the library reads its variables when it is imported."""
    program = f"""
from pathlib import Path
from export_scripts.conversion.request import ConversionRequest
from inference.pytriton.model_source import parse_model_name, prepare_weights
name = parse_model_name({name!r})
try:
    print(prepare_weights(name, ConversionRequest(Path(), Path("models") / name.key, 1, "fp32")))
except ValueError as error:
    print("refused:", error)
"""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), HF_HOME=str(tmp_path / "hf"))
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_download_takes_the_needed_files_and_is_found_again_offline(source, tmp_path):
    (source / "tf_model.h5").write_bytes(b"of another library")
    with standing_in_for_the_hub({"someone/tiny": source}) as (endpoint, asked):
        done = run_download("someone/tiny", tmp_path, endpoint=endpoint)
        assert done.stdout == "models/someone_tiny/1-gpu\n", done.stdout + done.stderr
        assert any(path.endswith("model.safetensors") for path in asked)
        assert not any(path.endswith("tf_model.h5") for path in asked)
    ft_dir = tmp_path / "models" / "someone_tiny" / "1-gpu"
    assert not validate_directory(ft_dir)
    # Converted: nothing is asked of the Hub.
    done = run_download("someone/tiny", tmp_path, endpoint=UNREACHABLE)
    assert done.stdout == "models/someone_tiny/1-gpu\n", done.stdout + done.stderr
    # Not converted any more, but downloaded.
    ft_dir.rename(tmp_path / "moved")
    done = run_download("someone/tiny", tmp_path, endpoint=UNREACHABLE, offline=True)
    assert done.stdout == "models/someone_tiny/1-gpu\n", done.stdout + done.stderr


def test_a_repository_without_weights_is_refused_and_a_file_may_be_named(source, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for each in source.glob("*.json"):
        shutil.copy(each, bare)
    (bare / "a.nemo").write_bytes(b"")
    with standing_in_for_the_hub({"someone/bare": bare}) as (endpoint, asked):
        done = run_download("someone/bare", tmp_path, endpoint=endpoint)
        assert "name one of its files, as in someone/bare:<file>" in done.stdout, done.stderr
        assert not any(path.endswith(".nemo") for path in asked)
        run_download("someone/bare:a.nemo", tmp_path, endpoint=endpoint)
        assert any(path.endswith("a.nemo") for path in asked)


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_the_message_says_how_to_do_without(tmp_path, offline):
    done = run_download("gpt2", tmp_path, endpoint=UNREACHABLE, offline=offline)
    assert "refused: --hf-model-name=gpt2 is not a local path" in done.stdout, done.stderr
    assert "models/gpt2/1-gpu does not exist" in done.stdout
    assert "give the path of a checkpoint instead" in done.stdout


def test_a_repository_that_does_not_exist_is_reported(tmp_path):
    with standing_in_for_the_hub({}) as (endpoint, _):
        done = run_download("nobody/nothing", tmp_path, endpoint=endpoint)
    assert "refused: --hf-model-name=nobody/nothing" in done.stdout, done.stderr
    assert "404" in done.stdout
