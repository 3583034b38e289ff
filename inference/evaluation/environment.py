"""Environment facts needed to reproduce a run."""

import hashlib
import os
import platform
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from foundations.files.checksum import sha256_of

_PACKAGES = (
    "slipway-serving",
    "torch",
    "numpy",
    "tokenizers",
    "tritonclient",
    "nvidia-pytriton",
    "hydra-core",
    "submitit",
)


def describe_environment() -> dict[str, str]:
    """Return the machine, processor, Python and package versions; unknown ones are left out."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = Path("/proc/cpuinfo").read_text("utf-8")
    processor = re.search(r"^model name\s*: (.*)$", cpus, re.M)
    found = {
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor[1] if processor else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "python": sys.version.split()[0],
    }
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {name: value for name, value in found.items() if value}


def folder_sha256(*folders: Path) -> str:
    """Return a hash of the names and contents of all files below folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(filter(Path.is_file, folder.rglob("*"))):
            digest.update(f"{sha256_of(path)}  {path.relative_to(folder)}\n".encode())
    return digest.hexdigest()
