"""Stage `export`: build a Triton repository from FasterTransformer shards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pydantic_core import to_jsonable_python

from export_scripts.conversion.request import output_problems
from export_scripts.ft.tokenizer_files import TOKENIZER_CHOICES, makes_tokenizer
from export_scripts.triton.object_store import StoreLocation, publish_repository
from export_scripts.triton.repository import (
    CONFIG_FILE,
    RepositoryRequest,
    build_repository,
    check_repository,
    repository_models,
)
from foundations.files.json_content import Fields
from stages.base import Finding, Stage, StageError, Summary
from stages.convert import KEYS as CONVERT_KEYS
from stages.progress import Progress

KEYS: Mapping[str, str] = {
    **{
        option.name: f"export.triton_deployment.{option.name}"
        for option in fields(RepositoryRequest)
    },
    "model_dir": "export.triton_deployment.triton_model_dir",
    "tp_size": "export.model.tensor_model_parallel_size",
    "pp_size": "export.triton_deployment.pipeline_model_parallel_size",
    "engine": "deploy.engine",
    "overwrite": "overwrite",
}
_MARKER = "export.json"
# Files that serve only later runs on this machine.
_NOT_PUBLISHED = (_MARKER, "*.convert.json")


@dataclass(eq=False)
class ExportStage(Stage):
    """Writes the models of a Triton repository for the shards of `convert`.

    Attributes:
        kind: configured kind of checkpoint (gpt3, t5, bert, ...), which decides the models of the
            repository before weights exist; None for a generating model.
        publish_to: object store to which the finished repository is copied, if any.
    """

    name = "export"

    request: RepositoryRequest
    kind: str | None = None
    publish_to: StoreLocation | None = None

    def check(self) -> Iterator[str]:
        """Yield the problems of sizes, types and destination, and a missing tokenizer."""
        yield from check_repository(self.request, names=KEYS, kind=self.kind)
        # Existing shards that are kept may lack the tokenizer that text models need.
        weights, has_text_models = self.request.weights_dir, len(self.model_folders()) > 1
        if weights.is_dir():  # `convert` has checked the folder if it is still to run
            yield from output_problems(self.request.model_dir, KEYS["model_dir"])
        stay = has_text_models and not self.job.overwrite and weights.is_dir()
        if stay and not makes_tokenizer(path.name for path in weights.iterdir()):
            yield (
                f"{weights} holds no tokenizer ({TOKENIZER_CHOICES}), which the models for text "
                f"need; put its files there, convert with {CONVERT_KEYS['vocab_path']}, or "
                f"set {KEYS['ensemble']}=false."
            )
        if self.publish_to is not None and find_spec("boto3") is None:
            yield "deploy.repository is an object store, which needs boto3: pip install boto3."

    def outputs(self) -> list[Path]:
        """Return the configuration of each model in the repository."""
        return [folder / CONFIG_FILE for folder in self.model_folders()]

    def model_folders(self) -> list[Path]:
        """Return the folder of each model: the model itself, and its kind's models for text."""
        return repository_models(self.request, kind=self.kind)

    def finding(self) -> Finding:
        """Compare the repository, on disk and in the object store, with the configuration."""
        found = super().finding()
        if found.marker is None or self.publish_to is None:
            return found
        url = self.publish_to.triton_url
        if found.marker.summary.get("published") == url:
            return found
        return Finding(changes=(f"it was not published to {url} when",))

    def marker_path(self) -> Path:
        """Return the marker inside the model's folder."""
        return self.request.model_dir / _MARKER

    def identity(self) -> Fields:
        """Return every setting that decides the repository."""
        values = to_jsonable_python(self.request)
        return {KEYS[name]: values[name] for name in values if name != "overwrite"}

    def inputs(self) -> list[Path]:
        """Return the shards."""
        return [self.request.weights_dir]

    def run(self, progress: Progress) -> Summary:
        """Build the repository, publish it if configured, and return the names of its models.

        Raises:
            StageError: the object store cannot be reached or holds other contents.
        """
        progress.update("writing the repository")
        folders = build_repository(self.request)
        repository = self.request.model_dir.parent
        summary = {
            "repository": str(repository),
            "models": [folder.name for folder in folders],
        }
        if self.publish_to is None:
            return summary
        try:
            sent = publish_repository(
                repository,
                self.publish_to,
                overwrite=self.job.overwrite,
                without=_NOT_PUBLISHED,
                progress=partial(progress.update, "publishing", unit="bytes"),
            )
        except (OSError, ValueError) as error:
            raise StageError(str(error)) from error
        url = self.publish_to.triton_url
        remark = f"{url}: {sent.sent} of {sent.files} files sent, {sent.sent_bytes} bytes"
        return summary | {"published": url, "remarks": [remark]}
