"""The certificate of a folder: its parts, the verdict of the first line, and its files."""

import dataclasses
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2

from export_scripts import __version__
from inference.certify.findings import (
    DIFFERS,
    EQUAL,
    NOT_COMPUTED,
    UP_TO,
    Part,
    Status,
    worst,
)

JSON_NAME, PAGE_NAME = "certificate.json", "certificate.html"
_NAMESPACE = "slipway-certificate"  # of the signature
_MOST_LISTED = 3
# Exit status of the command by the worst of its parts.
EXIT_STATUS = {EQUAL: 0, UP_TO: 0, DIFFERS: 1, NOT_COMPUTED: 3}


@dataclass(frozen=True)
class Side:
    """One side: its path, format and files."""

    path: str
    format: str
    files: dict[str, str]  # name -> SHA-256

    @property
    def sha256(self) -> str:
        """One digest of all files."""
        return sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Certificate:
    """Findings about a folder.

    Attributes:
        asked: what was left out, and how it is asked for.
        options: those that decide what was compared.
    """

    source: Side | None
    folder: Side | None
    parts: tuple[Part, ...]
    asked: tuple[str, ...]
    options: dict[str, Any]
    made_at: str = dataclasses.field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )

    @property
    def status(self) -> Status:
        """The worst of the parts."""
        return worst(part.status for part in self.parts)

    @property
    def verdict(self) -> str:
        """The first line: what holds for the whole, and what could not be computed."""
        status = self.status
        words = str(EQUAL)
        differing = [each for part in self.parts for each in part.of(DIFFERS)]
        bounds = list(dict.fromkeys(word for part in self.parts for word in part.up_to))
        if differing:
            more = len(differing) - _MOST_LISTED
            words = f"{DIFFERS}: " + "; ".join(map(str, differing[:_MOST_LISTED]))
            words += f"; and {more} more" if more > 0 else ""
        elif bounds:
            words = f"{UP_TO} {', '.join(bounds)}"
        elif status == UP_TO:
            words = f"{UP_TO} what is listed"
        missing = [part.name for part in self.parts if part.of(NOT_COMPUTED)]
        if status == NOT_COMPUTED and not any(part.compared for part in self.parts):
            words = NOT_COMPUTED
        elif missing:
            words += f"; not computed: {', '.join(missing)}"
        return words

    @property
    def card(self) -> str:
        """A line for a model card, in Markdown."""
        sides = [
            f"{name} `sha256:{side.sha256[:16]}`"
            for name, side in (("source", self.source), ("weights", self.folder))
            if side is not None
        ]
        head = f"**Certificate** ({self.made_at[:10]}, Slipway {__version__}): {self.verdict}"
        return ". ".join([head, *filter(None, [", ".join(sides)])])

    def table(self) -> dict[str, Any]:
        """Return everything as JSON, the verdict first."""
        values = dataclasses.asdict(self)
        for part, row in zip(self.parts, values["parts"], strict=True):
            row["status"] = part.status
        for name, side in (("source", self.source), ("folder", self.folder)):
            if side is not None:
                values[name]["sha256"] = side.sha256
        head = {"verdict": self.verdict, "status": self.status, "version": __version__}
        plain = _plain({**head, "card": self.card, **values})
        assert isinstance(plain, dict)
        return plain


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no words for infinities and NaN."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def certificate_text(certificate: Certificate) -> str:
    """Return the certificate for a terminal, the verdict first."""
    return "\n".join(_lines(certificate))


def _lines(certificate: Certificate) -> Iterator[str]:
    yield certificate.verdict
    for part in certificate.parts:
        yield f"{part.name:<12}{part.status:<14}{part.compared}"
        shown = [each for each in part.findings if each.status != EQUAL]
        yield from (f"            {each}" for each in shown[:20])
        if len(shown) > 20:
            yield f"            ... and {len(shown) - 20} more, in {JSON_NAME}"
    yield from (f"{'not asked':<12}{each}" for each in certificate.asked)
    yield ""
    yield certificate.card


def write_certificate(certificate: Certificate, output: Path, key: Path | None) -> list[Path]:
    """Write the certificate as JSON and as a page, signed where a key is given.

    Raises:
        ValueError: ssh-keygen does not sign.
    """
    output.mkdir(parents=True, exist_ok=True)
    path, page = output / JSON_NAME, output / PAGE_NAME
    text = json.dumps(certificate.table(), indent=1, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")
    page.write_text(_page(certificate, sha256(text.encode()).hexdigest()), encoding="utf-8")
    return [path, page, *([_signature(path, key)] if key is not None else [])]


def _signature(path: Path, key: Path) -> Path:
    signature = path.with_name(path.name + ".sig")
    signature.unlink(missing_ok=True)
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", _NAMESPACE, str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        raise ValueError("a signature needs ssh-keygen of OpenSSH, which is not there") from None
    if done.returncode:
        raise ValueError(f"ssh-keygen does not sign with {key}: {done.stderr.decode().strip()}")
    return signature


def _page(certificate: Certificate, digest: str) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        (Path(__file__).parent / "certificate.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(certificate=certificate, digest=digest, version=__version__)
