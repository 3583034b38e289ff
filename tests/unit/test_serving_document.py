"""The promises of docs/serving.md: its commands run, its table lists the models."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from export_scripts.families import FAMILIES
from export_scripts.triton.repository import is_generative
from export_scripts.triton.signature import MODEL_SIGNATURES
from inference.client import main as client
from inference.server.tensors import file_tensors
from tests.conftest import ROOT
from tests.documents import commands, run

TEXT = (ROOT / "docs" / "serving.md").read_text()
# Rows of the table, by the model_type that each serves.
ROWS = {
    "GPT, OPT, BLOOM": "GPT",
    "GPT-J": "GPT-J",
    "GPT-NeoX": "GPT-NeoX",
    "Llama-style": "Llama",
    "T5": "T5",
    "T5-Encoder": "T5-Encoder",
    "BERT": "bert",
    "interactive GPT": "GPT",
}
# Paths of the reader's, by checkpoints of the reference material.
STAND_INS = {
    "/models/gptj": "gptj_hf/tiny/source",
    "/models/t5.nemo": "t5_nemo/train_tp2_pp1_relative_geglu_nobias/source",
    "/models/bert": "bert/tiny/source",
}


def write_keys(folder: Path) -> None:
    """Write the certificate, key and token that the document's server is started with."""
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "chain.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node1"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    (folder / "token").write_text("0123456789abcdef" * 4)
    for name in ("key.pem", "token"):
        (folder / name).chmod(0o600)


def with_tokenizer(source: Path, shared: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint with a tokenizer, as the reader's has one."""
    copy = tmp_path / "models" / source.parents[1].name
    shutil.copytree(source, copy)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "sample_model" / name, copy)
    return copy


def table() -> dict[str, list[str]]:
    found = re.search(r"<!-- served how -->\n(.*?)\n<!-- end -->", TEXT, re.DOTALL)
    assert found is not None
    rows = [line.strip("| ").split(" | ") for line in found[1].splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_every_kind_of_model_has_a_row() -> None:
    assert list(table()) == list(ROWS)
    assert set(ROWS.values()) == set(MODEL_SIGNATURES)


@pytest.mark.parametrize("row", ROWS)
def test_engines_and_streaming_are_those_of_the_model(row: str) -> None:
    _, engines, streams, *_ = table()[row]
    families = [each for each in FAMILIES.values() if each.model_type == ROWS[row]]
    assert families
    on_ft = all(family.ft_backend for family in families)
    assert engines == ("pytorch, fastertransformer" if on_ft else "pytorch")
    assert streams == ("yes" if is_generative(ROWS[row]) else "no")


@pytest.mark.parametrize("command", commands(TEXT, "python main.py"))
def test_servers_of_the_document_pass_every_check(
    command: str, shared: Path, tmp_path: Path
) -> None:
    for path, case in STAND_INS.items():
        source = shared / "golden" / case
        archive = next(source.glob("*.nemo"), None) or with_tokenizer(source, shared, tmp_path)
        command = command.replace(path, str(archive))
    command = command.replace("/keys/", f"{tmp_path}/").replace("$PWD/token", f"{tmp_path}/token")
    write_keys(tmp_path)
    words = [word for word in shlex.split(command)[1:] if not word.startswith("base_results_dir=")]
    done = run([*words, "dry_run=true", f"base_results_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    assert "deploy" in done.stdout


def test_flags_of_the_client_are_those_of_the_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = commands(TEXT, "python -m inference.client")
    assert {shlex.split(line)[3] for line in shown} == {
        "generate", "stream", "encode", "request", "health"
    }  # fmt: skip
    for line in shown:
        words = shlex.split(line)
        with pytest.raises(SystemExit):
            client([words[3], "--help"])
        reported = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and word not in reported] == []


def test_request_files_of_the_document_can_be_read() -> None:
    files = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    assert len(files) == 2
    for each in files:
        tensors = file_tensors(each["request"])
        assert {tensor.ndim for tensor in tensors.values()} == {3}
