"""The promises of docs/openai.md: its commands are taken, its fields are those of the requests."""

import re
import shlex
from importlib.util import find_spec

from inference.front.openai.requests import (
    SPELLINGS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
)
from inference.system.ports import DEFAULT_PORTS
from tests.conftest import ROOT
from tests.documents import commands, run

TEXT = (ROOT / "docs" / "openai.md").read_text()


def test_the_command_is_taken_and_starts_the_endpoint(tmp_path):
    line, *_ = commands(TEXT)
    done = run([*shlex.split(line)[1:], f"base_results_dir={tmp_path}", "dry_run=true"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f":{DEFAULT_PORTS['openai']}/v1" in TEXT


def test_the_harness_is_asked_for_by_its_extra(tmp_path):
    _, line = commands(TEXT)
    done = run([*shlex.split(line)[1:], "dry_run=true", f"base_results_dir={tmp_path}"])
    if find_spec("lm_eval") is None:
        problems = [line for line in done.stderr.splitlines() if line.startswith("  - ")]
        assert len(problems) == 2, done.stderr
        assert all("pip install 'lm_eval[api]'" in line for line in problems)
    else:
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_fields_are_those_that_requests_may_have():
    table = TEXT.partition("## Fields")[2].partition("Fields that are not listed")[0]
    named = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if line.count("|") > 1 else "")
    }
    kinds = (ChatRequest, CompletionRequest, EmbeddingRequest)
    names = {name for kind in kinds for name in kind.model_fields}
    assert named == names.union(*SPELLINGS.values())
