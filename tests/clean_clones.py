"""A new user's first steps, with each Python found here: a clean clone, `make setup`, `make demo`.

    python tests/clean_clones.py [--others] [--count N] [--keep DIR]

Wheel folders and extra indexes that pip or uv are configured with on this machine are left out: a
new user has none. An index named in PIP_INDEX_URL stays. Only what is committed is cloned.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = range(11, 15)
# Variables that point pip and uv at files of one machine.
_LOCAL = {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT"}
_LOCAL |= {"UV_FIND_LINKS", "UV_NO_INDEX", "UV_CONFIG_FILE"}


def interpreters() -> dict[int, Path]:
    """Return a Python 3.x for each x that is supported and found: on PATH, pyenv's or uv's."""
    return {minor: path for minor in MINORS for path in list(_usable(minor))[:1]}


def _usable(minor: int) -> Iterator[Path]:
    name = f"python3.{minor}"
    found = shutil.which(name)
    folders = {
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions": f"3.{minor}.*",
        Path.home() / ".local/share/uv/python": f"cpython-3.{minor}.*",
    }
    paths = [Path(found)] if found else []
    for folder, pattern in folders.items():
        paths += sorted(folder.glob(f"{pattern}/bin/{name}"))
    for path in paths:
        if subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            yield path


def try_out(interpreter: Path, clone: Path) -> bool:
    """Clone, set up and run the demo; return whether all of it worked."""
    variables = {key: value for key, value in os.environ.items() if key not in _LOCAL}
    variables |= {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
    for key in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL"):
        variables.pop(key, None)
    commands = (
        ["git", "clone", "--quiet", str(ROOT), str(clone)],
        ["make", "-C", str(clone), "setup", f"PYTHON={interpreter}"],
        ["make", "-C", str(clone), "demo"],
    )
    for command in commands:
        start = time.monotonic()
        failed = subprocess.run(command, env=variables).returncode != 0
        state = "failed" if failed else "done"
        print(f"{interpreter}: {' '.join(command)}: {state}, {time.monotonic() - start:.0f} s")
        if failed:
            return False
    return True


def main() -> None:
    """Run; exit with 1 if something failed, or if there was no Python to try."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--others", action="store_true", help="leave out the Python that runs this")
    parser.add_argument("--count", type=int, default=len(MINORS), help="try so many at most")
    parser.add_argument("--keep", type=Path, help="put the clones here and keep them")
    args = parser.parse_args()
    found = interpreters()
    if args.others:
        found.pop(sys.version_info.minor, None)
    home = args.keep or Path(tempfile.mkdtemp(prefix="slipway-clones-"))
    try:
        chosen = list(found.values())[-args.count :]
        results = [try_out(each, home / each.name) for each in chosen]
    finally:
        if args.keep is None:
            shutil.rmtree(home)
    if not results:
        print(f"no Python of 3.{MINORS[0]} to 3.{MINORS[-1]} found to try")
    sys.exit(not results or not all(results))


if __name__ == "__main__":
    main()
