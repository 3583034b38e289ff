"""Find a tritonserver on this machine and the environment it has to run in."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from inference.plain_path import is_plain

SERVER_VARIABLE = "TRITON_SERVER"


@dataclass(frozen=True)
class TritonInstallation:
    """A server program, its backends if not in the usual place, and folders of shared libraries."""

    program: Path
    backend_directory: Path | None = None
    cache_directory: Path | None = None
    library_paths: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the variables that the server needs changed from those of this process."""
        folders = [str(path) for path in self.library_paths]
        if current := os.environ.get("LD_LIBRARY_PATH"):
            folders.append(current)
        # The Python backend embeds an interpreter and takes its packages from the first python3.
        interpreter = str(Path(sys.executable).parent)
        variables = {"PATH": os.pathsep.join([interpreter, os.environ.get("PATH", os.defpath)])}
        # Weights in huge pages: torch reads this once, before its first tensor.
        variables["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
        if folders:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
        return variables

    def arguments(self) -> list[str]:
        """Return the options that tell the server where its parts are."""
        arguments = []
        if self.backend_directory:
            arguments.append(f"--backend-directory={self.backend_directory}")
        if self.cache_directory:
            arguments.append(f"--cache-directory={self.cache_directory}")
        return arguments


def find_triton() -> TritonInstallation:
    """Return the server that TRITON_SERVER names, else the one on PATH, else nvidia-pytriton's.

    Raises:
        FileNotFoundError: there is none, or TRITON_SERVER names no file.
    """
    if named := os.environ.get(SERVER_VARIABLE):
        program = Path(named)
        if not program.is_file():
            raise FileNotFoundError(f"{SERVER_VARIABLE}={named} is not a file.")
        return TritonInstallation(program)
    if on_path := shutil.which("tritonserver"):
        return TritonInstallation(Path(on_path))
    if package := _wheel_folder():
        return _from_wheel(package)
    raise FileNotFoundError(
        "no tritonserver found; install the extra 'serve' (pip install 'slipway[serve]'), put "
        f"tritonserver on PATH, or name it in {SERVER_VARIABLE}."
    )


def _wheel_folder() -> Path | None:
    """Return `pytriton/tritonserver` of the installed wheel, without importing it."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "tritonserver"
    return folder if (folder / "bin" / "tritonserver").is_file() else None


def _from_wheel(folder: Path) -> TritonInstallation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise FileNotFoundError(
            f"nvidia-pytriton has no Python backend for Python {version} (it has: {found}); "
            "use one of those, or name another server in TRITON_SERVER."
        )
    numpy = metadata.version("numpy")
    if int(numpy.partition(".")[0]) > 1:
        raise FileNotFoundError(
            f"nvidia-pytriton's tritonserver gives empty answers with numpy {numpy}; install numpy "
            "1.26, or name another server in TRITON_SERVER."
        )
    library_folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    libraries = (folder.parents[1] / "nvidia_pytriton.libs", library_folder)
    return TritonInstallation(
        program=folder / "bin" / "tritonserver",
        backend_directory=_assembled_backends(folder / "backends", stub),
        cache_directory=folder / "caches",
        library_paths=libraries,
    )


def _assembled_backends(backends: Path, stub: Path) -> Path:
    """Return a copy of the wheel's backends with the stub of this interpreter in place.

    The stub's interpreter ignores PYTHONPATH but searches its own folder, so links there let the
    model files import what this process can: this project, from a checkout that is not installed,
    and packages in folders of PYTHONPATH. The copy is made once per wheel, set of backends,
    interpreter and set of links; several processes may make it at the same time.
    """
    links = _importable()
    names = sorted(path.name for path in backends.iterdir())
    identity = f"{stub} {stub.stat().st_mtime_ns} {names} {sorted(links.items())}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = _cache_root() / f"backends-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial.chmod(0o755)
        shutil.copytree(
            backends,
            partial,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        copied = Path(shutil.copy2(stub, partial / "python"))
        copied.chmod(copied.stat().st_mode | 0o111)
        for name, path in links.items():
            if not (link := partial / "python" / name).exists():
                link.symlink_to(path)
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _importable() -> dict[str, Path]:
    """Return what the Python backend would not find by itself, by name: the first of each wins."""
    root = Path(__file__).resolve().parents[2]
    found = {package: root / package for package in ("inference", "export_scripts")}
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        folder = Path(entry).resolve()
        if folder.is_dir() and folder != root:
            for path in sorted(folder.iterdir()):
                found.setdefault(path.name, path)
    return found


def _cache_root() -> Path:
    """Return a folder of this user that holds copies between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    candidates = [Path(base)] if base else []
    if home := os.environ.get("HOME"):
        candidates.append(Path(home) / ".cache")
    for candidate in candidates:
        folder = candidate / "slipway"
        if not is_plain(folder):
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue  # a read-only home; the next place may do
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"slipway-{os.getuid()}"
