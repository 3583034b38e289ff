"""The promises of docs/migrating.md: its commands are accepted, its tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from export_scripts.triton.parameters import PARAMETERS
from export_scripts.triton.signature import MODEL_SIGNATURES, declared
from inference.client import main as client
from inference.pytriton.server import main as pytriton
from inference.server.__main__ import main as server
from tests.conftest import ROOT
from tests.documents import commands, run
from tests.nvidia_repositories import add_nvidia_model

TEXT = (ROOT / "docs" / "migrating.md").read_text()
LINES = commands(TEXT)
MODULES = {
    "inference.server": server,
    "inference.client": client,
    "inference.pytriton.server": pytriton,
}
# A path of the reader's.
REPOSITORY = "/models/all_models/gpt"


def test_every_command_is_tried_here() -> None:
    tried = {"python -m", "python main.py", "ln -s", "tritonserver --model-repository"}
    assert {line for line in LINES if not line.startswith(tuple(tried))} == set()


@pytest.mark.parametrize("line", commands(TEXT, "python -m"))
def test_modules_know_their_options(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    positional = words[3:4] if words[2] == "inference.client" else []
    with pytest.raises(SystemExit):
        MODULES[words[2]]([*positional, "--help"])
    shown = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in shown] == []
    files = [word for word in words if word.endswith(".json")]
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("line", commands(TEXT, "python main.py"))
def test_launcher_takes_the_line(line: str, tmp_path: Path) -> None:
    repository = tmp_path / "all_models"
    sizes = {"tensor_para_size": "1", "pipeline_para_size": "1", "data_type": "fp32"}
    add_nvidia_model(repository, "fastertransformer", sizes | {"model_type": "GPT"})
    line = line.replace(REPOSITORY, str(repository))
    more = ["dry_run=true", "cluster_type=local", f"base_results_dir={tmp_path}/results"]
    done = run([*shlex.split(line)[1:], *more])
    assert done.returncode == 0, done.stderr


def test_backend_folder_is_where_the_link_points() -> None:
    (line,) = commands(TEXT, "ln -s")
    source = shlex.split(line)[2].removeprefix("$PWD/")
    assert (ROOT / source / "model.py").is_file()
    assert Path(source).name == "fastertransformer"


def test_tables_name_existing_things() -> None:
    rows = dict(re.findall(r"^\| (`[^|]+?`.*?) \| (.+?) \|$", TEXT, re.MULTILINE))
    (types,) = (text for key, text in rows.items() if key == "`model_type`")
    assert [name for name in MODEL_SIGNATURES if name != "Llama" and name not in types] == []
    nvidia = ("tensor_para_size", "is_half", "int8_mode", "enable_custom_all_reduce", "is_sparse")
    assert [name for name in nvidia if name not in PARAMETERS or f"`{name}`" not in TEXT] == []
    named = [*declared("nemo").inputs, *declared("nemo").outputs]
    assert [tensor.name for tensor in named if f"`{tensor.name}`" not in TEXT] == []
