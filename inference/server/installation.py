"""The tritonserver installed on this machine, its environment and its options."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from inference.front.sockets import ServerSockets
from inference.private_folder import is_plain, plain_temporary_folder
from inference.process_memory import memory_variables

SERVER_VARIABLE = "TRITON_SERVER"
# Python-based backends of this project, each a folder that a backend directory can hold.
OWN_BACKENDS = Path(__file__).resolve().parents[2] / "export_scripts" / "triton" / "backends"
_OPTION = re.compile(r"^\s*--([a-z][a-z-]*)", re.MULTILINE)
_HELP_TIMEOUT_S = 120.0  # a container's first read of the program can be slow
# Set by launchers of MPI processes.
_MPI_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
_MPIRUN = ("mpirun", "-n", "1", "--allow-run-as-root")
_REMOTE_SHELLS = ("ssh", "rsh")  # Open MPI's mpirun ends at once where there is neither
# The server itself waits this long for running requests; `stop` sets the limit that counts.
_EXIT_TIMEOUT_S = 3600
_EVERYWHERE = "0.0.0.0"  # where tritonserver listens by itself


@dataclass(frozen=True)
class TritonInstallation:
    """A server program, its backends if not in the usual place, and folders of shared libraries."""

    program: Path
    backend_directory: Path | None = None  # None for the one that was compiled into the program
    cache_directory: Path | None = None
    library_paths: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the variables of the server that differ from those of this process."""
        # The Python backend embeds an interpreter and takes its packages from the first python3.
        interpreter = str(Path(sys.executable).parent)
        variables = {"PATH": os.pathsep.join([interpreter, os.environ.get("PATH", os.defpath)])}
        searched = [*map(str, self.library_paths), os.environ.get("LD_LIBRARY_PATH", "")]
        if libraries := os.pathsep.join(filter(None, searched)):
            variables["LD_LIBRARY_PATH"] = libraries
        return variables | memory_variables()

    def known_options(self) -> frozenset[str]:
        """Return the names of the options that the program's help lists."""
        done = subprocess.run(
            [str(self.program), "--help"],
            capture_output=True,
            text=True,
            env=os.environ | self.environment(),
            timeout=_HELP_TIMEOUT_S,
            check=False,  # some releases end with 1 after their help
        )
        return frozenset(_OPTION.findall(done.stdout + done.stderr))

    def arguments(self) -> list[str]:
        """Return the options with the paths of the server's parts."""
        given = {"backend": self.backend_directory, "cache": self.cache_directory}
        return [f"--{name}-directory={path}" for name, path in given.items() if path]


def find_triton(*, own_backends: bool = True) -> TritonInstallation:
    """Return the server that TRITON_SERVER names, else the one on PATH, else nvidia-pytriton's.

    With `own_backends` it serves models for NVIDIA's FasterTransformer backend with this project's
    engine; without, with whatever backend the server itself has.

    Raises:
        FileNotFoundError: there is none, or TRITON_SERVER names no file.
        PermissionError: others can write where its backends are copied to.
    """
    own: dict[str, Path] = {}
    if own_backends:
        own = {each.name: each for each in OWN_BACKENDS.iterdir() if (each / "model.py").is_file()}
    named = os.environ.get(SERVER_VARIABLE)
    if named and not Path(named).is_file():
        raise FileNotFoundError(f"{SERVER_VARIABLE}={named} is not a file.")
    if program := named or shutil.which("tritonserver"):
        return _installed(Path(program), own)
    wheel = importlib.util.find_spec("pytriton")  # it is not imported
    if wheel is not None and wheel.origin is not None:
        folder = Path(wheel.origin).parent / "tritonserver"
        if (folder / "bin" / "tritonserver").is_file():
            return _from_wheel(folder, own)
    raise FileNotFoundError(
        "no tritonserver found; install the one of NVIDIA's package (pip install "
        f"nvidia-pytriton==0.7.0), put tritonserver on PATH, or name it in {SERVER_VARIABLE}."
    )


