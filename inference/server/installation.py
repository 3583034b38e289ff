"""The tritonserver installed on this machine, its environment and its options."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export_scripts.triton.model_config import parse_config
from export_scripts.triton.signature import ENCODERS
from inference.server.kinds import SERVER_VARIABLE, TRITONSERVER
from inference.system.process_memory import memory_variables

# This project's Python-based backends, each a folder for Triton's backend directory.
_ROOT = Path(__file__).resolve().parents[2]
OWN_BACKENDS = _ROOT / "export_scripts" / "triton" / "backends"
# The environment that `make triton` creates.
_ENVIRONMENT = _ROOT / ".triton"
# Program for the interpreter of an environment: prints its version, folders and numpy's version.
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
# The server's own limit for running requests; this project ends it once it has none.
_EXIT_TIMEOUT_S = 60


@dataclass(frozen=True)
class TritonInstallation:
    """A server program, and the files that it needs.

    Attributes:
        backends: files to link into its backend directory, by path in it; empty for the directory
            that is compiled into the program.
        cache_directory: None for the one that is compiled into the program.
        library_paths: folders of shared libraries.
        interpreter: the Python whose packages the Python backend imports.
    """

    program: Path
    backends: Mapping[str, Path] = field(default_factory=dict)
    cache_directory: Path | None = None
    library_paths: tuple[Path, ...] = ()
    interpreter: Path = Path(sys.executable)

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set for the server."""
        # The Python backend embeds an interpreter and uses the packages of the first python3.
        folders = [str(self.interpreter.parent), os.environ.get("PATH", os.defpath)]
        variables = {"PATH": os.pathsep.join(folders)}
        searched = [*map(str, self.library_paths), os.environ.get("LD_LIBRARY_PATH", "")]
        if libraries := os.pathsep.join(filter(None, searched)):
            variables["LD_LIBRARY_PATH"] = libraries
        return variables | memory_variables()

    def arguments(self, folder: Path | None = None) -> list[str]:
        """Return the options for the server's backend and cache directories.

        Links to its backends are created in `folder`; without one the built-in directory is used.
        """
        found = []
        if folder is not None and self.backends:
            for name, path in self.backends.items():
                link = folder / "backends" / name
                link.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".so":  # the server does not load libraries through links
                    shutil.copyfile(path, link)
                else:
                    link.symlink_to(path)
            found.append(f"--backend-directory={folder / 'backends'}")
        if self.cache_directory is not None:
            found.append(f"--cache-directory={self.cache_directory}")
        return found


def find_triton(*, own_backends: bool = True) -> TritonInstallation:
    """Return the server in TRITON_SERVER, else the one on PATH, else nvidia-pytriton's.

    TRITON_SERVER is a program, or the folder of a Python environment with nvidia-pytriton. Without
    it, the environment of this checkout (`make triton`) is tried, then this process's own.

    With `own_backends` this project's engine serves models for NVIDIA's FasterTransformer backend;
    without, the server's own backend does.

    Raises FileNotFoundError if there is no server, or none in TRITON_SERVER.
    """
    own = {}
    if own_backends:
        own = {path.name: path for path in OWN_BACKENDS.iterdir() if (path / "model.py").is_file()}
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
        f"{SERVER_VARIABLE}, or install the one of NVIDIA's PyTriton: `make triton` in a checkout; "
        "elsewhere pip install 'slipway-serving[triton]' in a separate environment with Python "
        f"3.11 or 3.12, and set {SERVER_VARIABLE} to its folder."
    )


def _facts_of(interpreter: Path) -> dict[str, Any]:
    """Return version, folders and numpy version of an interpreter, ignoring PYTHONPATH."""
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
    """Return the server of an image, whose backend directory is next to its program's folder."""
    backends = program.resolve().parent.parent / "backends"
    if not own or not backends.is_dir():
        return TritonInstallation(program)
    return TritonInstallation(program, {path.name: path for path in backends.iterdir()} | own)


def _from_wheel(
    interpreter: Path, facts: Mapping[str, Any], folder: Path, own: dict[str, Path]
) -> TritonInstallation:
    """Return nvidia-pytriton's server in an interpreter's packages. Raises FileNotFoundError."""
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
    python = {path.name: path for path in (folder / "backends" / "python").iterdir()}
    # The stub ignores PYTHONPATH but searches its own folder. Models import this project, which may
    # not be installed in that environment.
    python |= {name: _ROOT / name for name in ("inference", "export_scripts", "foundations")} | {
        stub.name: stub
    }
    return TritonInstallation(
        program=folder / "bin" / "tritonserver",
        backends={f"python/{name}": path for name, path in python.items()} | own,
        cache_directory=folder / "caches",
        # Triton's stub is linked to the interpreter's shared library.
        library_paths=(folder.parents[1] / "nvidia_pytriton.libs", Path(facts["libraries"])),
        interpreter=interpreter,
    )


def server_options(repository: str, sockets: Path) -> list[str]:
    """Return the options of a server that only listens on Unix sockets in a folder."""
    return [
        f"--model-repository={repository}",
        *_listening(sockets),
        f"--metrics-address=unix:{sockets / 'metrics'}",
        # Lets a model whose workers have died unload itself.
        "--model-control-mode=explicit",
        "--load-model=*",
        # Keep running, with a failed model listed together with its reason.
        "--exit-on-error=false",
        "--strict-readiness=true",
        *_completion(repository),
    ]


def nvidias_options(repository: str, sockets: Path) -> list[str]:
    """Return the options of a server with NVIDIA's C++ backend, which may be an old release.

    The backend cannot load a model twice in one process. Releases before 23.06 cannot bind the
    metrics to an address.
    """
    return [f"--model-repository={repository}", *_listening(sockets), "--allow-metrics=false"]


def _listening(sockets: Path) -> list[str]:
    # The server appends the port, also to the name of a Unix socket.
    return [
        "--allow-http=false",
        f"--grpc-address=unix:{sockets / 'grpc'}",
        "--grpc-port=8001",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
    ]


def _completion(repository: str) -> list[str]:
    """Return the option that keeps backends from completing configurations, unless one needs it.

    Encoders for NVIDIA's backend need it, as their config.pbtxt has missing or wrong tensor types;
    each model is then loaded twice.
    """
    for path in Path(repository).glob("*/config.pbtxt"):
        with contextlib.suppress(OSError, ValueError):  # the server reports bad files
            config = parse_config(path.read_text(encoding="utf-8"))
            model_type = config.parameters["model_type"].string_value
            if config.backend == "fastertransformer" and model_type in ENCODERS:
                return []
    return ["--disable-auto-complete-config"]


def mpi_start(*, is_step: bool = False) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command prefix and the variables of a server with NVIDIA's backend.

    Inside an MPI step the server is one of the step's processes; elsewhere mpirun starts it.
    Without mpirun, its process forms an MPI world of size 1.
    """
    # NCCL's parallel launch mode is faster but can hang.
    variables = {"NCCL_LAUNCH_MODE": os.environ.get("NCCL_LAUNCH_MODE", "GROUP")}
    if is_step or any(name in os.environ for name in _MPI_VARIABLES):
        return (), variables
    if shutil.which(_MPIRUN[0]) and any(map(shutil.which, _REMOTE_SHELLS)):
        return _MPIRUN, variables
    # By default Open MPI would start a daemon, which requires a remote shell.
    return (), {**variables, "OMPI_MCA_ess_singleton_isolated": "1"}
