"""The environment a tritonserver starts in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from inference.private_folder import plain_temporary_folder
from inference.server.installation import find_triton, old_server_options


@pytest.fixture(autouse=True)
def no_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_SERVER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_packages_on_pythonpath_are_found_by_the_python_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder / "planted").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'first'}::{tmp_path / 'second'}")
    backends = find_triton().backend_directory
    assert backends is not None
    assert (backends / "python/planted").resolve() == tmp_path / "first/planted"
    assert (backends / "python/inference/server").is_dir()


def test_models_for_nvidias_backend_find_ours_unless_theirs_is_asked_for() -> None:
    ours = find_triton().backend_directory
    theirs = find_triton(own_backends=False).backend_directory
    assert ours is not None
    assert theirs is not None
    assert (ours / "fastertransformer" / "model.py").is_file()
    assert not (theirs / "fastertransformer").exists()


def test_backends_of_an_installed_server_stay_next_to_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "opt" / "bin" / "tritonserver"
    for name in ("python", "onnxruntime", "fastertransformer"):
        (tmp_path / "opt" / "backends" / name).mkdir(parents=True)
    program.parent.mkdir()
    program.touch()
    monkeypatch.setenv("TRITON_SERVER", str(program))
    found = find_triton().backend_directory
    assert found is not None
    assert (found / "python").resolve() == tmp_path / "opt" / "backends" / "python"
    assert (found / "fastertransformer" / "model.py").is_file()
    assert {path.name for path in found.iterdir()} == {"python", "onnxruntime", "fastertransformer"}
    assert find_triton(own_backends=False).backend_directory is None


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user without a home."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"slipway-{os.getuid()}"


def test_without_a_home_backends_are_copied_to_a_folder_of_this_user(fallback: Path) -> None:
    backends = find_triton().backend_directory
    assert backends is not None
    assert backends.parent == fallback
    assert fallback.stat().st_mode & 0o077 == 0


def test_a_folder_that_others_can_write_is_not_served_from(fallback: Path) -> None:
    fallback.mkdir()
    fallback.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others; remove it"):
        find_triton()
    fallback.rmdir()
    fallback.symlink_to(fallback.parent)
    with pytest.raises(PermissionError, match="belongs to another user"):
        find_triton()


def test_temporary_folders_with_a_space_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/with a space")
    assert plain_temporary_folder() == Path("/tmp")


def plant_numpy(folder: Path, version: str) -> None:
    package = folder / f"numpy-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n")


@pytest.mark.parametrize("has_older_on_pythonpath", [False, True])
def test_numpy_that_the_server_would_import_in_vain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_older_on_pythonpath: bool
) -> None:
    own, given = tmp_path / "own", tmp_path / "given"
    plant_numpy(own, "2.5.5")
    monkeypatch.syspath_prepend(own)
    if has_older_on_pythonpath:  # first in this process, second in the server
        plant_numpy(given, "1.26.4")
        monkeypatch.syspath_prepend(given)
        monkeypatch.setenv("PYTHONPATH", str(given))
    message = rf"numpy 2\.5\.5, which it would import from {own}; install numpy 1\.26 there"
    with pytest.raises(FileNotFoundError, match=message):
        find_triton()


def test_newer_numpy_on_pythonpath_comes_after_the_interpreters_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_numpy(tmp_path / "given", "2.5.5")
    monkeypatch.syspath_prepend(tmp_path / "given")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    assert find_triton().program.is_file()


def test_the_program_names_its_options() -> None:
    known = find_triton().known_options()
    assert {"model-repository", "http-address", "grpc-address", "metrics-address"} <= known


def test_addresses_go_to_a_program_that_takes_them() -> None:
    ports = {"http": 8000, "grpc": 8001, "metrics": 8002}
    every = old_server_options("/repo", ports, host="127.0.0.1")
    assert [each for each in every if "address" in each] == [
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
    ]
    old = old_server_options("/repo", ports, host="127.0.0.1", known={"http-address"})
    assert [each for each in old if "address" in each] == ["--http-address=127.0.0.1"]
    assert "address" not in " ".join(old_server_options("/repo", ports, host="0.0.0.0"))
