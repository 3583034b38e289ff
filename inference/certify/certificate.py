"""The certificate of a folder: its parts, the verdict of the first line, and its files."""

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2

from foundations import __version__
from foundations.files.replace import replace_file
from foundations.job_options import JOB_KEYS
from inference.certify.findings import (
    DIFFERS,
    EQUAL,
    NOT_COMPUTED,
    UP_TO,
    Part,
    Status,
    worst,
)
from inference.certify.options import CertifySection

JSON_NAME, PAGE_NAME = "certificate.json", "certificate.html"
_SIGNATURE_NAME = f"{JSON_NAME}.sig"
_NAMESPACE = "slipway-certificate"  # of the signature
_MOST_LISTED = 3
# Exit status of the command by the worst of its parts.
EXIT_STATUS = {EQUAL: 0, UP_TO: 0, DIFFERS: 1, NOT_COMPUTED: 3}


@dataclass(frozen=True)
class Certificate:
    """Findings about a folder.

    Attributes:
        sides: of `source` and `folder`, where there are both: path, format, sha256 and files.
        left_out: what was not asked for, and how it is.
        given: what a user states of the source.
    """

    sides: Mapping[str, Mapping[str, Any]]
    parts: tuple[Part, ...]
    left_out: tuple[str, ...]
    options: CertifySection
    given: Sequence[tuple[str, str]]
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
        differing = [str(each) for part in self.parts for each in part.of(DIFFERS)]
        bounds = dict.fromkeys(word for part in self.parts for word in part.up_to)
        missing = [part.name for part in self.parts if part.of(NOT_COMPUTED)]
        if missing and not differing and not any(part.compared for part in self.parts):
            return NOT_COMPUTED
        words = str(EQUAL)
        if differing:
            more = len(differing) - _MOST_LISTED
            words = f"{DIFFERS}: " + "; ".join(differing[:_MOST_LISTED])
            words += f"; and {more} more" if more > 0 else ""
        elif bounds or self.status == UP_TO:
            words = f"{UP_TO} {', '.join(bounds) or 'what is listed'}"
        return words + (f"; not computed: {', '.join(missing)}" if missing else "")

    @property
    def card(self) -> str:
        """A line for a model card, in Markdown."""
        sides = (f"{name} `sha256:{side['sha256'][:16]}`" for name, side in self.sides.items())
        head = f"**Certificate** ({self.made_at[:10]}, Slipway {__version__}): {self.verdict}"
        return ". ".join(filter(None, [head, ", ".join(sides)]))

    def table(self) -> dict[str, Any]:
        """Return everything as JSON, the verdict first."""
        parts = [{**dataclasses.asdict(part), "status": part.status} for part in self.parts]
        options = dataclasses.asdict(self.options)
        found = {
            "verdict": self.verdict,
            "status": self.status,
            "version": __version__,
            "made_at": self.made_at,
            "card": self.card,
            "source": None,
            "folder": None,
            **self.sides,
            "parts": parts,
            "left_out": self.left_out,
            "options": {name: options[name] for name in options if name not in JOB_KEYS},
            "given": dict(self.given),
        }
        # JSON has no words for infinities and NaN.
        plain: dict[str, Any] = json.loads(json.dumps(found), parse_constant=str)
        return plain


def certificate_text(certificate: Certificate) -> str:
    """Return the certificate for a terminal, the verdict first."""
    return _rendered("txt", certificate.table())


def _rendered(kind: str, table: Mapping[str, Any], **more: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(f"certificate.{kind}.jinja").render(table, **more)


def write_certificate(certificate: Certificate) -> list[Path]:
    """Write the certificate as JSON and as a page, signed where a key is given.

    Raises:
        ValueError: ssh-keygen does not sign.
    """
    output, key = Path(certificate.options.output_dir), certificate.options.key
    output.mkdir(parents=True, exist_ok=True)
    path, page, signature = (output / name for name in (JSON_NAME, PAGE_NAME, _SIGNATURE_NAME))
    signature.unlink(missing_ok=True)  # of an earlier certificate
    text = json.dumps(certificate.table(), indent=1, allow_nan=False) + "\n"
    replace_file(path, text)
    digest = sha256(text.encode()).hexdigest()
    replace_file(page, _rendered("html", json.loads(text), digest=digest))
    if key is None:
        return [path, page]
    command = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", _NAMESPACE, str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        raise ValueError("a signature needs ssh-keygen of OpenSSH, which is not there") from None
    if done.returncode:
        raise ValueError(f"ssh-keygen does not sign with {key}: {done.stderr.decode().strip()}")
    return [path, page, signature]
