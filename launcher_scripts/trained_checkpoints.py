"""The checkpoints of a training run, and whether each one is complete.

Every trainer marks a finished checkpoint in its own way; `trained_checkpoints.yaml` lists the
trainers with fixed checkpoint names. NeMo 1 and 2 name a checkpoint by the user's template, with
`step=<n>`, and keep a file `<checkpoint>-unfinished` next to one that is being written or removed
(`nemo/lightning/pytorch/callbacks/model_checkpoint.py`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from export_scripts.checkpoints import recognise_format
from export_scripts.checkpoints.base import read_small
from export_scripts.checkpoints.partitioned import parse_rank_folder
from foundations.files.yaml_content import read_table
from stages.convert import CHECKPOINT_FOLDERS

_UNFINISHED = "-unfinished"
_STEP = re.compile(r"step[=_-](\d+)")
# Checkpoints lie in the run's folder or in one of these below it; torchtitan's is singular.
_FOLDERS = (Path(), Path("checkpoint"), *CHECKPOINT_FOLDERS)
_PLACES = {part for folder in _FOLDERS for part in folder.parts}
# Entries that are not checkpoints of their own: NeMo's markers and its averaged (EMA) weights, and
# NeMo-RL's folders while it writes or replaces a checkpoint.
_IGNORED = re.compile(r".*-unfinished|.*-EMA.*|(tmp|old)_step_\d+")
# Names that look like a checkpoint even if its layout is unknown.
_CHECKPOINT_LIKE = re.compile(r"(?i).*(step|iter|epoch|checkpoint|ckpt).*\d.*")


@dataclass(frozen=True)
class _Layout:
    """The layout of a trainer's checkpoint folders.

    Attributes:
        name: pattern of the folder's whole name; its group is the step.
        written: files in the folder, any one of which is written after the weights.
        removed: a file in the folder that is removed once the checkpoint is complete.
        tracker: a file next to the folders that names the last complete checkpoint.
        model: glob pattern of the model within the folder; empty, or without a match: the folder.
    """

    name: str
    written: Sequence[str] = ()
    removed: str = ""
    tracker: str = ""
    model: str = ""


_LAYOUTS = [_Layout(**row) for row in read_table(Path(__file__).with_suffix(".yaml"))]


@dataclass(frozen=True)
class TrainedCheckpoint:
    """One checkpoint of a training run.

    Attributes:
        step: training step, or iteration.
        path: the checkpoint, or the folder that holds the rank folders.
        name: name of the weight file in each rank folder; None if `path` is the checkpoint.
        missing: what the trainer has not done yet; empty once the checkpoint is complete.
    """

    step: int
    path: Path
    name: str | None = None
    missing: str = ""

    @property
    def label(self) -> str:
        """The checkpoint's name for users."""
        return self.name or self.path.name

    def files(self) -> list[Path]:
        """Return the files and folders that hold the checkpoint."""
        if self.name is None:
            return [self.path]
        return sorted(self.path.glob(f"*/{self.name}")) or [self.path / self.name]


def find_checkpoints(run: Path) -> list[TrainedCheckpoint]:
    """Return the checkpoints below the folder of a training run, sorted by step.

    If one step has several copies, such as NeMo's `-last`, the first complete one by name is taken.
    A run whose folder does not exist has no checkpoints yet.
    """
    found: dict[int, TrainedCheckpoint] = {}
    for folder in _folders(run):
        entries = (checkpoint for entry in folder.iterdir() for checkpoint in _in_entry(entry))
        for checkpoint in sorted(entries, key=lambda checkpoint: checkpoint.label):
            if "-EMA" in checkpoint.label:
                continue
            if found.setdefault(checkpoint.step, checkpoint).missing and not checkpoint.missing:
                found[checkpoint.step] = checkpoint
    return [found[step] for step in sorted(found)]


def unknown_entries(run: Path) -> list[Path]:
    """Return entries that look like a checkpoint, or can be read as one, but match no layout.

    Symbolic links, such as those to the latest or best checkpoint, are ignored.
    """
    return [
        entry
        for folder in _folders(run)
        for entry in sorted(folder.iterdir())
        if not entry.is_symlink() and entry.name not in _PLACES and _is_unknown(entry)
    ]


def _folders(run: Path) -> Iterator[Path]:
    return (folder for name in _FOLDERS if (folder := run / name).is_dir())


def _is_unknown(entry: Path) -> bool:
    if _IGNORED.fullmatch(entry.name) or parse_rank_folder(entry.name) or any(_in_entry(entry)):
        return False
    if not entry.is_dir():
        return entry.suffix == ".nemo"
    try:
        return bool(_CHECKPOINT_LIKE.fullmatch(entry.name) or recognise_format(entry))
    except (OSError, ValueError):
        return False


def _in_entry(entry: Path) -> Iterator[TrainedCheckpoint]:
    """Yield the checkpoints in an entry: all in a rank folder, at most one in any other entry."""
    if _IGNORED.fullmatch(entry.name):
        return
    folder = entry.parent
    if parse_rank_folder(entry.name) is not None and entry.is_dir():
        found = ((path.name, _STEP.search(path.name)) for path in entry.glob("*.ckpt"))
        yield from (_nemo(folder, int(match[1]), name) for name, match in found if match)
        return
    for layout in _LAYOUTS:
        if (match := re.fullmatch(layout.name, entry.name)) and entry.is_dir():
            step, model = int(match[1]), sorted(entry.glob(layout.model)) if layout.model else ()
            path = model[-1] if model else entry
            yield TrainedCheckpoint(step, path, missing=_missing(layout, entry, step))
            return
    if match := _STEP.search(entry.name):
        if entry.suffix == ".ckpt":
            yield _nemo(folder, int(match[1]), entry.name)
        elif entry.is_dir() or entry.suffix == ".nemo":
            missing = _unfinished(entry.with_name(entry.name.removesuffix(".nemo")))
            yield TrainedCheckpoint(int(match[1]), entry, missing=missing)


def _missing(layout: _Layout, entry: Path, step: int) -> str:
    """Return what the trainer still has to do with a checkpoint; empty if it is complete."""
    if layout.removed and (entry / layout.removed).exists():
        return f"the removal of {layout.removed}"
    if layout.written and not any((entry / name).is_file() for name in layout.written):
        return " or ".join(layout.written)
    if layout.tracker:
        tracked = _tracked_step(entry.parent / layout.tracker)
        if tracked is None or step > tracked:
            return f"its number in {layout.tracker}"
    return ""


def _nemo(folder: Path, step: int, name: str) -> TrainedCheckpoint:
    """Return a NeMo 1 checkpoint: a file in each rank folder, or a single file."""
    ranks = [rank for rank in folder.iterdir() if parse_rank_folder(rank.name) and rank.is_dir()]
    late = sorted(rank.name for rank in ranks if not (rank / name).is_file())
    missing = _unfinished(folder / name.removesuffix(".ckpt"))
    return TrainedCheckpoint(step, folder, name, missing or ", ".join(late))


def _unfinished(checkpoint: Path) -> str:
    marker = checkpoint.with_name(checkpoint.name + _UNFINISHED)
    return f"the removal of {marker.name}" if marker.exists() else ""


def _tracked_step(tracker: Path) -> int | None:
    """Return the step of the last complete checkpoint; None before the first."""
    try:
        text = read_small(tracker).decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    match = re.fullmatch(r"(?:global_step)?([0-9]{1,18})", text)
    return int(match[1]) if match else None
