"""Compiles the CPU's matrix products for a wheel or an editable installation.

Where that fails, for want of a compiler, the installation is of Python alone, and torch multiplies.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# yes: a build without the library fails; no: a wheel for every processor
VARIABLE = "SLIPWAY_BUILD_KERNEL"
FOLDER = "inference/parallel/native"
LIBRARY = f"{FOLDER}/rows.so"
# The functions of OpenMP are those of the library that torch has loaded: none is linked.
COMPILE = ["-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-c"]


def compile_library(root: Path, library: Path) -> None:
    """Compile the source of a checkout with CC, or `cc`.

    Raises:
        OSError: There is no compiler.
        subprocess.CalledProcessError: It failed.
    """
    folder, compiler = root / FOLDER, shlex.split(os.environ.get("CC", "cc"))
    # The engine takes no library of another source, such as one of before an update.
    checksum = zlib.crc32(b"".join((folder / name).read_bytes() for name in ("rows.c", "kernel.h")))
    with tempfile.TemporaryDirectory(dir=library.parent) as room:
        half, whole = f"{room}/rows.o", f"{room}/rows.so"
        given = [f"-DSOURCE={checksum}u", "rows.c", "-o", half]
        subprocess.run([*compiler, *COMPILE, *given], cwd=folder, check=True)
        subprocess.run([*compiler, "-shared", "-s", half, "-o", whole], check=True)
        Path(whole).replace(library)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library to a wheel, which is then one of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it; `version` is "standard" or "editable"."""
        wanted = os.environ.get(VARIABLE, "auto")
        if wanted not in ("auto", "yes", "no"):
            raise ValueError(f"{VARIABLE}={wanted}: expected auto, yes or no")
        if self.target_name != "wheel" or wanted == "no":
            return
        try:
            if sys.platform != "linux":
                raise OSError(f"it is not built on {sys.platform}")
            compile_library(Path(self.root), Path(self.root, LIBRARY))
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted == "yes":
                raise
            self.app.display_warning(f"without {LIBRARY}, torch will multiply on CPUs: {error}")
            return
        if version == "standard":
            build_data["artifacts"].append(LIBRARY)
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
