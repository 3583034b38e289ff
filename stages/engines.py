"""Commands of engines other than ours that speak OpenAI's protocol."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.server.openai_server import MODEL_FIELD

TOKEN_VARIABLE = "VLLM_API_KEY"  # vllm/envs.py; a command line is seen by other users
# Options of `vllm serve` that other keys of the configuration decide.
OWN_VLLM_OPTIONS: Mapping[str, str] = {
    "model": "deploy.repository",
    "served_model_name": "export.run.model_train_name",
    "host": "deploy.host",
    "port": "deploy.http_port",
    "uds": "deploy.http_port",
    "tensor_parallel_size": "export.model.tensor_model_parallel_size",
    "pipeline_parallel_size": "export.triton_deployment.pipeline_model_parallel_size",
    "api_key": "deploy.token_file",
    "ssl_certfile": "deploy.tls_cert",
    "ssl_keyfile": "deploy.tls_key",
}


VLLM_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def vllm_command(executable: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command of `vllm serve`; its options are vLLM's own, and it checks them.

    vLLM, docs/serving/openai_compatible_server.md and vllm/engine/arg_utils.py.
    """
    words = [word for key, value in options.items() for word in _option(key, value)]
    return (executable, "serve", MODEL_FIELD, *words)


def _option(key: str, value: Any) -> list[str]:
    """Return an option as vLLM's command line has it."""
    flag = f"--{key.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, Mapping):
        return [flag, json.dumps(dict(value))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [flag, *(json.dumps(v) if isinstance(v, Mapping) else str(v) for v in value)]
    return [flag, str(value)]
