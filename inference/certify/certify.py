"""Certify a folder: run every part of the comparison in order, and resume an interrupted run."""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import fingerprint_files
from export_scripts.conversion.plan import plan_conversion
from foundations import __version__
from foundations.files.checksum import sha256_of
from foundations.files.journal import Journal
from foundations.files.json_content import record_in
from inference.certify.activations import Source
from inference.certify.certificate import Certificate
from inference.certify.findings import Part
from inference.certify.layers import compare_layers, load_source, stored_types
from inference.certify.options import CertifySection, endpoint_problems, source_request
from inference.certify.pair import Pair, open_pair
from inference.certify.served import compare_endpoint, compare_served, read_training_rows
from inference.certify.settings import compare_generation, compare_settings
from inference.certify.tensors import Progress, TensorRecord, compare_tensors
from inference.certify.texts import compare_texts

STATE_NAME = "certify.jsonl"  # the journal of compared tensors
Given = Sequence[tuple[str, str]]


def certify(
    options: CertifySection, given: Given = (), progress: Progress = lambda *_: None
) -> Certificate:
    """Compare a folder with its source in every part.

    Without a folder, only the endpoint is compared with the source; without both, with a training
    step. `given` are config.ini values that the source does not state, as for a conversion.

    Raises:
        CheckpointMismatchError: the source cannot be read, or is a model of another family.
        ValueError: a path is not a checkpoint, or an option needs another one.
    """
    if problems := list(endpoint_problems(options, lambda name: f"--{name.replace('_', '-')}")):
        raise ValueError("\n".join(problems))
    output = Path(options.output_dir)
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    try:
        return _compare_parts(options, tuple(given), progress)
    except (ValueError, OSError):
        with contextlib.suppress(OSError):  # a folder that holds a journal is not empty, and stays
            for folder in created:
                folder.rmdir()
        raise


def _compare_parts(options: CertifySection, given: Given, progress: Progress) -> Certificate:
    rows = read_training_rows(Path(options.training)) if options.training else None
    parts: list[Part] = []
    sides: dict[str, Any] = {}
    left_out: tuple[str, ...] = ()
    if options.source is not None and options.folder is not None:
        output = Path(options.output_dir)
        with tempfile.TemporaryDirectory(dir=output, prefix=".scratch-") as scratch:
            pair = open_pair(Path(options.folder), options, given, scratch_dir=Path(scratch))
            texts, tokens = compare_texts(pair)
            journal = Journal(output / STATE_NAME, _identity(pair, options, given))
            records = (record_in(TensorRecord, line) for line in journal.lines())
            tensors = compare_tensors(
                pair,
                tokens=tokens,
                done={record.key: record for record in records},
                keep=lambda record: journal.add(asdict(record)),
                progress=progress,
            )
            parts = [tensors, compare_settings(pair), *texts, compare_generation(pair)]
            source_files, folder_files = pair.files
            sides = {
                "source": _side(options.source, pair.facts.reader.format, source_files),
                "folder": _side(options.folder, pair.folder.reader.format, folder_files),
            }

            def ask(source: Source) -> Iterator[Part]:
                if options.endpoint is not None:
                    yield compare_endpoint(source, options, stored_types(pair.folder))

            if options.layers or options.endpoint is not None:
                parts += compare_layers(pair, options, ask=ask, scratch=Path(scratch))
        requested = {
            "layers and logits (--no-layers)": options.layers,
            "served answers (--endpoint URL)": options.endpoint is not None,
        }
        left_out = tuple(name for name, is_requested in requested.items() if not is_requested)
    elif options.source is not None:
        parts.append(_compare_source_with_endpoint(options, given))
    if rows is not None:
        parts.append(compare_served("training", rows, str(options.training), options))
    return Certificate(sides, tuple(parts), left_out, options, given)


def _compare_source_with_endpoint(options: CertifySection, given: Given) -> Part:
    """Compare a server with the source, without the folder that it serves."""
    with tempfile.TemporaryDirectory() as scratch:
        request = source_request(
            options, given, output_dir=Path(scratch), tp_size=1, weight_data_type="fp32"
        )
        plan = plan_conversion(request, scratch_dir=Path(scratch))
        loaded = load_source(plan, plan.facts.reader.path, Path(scratch))
        return compare_endpoint(loaded, options, ())


def _side(path: str, kind: str, files: Iterable[Path]) -> dict[str, Any]:
    """Describe one side: the SHA-256 of each file, and of the JSON table of these checksums."""
    sums = {}
    for file in sorted(filter(Path.is_file, files)):
        is_inside = file != Path(path) and file.is_relative_to(path)
        sums[str(file.relative_to(path)) if is_inside else file.name] = sha256_of(file)
    total = sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
    return {"path": path, "format": kind, "sha256": total, "files": sums}


def _identity(pair: Pair, options: CertifySection, given: Given) -> str:
    """Return a journal identity, which changes when earlier records no longer hold."""
    files = [[*filter(Path.is_file, side)] for side in pair.files]
    # The modification time can be restored, the inode's change time cannot.
    change_times = [file.stat().st_ctime_ns for side in files for file in side]
    paths = [str(file) for side in files for file in side]
    source = [str(pair.config), *options.lora]
    return json.dumps(
        [__version__, *map(fingerprint_files, files), change_times, paths, given, source]
    )
