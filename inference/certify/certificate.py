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
from inference.certify.findings import DIFFERS, EQUAL, NOT_COMPUTED, UP_TO, Part, Status, worst
from inference.certify.options import CertifySection

JSON_NAME, PAGE_NAME = "certificate.json", "certificate.html"
_SIGNATURE_NAME = f"{JSON_NAME}.sig"
_NAMESPACE = "slipway-certificate"  # ssh-keygen's namespace of the signature
_MAX_LISTED = 3  # differences named in the verdict
# Worst status of the parts -> exit status of the command.
EXIT_STATUS = {EQUAL: 0, UP_TO: 0, DIFFERS: 1, NOT_COMPUTED: 3}


@dataclass(frozen=True)
class Certificate:
    """Findings about a folder.

    Attributes:
        sides: `source` and `folder` -> path, format, sha256 and files; empty without a folder.
        left_out: parts that were not requested, each with the option that decides it.
        given: config.ini values that the user stated for the source.
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
        """The worst status of the parts."""
        return worst(part.status for part in self.parts)

    @property
    def verdict(self) -> str:
        """The first line: the result of all parts, and the parts that could not be computed."""
        differing = [str(remark) for part in self.parts for remark in part.of(DIFFERS)]
        bounds = dict.fromkeys(bound for part in self.parts for bound in part.up_to)
        missing = [part.name for part in self.parts if part.of(NOT_COMPUTED)]
        if missing and not differing and not any(part.compared for part in self.parts):
            return NOT_COMPUTED
        line = str(EQUAL)
        if differing:
            more = len(differing) - _MAX_LISTED
            line = f"{DIFFERS}: " + "; ".join(differing[:_MAX_LISTED])
            line += f"; and {more} more" if more > 0 else ""
        elif bounds or self.status == UP_TO:
            line = f"{UP_TO} {', '.join(bounds) or 'what is listed'}"
        return line + (f"; not computed: {', '.join(missing)}" if missing else "")

    @property
    def card(self) -> str:
        """The certificate in one line of Markdown, for a model card."""
        sides = (f"{name} `sha256:{side['sha256'][:16]}`" for name, side in self.sides.items())
        head = f"**Certificate** ({self.made_at[:10]}, Slipway {__version__}): {self.verdict}"
        return ". ".join(filter(None, [head, ", ".join(sides)]))

    def table(self) -> dict[str, Any]:
        """Return the whole certificate as JSON values, the verdict first."""
        parts = [{**dataclasses.asdict(part), "status": part.status} for part in self.parts]
        options = dataclasses.asdict(self.options)
        table = {
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
        # JSON has no infinities and no NaN: they become strings.
        plain: dict[str, Any] = json.loads(json.dumps(table, default=str), parse_constant=str)
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
        ValueError: ssh-keygen is not installed, or refuses the key.
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
        raise ValueError(
            "--key needs OpenSSH's ssh-keygen, which is not on PATH; install it"
        ) from None
    if done.returncode:
        raise ValueError(f"ssh-keygen cannot sign with {key}: {done.stderr.decode().strip()}")
    return [path, page, signature]
