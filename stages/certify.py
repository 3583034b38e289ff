"""Stage `certify`: compare a folder with its source, and write the certificate."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic_core import to_jsonable_python

from foundations.files.json_content import Fields
from foundations.job_options import JOB_KEYS
from inference.certify.options import CertifySection, endpoint_problems
from inference.evaluation.gate import EXIT_NOT_EVALUATED
from stages.base import Stage, StageError, Summary
from stages.convert import find_checkpoint
from stages.deploy_config import DeployConfig, check_deploy
from stages.evaluate import is_address
from stages.progress import Progress
from stages.serving import serving

# Options with files that are needed to read the source.
_SOURCE_OPTIONS = ("lora", "model_config", "vocab_path", "merges_path")


@dataclass(eq=False)
class CertifyStage(Stage):
    """Writes `certificate.json` and `certificate.html`.

    Attributes:
        source: the configured checkpoint.
        folder: the folder to certify.
        from_convert: whether `convert` writes the folder, so that it may not exist yet.
        given: config.ini values that the source does not record.
        deploy: the server to start, with `certify.serve`.
    """

    name = "certify"
    guards_configuration = False

    options: CertifySection
    source: Path
    folder: Path
    from_convert: bool
    given: tuple[tuple[str, str], ...] = ()
    deploy: DeployConfig | None = None

    def check(self) -> Iterator[str]:
        """Yield missing files and contradictory options."""
        options = self.options
        needed = self._option_paths("training", "key", *_SOURCE_OPTIONS)
        if not self.from_convert:
            needed += [("folder", self.folder), ("source", find_checkpoint(self.source))]
        yield from (
            f"certify.{name}={path} does not exist." for name, path in needed if not path.exists()
        )
        yield from endpoint_problems(options, "certify.{}".format)
        if self.deploy is not None:
            yield from check_deploy(self.deploy)
        if options.endpoint is None:
            return
        if not is_address(options.endpoint, options.protocol):
            yield (
                f"certify.endpoint={options.endpoint} is not an address; write "
                "http://host:port/v1, host:port for certify.protocol=grpc or http, or null to "
                "query no server."
            )
        yield from options.credentials.problems(prefix="certify.", joiner="_")

    def outputs(self) -> list[Path]:
        """Return the certificate and its page."""
        folder = Path(self.options.output_dir)
        return [folder / "certificate.json", folder / "certificate.html"]

    def marker_path(self) -> Path:
        """Return the marker, next to the certificate."""
        return Path(self.options.output_dir) / "certify.done.json"

    def identity(self) -> Fields:
        """Return what decides the certificate."""
        own = {"source": self.source, "folder": self.folder, "given": dict(self.given)}
        values = to_jsonable_python({**vars(self.options), **own})
        return {f"certify.{name}": values[name] for name in values if name not in JOB_KEYS}

    def inputs(self) -> list[Path]:
        """Return source, folder and the files that options name."""
        files = self._option_paths("training", *_SOURCE_OPTIONS)
        return [find_checkpoint(self.source), self.folder, *(path for _, path in files)]

    def _option_paths(self, *names: str) -> list[tuple[str, Path]]:
        """Return the files and folders that options name, as pairs of option and path."""
        found = ((name, getattr(self.options, name)) for name in names)
        several = ((name, each if isinstance(each, list) else [each]) for name, each in found)
        return [(name, Path(path)) for name, paths in several for path in paths if path is not None]

    def run(self, progress: Progress) -> Summary:
        """Compare source and folder, and write the certificate.

        Raises:
            StageError: they cannot be compared, they differ, or a comparison was not computed.
        """
        from inference.certify.certificate import EXIT_STATUS, write_certificate
        from inference.certify.certify import certify

        source, folder = find_checkpoint(self.source).absolute(), self.folder.absolute()
        options = replace(self.options, source=str(source), folder=str(folder))
        try:
            shown = partial(progress.update, "comparing", unit="bytes")
            with self._served(options, progress) as options:
                certificate = certify(options, self.given, shown)
            files = write_certificate(certificate)
        except ValueError as error:
            raise StageError(str(error), exit_code=EXIT_NOT_EVALUATED) from error
        summary = {"verdict": certificate.verdict, "page": str(files[1])}
        if code := EXIT_STATUS[certificate.status]:
            message = f"{certificate.verdict}; see {files[1]}"
            code = 1 if code == 1 else EXIT_NOT_EVALUATED
            raise StageError(message, summary=summary, exit_code=code)
        return summary

    @contextmanager
    def _served(self, options: CertifySection, progress: Progress) -> Iterator[CertifySection]:
        """Yield the options with the address of the configured server, which runs meanwhile."""
        if self.deploy is None:
            yield options
            return
        with serving(self.deploy, self.job.folder, progress) as (_, endpoint):
            yield replace(
                options,
                endpoint=endpoint.address(options.protocol),
                model=options.model or self.deploy.model_name,
            )
