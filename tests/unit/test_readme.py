"""README.md: its commands and examples run, its tables are true."""

import re
import shlex

import pytest

from launcher_scripts.main import main
from tests.conftest import ROOT
from tests.documents import commands, run

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", commands(README, "make "))
def test_make_targets_exist(command):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_python_examples_run(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    result = run(["-c", example.replace("results/python", str(tmp_path))])
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\(\((\d+, ){7}\d+\),\)", result.stdout.strip())


@pytest.mark.parametrize(("page", "option"), [("conversion", ()), ("leaving", ("--leaving",))])
def test_the_support_tables_are_those_of_the_families(page, option):
    document = (ROOT / f"docs/{page}.md").read_text()
    words = ["export_scripts.list_families", *option, "--markdown"]
    printed = run(["-m", *words]).stdout.strip()
    table = re.search(r"<!-- python -m (.*?) -->\n(.*?)\n<!-- end -->", document, re.DOTALL)
    assert table is not None
    assert table[1] == " ".join(words)
    assert table[2] == printed


def test_the_refusal_shown_is_the_one_printed(tmp_path, capsys):
    shown = re.search(r"```\n\$ python main\.py (.*?)\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert main([*shlex.split(shown[1]), f"base_results_dir={tmp_path}"]) == 2
    assert " ".join(shown[2].split()) in " ".join(capsys.readouterr().err.split())
