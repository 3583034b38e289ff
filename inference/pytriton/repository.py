"""A repository of one model from text to text, for the clients of PyTriton.

The interface `text` has the tensors of PyTriton's FasterTransformer example, and `sequence_tokens`;
`nemo` has those of its NeMo example (examples/nemo_megatron_gpt_multinode), whose names and types
follow NeMo's LengthParam, SamplingParam and OutputType; `nemo-deploy` has the inputs that the two
query classes of nemo/deploy/nlp/query_llm.py send.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from export_scripts.ft.config_ini import read_config
from export_scripts.triton.model_config import TritonModelConfig
from export_scripts.triton.repository import write_model
from export_scripts.triton.signature import declared

MAX_BATCH_SIZE = 128

# Import from inference.backend for each interface, by its name in the table of signatures.
INTERFACES = {
    "text": "text_generation import TextModel",
    "nemo": "nemo_generation import NemoModel",
    "nemo-deploy": "nemo_generation import NemoDeployModel",
}
NEMO_NAME = "GPT"  # the model name that the client of PyTriton's NeMo example uses
_SCRIPT = "from inference.backend.{} as TritonPythonModel  # noqa: F401\n"


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
    """Write a repository that serves a folder of converted weights in place.

    `weights` is `<TP>-gpu`, with the tokenizer; `interface` a key of INTERFACES. `data_type` None
    stands for the type of the weights. `parameters` are added to config.pbtxt, except None values.
    Raises ValueError if the name is not valid for a folder, or the weights have no config.ini.
    """
    if not re.fullmatch(r"[\w.-]*\w", name, re.ASCII):
        raise ValueError(f"--model-name={name}: use letters, digits, _, - and .")
    family, config = read_config(weights)
    values = {
        "model_type": family.model_type,
        "tensor_para_size": tp_size,
        "pipeline_para_size": pp_size,
        "data_type": data_type or config.weight_data_type,
        "model_checkpoint_path": weights.resolve(),
        **(parameters or {}),
    }
    served = TritonModelConfig(
        name=name,
        backend="python",
        max_batch_size=MAX_BATCH_SIZE,
        signature=declared(interface),
        parameters={key: str(value) for key, value in values.items() if value is not None},
        max_queue_delay_us=0,
        files={"model.py": _SCRIPT.format(INTERFACES[interface]).encode()},
    )
    write_model(folder, served)
