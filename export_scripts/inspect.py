"""Command: python -m export_scripts.inspect --help; numpy is not imported."""

import argparse
import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.huggingface import (
    is_huggingface,
    open_configuration,
    snapshot_folder,
)
from export_scripts.checkpoints.quantized import quantization, with_plain_weights
from export_scripts.checkpoints.sharded_huggingface import CONFIG_NAME as HUGGINGFACE_CONFIG
from export_scripts.conversion.huggingface import plan_huggingface
from export_scripts.conversion.lora import with_own_adapter
from export_scripts.conversion.plan import find_mapping, plan_conversion
from export_scripts.conversion.request import ConversionRequest
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.ft.config_ini import CONFIG_NAME, read_config
from export_scripts.ft.layout import TOKENIZER_FILES, expected_files
from export_scripts.ft.validation import read_manifest, validate_directory
from foundations.commands import command_parser, run_command, say
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table


def describe(path: Path, *, tensors: bool = False, settings: Path | None = None) -> Fields:
    """Return a description of a path, and what can be done with it; `tensors` lists all tensors.

    `settings` is the config.json, or its folder, for a trainer's checkpoint without one.

    Raises:
        ValueError: The path is not a checkpoint, a converted folder or a config.json.
    """
    if path.name == HUGGINGFACE_CONFIG and path.is_file():
        path = path.parent
    path = snapshot_folder(path)
    if path.is_dir() and (path / CONFIG_NAME).is_file():
        facts = _describe_folder(path, tensors=tensors)
    else:
        try:
            facts = _describe_checkpoint(open_checkpoint(path, settings=settings), tensors=tensors)
        except CheckpointMismatchError as error:
            if not is_huggingface(path):
                raise
            facts = _describe_config(path, error.problems)
    return facts | {"can be": facts.pop("can be")}  # moved to the end


def _describe_folder(path: Path, *, tensors: bool) -> Fields:
    family, config = read_config(path)
    files = expected_files(family, config)
    problems = validate_directory(path, checksums=False)
    facts = {
        "kind": "FasterTransformer folder",
        "path": str(path),
        "family": family.name,
        "model type": family.model_type,
        "tensor parallel": config.tensor_para_size,
        "weight type": config.weight_data_type,
        "parameters": sum(
            math.prod(tensor.shape) for tensor in family.tensors(config) if tensor.fp8_part != 1
        ),
        "weight files": len(files),
        "bytes": sum(files.values()),
        "config": config.sections(),
        "tokenizer": sorted(
            {entry.name for pattern in TOKENIZER_FILES for entry in path.glob(pattern)}
        ),
        "problems": problems,
        "can be": _served(family, config),
    }
    if not problems:
        _add_target(facts, path)
    # The problems include a damaged manifest.
    with contextlib.suppress(ValueError, LookupError):
        manifest = read_manifest(path)
        facts["converted from"] = manifest["source"]["path"]
        facts["converted by"] = manifest["tool"]
    if tensors:
        facts["tensors"] = {t.name: list(t.shape) for t in family.tensors(config)}
    return facts


def _describe_checkpoint(reader: CheckpointReader, *, tensors: bool) -> Fields:
    pieces = reader.tensors
    types = Counter(piece.dtype for each in pieces.values() for piece in each)
    config = reader.config
    quantised = quantization(reader)
    facts: Fields = {
        "kind": f"{reader.format} checkpoint",
        "path": str(reader.path),
        "tensor parallel": config.get("tensor_model_parallel_size") or 1,
        "pipeline parallel": config.get("pipeline_model_parallel_size") or 1,
        "tensors stored": len(pieces),
        "bytes": sum(piece.span_bytes for each in pieces.values() for piece in each),
        "types": ", ".join(f"{name} ({count})" for name, count in types.most_common()),
        "quantised by": quantised and str(quantised.get("quant_method", "unknown")),
        "tokenizer": list(reader.tokenizer),
        "notes": list(reader.remarks),
        "config": _plain(config or reader.settings),
    }
    facts |= _becomes(reader)
    if "parameters" in facts and pieces:
        _add_target(facts, Path(reader.path), reader)
    facts["can be"] += _passed_through(reader)
    if tensors:
        facts["tensors"] = {key: [list(p.shape) for p in each] for key, each in pieces.items()}
    return facts


