"""Conversions of small checkpoints, by default to fp32 for one rank."""

from pathlib import Path
from typing import Any

import pytest

from export_scripts.conversion.convert import ConversionRequest, check_conversion, convert
from tests.ft_folders import OpenedFolder


def request_of(source: Path, output: Path, **fields: Any) -> ConversionRequest:
    return ConversionRequest(source, output, **{"tp_size": 1, "weight_data_type": "fp32", **fields})


def folder_of(source: Path, output: Path, **fields: Any) -> Path:
    """Convert a checkpoint; return the folder."""
    return convert(request_of(source, output, **fields)).ft_dir


def converted(source: Path, output: Path, **fields: Any) -> OpenedFolder:
    """Convert a checkpoint; return the folder of shards, opened."""
    return OpenedFolder(folder_of(source, output, **fields))


def written(source: Path, output: Path, **fields: Any) -> Path:
    """Convert a checkpoint to a Hugging Face folder; return it."""
    return folder_of(source, output, output_format="huggingface", **fields)


def remarks_of(source: Path, output: Path, **fields: Any) -> str:
    """Convert a checkpoint; return the remarks, a line each."""
    return "\n".join(convert(request_of(source, output, **fields)).remarks)


def problems_of(source: Path, output: Path, **fields: Any) -> str:
    """Return the problems of a conversion, a line each."""
    return "\n".join(check_conversion(request_of(source, output, **fields)))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refusal(source: Path, folder: Path, **fields: Any) -> str:
    """Return the message with which a conversion ends; nothing may be left behind."""
    output = folder / "out"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the text
        convert(request_of(source, output, **fields))
    assert not output.exists() or list(output.iterdir()) == []
    return str(caught.value)
