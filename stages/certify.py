"""Stage `certify`: compare a folder with its source, and write the certificate."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inference.certify.options import JOB_OPTIONS, CertifySection, endpoint_problems
from inference.evaluation.gate import EXIT_NOT_EVALUATED
from inference.evaluation.options import OPENAI
from inference.front.access import Credentials
from stages.base import Stage, StageError, Summary, as_json
from stages.convert import find_checkpoint
from stages.evaluate import is_address
from stages.progress import Progress


@dataclass(eq=False)
class CertifyStage(Stage):
    """Writes `certificate.json` and `certificate.html`.

    Attributes:
        source: the checkpoint, as configured.
        folder: what is certified.
        follows: whether `convert` makes the folder, so that it may not be there yet.
        given: config.ini values that the source does not state.
    """

    name = "certify"
    sections = ("certify",)
    guards_configuration = False

    options: CertifySection
    source: Path
    folder: Path
    follows: bool
    given: tuple[tuple[str, str], ...] = ()

    def check(self) -> list[str]:
        """Return what is not there, and options that need another one."""
        options = self.options
        needed = [("folder", self.folder), ("source", find_checkpoint(self.source))]
        needed = [] if self.follows else needed
        given = ((name, getattr(options, name)) for name in ("training", "key"))
        needed += [(name, Path(path)) for name, path in given if path is not None]
        problems = [
            f"certify.{name}={path} does not exist." for name, path in needed if not path.exists()
        ]
        problems += endpoint_problems(options, "certify.")
        if options.endpoint is None:
            return problems
        if not is_address(options.endpoint, OPENAI):
            problems.append(
                f"certify.endpoint={options.endpoint} is not an address; write "
                "http://host:port/v1, or null to ask no server."
            )
        if not options.batch_sizes:
            problems.append("certify.batch_sizes is empty; name at least one, such as [1].")
        token_file = None if options.token_file is None else Path(options.token_file)
        return problems + Credentials(token_file=token_file).problems(prefix="certify.", joiner="_")

    def outputs(self) -> list[Path]:
        """Return the certificate and its page."""
        folder = Path(self.options.output_dir)
        return [folder / "certificate.json", folder / "certificate.html"]

    def marker_path(self) -> Path:
        """Return the marker, next to the certificate."""
        return Path(self.options.output_dir) / "certify.done.json"

    def identity(self) -> dict[str, Any]:
        """Return what decides the certificate."""
        values = {**asdict(self.options), "source": self.source, "folder": self.folder}
        return {
            f"certify.{name}": as_json(value)
            for name, value in {**values, "given": dict(self.given)}.items()
            if name not in JOB_OPTIONS
        }

    def inputs(self) -> list[Path]:
        """Return both sides, and the file of the training step."""
        training = self.options.training
        return [find_checkpoint(self.source), self.folder, *([Path(training)] if training else [])]

    def run(self, progress: Progress) -> Summary:
        """Compare, and write the certificate.

        Raises:
            StageError: the two cannot be compared, differ, or something was not computed.
        """
        from inference.certify.certificate import EXIT_STATUS, write_certificate
        from inference.certify.certify import certify

        source, folder = find_checkpoint(self.source).absolute(), self.folder.absolute()
        options = replace(self.options, source=str(source), folder=str(folder))
        try:
            shown = partial(progress.update, "comparing", unit="bytes")
            certificate = certify(options, self.given, shown)
            files = write_certificate(certificate)
        except ValueError as error:
            raise StageError(str(error), exit_code=EXIT_NOT_EVALUATED) from error
        summary: Summary = {"verdict": certificate.verdict, "page": str(files[1])}
        if code := EXIT_STATUS[certificate.status]:
            message = f"{certificate.verdict}; see {files[1]}"
            code = 1 if code == 1 else EXIT_NOT_EVALUATED
            raise StageError(message, summary=summary, exit_code=code)
        return summary
