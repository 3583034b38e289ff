"""README.md: its commands and examples run, its tables and links are true, it stays short."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents import commands, run

README = (ROOT / "README.md").read_text()
SAMPLE = ROOT / "examples/gpt_books_5m/gpt_books_5m.nemo"
# The reader's paths, and the files of the checkout that replace them here.
STAND_INS = {
    "/models/gpt3_5b.nemo": str(SAMPLE),
    "/data/lambada_test.jsonl": str(ROOT / "examples/passages.jsonl"),
}


@pytest.mark.parametrize("command", commands(README, "make "))
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", [c for c in commands(README, "python main.py") if "=" in c])
def test_pipeline_commands_compose(command: str, tmp_path: Path) -> None:
    for path, stand_in in STAND_INS.items():
        command = command.replace(path, stand_in)
    words = [word for word in shlex.split(command)[1:] if not word.startswith("base_results_dir=")]
    if "action=" in command:
        result = run([*words, "--cfg", "job"])
    else:
        result = run([*words, "dry_run=true", f"base_results_dir={tmp_path}"])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", commands(README, "python -m "))
def test_tools_explain_the_options_that_are_shown(command: str) -> None:
    words = shlex.split(command)
    module, options = words[2], [word for word in words if word.startswith("--")]
    subcommand = [word for word in words[3:4] if re.fullmatch(r"[a-z]+", word)]
    result = run(["-m", module, *subcommand, "--help"])
    assert result.returncode == 0, result.stderr
    assert [option for option in options if option not in result.stdout] == []


def test_python_examples_run(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    known = f"checkpoint, output_dir = Path({str(SAMPLE)!r}), Path({str(tmp_path)!r})"
    result = run(["-c", f"from pathlib import Path\n{known}\n{example}"])
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\(\((\d+, ){7}\d+\),\)", result.stdout.strip())


@pytest.mark.parametrize(("page", "option"), [("conversion", ()), ("leaving", ("--leaving",))])
def test_the_support_tables_are_those_of_the_families(page: str, option: tuple[str, ...]) -> None:
    document = (ROOT / f"docs/{page}.md").read_text()
    words = ["export_scripts.list_families", *option, "--markdown"]
    printed = run(["-m", *words]).stdout.strip()
    table = re.search(r"<!-- python -m (.*?) -->\n(.*?)\n<!-- end -->", document, re.DOTALL)
    assert table is not None
    assert table[1] == " ".join(words)
    assert table[2] == printed


def test_the_refusal_shown_is_the_one_printed(tmp_path: Path) -> None:
    shown = re.search(r"```\n\$ python (main\.py .*?)\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    result = run([*shlex.split(shown[1]), f"base_results_dir={tmp_path}"])
    assert result.returncode == 2
    assert " ".join(shown[2].split()) in " ".join(result.stderr.split())


@pytest.mark.parametrize("document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    assert [
        link
        for link in links
        if not link.startswith("http") and not (document.parent / link).exists()
    ] == []


def test_files_that_are_named_exist() -> None:
    documents = [README, (ROOT / "CONTRIBUTING.md").read_text()]
    named = {path for text in documents for path in re.findall(r"`([\w./]+/[\w.]+\.\w+)`", text)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_index_of_the_documents_is_whole() -> None:
    linked = set(re.findall(r"\]\(([\w.]+)\)", (ROOT / "docs/README.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:inference|stages|export_scripts|launcher_scripts)/[\w/.]+)`", text)
    assert named
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_every_folder_at_the_top_is_explained() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = {line.split("/")[0] for line in listed.stdout.splitlines() if "/" in line}
    plain = {name for name in folders if not name.startswith(".")}
    assert [name for name in sorted(plain) if f"\n{name}/" not in README] == []


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 150
