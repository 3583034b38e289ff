"""Command: python -m export_scripts.inspect --help; numpy is not imported."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.huggingface import open_configuration
from export_scripts.commands import command_parser, run_command, say
from export_scripts.conversion.plan import find_mapping
from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.files.json_content import json_object
from export_scripts.ft.config_ini import CONFIG_NAME, read_config
from export_scripts.ft.layout import EXTRA_FILES, expected_files, manifest_path
from export_scripts.ft.validation import validate_directory


def describe(path: Path, *, tensors: bool = False) -> dict[str, Any]:
    """Return a description of a path.

    Args:
        path: A checkpoint, a folder with config.json alone, or a converted folder.
        tensors: Also list every tensor.

    Raises:
        ValueError: The path is neither.
    """
    if path.is_dir() and (path / CONFIG_NAME).is_file():
        return _describe_folder(path, tensors=tensors)
    reader = open_configuration(path) or open_checkpoint(path)
    return _describe_checkpoint(reader, tensors=tensors)


def _describe_folder(path: Path, *, tensors: bool) -> dict[str, Any]:
    family, config = read_config(path)
    files = expected_files(family, config, config.tensor_para_size)
    facts: dict[str, Any] = {
        "kind": "FasterTransformer folder",
        "path": str(path),
        "family": family.name,
        "model type": family.model_type,
        "tensor parallel": config.tensor_para_size,
        "weight type": config.weight_data_type,
        "parameters": sum(math.prod(tensor.shape) for tensor in family.tensors(config)),
        "weight files": len(files),
        "bytes": sum(files.values()),
        "config": config.sections(),
        "tokenizer": sorted(
            {
                entry.name
                for pattern in EXTRA_FILES
                for entry in path.glob(pattern)
                if entry.name not in (CONFIG_NAME, "args.txt")
            }
        ),
        "problems": validate_directory(path, checksums=False),
    }
    manifest = manifest_path(path)
    # A damaged manifest is among the problems.
    with contextlib.suppress(ValueError, LookupError, TypeError):
        if manifest.is_file():
            record = json_object(manifest.read_bytes(), manifest)
            facts["converted from"] = record["source"]["path"]
            facts["converted by"] = record["tool"]
    if tensors:
        facts["tensors"] = {t.name: list(t.shape) for t in family.tensors(config)}
    return facts


def _describe_checkpoint(reader: CheckpointReader, *, tensors: bool) -> dict[str, Any]:
    pieces = {key: reader.pieces(key) for key in reader.keys()}  # noqa: SIM118 - not a mapping
    types = Counter(piece.dtype for each in pieces.values() for piece in each)
    config = reader.config()
    facts: dict[str, Any] = {
        "kind": f"{reader.format} checkpoint",
        "path": str(reader.path),
        "tensor parallel": config.get("tensor_model_parallel_size") or 1,
        "pipeline parallel": config.get("pipeline_model_parallel_size") or 1,
        "tensors stored": len(pieces),
        "bytes": sum(piece.span_bytes for each in pieces.values() for piece in each),
        "types": ", ".join(f"{name} ({count})" for name, count in types.most_common()),
        "tokenizer": [file.name for file in reader.tokenizer_files()],
        "notes": list(reader.notes()),
        "config": {k: v for k, v in config.items() if isinstance(v, (str, int, float, bool))},
    }
    facts |= _becomes(reader)
    if tensors:
        facts["tensors"] = {key: [list(p.shape) for p in each] for key, each in pieces.items()}
    return facts


def _becomes(reader: CheckpointReader) -> dict[str, Any]:
    """Return the family a checkpoint becomes, or every reason it cannot be converted."""
    facts = Facts(
        reader=reader, tp_size=1, weight_data_type="fp16", tokenizer=tuple(reader.tokenizer_files())
    )
    try:
        mapping = find_mapping(facts)
        facts = dataclasses.replace(facts, prefix=mapping.prefix)
        reasons = mapping.unsupported(facts)
        config = None if reasons else mapping.config(facts)
    except CheckpointMismatchError as error:
        return {"cannot be converted": error.problems}
    except ValueError as error:
        return {"source": mapping.title, "family": mapping.family.name, "needs": str(error)}
    out: dict[str, Any] = {"source": mapping.title, "family": mapping.family.name}
    if config is None:
        return out | {"cannot be converted": reasons}
    shapes = [tensor.shape for tensor in mapping.family.tensors(config)]
    return out | {
        "parameters": sum(math.prod(shape) for shape in shapes),
        "inference tensor parallel": mapping.family.tp_sizes(config),
    }


def description_text(facts: Mapping[str, Any]) -> str:
    """Return a description as text."""
    lines: list[str] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines.append(f"{name}:")
            lines += [f"  {line}" for line in _pairs(value)]
        elif isinstance(value, list) and value and not isinstance(value[0], int):
            lines += [f"{name}:", *(f"  {item}" for item in value)]
        elif value not in ([], "", None):
            lines.append(f"{name}: {_short(value)}")
    return "\n".join(lines)


def _pairs(value: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"[{key}]", *(f"  {inner}" for inner in _pairs(item))]
        else:
            lines.append(f"{key} = {_short(item)}")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = command_parser(
        "inspect",
        """
        Describe a checkpoint or a converted folder: format, family, sizes, parallelism, types,
        tokenizer, and whether a checkpoint can be converted. Reads no tensor.
        """,
        "exit status: 0 when the path is recognised, 1 otherwise.",
    )
    parser.add_argument("path", type=Path, help="a .nemo archive, a checkpoint or an FT folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")

    def handler(options: argparse.Namespace) -> int:
        facts = describe(options.path, tensors=options.tensors)
        say(json.dumps(facts, indent=1) if options.json else description_text(facts))
        return 0

    return run_command(parser, handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
