"""The promises of docs/migrating.md: its commands are accepted, its tables are complete."""

import re
import shlex
from pathlib import Path

from export_scripts.triton.parameters import PARAMETERS
from export_scripts.triton.signature import MODEL_SIGNATURES, declared
from tests.conftest import ROOT
from tests.documents import commands

TEXT = (ROOT / "docs" / "migrating.md").read_text()
LINES = commands(TEXT)


def test_every_command_is_tried_here():
    tried = {"python -m", "python main.py", "ln -s", "tritonserver --model-repository"}
    assert {line for line in LINES if not line.startswith(tuple(tried))} == set()


def test_backend_folder_is_where_the_link_points():
    (line,) = commands(TEXT, "ln -s")
    source = shlex.split(line)[2].removeprefix("$PWD/")
    assert (ROOT / source / "model.py").is_file()
    assert Path(source).name == "fastertransformer"


def test_tables_name_existing_things():
    rows = dict(re.findall(r"^\| (`[^|]+?`.*?) \| (.+?) \|$", TEXT, re.MULTILINE))
    (types,) = (text for key, text in rows.items() if key == "`model_type`")
    assert [name for name in MODEL_SIGNATURES if name != "Llama" and name not in types] == []
    nvidia = ("tensor_para_size", "is_half", "int8_mode", "enable_custom_all_reduce", "is_sparse")
    assert [name for name in nvidia if name not in PARAMETERS or f"`{name}`" not in TEXT] == []
    named = [*declared("nemo").inputs, *declared("nemo").outputs]
    assert [tensor.name for tensor in named if f"`{tensor.name}`" not in TEXT] == []
