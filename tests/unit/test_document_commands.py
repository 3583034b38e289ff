"""Commands of several documents are planned as written, up to the start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher_scripts.main import main
from tests.conftest import ROOT
from tests.documents import commands
from tests.tiny_text_gpt2 import write_tiny_gpt2

DOCUMENTS = (
    "clusters.md",
    "docker.md",
    "evaluation.md",
    "fastertransformer_backend.md",
    "pytriton.md",
)
# Commands that need the reader's files or ask a cluster; each is tested elsewhere.
NOT_HERE = ("action=", "evaluate.server=", "export=gpt3/sample 'stages=[evaluate]'")


def planned() -> list[str]:
    texts = ((ROOT / "docs" / name).read_text() for name in DOCUMENTS)
    found = [line for text in texts for line in commands(text) if "main.py" in line]
    return [line for line in found if not any(words in line for words in NOT_HERE)]


def words_of(line: str, folder: Path) -> list[str]:
    """Return the overrides of a command, with a model of ours where the reader's own is meant."""
    words = shlex.split(line.replace("$PWD", str(folder)).replace(" ... ", " "), comments=True)
    words = words[next(i for i, word in enumerate(words) if word.endswith("main.py")) + 1 :]
    words = [re.sub(r"^(base_results_dir|data_dir)=.*", rf"\1={folder}/r", word) for word in words]
    words = [word for word in words if not word.startswith("launcher_scripts_path=")]
    if "export=gpt3/sample" not in words and "export.model.sizes.family=gpt" not in words:
        source = write_tiny_gpt2(folder / "source", positions=1024)
        words += [
            f"export.model.checkpoint_path={source}",
            "export.model.tensor_model_parallel_size=1",
            "export.triton_deployment.max_batch_size=8",
        ]
    for name in ("slipway.sqsh", "slipway-ft.sqsh"):
        (folder / name).touch()
    words = [word.replace("/images/", f"{folder}/") for word in words]
    if not any(word.startswith("base_results_dir=") for word in words):
        words.append(f"base_results_dir={folder}/r")
    return words


@pytest.mark.parametrize("line", planned())
def test_command_is_planned_as_written(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*words_of(line, tmp_path), "dry_run=true"])
    seen = capsys.readouterr()
    assert status == 0, seen.err
    assert list(tmp_path.rglob("*_submission.sh")) or list(tmp_path.rglob("*_manifests.yaml"))


def test_most_commands_are_looked_at() -> None:
    assert len(planned()) >= 10
