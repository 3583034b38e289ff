"""Certify a folder: every part of the comparison, in order, resumed where it was interrupted."""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from export_scripts import __version__
from export_scripts.checkpoints.base import fingerprint_files
from export_scripts.files.checksum import sha256_of
from inference.certify.certificate import Certificate, Side
from inference.certify.findings import Part, not_computed
from inference.certify.layers import Original, compare_layers, compute_original
from inference.certify.pair import Pair, open_pair
from inference.certify.served import Endpoint, compare_served, read_training_rows
from inference.certify.settings import compare_generation, compare_settings
from inference.certify.tensors import Progress, TensorRecord, compare_tensors
from inference.certify.texts import compare_texts

_SERVED_ROWS = 8
STATE_NAME = "certify.jsonl"  # what was compared so far


@dataclass(frozen=True)
class CertifyRequest:
    """A request to certify a folder.

    Attributes:
        source: the checkpoint, in any format that is converted.
        folder: a Hugging Face folder or a folder of shards, whoever made it. Without both, a
            training step alone is compared with the endpoint.
        output: where the certificate goes, and the state of an interrupted run.
        given: config.ini values that the source does not state, as for a conversion.
        data_type: in which shards are computed; everything else is computed in fp32.
        tolerance: largest relative error of a layer; None for that of the types.
        computes: whether layers and logits are computed.
        endpoint: a running server of the folder.
        training: log probabilities of a training step, which the endpoint's are compared with.
    """

    source: Path | None
    folder: Path | None
    output: Path
    given: tuple[tuple[str, str], ...] = ()
    data_type: str = "fp32"
    tolerance: float | None = None
    prompt_ids: tuple[int, ...] = ()
    computes: bool = True
    endpoint: Endpoint | None = None
    training: Path | None = None
    key: Path | None = None


def certify(request: CertifyRequest, progress: Progress = lambda *_: None) -> Certificate:
    """Compare a folder with its source in every part.

    Raises:
        CheckpointMismatchError: the source cannot be read, or is a model of another family.
        ValueError: a path is not a checkpoint.
    """
    made = [each for each in (request.output, *request.output.parents) if not each.exists()]
    request.output.mkdir(parents=True, exist_ok=True)
    try:
        return _certified(request, progress)
    except (ValueError, OSError):
        with contextlib.suppress(OSError):  # one of them holds what was compared so far
            for folder in made:
                folder.rmdir()
        raise


def _certified(request: CertifyRequest, progress: Progress) -> Certificate:
    if request.source is None or request.folder is None:
        return Certificate(None, None, tuple(_training(request)), (), {})
    with tempfile.TemporaryDirectory(dir=request.output, prefix=".scratch-") as scratch:
        given = request.given
        pair = open_pair(request.source, request.folder, given=given, scratch_dir=Path(scratch))
        texts = compare_texts(pair)
        with _State(request.output / STATE_NAME, _identity(pair, request)) as state:
            tensors = compare_tensors(
                pair,
                tokens=texts.tokens,
                done=state.records,
                keep=state.keep,
                progress=progress,
            )
            sides = [
                Side(str(path), facts.reader.format, state.hashes(files, path))
                for path, facts, files in zip(
                    (request.source, request.folder),
                    (pair.facts, pair.folder.facts),
                    pair.files,
                    strict=True,
                )
            ]
        parts: list[Part] = [tensors, compare_settings(pair), *texts.parts]
        parts.append(compare_generation(pair))
        asked: list[str] = []
        _computed(pair, request, Path(scratch), parts, asked)
    return Certificate(
        sides[0],
        sides[1],
        tuple(parts),
        tuple(asked),
        {"given": dict(given), "data_type": request.data_type, "tolerance": request.tolerance},
    )


def _computed(
    pair: Pair, request: CertifyRequest, scratch: Path, parts: list[Part], asked: list[str]
) -> None:
    """Add the parts that compute the models or ask a server, and what was not asked for."""
    original: Original | Part | None = None
    if request.computes:
        original = compute_original(
            pair,
            prompt_ids=request.prompt_ids,
            rows=_SERVED_ROWS if request.endpoint else 0,
            scratch_dir=scratch,
        )
        if isinstance(original, Original):
            kinds = {"data_type": request.data_type, "tolerance": request.tolerance}
            parts.append(compare_layers(pair, original, **kinds))  # type: ignore[arg-type]
        else:
            parts.append(original)
    else:
        asked.append("layers and logits (--no-layers)")
    if request.endpoint is None:
        asked.append("served answers (--endpoint URL)")
    elif isinstance(original, Original) and original.rows:
        of = original.title
        parts.append(compare_served("served", original.rows, of, request.endpoint))
    else:
        parts.append(not_computed("served", "nothing could compute the source's log probabilities"))
    parts += _training(request)


def _training(request: CertifyRequest) -> Iterator[Part]:
    """Yield the comparison of a training step with the endpoint, if that is asked for."""
    if request.endpoint is not None and request.training is not None:
        rows = read_training_rows(request.training)
        yield compare_served("training", rows, str(request.training), request.endpoint)


def _identity(pair: Pair, request: CertifyRequest) -> str:
    """Return what changes when a comparison has to begin anew."""
    files = [[file for file in several if file.is_file()] for several in pair.files]
    # An editor can restore the time of a change, and not that of the change of the inode.
    changes = [file.stat().st_ctime_ns for several in files for file in several]
    prints = [*map(fingerprint_files, files), *changes]
    facts = [__version__, *prints, request.given, str(request.source), str(request.folder)]
    return sha256(json.dumps(facts).encode()).hexdigest()


class _State:
    """Records of an interrupted run: a line each, after one that says of what they are."""

    def __init__(self, path: Path, identity: str) -> None:
        self.records: dict[str, TensorRecord] = {}
        self._hashes: dict[str, str] = {}
        self._path, self._identity = path, identity
        self._file: TextIO

    def __enter__(self) -> "_State":
        lines = self._path.read_text("utf-8").split("\n")[:-1] if self._path.is_file() else []
        if lines and lines[0] == self._identity:
            for line in lines[1:]:
                self._read(json.loads(line))
        else:
            lines = []
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write("".join(f"{line}\n" for line in lines or [self._identity]))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, row: dict[str, Any]) -> None:
        if "sha256" in row:
            self._hashes[row["path"]] = row["sha256"]
            return
        names = {field.name for field in fields(TensorRecord)}
        values = {name: _tuples(value) for name, value in row.items() if name in names}
        record = TensorRecord(**values)
        self.records[record.key] = record

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def keep(self, record: TensorRecord) -> None:
        """Add a record."""
        self._write(asdict(record))

    def hashes(self, files: Iterable[Path], folder: Path) -> dict[str, str]:
        """Return the SHA-256 of files by their names in a folder."""
        found = {}
        for path in sorted(each for each in files if each.is_file()):
            name = str(path)
            if name not in self._hashes:
                self._hashes[name] = sha256_of(path)
                self._write({"path": name, "sha256": self._hashes[name]})
            inside = path.is_relative_to(folder)
            found[str(path.relative_to(folder)) if inside and path != folder else path.name] = (
                self._hashes[name]
            )
        return found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
