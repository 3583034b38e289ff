"""Environment facts needed to reproduce a run."""

import hashlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from export_scripts.ft.layout import manifest_path
from foundations.files.checksum import sha256_of
from foundations.files.json_content import json_object

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
    """Return names and values worth keeping: machine, processor, Python, package versions."""
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
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    found |= {package: installed[package] for package in _PACKAGES if package in installed}
    return {name: value for name, value in found.items() if value}


def describe_weights(weights_dir: Path) -> tuple[str, str]:
    """Return family and hash of a converted folder, from the manifest next to it.

    The hash covers the name and the content of every file; both are empty without a readable
    manifest.
    """
    path = manifest_path(weights_dir)
    if not path.is_file():
        return "", ""
    try:
        manifest = json_object(path.read_bytes(), path)
        family, files = str(manifest["family"]), manifest["files"]
        # Manifests of earlier versions have sha256.
        sums = {name: facts.get("crc32") or facts["sha256"] for name, facts in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.stderr.write(
            f"{path} is not a readable manifest ({error!r}); the report is without the family and "
            "the hash of the weights\n"
        )
        return "", ""
    lines = (f"{sums[name]}  {name}\n" for name in sorted(sums))
    return family, hashlib.sha256("".join(lines).encode()).hexdigest()


def folder_sha256(*folders: Path) -> str:
    """Return a hash of the names and the contents of all files below folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            digest.update(f"{sha256_of(path)}  {path.relative_to(folder)}\n".encode())
    return digest.hexdigest()
