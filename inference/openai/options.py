"""Settings of the endpoint, as `deploy` gives them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 8003


@dataclass(frozen=True)
class OpenAIOptions:
    """An endpoint next to a server.

    Attributes:
        port: where it listens; 0 takes a free one.
        tokenizer: folder of the tokenizer's files; None for that of the repository.
    """

    port: int = DEFAULT_PORT
    tokenizer: Path | None = None

    def arguments(self, *, repository: str) -> list[str]:
        """Return the options of `python -m inference.openai` that name files."""
        found = [] if "://" in repository else [f"--repository={Path(repository).absolute()}"]
        if self.tokenizer is not None:
            found.append(f"--tokenizer={self.tokenizer.absolute()}")
        return found
