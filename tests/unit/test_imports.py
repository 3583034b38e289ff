"""The direction of imports, and that the login node loads nothing heavy."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The map of the tree, from the ground up: each folder and the folders it imports from, which stand
# above it. A module belongs to the longest name here that begins its own.
ARROWS: dict[str, tuple[str, ...]] = {
    "foundations": (),
    "export_scripts.sentencepiece_model": (),
    "export_scripts.numeric": (),
    "export_scripts.checkpoints": (
        "foundations",
        "export_scripts.numeric",
        "export_scripts.sentencepiece_model",
    ),
    "export_scripts.families.layout": (
        "foundations",
        "export_scripts.numeric",
    ),
    "export_scripts.families.mapping": (
        "export_scripts.checkpoints",
        "foundations",
        "export_scripts.families.layout",
        "export_scripts.numeric",
    ),
    "export_scripts.families.gpt": (
        "foundations",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
    ),
    "export_scripts.families.dense": (
        "foundations",
        "export_scripts.families.gpt",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
    ),
    "export_scripts.families.t5": (
        "export_scripts.checkpoints",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
        "foundations",
    ),
    "export_scripts.families": (
        "foundations",
        "export_scripts.families.dense",
        "export_scripts.families.gpt",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
        "export_scripts.families.t5",
    ),
    "export_scripts.ft": (
        "foundations",
        "export_scripts.families.layout",
        "export_scripts.numeric",
        "export_scripts.sentencepiece_model",
    ),
    "export_scripts.conversion": (
        "foundations",
        "export_scripts.checkpoints",
        "export_scripts.families",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
        "export_scripts.ft",
        "export_scripts.numeric",
        "export_scripts.sentencepiece_model",
    ),
    "export_scripts.triton": (
        "foundations",
        "export_scripts.families",
        "export_scripts.families.layout",
        "export_scripts.ft",
    ),
    # The commands.
    "export_scripts": (
        "export_scripts.checkpoints",
        "export_scripts.conversion",
        "foundations",
        "export_scripts.families",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
        "export_scripts.ft",
        "export_scripts.numeric",
        "export_scripts.triton",
    ),
    "inference.system": (),
    "inference.parallel": (
        "export_scripts.families.layout",
        "inference.system",
    ),
    "inference.model": (
        "foundations",
        "export_scripts.families.layout",
        "export_scripts.ft",
        "inference.parallel",
    ),
    "inference.ranks": (
        "foundations",
        "export_scripts.families.layout",
        "export_scripts.ft",
        "export_scripts.numeric",
        "inference.system",
        "inference.model",
        "inference.parallel",
    ),
    "inference.decoding": (),
    "inference.engine": (
        "export_scripts.families.layout",
        "export_scripts.ft",
        "export_scripts.numeric",
        "export_scripts.triton",
        "inference.system",
        "inference.decoding",
        "inference.model",
        "inference.ranks",
    ),
    "inference.backend": (
        "foundations",
        "export_scripts.ft",
        "export_scripts.numeric",
        "export_scripts.triton",
        "inference.system",
        "inference.decoding",
        "inference.engine",
        "inference.ranks",
    ),
    # Runs in the server, which has the whole project.
    "export_scripts.triton.backends": ("inference.backend",),
    "inference.front": (
        "foundations",
        "inference.system",
    ),
    "inference.front.openai": (
        "export_scripts.ft",
        "inference.backend",
        "inference.decoding",
        "inference.front",
    ),
    "inference.server": (
        "export_scripts.triton",
        "inference.system",
        "inference.decoding",
        "inference.front",
    ),
    "inference.host": (
        "export_scripts.ft",
        "export_scripts.triton",
        "inference.system",
        "inference.backend",
        "inference.decoding",
        "inference.front",
        "inference.front.openai",
        "inference.server",
    ),
    "inference.client": (
        "foundations",
        "export_scripts.triton",
        "inference.system",
        "inference.decoding",
        "inference.front",
        "inference.server",
    ),
    "inference.pytriton": (
        "export_scripts.conversion",
        "foundations",
        "export_scripts.ft",
        "export_scripts.numeric",
        "export_scripts.triton",
        "inference.system",
        "inference.ranks",
        "inference.server",
    ),
    "inference.evaluation": (
        "foundations",
        "export_scripts.ft",
        "inference.front",
    ),
    "inference.evaluation.tasks": (
        "export_scripts.conversion",
        "export_scripts.families.layout",
        "foundations",
        "export_scripts.ft",
        "inference.evaluation",
    ),
    "inference.evaluation.report": (
        "foundations",
        "inference.evaluation",
    ),
    "inference.evaluation.run": (
        "foundations",
        "export_scripts.ft",
        "inference.backend",
        "inference.evaluation",
        "inference.evaluation.report",
        "inference.evaluation.tasks",
        "inference.server",
    ),
    "inference.certify": (
        "foundations",
        "export_scripts.checkpoints",
        "export_scripts.conversion",
        "export_scripts.families.gpt",
        "export_scripts.families.layout",
        "export_scripts.families.mapping",
        "export_scripts.ft",
        "export_scripts.numeric",
        "inference.backend",
        "inference.engine",
        "inference.front",
        "inference.front.openai",
        "inference.model",
        "inference.ranks",
        "inference.evaluation",
        "inference.evaluation.run",
        "inference.server",
    ),
    "inference.compare": (
        "foundations",
        "inference.evaluation",
        "inference.evaluation.report",
    ),
    "stages": (
        "export_scripts.checkpoints",
        "export_scripts.conversion",
        "foundations",
        "export_scripts.ft",
        "export_scripts.triton",
        "inference.system",
        "inference.evaluation",
        "inference.evaluation.report",
        "inference.evaluation.run",
        "inference.front",
        "inference.pytriton",
        "inference.server",
        "inference.certify",
    ),
    "launcher_scripts.configuration": (
        "export_scripts.conversion",
        "foundations",
        "export_scripts.triton",
        "inference.system",
        "inference.evaluation",
        "stages",
        "inference.certify",
    ),
    "launcher_scripts.launchers": (
        "foundations",
        "inference.system",
        "launcher_scripts.configuration",
        "stages",
    ),
    "launcher_scripts": (
        "foundations",
        "export_scripts.checkpoints",
        "inference.compare",
        "inference.evaluation",
        "inference.evaluation.report",
        "inference.evaluation.run",
        "inference.server",
        "inference.system",
        "launcher_scripts.configuration",
        "launcher_scripts.launchers",
        "stages",
    ),
}
# Public names that several modules define.
SHARED_NAMES = {
    "main": "every command has one",
}
# Modules of one folder, its __init__ left out.
MOST_MODULES = 20

HEAVY = (
    "torch", "transformers", "numpy", "tritonclient", "grpc", "matplotlib",
    "sentencepiece",
)  # fmt: skip
COMMANDS = {
    "--help": ["--help"],
    "--cfg job": ["export=gpt3/sample", "--cfg", "job"],
    "dry run": ["export=gpt3/sample", "dry_run=true"],
    "refused": ["export=gpt3/sample", "export.model.tensor_model_parallel_size=3"],
}


def read_modules() -> dict[str, Path]:
    roots = dict.fromkeys(name.partition(".")[0] for name in ARROWS)
    paths = (path.relative_to(ROOT) for root in roots for path in (ROOT / root).rglob("*.py"))
    # A run from here leaves a repository with model files among its results.
    own = (path for path in paths if "results" not in path.parts)
    return {".".join(path.with_suffix("").parts): ROOT / path for path in own}


MODULES = read_modules()


def module_called(name: str) -> str | None:
    return next((each for each in (name, f"{name}.__init__") if each in MODULES), None)


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the project's modules that a file imports, lazily or for types alone included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [module_called(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            found = [
                module_called(f"{node.module}.{alias.name}") or module_called(node.module)
                for alias in node.names
            ]
        else:
            continue
        yield from filter(None, found)


@cache
def imports() -> dict[str, set[str]]:
    """Return the project's modules that each of them imports."""
    return {name: set(imported_modules(path)) - {name} for name, path in MODULES.items()}


