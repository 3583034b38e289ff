"""The environment a tritonserver starts in."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from inference.server.installation import find_triton, nvidias_options, server_options
from inference.system.private_folder import plain_temporary_folder


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_SERVER", raising=False)


def backends_of(folder: Path, *, own_backends: bool = True) -> Path | None:
    """Return the folder of backends that a server gets."""
    options = find_triton(own_backends=own_backends).arguments(folder)
    found = [each.partition("=")[2] for each in options if each.startswith("--backend-dir")]
    return Path(found[0]) if found else None


@pytest.mark.triton
def test_models_find_this_project_beside_the_python_backend(tmp_path):
    backends = backends_of(tmp_path)
    assert backends is not None
    assert (backends / "python/inference/server").is_dir()
    assert os.access(backends / "python/triton_python_backend_stub", os.X_OK)
    library = backends / "python/libtriton_python.so"
    assert library.is_file()
    assert not library.is_symlink()  # which the server refuses for Python-based backends


@pytest.mark.triton
def test_models_for_nvidias_backend_find_ours_unless_theirs_is_asked_for(tmp_path):
    ours = backends_of(tmp_path / "ours")
    theirs = backends_of(tmp_path / "theirs", own_backends=False)
    assert ours is not None
    assert theirs is not None
    assert (ours / "fastertransformer" / "model.py").is_file()
    assert not (theirs / "fastertransformer").exists()


def test_backends_of_an_installed_server_stay_next_to_ours(tmp_path, monkeypatch):
    program = tmp_path / "opt" / "bin" / "tritonserver"
    for name in ("python", "onnxruntime", "fastertransformer"):
        (tmp_path / "opt" / "backends" / name).mkdir(parents=True)
    program.parent.mkdir()
    program.touch()
    monkeypatch.setenv("TRITON_SERVER", str(program))
    found = backends_of(tmp_path)
    assert found is not None
    assert (found / "python").resolve() == tmp_path / "opt" / "backends" / "python"
    assert (found / "fastertransformer" / "model.py").is_file()
    assert {path.name for path in found.iterdir()} == {"python", "onnxruntime", "fastertransformer"}
    assert backends_of(tmp_path, own_backends=False) is None


def test_temporary_folders_with_a_space_are_passed_over(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/with a space")
    assert plain_temporary_folder() == Path("/tmp")


def environment(folder: Path, *, version: str = "3.11", numpy: str | None = "1.26.4") -> Path:
    """An environment with a wheel of a server, whose interpreter states these facts."""
    facts = {"version": version, "packages": f"{folder}/packages", "numpy": numpy}
    server = folder / "packages/pytriton/tritonserver"
    (server / "backends/python").mkdir(parents=True)
    stub = server / "python_backend_stubs/3.11/triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.touch()
    program = folder / "bin/python"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{json.dumps(facts | {'libraries': '/usr/lib'})}'\n")
    program.chmod(0o755)
    return folder


def test_an_environment_may_be_named(tmp_path, monkeypatch):
    folder = environment(tmp_path / "named")
    monkeypatch.setenv("TRITON_SERVER", str(folder))
    found = find_triton()
    assert found.program == folder / "packages/pytriton/tritonserver/bin/tritonserver"
    assert found.environment()["PATH"].startswith(f"{folder}/bin:")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"numpy": "2.5.5"}, r"empty answers with numpy 2\.5\.5 of"),
        ({"numpy": None}, "numpy None of"),
        ({"version": "3.13"}, r"no Python backend for Python 3\.13 of .*it has: 3\.11"),
    ],
)
def test_an_environment_that_cannot_serve_is_refused(tmp_path, monkeypatch, facts, message):
    folder = environment(tmp_path / "named", **facts)
    monkeypatch.setenv("TRITON_SERVER", str(folder))
    with pytest.raises(FileNotFoundError, match=message):
        find_triton()


@pytest.mark.parametrize("exists", [False, True])
def test_a_name_of_neither_program_nor_environment_is_refused(tmp_path, monkeypatch, exists):
    folder = tmp_path / "named"
    if exists:
        folder.mkdir()
    monkeypatch.setenv("TRITON_SERVER", str(folder))
    with pytest.raises(FileNotFoundError, match=f"{folder} is neither a program nor"):
        find_triton()


def test_a_server_listens_on_sockets_of_its_owner_alone(tmp_path):
    for options in (server_options("/repo", tmp_path), nvidias_options("/repo", tmp_path)):
        assert f"--grpc-address=unix:{tmp_path}/grpc" in options
        assert "--allow-http=false" in options
        addresses = [each for each in options if "-address=" in each]
        assert all(f"=unix:{tmp_path}/" in each for each in addresses)
    assert "--allow-metrics=false" in nvidias_options("/repo", tmp_path)
