"""Stage `convert`: convert a checkpoint to FasterTransformer shards or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from pydantic_core import to_jsonable_python

from export_scripts.conversion.request import ConversionRequest
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import Fields
from stages.base import Stage, StageError, Summary
from stages.progress import Progress

# Fields of ConversionRequest -> configuration keys, for messages.
KEYS: Mapping[str, str] = {
    **{
        option.name: f"convert.{option.name}"
        for option in fields(ConversionRequest)
        if option.compare
    },
    "checkpoint_path": "export.model.checkpoint_path",
    "checkpoint_name": "export.model.checkpoint_name",
    "output_dir": "export.triton_deployment.triton_model_dir",
    "tp_size": "export.model.tensor_model_parallel_size",
    "pp_size": "export.triton_deployment.pipeline_model_parallel_size",
    "weight_data_type": "export.model.weight_data_type",
    "processes": "export.model.processes",
    "model_type": "export.run.model_type",
    "output_format": "convert.format",
    "overwrite": "overwrite",
    "for_text": "export.triton_deployment.ensemble",
}
# Fields that do not decide the bytes of the shards.
_NOT_IDENTITY = ("output_dir", "processes", "overwrite", "pp_size", "for_text", "names")
# Folders in which the NeMo launcher's training writes checkpoints.
CHECKPOINT_FOLDERS = (Path("checkpoints"), Path("results", "checkpoints"))


@dataclass(eq=False)
class ConvertStage(Stage):
    """Writes `<triton_model_dir>/1/<TP>-gpu`, or `huggingface` there, from a checkpoint.

    Attributes:
        request: the request as configured; `_resolved_request` has the checkpoint that is read.
        may_be_remote: whether only other machines may see the checkpoint.
    """

    name = "convert"
    guards_inputs = True
    accepts_unmarked = True

    request: ConversionRequest
    may_be_remote: bool = False

    def __post_init__(self) -> None:
        self.request = replace(self.request, names=KEYS)

    def check(self) -> list[str]:
        """Return the problems of the checkpoint, sizes and destination."""
        from export_scripts.conversion.convert import check_conversion

        if self._is_remote:
            return []
        request = self._resolved_request()
        if self.marker_path().exists():
            # `finding` reports problems of an earlier run's folder.
            request = replace(request, overwrite=True)
        return check_conversion(request)

    def outputs(self) -> list[Path]:
        """Return the folder to write."""
        return [self.request.folder]

    def marker_path(self) -> Path:
        """Return the marker; it lies next to the folder, which holds only the loader's files."""
        return self.request.folder.with_name(f"{self.request.folder.name}.convert.json")

    def identity(self) -> Fields:
        """Return the source and all options that decide the bytes."""
        values = to_jsonable_python(self._resolved_request())
        return {KEYS[name]: values[name] for name in values if name not in _NOT_IDENTITY}

    def inputs(self) -> list[Path]:
        """Return the checkpoint and the other files that are read."""
        return [path for _, path in self._resolved_request().sources]

    def damage(self) -> list[str]:
        """Return the differences between the folder and its manifest."""
        from export_scripts.conversion.convert import folder_problems

        folder, remedy = self.request.folder, "set overwrite=true to convert again."
        problems = folder_problems(folder, checksums=False)
        return [f"{folder} is damaged: {problem}; {remedy}" for problem in problems]

    def notes(self) -> list[str]:
        """Return a note if the checkpoint is not on this machine, or another path is read."""
        given, found = self.request.checkpoint_path, self._resolved_request().checkpoint_path
        key = f"{KEYS['checkpoint_path']}={given}"
        if self._is_remote:
            return [f"{key} is not on this machine: sizes are not checked against the model"]
        if found == given:
            return []
        if given.exists():
            return [f"{key}: using {found} in it"]
        return [f"{key} does not exist; using {found}"]

    @property
    def _is_remote(self) -> bool:
        return self.may_be_remote and not self._resolved_request().checkpoint_path.exists()

    def run(self, progress: Progress) -> Summary:
        """Convert.

        Raises:
            CheckpointMismatchError: the checkpoint lacks tensors of the layout, or has others.
            StageError: it cannot be read, or the disk is too small for the outputs.
        """
        from export_scripts.conversion.convert import convert

        report = partial(progress.update, "converting", unit="bytes")
        self.request.output_dir.mkdir(parents=True, exist_ok=True)
        try:
            done = convert(self._resolved_request(), progress=report)
        except CheckpointMismatchError:
            raise
        except ValueError as error:  # checkpoint, sizes or disk space
            raise StageError(str(error)) from error
        return {
            "tensors": done.tensors,
            "files": done.files,
            "size_bytes": done.size_bytes,
            "seconds": round(done.seconds, 2),
            "peak_memory_bytes": done.peak_memory_bytes,
            "remarks": list(done.remarks),
        }

    def _resolved_request(self) -> ConversionRequest:
        """Return the request with the path that `find_checkpoint` returns."""
        found = find_checkpoint(self.request.checkpoint_path)
        return replace(self.request, checkpoint_path=found)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint to read for a configured path.

    If `path` does not exist, `checkpoints` and `results/checkpoints` stand for each other: the NeMo
    launcher's guides name the former, its shipped configuration the latter. The root of a Hugging
    Face cache folder is replaced by its snapshot, and a folder by its only .nemo file if it holds
    no checkpoint of another kind.
    """
    near, far = CHECKPOINT_FOLDERS
    twin = path
    if path.parts[-2:] == far.parts:
        twin = path.parents[1] / near
    elif path.name == near.name:
        twin = path.parent / far
    found = path if path.exists() or not twin.exists() else twin
    if not found.is_dir():
        return found
    from export_scripts.checkpoints.huggingface import snapshot_folder

    archives = list(found.glob("*.nemo"))
    others = (
        entry.suffix == ".ckpt"
        or entry.name == "model_config.yaml"
        or (entry.is_dir() and "rank_" in entry.name)
        for entry in found.iterdir()
    )
    if len(archives) == 1 and not any(others):
        return archives[0]
    return snapshot_folder(found)
