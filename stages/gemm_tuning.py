"""FasterTransformer's programs that measure a model's matrix products, and their arguments.

Argument orders: FasterTransformer, examples/cpp/*/ and src/fastertransformer/utils/gemm_test. The
result, gemm_config.in, is read by the server from its working directory.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import StageError
from stages.deploy_config import DeployConfig

if TYPE_CHECKING:
    from export_scripts.families.layout.config import FTConfig

RESULT_NAME = "gemm_config.in"
_POLL_S = 0.2
_TYPES = {"fp32": 0, "fp16": 1, "bf16": 2}


def tuning_command(config: DeployConfig) -> list[str]:
    """Return the command that measures the model of a configuration.

    Raises:
        CheckpointMismatchError: config.ini of the weights is missing or unreadable.
    """
    from export_scripts.ft.config_ini import read_config

    tuning = config.gemm_tuning
    family, model = read_config(config.weights_dir)
    program, sizes = _model_arguments(family.name, model)
    shape = [tuning.batch_size, tuning.beam_width, tuning.input_len]
    kind = _TYPES[config.data_type]
    if program == "bert_gemm":
        # batch, sequence, heads, size per head, type, whether int8, ranks
        words = [tuning.batch_size, tuning.input_len, *sizes, kind, 0, config.tp_size]
    else:
        # An optional further argument appends to the result of an earlier run.
        words = [*shape, *sizes, kind, config.tp_size]
    return [str(tuning.program_dir / program), *map(str, words)]


def tune(
    config: DeployConfig, work_dir: Path, log_path: Path, *, check: Callable[[], None]
) -> None:
    """Measure in `work_dir`, where the result stays; nothing is done when it is there already.

    `check` is called repeatedly; an exception that it raises ends the program.

    Raises:
        StageError: the program is missing or fails.
    """
    command = tuning_command(config)
    command_path, result = work_dir / "gemm_command.txt", work_dir / RESULT_NAME
    text = " ".join(command)
    if (
        result.is_file()
        and command_path.is_file()
        and command_path.read_text(encoding="utf-8") == text
    ):
        return
    work_dir.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    try:
        _run(command, work_dir, log_path, check)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StageError(
            f"the tuning of matrix products failed: {error}; see {log_path}, name the folder of "
            "its programs in deploy.gemm_tuning.program_dir, or set deploy.gemm_tuning.enabled="
            "false."
        ) from error
    if not result.is_file():
        raise StageError(f"{command[0]} has written no {RESULT_NAME}; see {log_path}.")
    command_path.write_text(text, encoding="utf-8")


def _run(command: Sequence[str], work_dir: Path, log_path: Path, check: Callable[[], None]) -> None:
    """Run a program to its end. Raises OSError or CalledProcessError if it fails."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=work_dir, stdout=log, stderr=log)
    try:
        while True:
            check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                if status := process.wait(_POLL_S):
                    raise subprocess.CalledProcessError(status, command)
                return
    finally:
        process.kill()
        process.wait()


def _model_arguments(family: str, model: FTConfig) -> tuple[str, list[int]]:
    """Return the program for a family and the sizes of the model in its order."""

    def sizes(*names: str) -> list[int]:
        return [int(getattr(model, name)) for name in names]

    if family in ("t5", "t5_encoder"):
        # Both stacks of a folder have the same sizes.
        stack = sizes("d_model", "num_heads", "d_kv", "d_ff")
        return "t5_gemm", [*stack, *stack, *sizes("vocab_size")]
    if family == "bert":
        return "bert_gemm", sizes("head_num", "size_per_head")
    return "gpt_gemm", sizes("head_num", "size_per_head", "inter_size", "vocab_size")