def _describe_config(path: Path, problems: Sequence[str]) -> Fields:
    """Return a description from config.json of a folder whose weights cannot be read."""
    reader = open_configuration(path)
    facts = _becomes(reader)
    return {
        "kind": "huggingface configuration",
        "path": str(path),
        "weights": list(problems),
        "tokenizer": list(reader.tokenizer),
        "config": _plain(reader.config),
        **facts,
        "can be": facts["can be"] + _passed_through(reader),
    }


def _plain(config: Table) -> Fields:
    return {k: v for k, v in config.items() if isinstance(v, (str, int, float, bool))}


def _becomes(reader: CheckpointReader) -> Fields:
    """Return the family that a checkpoint becomes, or every reason why it cannot be converted."""
    try:
        plain = with_own_adapter(with_plain_weights(reader))
        facts = Facts(plain, tp_size=1, weight_data_type="fp16", tokenizer=reader.tokenizer)
        mapping, facts = find_mapping(facts)
    except CheckpointMismatchError as error:
        return {"cannot be converted": error.problems, "can be": []}
    out: Fields = {"source": mapping.title, "family": mapping.family.name, "can be": []}
    try:
        refuse(mapping.reasons(facts))
        config = mapping.checked_config(facts)
    except CheckpointMismatchError as error:
        return out | {"cannot be converted": error.problems}
    except ValueError as error:
        return out | {"needs": str(error)}
    shapes = [tensor.shape for tensor in mapping.family.tensors(config)]
    out["parameters"] = sum(math.prod(shape) for shape in shapes)
    if mapping.family.has_shards:
        out["inference tensor parallel"] = mapping.family.tp_sizes(config)
        out["can be"] = ["converted to shards", *_served(mapping.family, config)]
    return out


def _served(family: ModelFamily, config: FTConfig) -> list[str]:
    lines = ["served from shards by Slipway's engine (deploy.engine=pytorch)"]
    if family.ft_backend and not config.ft_limits():
        lines.append("served from shards by NVIDIA's backend (deploy.engine=fastertransformer)")
    return lines


def _add_target(facts: Fields, path: Path, reader: CheckpointReader | None = None) -> None:
    """Add the Hugging Face model that a source can be written as, or the reasons against it."""
    request = ConversionRequest(path, path.parent, 1, "bf16", output_format="huggingface")
    try:
        plan = plan_huggingface(plan_conversion(request, reader=reader))
    except ValueError as error:
        facts["no Hugging Face folder"] = str(error).split("\n")
        return
    kind = json.loads(plan.extra_files["config.json"])["model_type"]
    facts["can be"].append(
        f"converted to a Hugging Face folder, model type {kind} (convert.format=huggingface), for "
        "vLLM and transformers"
    )


def _passed_through(reader: CheckpointReader) -> list[str]:
    """Return how another engine can serve a Hugging Face folder without conversion."""
    if reader.format != "huggingface" or reader.settings_dir is not None:
        return []
    kind = reader.config.get("model_type", "unknown")
    return [
        f"served as it is by vLLM, if the installed one knows {kind} and the quantisation, if any "
        f"(deploy.engine=vllm deploy.repository={reader.path})"
    ]


def description_text(facts: Table, indent: str = "") -> str:
    """Return a description as text."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", description_text(value, f"{indent}  ")]
        elif isinstance(value, list) and value and isinstance(value[0], str):
            lines += [f"{indent}{name}:", *(f"{indent}  {item}" for item in value)]
        elif isinstance(value, list):
            lines.append(f"{indent}{name}: {', '.join(map(str, value))}" if value else "")
        elif value not in ("", None):
            lines.append(f"{indent}{name}: {value}")
    return "\n".join(filter(None, lines))


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = command_parser(
        "inspect",
        """
        Describe a checkpoint or a converted folder: format, family, sizes, parallelism, types,
        tokenizer, and what can be done with it: which engines serve it, what it converts to.
        No tensor is read. For a Hugging Face model, its config.json is enough.
        """,
        "exit status: 0 when the path is recognised, 1 otherwise.",
    )
    parser.add_argument("path", type=Path, help="a .nemo archive, a checkpoint or an FT folder")
    parser.add_argument(
        "--model-config",
        type=Path,
        help="config.json, or its folder, for a trainer's checkpoint without one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")

    def handler(options: argparse.Namespace) -> None:
        facts = describe(options.path, tensors=options.tensors, settings=options.model_config)
        say(json.dumps(facts, indent=1) if options.json else description_text(facts))

    return run_command(parser, handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
