"""What docs/openai.md promises: its command is taken, its fields are those of the requests."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from inference.openai import parameters
from inference.openai.errors import ApiError
from inference.openai.options import DEFAULT_PORT
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "openai.md").read_text()


def test_the_command_is_taken_and_starts_the_endpoint(tmp_path: Path) -> None:
    (line,) = re.findall(r"```bash\n(.*?)\n```", TEXT, re.DOTALL)
    words = [sys.executable, *shlex.split(line)[1:], f"base_results_dir={tmp_path}", "dry_run=true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f":{DEFAULT_PORT}/v1" in TEXT


def test_the_fields_are_those_that_requests_may_have() -> None:
    table = TEXT.partition("## Fields")[2].partition("What is not listed")[0]
    named = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if line.count("|") > 1 else "")
    }
    chat = {"messages", "top_logprobs"}
    for name in named:
        parse = parameters.parse_chat if name in chat else parameters.parse_completion
        with pytest.raises(ApiError, match=rf"\b{name}: (?!is not a field)"):
            parse({name: object()})
