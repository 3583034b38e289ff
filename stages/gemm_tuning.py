"""FasterTransformer's programs that measure a model's matrix products, and their arguments.

Argument orders: FasterTransformer, examples/cpp/*/ and src/fastertransformer/utils/gemm_test. The
result, gemm_config.in, is read by the server from its working directory.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from stages.base import StageError
from stages.deploy_config import DeployConfig

RESULT_NAME = "gemm_config.in"
_POLL_S = 0.2
_TYPES = {"fp32": 0, "fp16": 1, "bf16": 2}
# By family; gpt_gemm for all others.
_PROGRAMS = {"t5": "t5_gemm", "t5_encoder": "t5_gemm", "bert": "bert_gemm"}
_STACK = ("d_model", "num_heads", "d_kv", "d_ff")  # both stacks of a folder have the same sizes
# Of the model, in the program's order.
_SIZES = {
    "t5_gemm": (*_STACK, *_STACK, "vocab_size"),
    "bert_gemm": ("head_num", "size_per_head"),
    "gpt_gemm": ("head_num", "size_per_head", "inter_size", "vocab_size"),
}


def tuning_command(config: DeployConfig) -> list[str]:
    """Return the command that measures the model of a configuration.

    Raises:
        CheckpointMismatchError: config.ini of the weights is missing or unreadable.
    """
    from export_scripts.ft.config_ini import read_config

    tuning = config.gemm_tuning
    family, model = read_config(config.weights_dir)
    program = _PROGRAMS.get(family.name, "gpt_gemm")
    sizes = [int(getattr(model, name)) for name in _SIZES[program]]
    kind = _TYPES[config.data_type]
    if program == "bert_gemm":
        # batch, sequence, heads, size per head, type, whether int8, ranks
        words = [tuning.batch_size, tuning.input_len, *sizes, kind, 0, config.tp_size]
    else:
        # An optional further argument appends to the result of an earlier run.
        shape = [tuning.batch_size, tuning.beam_width, tuning.input_len]
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
    if result.is_file() and command_path.is_file() and command_path.read_text("utf-8") == text:
        return
    work_dir.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=work_dir, stdout=log, stderr=log)
        try:
            while (status := process.poll()) is None:
                check()
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        if status:
            raise subprocess.CalledProcessError(status, command)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StageError(
            f"the tuning of matrix products failed: {error}; see {log_path}, name the folder of "
            "its programs in deploy.gemm_tuning.program_dir, or set deploy.gemm_tuning.enabled="
            "false."
        ) from error
    if not result.is_file():
        raise StageError(f"{command[0]} has written no {RESULT_NAME}; see {log_path}.")
    command_path.write_text(text, encoding="utf-8")
