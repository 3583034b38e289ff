"""Commands of other engines, which speak OpenAI's protocol."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from export_scripts.conversion.request import PEFT_CONFIG
from foundations.files.json_content import Fields, Table
from foundations.files.yaml_content import read_table
from inference.server.openai_server import MODEL_FIELD

# Fields of a command for several nodes: the rendezvous address on the first node.
HEAD_FIELD, HEAD_PORT_FIELD = "{head}", "{head_port}"

TOKEN_VARIABLE = "VLLM_API_KEY"  # vllm/envs.py; other users could read a token in a command line
# Options of `vllm serve` that other configuration keys decide.
OWN_VLLM_OPTIONS: dict[str, str] = read_table(Path(__file__).with_name("vllm_options.yaml"))
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
VLLM_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def vllm_command(executable: str, options: Table) -> list[str]:
    """Return the command of `vllm serve`; vLLM itself checks the options.

    vLLM, docs/serving/openai_compatible_server.md and vllm/engine/arg_utils.py.
    """
    words = [executable, "serve", MODEL_FIELD]
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            values = value if is_list else [value]
            shown = (json.dumps(dict(v)) if isinstance(v, Mapping) else str(v) for v in values)
            words += [f"--{name}", *shown]
    return words


def adapter_options(name: str, folder: Path) -> Fields:
    """Return the options of `vllm serve` for an adapter that is served under a name.

    The maximum rank can be given only once the folder exists. vLLM 0.32, vllm/config/lora.py.
    """
    options = {"enable_lora": True, "lora_modules": [f"{name}={folder}"]}
    settings = folder / PEFT_CONFIG
    if not settings.is_file():
        return options
    from export_scripts.checkpoints.base import json_file  # and all readers

    if type(rank := json_file(settings).get("r")) is int:
        options["max_lora_rank"] = next((most for most in _LORA_RANKS if most >= rank), rank)
    return options


def several_nodes(nodes: int, rank: int) -> Fields:
    """Return the options of `vllm serve` on one of several nodes; the first one listens.

    vLLM, docs/serving/parallelism_scaling.md: one process per node, without Ray.
    """
    options = {
        "nnodes": nodes,
        "node_rank": rank,
        "master_addr": HEAD_FIELD,
        "master_port": HEAD_PORT_FIELD,
    }
    return options if rank == 0 else options | {"headless": True}
