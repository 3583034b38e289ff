"""Settings of the endpoint; the section `deploy.openai` of the configuration."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from export_scripts.values import PORT, option
from inference.ports import DEFAULT_PORTS

DEFAULT_PORT = DEFAULT_PORTS["openai"]
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-f:]+\](:[0-9]+)?")


@dataclass(frozen=True)
class OpenAIOptions:
    """`deploy.openai`: an endpoint of OpenAI's protocol next to Triton's."""

    port: int = option("its port; 0 takes a free one", DEFAULT_PORT, within=(0, PORT))
    tokenizer: Path | None = option(
        "folder of the tokenizer's files; null: the repository's own", None, path=True
    )
    enabled: bool = option("serve it", False)
    origins: list[str] = option(
        "web pages that may ask, as their browser names them: https://chat.example.org; [*]: all",
        [],
    )

    def arguments(self) -> list[str]:
        """Return the options of `python -m inference.front` next to the port."""
        tokenizer = (
            [] if self.tokenizer is None else [f"--openai-tokenizer={self.tokenizer.absolute()}"]
        )
        return [*tokenizer, *(f"--openai-origin={each}" for each in self.origins)]

    def problems(self, *, prefix: str = "deploy.openai.") -> list[str]:
        """Return the origins that no browser would send."""
        return [
            f"{prefix}origins: {each!r} is not an origin; write https://host[:port], or *."
            for each in self.origins
            if each != "*" and not _ORIGIN.fullmatch(each)
        ]
