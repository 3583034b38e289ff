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
        backends: what its folder of backends holds, by path in it; nothing for the folder that was
            compiled into the program.
        cache_directory: None for the one that was compiled into the program.
        library_paths: folders of shared libraries.
        interpreter: the Python whose packages the Python backend imports.
    """

    program: Path
    backends: Mapping[str, Path] = field(default_factory=dict)
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

    def arguments(self, folder: Path | None = None) -> list[str]:
        """Return the options with the paths of the server's parts.

        Links to its backends are made in `folder`; without one it has those that it was built
        with.
        """
        found = []
        if folder is not None and self.backends:
            for name, path in self.backends.items():
                link = folder / "backends" / name
                link.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".so":  # the server loads none that lies elsewhere
                    shutil.copyfile(path, link)
                else:
                    link.symlink_to(path)
            found.append(f"--backend-directory={folder / 'backends'}")
        if self.cache_directory is not None:
            found.append(f"--cache-directory={self.cache_directory}")
        return found


def find_triton(*, own_backends: bool = True) -> TritonInstallation:
    """Return the server that TRITON_SERVER names, else the one on PATH, else nvidia-pytriton's.

    TRITON_SERVER names a program, or the folder of a Python environment that has nvidia-pytriton.
    Where it is not set, such an environment is looked for in this checkout (`make triton`), then
    this process's own is.

    With `own_backends` it serves models for NVIDIA's FasterTransformer backend with this project's
    engine; without, with whatever backend the server itself has.

    Raises FileNotFoundError if there is none, or TRITON_SERVER names none.
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
    return TritonInstallation(program, {path.name: path for path in backends.iterdir()} | own)


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
    python = {path.name: path for path in (folder / "backends" / "python").iterdir()}
    # The stub ignores PYTHONPATH but searches its own folder: models import this project, which
    # need not be installed in its environment.
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
