"""The pins hold on any machine, and every place names the same Pythons."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.clean_clones import MINORS
from tests.conftest import ROOT

FILES = sorted(ROOT.glob("requirements/*.txt"))
PINS = ("constraints.txt", "developer.txt")
HASHED = (*PINS, "publish.txt", "triton.txt")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pins_name_versions_that_any_index_has(path):
    lines = path.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", " "))]
    assert pins
    for pin in pins:
        # A plain version: no local label (+cpu), URL, path or option.
        assert re.fullmatch(r"[a-z0-9_.-]+==[0-9][0-9a-z.]*( ; [^@/]*)?( \\)?", pin), pin


def test_every_pin_has_hashes_but_that_of_torch():
    text = "".join((ROOT / "requirements" / name).read_text() for name in HASHED)
    for pin in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in pin, pin
    assert not re.search(r"^(torch|triton|nvidia-c\S*)==", text, re.MULTILINE)


def test_what_the_tritonserver_of_2024_needs_old_binds_its_own_environment_alone():
    def pins(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / name).read_text()
        return dict(re.findall(r"^(\S+)==(\d+)", text, re.MULTILINE))

    ours, tritons = pins("constraints.txt"), pins("triton.txt")
    assert (ours["numpy"], tritons["numpy"]) == ("2", "1")
    assert "nvidia-pytriton" in tritons
    assert "nvidia-pytriton" not in ours | pins("developer.txt")


def test_no_package_is_pinned_twice():
    named = [
        set(re.findall(r"^(\S+)==", (ROOT / "requirements" / each).read_text(), re.MULTILINE))
        for each in PINS
    ]
    assert named[0] & named[1] == set()


def test_nothing_installs_the_package_of_others_with_this_projects_name():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    texts = {".py", ".md", ".toml", ".yaml", ".sh", ""}
    paths = [ROOT / each for each in listed.stdout.splitlines()]
    for path in {each for each in paths if each.suffix in texts and each.is_file()}:
        if path != Path(__file__):
            assert not re.search(
                r"install\W+slipway\b(?!-serving)|slipway\[", path.read_text(errors="replace")
            ), path


def test_versions_in_the_docs_are_those_of_the_pins():
    pins = dict(re.findall(r"^(\S+)==(\S+)", "\n".join(f.read_text() for f in FILES), re.MULTILINE))
    text = (ROOT / "docs/docker.md").read_text()
    for name in ("nvidia-pytriton", "submitit", "torch", "transformers"):
        assert f"{name} {pins[name]} |" in text, name


def test_one_range_of_pythons_is_named_everywhere():
    first, last = MINORS[0], MINORS[-1]
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">=3.{first},<3.{last + 1}"' in project
    assert f"Python 3.{first} to 3.{last}" in (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {first}) <= sys.version_info < (3, {last + 1})" in makefile
    assert f"slipway needs 3.{first} to 3.{last}" in makefile
    assert f"--python '>=3.{first},<3.{last + 1}'" in makefile
    assert f"for python in {' '.join(f'3.{minor}' for minor in MINORS)};" in makefile


def test_make_alone_explains_every_target():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True).stdout
    assert set(targets) == {"help", *re.findall(r"make ([a-z]+)", shown)}
