"""Commands of the documents other than main.py: run on small models, or read by the real parsers.

No server, GPU, docker or Slurm is here for each of them: their options and values are read by the
parser of the program that is named, which then stops.
"""

import argparse
import importlib
import re
import runpy
import shlex
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.tiny_megatron_core import core_state, write_core
from tests.unit.export_scripts.conversion.test_lora import all_factors, write_nemo_adapter

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docker/README.md"]
# docker is on few machines that run the tests; these are options of its command-line reference.
DOCKER_RUN = {
    "--rm",
    "--init",
    "--gpus",
    "--shm-size",
    "--ulimit",
    "--user",
    "--publish",
    "--volume",
    "--env",
}
DOCKER_BUILD = {"--file", "--tag", "--build-arg"}
DOCKER_SWITCHES = {"--rm", "--init"}


class ParsedError(Exception):
    """A command line that its program has taken."""


def code(path: Path) -> list[str]:
    """Return the lines of a document's blocks and its code spans, continuation lines joined."""
    text = path.read_text()
    blocks = re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    # An indented line may be one of a list.
    return [
        *(line for line in lines if "`" not in line),
        *(" ".join(span.split()) for span in spans),
    ]


def modules() -> list[str]:
    """Return each `python -m` of this project that the documents have, from the module on."""
    found = {
        match[1]
        for path in DOCUMENTS
        for line in code(path)
        if (match := re.search(r"python -m ((?:export_scripts|inference|benchmarks)\b.*)", line))
    }
    return sorted(found)


def docker(word: str) -> list[list[str]]:
    return [
        shlex.split(line, comments=True)
        for path in DOCUMENTS
        for line in code(path)
        if re.match(rf"docker {word} --\w+ .* (slipway|\.$)", line)
    ]


def read_by(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give words to a module's own command line, which must take them; nothing is started."""
    parse = argparse.ArgumentParser.parse_args

    def stops(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        parse(parser, *args, **options)
        raise ParsedError

    is_package = find_spec(module).submodule_search_locations is not None  # type: ignore[union-attr]
    name = f"{module}.__main__" if is_package else module
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stops)
    monkeypatch.setattr(sys, "argv", [module, *words])
    program = importlib.import_module(name)
    start = partial(runpy.run_path, str(program.__file__), run_name="__main__")
    if main := getattr(program, "main", None):
        start = partial(main, *[words] * bool(signature(main).parameters))
    with pytest.raises((ParsedError, SystemExit)) as caught:
        start()
    assert not getattr(caught.value, "code", 0)  # --help ends well


@pytest.mark.parametrize("line", modules())
def test_a_modules_own_parser_takes_the_line(line, monkeypatch):
    module, *words = shlex.split(line, comments=True)
    assert find_spec(module) is not None
    if words:  # a name alone is a mention
        read_by(module, words, monkeypatch)


def test_commands_about_conversion_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/gpt_books_5m/gpt_books_5m.nemo", "model.nemo")
    write_core(Path("base.nemo"), core_state())
    write_nemo_adapter(Path("math.nemo"), all_factors(), tp=1, pp=1)
    lines = [
        line for line in code(ROOT / "docs/conversion.md") if "python -m export_scripts." in line
    ]
    seen = set()
    for line in dict.fromkeys(lines):
        module, *words = shlex.split(line)[2:]
        for large, small in {"4096": "64", "28": "2", "16": "4", "PATH": "model.nemo"}.items():
            words = [small if word == large else word for word in words]
        words = [
            word.replace("out/1", "synthetic") if "synth" in module else word for word in words
        ]
        assert importlib.import_module(module).main(words) in (0, None)
        seen.add(module.removeprefix("export_scripts."))
    assert seen == {"convert", "inspect", "validate", "list_families", "synthesize"}


@pytest.mark.parametrize("words", docker("build"), ids=lambda words: words[-2])
def test_images_are_built_of_existing_files(words):
    options = dict(zip(words[2:-1:2], words[3:-1:2], strict=True))
    assert set(options) <= DOCKER_BUILD
    assert (ROOT / options["--file"]).is_file()
    assert words[-1] == "."


@pytest.mark.parametrize("words", docker("run"), ids=lambda words: words[-1])
def test_containers_run_images_that_are_built_and_commands_that_exist(words, monkeypatch):
    at = 2
    while words[at].startswith("-"):
        assert words[at] in DOCKER_RUN
        at += 1 if words[at] in DOCKER_SWITCHES else 2
    tags = {each[each.index("--tag") + 1] for each in docker("build")}
    assert words[at] in tags
    command = words[at + 1 :]
    if command[:1] == ["torchrun"]:
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(command[1:])
        assert given.module
        read_by(given.training_script, given.training_script_args, monkeypatch)
        sizes = [int(given.training_script_args[given.training_script_args.index("--tp") + 1])]
        assert sizes == [int(given.nproc_per_node)]
    else:  # test_document_commands.py plans those of main.py
        assert command[:2] in ([], ["python", "main.py"])


def test_documents_have_such_commands():
    assert len(modules()) > 30
    assert len(docker("run")) == 4
    assert len(docker("build")) == 2
