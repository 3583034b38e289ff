"""Stage `convert`: a checkpoint becomes FasterTransformer shards, or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from export_scripts.conversion.request import ConversionRequest
from foundations.errors import CheckpointMismatchError
from stages.base import Stage, StageError, Summary, as_json
from stages.progress import Progress

# Configuration keys, for messages.
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
_WITHOUT_EFFECT = ("output_dir", "processes", "overwrite", "pp_size", "for_text", "names")
# The two places where training leaves its checkpoints.
CHECKPOINT_FOLDERS = (Path("checkpoints"), Path("results", "checkpoints"))


@dataclass(eq=False)
class ConvertStage(Stage):
    """Writes `<triton_model_dir>/1/<TP>-gpu`, or `huggingface` there, from a checkpoint.

    Attributes:
        request: as configured; what is really read is in `_found`.
        may_be_elsewhere: the checkpoint may be on machines that this one cannot see.
    """

    name = "convert"
    guards_inputs = True
    takes_outputs = True

    request: ConversionRequest
    may_be_elsewhere: bool = False

    def __post_init__(self) -> None:
        self.request = replace(self.request, names=KEYS)

    def check(self) -> list[str]:
        """Return the problems of checkpoint, sizes and destination."""
        from export_scripts.conversion.convert import check_conversion

        if self._is_elsewhere:
            return []
        request = self._found()
        if self.marker_path().exists():
            # `finding` compares the folder of an earlier run, and reports it.
            request = replace(request, overwrite=True)
        return check_conversion(request)

    def outputs(self) -> list[Path]:
        """Return the folder to write."""
        return [self.request.folder]

    def marker_path(self) -> Path:
        """Return the marker, next to the folder, which holds exactly the loader's files."""
        return self.request.folder.with_name(f"{self.request.folder.name}.convert.json")

    def identity(self) -> dict[str, Any]:
        """Return the source and everything that decides the bytes."""
        values = asdict(self._found())
        return {
            KEYS[name]: as_json(value)
            for name, value in values.items()
            if name not in _WITHOUT_EFFECT
        }

    def inputs(self) -> list[Path]:
        """Return the checkpoint and the files that go with it."""
        return [path for _, path in self._found().sources]

    def damage(self) -> list[str]:
        """Return differences between the folder on disk and what describes it."""
        from export_scripts.conversion.convert import folder_problems

        folder, remedy = self.request.folder, "set overwrite=true to convert again."
        problems = folder_problems(folder, checksums=False)
        return [f"{folder} is damaged: {problem}; {remedy}" for problem in problems]

    def notes(self) -> list[str]:
        """Return a remark on a checkpoint that is elsewhere, or that was taken for another."""
        asked, found = self.request.checkpoint_path, self._found().checkpoint_path
        key = f"{KEYS['checkpoint_path']}={asked}"
        if self._is_elsewhere:
            return [f"{key} is not on this machine: whether sizes fit the model is not known"]
        if found == asked:
            return []
        if asked.exists():
            return [f"{key}: taking {found} in it"]
        return [f"{key} does not exist; taking {found}"]

    @property
    def _is_elsewhere(self) -> bool:
        return self.may_be_elsewhere and not self._found().checkpoint_path.exists()

    def run(self, progress: Progress) -> Summary:
        """Convert.

        Raises:
            CheckpointMismatchError: the checkpoint lacks what the layout needs, or holds more.
            StageError: it cannot be read, or there is no room for the shards.
        """
        from export_scripts.conversion.convert import convert

        report = partial(progress.update, "converting", unit="bytes")
        self.request.output_dir.mkdir(parents=True, exist_ok=True)
        try:
            done = convert(self._found(), progress=report)
        except CheckpointMismatchError:
            raise
        except ValueError as error:  # checkpoint, sizes, or too little room
            raise StageError(str(error)) from error
        return {
            "tensors": done.tensors,
            "files": done.files,
            "size_bytes": done.size_bytes,
            "seconds": round(done.seconds, 2),
            "peak_memory_bytes": done.peak_memory_bytes,
            "remarks": list(done.remarks),
        }

    def _found(self) -> ConversionRequest:
        """Return the request with what `find_checkpoint` finds for its checkpoint."""
        found = find_checkpoint(self.request.checkpoint_path)
        return replace(self.request, checkpoint_path=found)


def find_checkpoint(path: Path) -> Path:
    """Return `path`, or its twin `checkpoints` <-> `results/checkpoints` when only that exists.

    Guides of the NeMo launcher name the first, its shipped configuration the second. The root of a
    Hugging Face cache folder is replaced by the snapshot in it, and a folder by the only .nemo file
    in it when it holds no checkpoint of another kind.
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
        each.suffix == ".ckpt"
        or each.name == "model_config.yaml"
        or (each.is_dir() and "rank_" in each.name)
        for each in found.iterdir()
    )
    if len(archives) == 1 and not any(others):
        return archives[0]
    return snapshot_folder(found)