def folder_of(module: str) -> str:
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(name for name in names if name in ARROWS)


def test_the_map_is_drawn_from_the_ground_up():
    order = list(ARROWS)
    wrong = {
        f"{folder} imports from {other}, which has to stand above it"
        for folder, others in ARROWS.items()
        for other in others
        if order.index(other) >= order.index(folder)
    }
    assert not wrong


def test_imports_follow_the_map():
    found = {
        (folder_of(name), folder_of(other)): f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if folder_of(name) != folder_of(other)
    }
    drawn = {(folder, other) for folder, others in ARROWS.items() for other in others}
    assert not {text for pair, text in found.items() if pair not in drawn}
    unused = drawn - set(found)
    assert not unused, "nothing imports along these arrows; delete them"


def test_no_circle_of_modules():
    left = {name: set(others) for name, others in imports().items()}
    # Without those that import none of the rest, what stays is circles and what leads to them.
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left


def test_a_public_name_stands_once_on_the_map():
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                places.setdefault(node.name, []).append(module)
    twins = {
        name: modules
        for name, modules in places.items()
        if len(modules) > 1 and not name.startswith("_") and name not in SHARED_NAMES
    }
    assert not twins


@pytest.mark.parametrize("folder", [name for name in ARROWS if f"{name}.__init__" in MODULES])
def test_a_folder_says_what_belongs_there_and_stays_small(folder):
    path = MODULES[f"{folder}.__init__"]
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    modules = [each for each in path.parent.glob("*.py") if each != path]
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("name", COMMANDS)
def test_login_node_loads_nothing_heavy(name, tmp_path):
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
def test_python_without_the_packages_is_reported_in_one_line(script):
    done = subprocess.run(
        [sys.executable, "-E", "-S", script, "--help"],  # -S: no installed packages
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "lacks hydra, isal, jinja2, pydantic, submitit; make the environment with" in line


def test_both_entries_are_the_same_command():
    one, other = (
        subprocess.run(
            [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        for script in ("main.py", "launcher_scripts/main.py")
    )
    assert one.returncode == other.returncode == 0
    assert one.stdout == other.stdout
