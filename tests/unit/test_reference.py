"""Tests run with the reference material of this repository alone, or say what they lack."""

import ast
import re

from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "reference" / "golden"


def test_cases_that_are_not_kept_here_are_asked_for_as_material():
    families = "|".join(folder.name for folder in GOLDEN.iterdir())
    case = re.compile(f"({families})/(?!export_)[a-z0-9_]+")
    missing = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        names = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and case.fullmatch(node.value)
        }
        if "material(" not in text:
            missing += [f"{path.name}: {name}" for name in names if not (GOLDEN / name).exists()]
    assert not missing
