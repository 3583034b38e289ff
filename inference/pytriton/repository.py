"""A repository of one model that takes and gives text, for the clients of PyTriton.

INPUTS and OUTPUTS are those of its FasterTransformer example, and `sequence_tokens`; those of
NEMO are of its NeMo example (examples/nemo_megatron_gpt_multinode), whose names and types follow
NeMo's LengthParam, SamplingParam and OutputType. NEMO_DEPLOY_INPUTS are what the two query classes
of nemo/deploy/nlp/query_llm.py send.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from export_scripts.ft.config_ini import read_config
from export_scripts.triton.model_config import TritonModelConfig
from export_scripts.triton.repository import write_model
from export_scripts.triton.signature import ModelSignature, TensorSignature

MAX_BATCH_SIZE = 128

INPUTS = (
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    TensorSignature("request_output_len", "UINT32", (1,), doc="new tokens, for each row"),
    TensorSignature("beam_width", "UINT32", (1,), optional=True, doc="texts for each prompt"),
)
OUTPUTS = (
    TensorSignature("sentences", "BYTES", (-1, 1), doc="prompt and answer, best first"),
    TensorSignature("sequence_length", "INT64", (-1,), doc="characters of each sentence"),
    TensorSignature("cum_log_probs", "FP32", (-1,), doc="of each answer"),
    TensorSignature("sequence_tokens", "INT64", (-1,), doc="tokens of prompt and answer"),
)


def _optional(name: str, dtype: str, dims: tuple[int, ...] = (1,), *, doc: str) -> TensorSignature:
    return TensorSignature(name, dtype, dims, optional=True, doc=doc)


def _lengths(dtype: str, which: str) -> tuple[TensorSignature, ...]:
    docs = {"max": "new tokens", "min": "before the end token"}
    return tuple(_optional(f"{end}_{which}", dtype, doc=doc) for end, doc in docs.items())


def _sampling(whole: str) -> tuple[TensorSignature, ...]:
    return (
        _optional("use_greedy", "BOOL", doc="the likeliest token always"),
        _optional("temperature", "FP32", doc="divides the logits"),
        _optional("top_k", whole, doc="0: any number of candidates"),
        _optional("top_p", "FP32", doc="probability to sample from"),
        _optional("repetition_penalty", "FP32", doc="1 is neutral"),
        _optional("add_BOS", "BOOL", doc="put the start token in front"),
        _optional("all_probs", "BOOL", doc="must be false"),
        _optional("compute_logprob", "BOOL", doc="fill logprob"),
    )


NEMO_INPUTS = (
    TensorSignature("tasks", "BYTES", (1,), doc="text_generation, or the name of a prompt table"),
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    *_lengths("INT32", "length"),
    *_sampling("INT32"),
    _optional("end_strings", "BYTES", (1, -1), doc="texts that end an answer"),
)
NEMO_DEPLOY_INPUTS = (
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    _optional("task_id", "BYTES", doc="the name of a prompt table"),
    *_lengths("INT64", "length"),
    *_lengths("INT64", "output_len"),
    *_sampling("INT64"),
    _optional("random_seed", "INT64", doc="of sampling"),
    _optional("end_strings", "BYTES", (-1,), doc="texts that end an answer"),
    _optional("stop_words_list", "BYTES", (-1,), doc="the same"),
    _optional("bad_words_list", "BYTES", (-1,), doc="texts that no answer has"),
    _optional("no_repeat_ngram_size", "FP32", doc="must be 0"),
)
NEMO_OUTPUTS = (
    TensorSignature("sentences", "BYTES", (1,), doc="prompt and answer"),
    TensorSignature("tokens", "BYTES", (1, -1), doc="text of each token"),
    TensorSignature("token_ids", "INT32", (1, -1), doc="of prompt and answer"),
    TensorSignature("logprob", "FP32", (1, -1), doc="of each token but the first, else NaN"),
    TensorSignature("offsets", "INT32", (1, -1), doc="characters before each token"),
)

# Interface: module and class of the model in inference.backend, inputs, outputs.
INTERFACES: dict[str, tuple[str, tuple[TensorSignature, ...], tuple[TensorSignature, ...]]] = {
    "text": ("text_generation import TextModel", INPUTS, OUTPUTS),
    "nemo": ("nemo_generation import NemoModel", NEMO_INPUTS, NEMO_OUTPUTS),
    "nemo-deploy": ("nemo_generation import NemoDeployModel", NEMO_DEPLOY_INPUTS, NEMO_OUTPUTS),
}
NEMO_NAME = "GPT"  # which the client of PyTriton's NeMo example asks for
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
    """Write a repository that serves a folder of converted weights, where they are.

    `weights` is `<TP>-gpu`, with the tokenizer; `interface` a key of INTERFACES. The model computes
    in the type of the weights if `data_type` is None. Further `parameters` of config.pbtxt are left
    out if they are None. Raises ValueError if the name cannot be that of a folder, or the weights
    have no config.ini.
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
    served = TritonModelConfig(
        name=name,
        backend="python",
        max_batch_size=MAX_BATCH_SIZE,
        signature=ModelSignature(inputs, outputs),
        parameters={key: str(value) for key, value in given.items() if value is not None},
        max_queue_delay_us=0,
        files={"model.py": _SCRIPT.format(model).encode()},
    )
    write_model(folder, served)
