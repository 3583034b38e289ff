"""The commands: status, messages, and what they print."""

import importlib
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from foundations.commands import accept_any_text, say
from tests.conftest import ROOT
from tests.tiny import write_nemo


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process."""
    command = importlib.import_module(f"export_scripts.{name}").main
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()) as errors:
        try:
            status = command(list(map(str, arguments)))
        except SystemExit as end:  # after --help
            status = end.code
    return subprocess.CompletedProcess([name], status, shown.getvalue(), errors.getvalue())


def convert(source: Path, output: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run(
        "convert", "--checkpoint-path", source, "--output-dir", output,
        "--tensor-model-parallel-size", 2, "--weight-data-type", "fp16", *more,
    )  # fmt: skip


def test_convert_validate_and_inspect_a_folder(tmp_path):
    source = write_nemo(tmp_path / "x.nemo", tp=2)
    result = convert(source, tmp_path / "out", "--processes", 2)
    assert (result.returncode, result.stderr) == (0, "")
    assert "tensors      52 in " in result.stdout
    assert "MB/s" in result.stdout
    assert "peak memory" in result.stdout
    sound = run("validate", tmp_path / "out/2-gpu")
    assert (sound.returncode, "sizes and checksums agree" in sound.stdout) == (0, True)
    facts = json.loads(run("inspect", tmp_path / "out/2-gpu", "--json").stdout)
    assert (facts["family"], facts["tensor parallel"], facts["weight type"]) == ("gpt", 2, "fp16")
    assert facts["tokenizer"] == ["merges.txt", "vocab.json"]
    again = convert(source, tmp_path / "out")
    assert "is already complete; nothing to do" in again.stdout


def test_a_conversion_imports_no_torch(tmp_path):
    """Its import takes longer than a small conversion."""
    source = write_nemo(tmp_path / "x.nemo")
    command = [sys.executable, "-X", "importtime", "-m", "export_scripts.convert"]
    command += ["--checkpoint-path", str(source), "--output-dir", str(tmp_path / "out")]
    command += ["--tensor-model-parallel-size", "1", "--weight-data-type", "bf16"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "safetensors"}


def test_a_refused_conversion_exits_1_with_the_reasons(tmp_path):
    source = write_nemo(tmp_path / "x.nemo", config={"activation": "swiglu", "headscale": True})
    result = convert(source, tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.count("error: ") == 2
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "out").glob("*"))


def test_validate_exits_1_and_lists_the_differences(tmp_path):
    convert(write_nemo(tmp_path / "x.nemo"), tmp_path / "out")
    (tmp_path / "out/2-gpu/model.wte.bin").unlink()
    result = run("validate", tmp_path / "out/2-gpu", "--quick")
    assert result.returncode == 1
    assert "model.wte.bin is missing" in result.stdout


def test_inspect_reports_why_a_checkpoint_cannot_be_converted(tmp_path):
    source = write_nemo(tmp_path / "x.nemo", config={"position_embedding_type": "alibi"})
    facts = json.loads(run("inspect", source, "--json").stdout)
    assert "position_embedding_type = alibi" in facts["cannot be converted"][0]


@pytest.mark.parametrize("name", ["convert", "validate", "inspect", "list_families"])
def test_help_describes_the_command(name):
    result = run(name, "--help")
    assert result.returncode == 0
    assert f"usage: python -m export_scripts.{name}" in result.stdout


@pytest.mark.parametrize("name", ["inspect", "list_families"])
def test_light_commands_do_not_load_torch(name, tmp_path):
    arguments = [str(write_nemo(tmp_path / "x.nemo"))] if name == "inspect" else []
    code = (
        "import sys\n"
        f"from export_scripts.{name} import main as command\n"
        f"assert command({arguments}) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_bad_pair_is_reported(tmp_path):
    result = convert(write_nemo(tmp_path / "x.nemo"), tmp_path / "out", "--set", "head_num")
    assert (result.returncode, result.stderr) == (1, "error: --set head_num is not KEY=VALUE\n")


def test_output_escapes_what_the_locale_lacks(monkeypatch):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    accept_any_text()
    say("mod\u00e8le")
    stream.flush()
    assert written.getvalue() == b"mod\\xe8le\n"
