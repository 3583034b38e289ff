"""A repository of one model that takes and gives text, for the clients of PyTriton."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from export_scripts.ft.config_ini import read_config
from export_scripts.triton.model_config import TritonModelConfig
from export_scripts.triton.signature import ModelSignature, TensorSignature
from inference.backend.text_signature import (
    INPUTS,
    MAX_BATCH_SIZE,
    NEMO_DEPLOY_INPUTS,
    NEMO_INPUTS,
    NEMO_OUTPUTS,
    OUTPUTS,
)

# Interface: class of the model in inference.backend.text_generation, inputs, outputs.
INTERFACES: dict[str, tuple[str, tuple[TensorSignature, ...], tuple[TensorSignature, ...]]] = {
    "text": ("TextModel", INPUTS, OUTPUTS),
    "nemo": ("NemoModel", NEMO_INPUTS, NEMO_OUTPUTS),
    "nemo-deploy": ("NemoDeployModel", NEMO_DEPLOY_INPUTS, NEMO_OUTPUTS),
}
NEMO_NAME = "GPT"  # which the client of PyTriton's NeMo example asks for
_SCRIPT = "from inference.backend.text_generation import {} as TritonPythonModel  # noqa: F401\n"


def write_text_repository(
    folder: Path,
    weights: Path,
    *,
    name: str,
    interface: str,
    tp_size: int,
    pp_size: int,
    data_type: str | None = None,
    parameters: Mapping[str, object] | None = None,
) -> None:
    """Write a repository that serves a folder of converted weights, where they are.

    Args:
        folder: Of the repository.
        weights: `<TP>-gpu`, with the tokenizer.
        name: Of the model.
        interface: A key of INTERFACES.
        tp_size: Tensor-parallel size.
        pp_size: Pipeline-parallel size.
        data_type: To compute in; None for that of the weights.
        parameters: Further ones of config.pbtxt; those of None are left out.

    Raises:
        ValueError: The name cannot be that of a folder, or the weights have no config.ini.
    """
    if not re.fullmatch(r"[\w.-]*\w", name, re.ASCII):
        raise ValueError(f"--model-name={name}: use letters, digits, _, - and .")
    family, config = read_config(weights)
    model, inputs, outputs = INTERFACES[interface]
    given = {
        "model_type": family.model_type,
        "tensor_para_size": tp_size,
        "pipeline_para_size": pp_size,
        "data_type": data_type or config.weight_data_type,
        "model_checkpoint_path": weights.resolve(),
        **(parameters or {}),
    }
    text = TritonModelConfig(
        name=name,
        backend="python",
        max_batch_size=MAX_BATCH_SIZE,
        signature=ModelSignature(inputs, outputs),
        parameters={key: str(value) for key, value in given.items() if value is not None},
        max_queue_delay_us=0,
    ).to_text()
    version = folder / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_SCRIPT.format(model), encoding="utf-8")
    (folder / name / "config.pbtxt").write_text(text, encoding="utf-8")
