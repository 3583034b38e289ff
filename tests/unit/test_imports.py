"""The direction of imports, and that the login node loads nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each may import those after it, and none before it.
ORDER = ("launcher_scripts", "stages", "inference", "export_scripts")
MODEL_FILES = ROOT / "export_scripts" / "triton" / "models"
HEAVY = ("torch", "transformers", "numpy", "tritonclient", "grpc", "matplotlib", "sentencepiece")
COMMANDS = {
    "--help": ["--help"],
    "--cfg job": ["export=gpt3/sample", "--cfg", "job"],
    "dry run": ["export=gpt3/sample", "dry_run=true"],
    "refused": ["export=gpt3/sample", "export.model.tensor_model_parallel_size=3"],
}


def imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_in_one_direction(package: str) -> None:
    forbidden = set(ORDER[: ORDER.index(package)])
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        # Model files of a repository run in the server, which has the whole project.
        if MODEL_FILES not in path.parents
        for name in imported_packages(path)
        if name in forbidden
    }
    assert not wrong


@pytest.mark.parametrize("name", COMMANDS)
def test_login_node_loads_nothing_heavy(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "main.py", *COMMANDS[name]]
    if name != "--help":
        command.append(f"base_results_dir={tmp_path}")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == (2 if name == "refused" else 0), done.stdout + done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "hydra" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("script", ["main.py", "launcher_scripts/main.py"])
def test_python_without_the_packages_is_told_in_one_line(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-E", "-S", script, "--help"],  # -S: no installed packages
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "lacks hydra, submitit, yaml; make the environment with `make setup`" in line


def test_both_entries_are_the_same_command() -> None:
    one, other = (
        subprocess.run(
            [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        for script in ("main.py", "launcher_scripts/main.py")
    )
    assert one.returncode == other.returncode == 0
    assert one.stdout == other.stdout
