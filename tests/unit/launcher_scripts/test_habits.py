"""The habits of Hydra's users: tab completion, folders of configuration files of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.main import main
from tests.conftest import ROOT


def completion(word: str, line: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "main.py", "-sc", word],
        cwd=ROOT,
        env=os.environ | {"COMP_LINE": line},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_gets_its_completion() -> None:
    assert "complete" in completion("install=bash")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("export.model.tensor", "export.model.tensor_model_parallel_size="),
        ("cluster=k", "cluster=kubernetes"),
    ],
)
def test_tab_offers_keys_and_choices(typed: str, offered: str) -> None:
    assert offered in completion("query=bash", f"python main.py {typed}").split()


def test_files_of_the_user_s_own_folder_are_chosen_like_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "conf/export/mine/tiny.yaml"
    own.parent.mkdir(parents=True)
    text = (ROOT / "conf/export/gpt3/sample.yaml").read_text()
    own.write_text(text.replace("model_train_name: gpt_books_5m", "model_train_name: my_model"))
    words = ("export=mine/tiny", "stages=[convert]", f"base_results_dir={tmp_path}", "dry_run=true")
    assert main([f"--config-dir={tmp_path / 'conf'}", *words]) == 0
    assert "export_my_model" in capsys.readouterr().out
    assert list(tmp_path.glob("my_model/*/convert/*_submission.sh"))
