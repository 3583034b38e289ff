"""Comparison of a converted folder, of either format, with what describes it."""

from __future__ import annotations

from pathlib import Path

from export_scripts.checkpoints.huggingface import is_huggingface
from export_scripts.conversion.plan import plan_conversion
from export_scripts.conversion.request import OPTION_NAMES, ConversionRequest
from export_scripts.errors import CheckpointMismatchError
from export_scripts.ft.validation import manifest_problems, validate_directory


def folder_problems(folder: Path, *, checksums: bool = True) -> list[str]:
    """Return every difference between a converted folder and its description.

    Of an FT folder as `validate_directory`; of a Hugging Face folder: its names, shapes and sizes
    against its configuration, and its files against its manifest.
    """
    if not folder.is_dir() or not is_huggingface(folder):
        return validate_directory(folder, checksums=checksums)
    problems = list(manifest_problems(folder, checksums=checksums).values())
    request = ConversionRequest(
        folder, folder.parent, 1, weight_data_type="fp32", output_format="huggingface"
    )
    try:
        plan_conversion(request, names=OPTION_NAMES)
    except (CheckpointMismatchError, ValueError) as error:
        problems += str(error).split("\n")
    return problems
