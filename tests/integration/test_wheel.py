"""The wheel alone is the project: installed, it works from any folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.conftest import ROOT

SAMPLE = ["export=gpt3/sample", "evaluate.tasks=[lambada]", "deploy.http_port=0"]
SMALL = ["evaluate.limit=4", "evaluate.latency.enabled=false"]
SMALL += ["export.model.tensor_model_parallel_size=1"]
PORTS = ["deploy.grpc_port=0", "deploy.metrics_port=0"]
_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
_WHEEL = [*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"]
# Optimised as a release is, the products take ten seconds to compile.
_QUICKLY = {"CC": """sh -c 'exec cc "$@" -O1' cc"""}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel; what it requires is this one's."""
    folder = tmp_path_factory.mktemp("wheel")
    # The compiled library lies in the source, which is that of other tests.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.so", "docs", "results", "tests")
    source = shutil.copytree(ROOT, folder / "source", ignore=left_out)
    subprocess.run([*_WHEEL, folder, source], env=os.environ | _QUICKLY, check=True)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    python = environment / "bin" / "python"
    subprocess.run(
        [*_PIP, f"--python={python}", "install", "--no-deps", "--no-compile", wheel], check=True
    )
    # Not its path files: one of them leads to this checkout.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment / "bin"


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command in a folder, without a home; return its output."""
    kept: Mapping[str, str] = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder of mine"
    folder.mkdir()
    return folder


def test_the_wheel_is_one_folder_and_a_path_file(installed):
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    names = {each.name for each in packages.iterdir() if not each.name.endswith(".dist-info")}
    assert names == {"slipway_serving", "slipway_serving.pth", "others.pth"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_wheel_holds_the_products_of_a_cpu(installed, elsewhere):
    where = "import inference.parallel.native_cpu as n; print(n.LIBRARY, n.has_library())"
    library, found = run([installed / "python", "-c", where], elsewhere).split()
    assert Path(library).is_relative_to(installed.parent)
    assert found == "True"


def test_without_a_compiler_the_wheel_is_of_python_alone(tmp_path):
    without = os.environ | {"CC": "/nonexistent/cc"}
    subprocess.run([*_WHEEL, tmp_path, ROOT], env=without, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]
    asked = without | {"SLIPWAY_BUILD_KERNEL": "yes"}
    assert subprocess.run([*_WHEEL, tmp_path, ROOT], env=asked, capture_output=True).returncode


def test_modules_have_the_same_names_as_in_a_checkout(installed, elsewhere):
    where = "import inference.client, export_scripts; print(export_scripts.__file__)"
    shown = run([installed / "python", "-c", where], elsewhere)
    assert Path(shown.strip()).is_relative_to(installed.parent)
    for module in ("export_scripts.convert", "inference.client", "inference.certify"):
        assert "usage:" in run([installed / "python", "-m", module, "--help"], elsewhere)
    assert "usage: slipway-serving" in run([installed / "slipway-serving", "--help"], elsewhere)


@pytest.mark.triton
def test_the_installed_command_works_in_the_folder_where_it_is_given(installed, elsewhere):
    shown = run([installed / "slipway-serving", *SAMPLE, *SMALL, *PORTS], elsewhere)
    assert "lambada" in shown
    assert f"results: {elsewhere}/results/gpt_books_5m/" in shown
    (results,) = (elsewhere / "results" / "gpt_books_5m").iterdir()
    assert (results / "results" / "evaluate" / "report.json").is_file()
    for name in ("model_repo/fastertransformer/config.pbtxt", "launcher_cmd.log"):
        assert str(ROOT) not in (results / name).read_text()