def _installed(program: Path, own: dict[str, Path]) -> TritonInstallation:
    """Return a server of an image, whose backends are in the folder next to its own."""
    backends = program.resolve().parent.parent / "backends"
    if not own or not backends.is_dir():
        return TritonInstallation(program)
    links = {path.name: path for path in backends.iterdir()} | own
    identity = f"{backends} {sorted(links.items())}"
    folder = _cached_folder(identity, lambda folder: _link(folder, links))
    return TritonInstallation(program, backend_directory=folder)


def _from_wheel(folder: Path, own: dict[str, Path]) -> TritonInstallation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise FileNotFoundError(
            f"nvidia-pytriton has no Python backend for Python {version} (it has: {found}); "
            "use one of those, or name another server in TRITON_SERVER."
        )
    numpy, place = _numpy_of_the_server()
    if int(numpy.partition(".")[0]) > 1:
        raise FileNotFoundError(
            f"nvidia-pytriton's tritonserver gives empty answers with numpy {numpy}, which it "
            f"would import from {place}; install numpy 1.26 there, or name another server in "
            "TRITON_SERVER."
        )
    # Triton's stub is linked to this interpreter's shared library.
    own_libraries = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    return TritonInstallation(
        program=folder / "bin" / "tritonserver",
        backend_directory=_assembled_backends(folder / "backends", stub, own),
        cache_directory=folder / "caches",
        library_paths=(folder.parents[1] / "nvidia_pytriton.libs", own_libraries),
    )


def _numpy_of_the_server() -> tuple[str, str]:
    """Return the version of the numpy that the Python backend imports, and its folder.

    The interpreter's own packages come first there, those of folders in PYTHONPATH after them: the
    other way round than in this process.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    given = {Path(each).resolve() for each in entries if each}
    own = [each for each in sys.path if each and Path(each).resolve() not in given]
    for folders in (own, sys.path):
        for found in metadata.distributions(name="numpy", path=folders):
            return found.version, str(found.locate_file(""))
    return metadata.version("numpy"), "its packages"


def _assembled_backends(backends: Path, stub: Path, own: Mapping[str, Path]) -> Path:
    """Return a copy of the wheel's backends and links to `own`, with this interpreter's stub.

    The stub's interpreter ignores PYTHONPATH but searches its own folder, so links there let the
    model files import what this process can: this project, from a checkout that is not installed,
    and packages in folders of PYTHONPATH. The copy is made once per wheel, set of backends,
    interpreter and set of links; several processes may make it at the same time.
    """
    links = _importable()
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


def _importable() -> dict[str, Path]:
    """Return the modules that the Python backend does not find itself; the first of a name wins."""
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


def server_options(
    repository: str, sockets: ServerSockets, *, completes_configs: bool
) -> list[str]:
    """Return the options of a server of this project, which listens on Unix sockets alone.

    The sockets' owner may load and unload models; the front passes no such request on. With
    `completes_configs` backends may fill in what a config.pbtxt leaves out, for which each of their
    models is loaded twice.
    """
    grpc, _, port = str(sockets.grpc).rpartition(":")
    return [
        f"--model-repository={repository}",
        f"--http-address=unix:{sockets.http}",
        f"--grpc-address=unix:{grpc}",
        f"--grpc-port={port}",
        f"--metrics-address=unix:{sockets.metrics}",
        # Lets a model whose workers died take itself out of service.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A failed model stays listed with its reason; the server goes on.
        "--exit-on-error=false",
        "--strict-readiness=true",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        *(() if completes_configs else ("--disable-auto-complete-config",)),
    ]


def old_server_options(
    repository: str, ports: Mapping[str, int], *, host: str, known: Collection[str] | None = None
) -> list[str]:
    """Return options that releases of tritonserver for NVIDIA's C++ backend know.

    Models are loaded once: the backend cannot load one again in the same process. `known` are the
    options that the program takes: releases before 23.06 cannot bind the metrics to an address.
    """
    addresses = [f"{name}-address" for name in ports if host != _EVERYWHERE]
    return [
        f"--model-repository={repository}",
        *(f"--{name}-port={port}" for name, port in ports.items()),
        *(f"--{name}={host}" for name in addresses if known is None or name in known),
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
    ]


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
