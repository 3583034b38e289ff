"""The commands that documents show, and their trial."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def commands(text: str, start: str = "") -> list[str]:
    """Return the lines of a document's shell blocks that begin so, continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [each for each in lines if each.strip() and each[0] != "#" and each.startswith(start)]


def run(words: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
