"""The tritonserver installed on this machine, its environment and its options."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.triton.model_config import parse_config
from export_scripts.triton.signature import ENCODERS
from inference.server.kinds import SERVER_VARIABLE, TRITONSERVER
from inference.system.private_folder import is_plain, plain_temporary_folder
from inference.system.process_memory import memory_variables

# Python-based backends of this project, each a folder that a backend directory can hold.
_ROOT = Path(__file__).resolve().parents[2]
OWN_BACKENDS = _ROOT / "export_scripts" / "triton" / "backends"
# The environment that `make triton` makes.
_ENVIRONMENT = _ROOT / ".triton"
# Printed by the interpreter of an environment: its version, packages, shared library and numpy.
_FACTS = """
import json, sysconfig
from importlib import metadata
try:
    numpy = metadata.version("numpy")
except metadata.PackageNotFoundError:
    numpy = None
print(json.dumps({
    "version": sysconfig.get_python_version(),
    "packages": sysconfig.get_path("purelib"),
    "libraries": sysconfig.get_config_var("LIBDIR"),
    "numpy": numpy,
}))
"""
_HELP_TIMEOUT_S = 120.0  # a container's first read of the program can be slow
# Set by launchers of MPI processes.
_MPI_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
_MPIRUN = ("mpirun", "-n", "1", "--allow-run-as-root")
_REMOTE_SHELLS = ("ssh", "rsh")  # Open MPI's mpirun ends at once where there is neither
# The server itself waits this long for running requests: it is ended once it has none.
_EXIT_TIMEOUT_S = 60


@dataclass(frozen=True)
class TritonInstallation:
    """A server program, and what it needs from elsewhere.

    Attributes:
        backend_directory: None for the one that was compiled into the program; so is
            `cache_directory`.
        library_paths: folders of shared libraries.
        interpreter: the Python whose packages the Python backend imports.
    """

    program: Path
    backend_directory: Path | None = None
    cache_directory: Path | None = None
    library_paths: tuple[Path, ...] = ()
    interpreter: Path = Path(sys.executable)

    def environment(self) -> dict[str, str]:
        """Return the variables of the server that differ from those of this process."""
        # The Python backend embeds an interpreter and takes its packages from the first python3.
        folders = [str(self.interpreter.parent), os.environ.get("PATH", os.defpath)]
        variables = {"PATH": os.pathsep.join(folders)}
        searched = [*map(str, self.library_paths), os.environ.get("LD_LIBRARY_PATH", "")]
        if libraries := os.pathsep.join(filter(None, searched)):
            variables["LD_LIBRARY_PATH"] = libraries
        return variables | memory_variables()

    def arguments(self) -> list[str]:
        """Return the options with the paths of the server's parts."""
        given = {"backend": self.backend_directory, "cache": self.cache_directory}
        return [f"--{name}-directory={path}" for name, path in given.items() if path]


def find_triton(*, own_backends: bool = True) -> TritonInstallation:
    """Return the server that TRITON_SERVER names, else the one on PATH, else nvidia-pytriton's.

    TRITON_SERVER names a program, or the folder of a Python environment that has nvidia-pytriton.
    Where it is not set, such an environment is looked for in this checkout (`make triton`), then
    this process's own is.

    With `own_backends` it serves models for NVIDIA's FasterTransformer backend with this project's
    engine; without, with whatever backend the server itself has.

    Raises:
        FileNotFoundError: there is none, or TRITON_SERVER names none.
        PermissionError: others can write where its backends are copied to.
    """
    own: dict[str, Path] = {}
    if own_backends:
        own = {each.name: each for each in OWN_BACKENDS.iterdir() if (each / "model.py").is_file()}
    named = os.environ.get(SERVER_VARIABLE)
    program = named or shutil.which(TRITONSERVER)
    if program and Path(program).is_file():
        return _installed(Path(program), own)
    for environment in (named,) if named else (_ENVIRONMENT, sys.prefix):
        if (interpreter := Path(environment, "bin", "python")).is_file():
            facts = _facts_of(interpreter)
            if (folder := Path(facts["packages"], "pytriton", "tritonserver")).is_dir():
                return _from_wheel(interpreter, facts, folder, own)
    if named:
        raise FileNotFoundError(
            f"{SERVER_VARIABLE}={named} is neither a program nor a Python environment that has "
            "nvidia-pytriton."
        )
    raise FileNotFoundError(
        "no tritonserver found; put one on PATH, name it in "
        f"{SERVER_VARIABLE}, or install the one of NVIDIA's PyTriton: `make triton` in a checkout, "
        "elsewhere pip install 'slipway-serving[triton]' in an environment of its own with Python "
        f"3.11 or 3.12, whose folder {SERVER_VARIABLE} then names."
    )


