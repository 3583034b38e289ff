"""The checkpoints of a training run, and whether each one is whole.

Every trainer says in its own way that a checkpoint is finished:

- NeMo 1 and 2 keep a file `<checkpoint>-unfinished` next to one that is being written or removed
  (`nemo/lightning/pytorch/callbacks/model_checkpoint.py`).
- Megatron-LM and Megatron Bridge write the iteration into `latest_checkpointed_iteration.txt` last.
- Trainers of Hugging Face write `trainer_state.json` into the folder after the weights.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from export_scripts.checkpoints.base import read_small
from export_scripts.checkpoints.partitioned import parse_rank_folder
from stages.convert import CHECKPOINT_FOLDERS

_TRACKER = "latest_checkpointed_iteration.txt"
_UNFINISHED = "-unfinished"
_STEP = re.compile(r"step[=_-](\d+)")
_ITERATION = re.compile(r"iter_(\d{7,})")
_HUGGING_FACE = re.compile(r"checkpoint-(\d+)")
# In the folder of the run itself, or below it.
_FOLDERS = (Path(), *CHECKPOINT_FOLDERS)


@dataclass(frozen=True)
class TrainedCheckpoint:
    """One checkpoint of a training run.

    Attributes:
        step: training step, or iteration.
        path: the checkpoint; where ranks have folders, the folder of these.
        name: name of the weight files in the folders of ranks; None for a checkpoint of its own.
        missing: what its trainer has not written yet; empty once the checkpoint is whole.
    """

    step: int
    path: Path
    name: str | None = None
    missing: str = ""

    @property
    def label(self) -> str:
        """The name that a user knows it by."""
        return self.name or self.path.name

    def files(self) -> tuple[Path, ...]:
        """Return the files and folders that hold it."""
        if self.name is None:
            return (self.path,)
        return tuple(sorted(self.path.glob(f"*/{self.name}"))) or (self.path / self.name,)


def find_checkpoints(run: Path) -> list[TrainedCheckpoint]:
    """Return the checkpoints below the folder of a training run, in the order of their steps.

    Of several copies of one step, such as NeMo's `-last`, the first by name is taken. A run whose
    folder does not exist has no checkpoints yet.
    """
    found: dict[int, TrainedCheckpoint] = {}
    for folder in (run / each for each in _FOLDERS):
        if folder.is_dir():
            for each in sorted(_in_folder(folder), key=lambda one: one.label):
                if "-EMA" in each.label:
                    continue  # weights averaged over training, next to the step's own
                if found.setdefault(each.step, each).missing and not each.missing:
                    found[each.step] = each
    return [found[step] for step in sorted(found)]


def _in_folder(folder: Path) -> Iterator[TrainedCheckpoint]:
    tracked = _tracked_iteration(folder)
    for entry in folder.iterdir():
        if match := _ITERATION.fullmatch(entry.name):
            step = int(match[1])
            missing = "" if tracked is not None and step <= tracked else f"its number in {_TRACKER}"
            yield TrainedCheckpoint(step, entry, missing=missing)
        elif match := _HUGGING_FACE.fullmatch(entry.name):
            state = "trainer_state.json"
            missing = "" if (entry / state).is_file() else state
            yield TrainedCheckpoint(int(match[1]), entry, missing=missing)
        elif parse_rank_folder(entry.name) is not None and entry.is_dir():
            found = ((path.name, _STEP.search(path.name)) for path in entry.glob("*.ckpt"))
            yield from (_nemo(folder, int(match[1]), name) for name, match in found if match)
        elif not entry.name.endswith(_UNFINISHED) and (match := _STEP.search(entry.name)):
            if entry.suffix == ".ckpt":
                yield _nemo(folder, int(match[1]), entry.name)
            elif entry.is_dir() or entry.suffix == ".nemo":
                missing = _unfinished(folder / entry.name.removesuffix(".nemo"))
                yield TrainedCheckpoint(int(match[1]), entry, missing=missing)


def _nemo(folder: Path, step: int, name: str) -> TrainedCheckpoint:
    """Return a checkpoint of NeMo 1 whose ranks have a file each, or that is one file."""
    ranks = [each for each in folder.iterdir() if parse_rank_folder(each.name) and each.is_dir()]
    late = sorted(each.name for each in ranks if not (each / name).is_file())
    missing = _unfinished(folder / name.removesuffix(".ckpt"))
    return TrainedCheckpoint(step, folder, name, missing or ", ".join(late))


def _unfinished(checkpoint: Path) -> str:
    marker = checkpoint.with_name(checkpoint.name + _UNFINISHED)
    return f"the removal of {marker.name}" if marker.exists() else ""


def _tracked_iteration(folder: Path) -> int | None:
    """Return the last iteration that Megatron has finished; None before the first."""
    try:
        text = read_small(folder / _TRACKER).decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
