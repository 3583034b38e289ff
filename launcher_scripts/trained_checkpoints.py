"""The checkpoints of a training run, and whether each one is whole.

Every trainer says in its own way that a checkpoint is finished; `trained_checkpoints.yaml` has
those whose names are their own. NeMo 1 and 2 name a checkpoint by a template of the user's with
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
from foundations.files.yaml_content import read_own_table
from stages.convert import CHECKPOINT_FOLDERS

_UNFINISHED = "-unfinished"
_STEP = re.compile(r"step[=_-](\d+)")
# In the folder of the run itself, or below it; torchtitan's is in the singular.
_FOLDERS = (Path(), Path("checkpoint"), *CHECKPOINT_FOLDERS)
_PLACES = {part for folder in _FOLDERS for part in folder.parts}
# Entries that hold nothing to read, or nothing more: NeMo's markers, and its weights averaged over
# training next to the step's own; NeMo-RL's folders while it writes and replaces.
_PASSED_OVER = re.compile(r".*-unfinished|.*-EMA.*|(tmp|old)_step_\d+")
# Names by which a checkpoint of an unknown form is noticed, though it may not be read.
_STEPPED = re.compile(r"(?i).*(step|iter|epoch|checkpoint|ckpt).*\d.*")


@dataclass(frozen=True)
class _Form:
    """The form of a trainer's checkpoints: folders whose whole `name` ends with the step.

    Attributes:
        written: files of which any one is written into the folder after the weights.
        removed: a file in the folder that goes once it is whole.
        tracker: a file next to the folders that names the last one that is whole.
        model: where in the folder the model lies, as a pattern; the folder itself where nothing is.
    """

    name: str
    written: Sequence[str] = ()
    removed: str = ""
    tracker: str = ""
    model: str = ""


_FORMS = [_Form(**row) for row in read_own_table(Path(__file__).with_suffix(".yaml"))]


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
    for folder in _folders(run):
        entries = (each for entry in folder.iterdir() for each in _of(entry))
        for each in sorted(entries, key=lambda one: one.label):
            if "-EMA" in each.label:
                continue
            if found.setdefault(each.step, each).missing and not each.missing:
                found[each.step] = each
    return [found[step] for step in sorted(found)]


def unknown_entries(run: Path) -> list[Path]:
    """Return what has no name of a known form, and looks like a checkpoint or can be read as one.

    Links, such as those to the latest and to the best, are none.
    """
    return [
        entry
        for folder in _folders(run)
        for entry in sorted(folder.iterdir())
        if not entry.is_symlink() and entry.name not in _PLACES and _is_unknown(entry)
    ]


def _folders(run: Path) -> Iterator[Path]:
    return (folder for each in _FOLDERS if (folder := run / each).is_dir())


def _is_unknown(entry: Path) -> bool:
    if _PASSED_OVER.fullmatch(entry.name) or parse_rank_folder(entry.name) or any(_of(entry)):
        return False
    if not entry.is_dir():
        return entry.suffix == ".nemo"
    try:
        return bool(_STEPPED.fullmatch(entry.name) or recognise_format(entry))
    except (OSError, ValueError):
        return False


def _of(entry: Path) -> Iterator[TrainedCheckpoint]:
    """Yield the checkpoints of an entry: one at most, but for a rank's folder all in it."""
    if _PASSED_OVER.fullmatch(entry.name):
        return
    folder = entry.parent
    if parse_rank_folder(entry.name) is not None and entry.is_dir():
        found = ((path.name, _STEP.search(path.name)) for path in entry.glob("*.ckpt"))
        yield from (_nemo(folder, int(match[1]), name) for name, match in found if match)
        return
    for form in _FORMS:
        if (match := re.fullmatch(form.name, entry.name)) and entry.is_dir():
            step, model = int(match[1]), sorted(entry.glob(form.model)) if form.model else ()
            path = model[-1] if model else entry
            yield TrainedCheckpoint(step, path, missing=_missing(form, entry, step))
            return
    if match := _STEP.search(entry.name):
        if entry.suffix == ".ckpt":
            yield _nemo(folder, int(match[1]), entry.name)
        elif entry.is_dir() or entry.suffix == ".nemo":
            missing = _unfinished(entry.with_name(entry.name.removesuffix(".nemo")))
            yield TrainedCheckpoint(int(match[1]), entry, missing=missing)


def _missing(form: _Form, entry: Path, step: int) -> str:
    """Return what the trainer has yet to do with a checkpoint; "" if it is whole."""
    if form.removed and (entry / form.removed).exists():
        return f"the removal of {form.removed}"
    if form.written and not any((entry / name).is_file() for name in form.written):
        return " or ".join(form.written)
    if form.tracker:
        tracked = _tracked_step(entry.parent / form.tracker)
        if tracked is None or step > tracked:
            return f"its number in {form.tracker}"
    return ""


def _nemo(folder: Path, step: int, name: str) -> TrainedCheckpoint:
    """Return a checkpoint of NeMo 1 whose ranks have a file each, or that is one file."""
    ranks = [each for each in folder.iterdir() if parse_rank_folder(each.name) and each.is_dir()]
    late = sorted(each.name for each in ranks if not (each / name).is_file())
    missing = _unfinished(folder / name.removesuffix(".ckpt"))
    return TrainedCheckpoint(step, folder, name, missing or ", ".join(late))


def _unfinished(checkpoint: Path) -> str:
    marker = checkpoint.with_name(checkpoint.name + _UNFINISHED)
    return f"the removal of {marker.name}" if marker.exists() else ""


def _tracked_step(tracker: Path) -> int | None:
    """Return the step of the last checkpoint that is whole; None before the first."""
    try:
        text = read_small(tracker).decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    match = re.fullmatch(r"(?:global_step)?([0-9]{1,18})", text)
    return int(match[1]) if match else None