def _facts_of(interpreter: Path) -> dict[str, Any]:
    """Return what an interpreter says of itself, without the packages of PYTHONPATH."""
    done = subprocess.run(
        [interpreter, "-E", "-c", _FACTS],
        capture_output=True,
        text=True,
        timeout=_HELP_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise FileNotFoundError(f"{interpreter} does not run: {done.stderr.strip()[-500:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def _installed(program: Path, own: dict[str, Path]) -> TritonInstallation:
    """Return a server of an image, whose backends are in the folder next to its own."""
    backends = program.resolve().parent.parent / "backends"
    if not own or not backends.is_dir():
        return TritonInstallation(program)
    links = {path.name: path for path in backends.iterdir()} | own
    identity = f"{backends} {sorted(links.items())}"
    folder = _cached_folder(identity, lambda folder: _link(folder, links))
    return TritonInstallation(program, backend_directory=folder)


def _from_wheel(
    interpreter: Path, facts: Mapping[str, Any], folder: Path, own: dict[str, Path]
) -> TritonInstallation:
    """Return the server of nvidia-pytriton in an interpreter's packages."""
    version = facts["version"]
    stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise FileNotFoundError(
            f"nvidia-pytriton has no Python backend for Python {version} of {interpreter} (it has: "
            f"{found}); install it in an environment with one of those, and name that environment "
            f"in {SERVER_VARIABLE}."
        )
    numpy = facts["numpy"]
    if numpy is None or not numpy.startswith("1."):
        raise FileNotFoundError(
            f"nvidia-pytriton's tritonserver gives empty answers with numpy {numpy} of "
            f"{interpreter}; install numpy 1.26 there, or name another server or environment in "
            f"{SERVER_VARIABLE}."
        )
    return TritonInstallation(
        program=folder / "bin" / "tritonserver",
        backend_directory=_assembled_backends(folder / "backends", stub, own),
        cache_directory=folder / "caches",
        # Triton's stub is linked to the interpreter's shared library.
        library_paths=(folder.parents[1] / "nvidia_pytriton.libs", Path(facts["libraries"])),
        interpreter=interpreter,
    )


def _assembled_backends(backends: Path, stub: Path, own: Mapping[str, Path]) -> Path:
    """Return a copy of the wheel's backends with links to `own`, this project and a stub.

    The stub's interpreter ignores PYTHONPATH but searches its own folder: links there let the model
    files import this project, which need not be installed in the server's environment. The copy is
    made once for each wheel, set of backends and interpreter; several processes may make it at the
    same time.
    """
    links = {package: _ROOT / package for package in ("inference", "export_scripts")}
    names = sorted(path.name for path in backends.iterdir())
    identity = (
        f"{stub} {stub.stat().st_mtime_ns} {names} {sorted(links.items())} {sorted(own.items())}"
    )

    def fill(folder: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(backends, folder, dirs_exist_ok=True, ignore=ignored)
        copied = Path(shutil.copy2(stub, folder / "python"))
        copied.chmod(copied.stat().st_mode | 0o111)
        _link(folder / "python", links)
        _link(folder, own)

    return _cached_folder(identity, fill)


def _link(folder: Path, targets: Mapping[str, Path]) -> None:
    for name, path in targets.items():
        if not (link := folder / name).exists():
            link.symlink_to(path)


def _cached_folder(identity: str, fill: Callable[[Path], None]) -> Path:
    """Return the cached folder of backends for an identity, which `fill` fills at first use."""
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = _cache_root() / f"backends-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial.chmod(0o755)
        fill(partial)
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process has made it
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _cache_root() -> Path:
    """Return a folder of this user that holds copies between runs."""
    home = os.environ.get("HOME")
    for base in filter(None, (os.environ.get("XDG_CACHE_HOME"), home and f"{home}/.cache")):
        folder = Path(base) / "slipway"
        with contextlib.suppress(OSError):  # a read-only home; try the next folder
            if is_plain(folder):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK):
                    return folder
    folder = plain_temporary_folder() / f"slipway-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Its programs run in the server, and anybody could have made it.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} belongs to another user or can be written by others; remove it, or set "
            "XDG_CACHE_HOME to a folder of your own"
        )
    return folder


def server_options(repository: str, sockets: Path) -> list[str]:
    """Return the options of a server that listens on Unix sockets in a folder alone."""
    return [
        f"--model-repository={repository}",
        *_listening(sockets),
        f"--metrics-address=unix:{sockets / 'metrics'}",
        # Lets a model whose workers died take itself out of service.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A failed model stays listed with its reason; the server goes on.
        "--exit-on-error=false",
        "--strict-readiness=true",
        *_completion(repository),
    ]


def nvidias_options(repository: str, sockets: Path) -> list[str]:
    """Return options that releases of tritonserver for NVIDIA's C++ backend know.

    Models are loaded once: the backend cannot load one again in the same process. Releases before
    23.06 cannot bind the metrics to an address.
    """
    return [f"--model-repository={repository}", *_listening(sockets), "--allow-metrics=false"]


def _listening(sockets: Path) -> list[str]:
    # To the name of a Unix socket, too, the server adds the port.
    return [
        "--allow-http=false",
        f"--grpc-address=unix:{sockets / 'grpc'}",
        "--grpc-port=8001",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
    ]


def _completion(repository: str) -> list[str]:
    """Return the option by which backends fill in nothing that a config.pbtxt leaves out.

    For an encoder made for NVIDIA's backend they have to: its configuration does not give the types
    of its tensors, or not the right ones. Each model is then loaded twice.
    """
    for path in Path(repository).glob("*/config.pbtxt"):
        with contextlib.suppress(OSError, ValueError):  # the server reports what is wrong with it
            config = parse_config(path.read_text(encoding="utf-8"))
            model_type = config.parameters["model_type"].string_value
            if config.backend == "fastertransformer" and model_type in ENCODERS:
                return []
    return ["--disable-auto-complete-config"]


def mpi_start(*, is_step: bool = False) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command prefix of a server with NVIDIA's backend, and its variables.

    In an MPI step it is one of the step's processes, elsewhere mpirun starts it. Without mpirun,
    too, the backend's process is the only one of its MPI world.
    """
    # Parallel launches are faster and can hang.
    variables = {"NCCL_LAUNCH_MODE": os.environ.get("NCCL_LAUNCH_MODE", "GROUP")}
    if is_step or any(name in os.environ for name in _MPI_VARIABLES):
        return (), variables
    if shutil.which(_MPIRUN[0]) and any(map(shutil.which, _REMOTE_SHELLS)):
        return _MPIRUN, variables
    # By itself Open MPI would start a daemon, for which it wants a remote shell.
    return (), {**variables, "OMPI_MCA_ess_singleton_isolated": "1"}
