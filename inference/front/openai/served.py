"""Models for OpenAI's protocol: which of a repository's they are, and what they answer."""

# Shapes: n candidates, S prompt, L prompt and answer, W best tokens of a place; B rows, E hidden

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.ft.config_ini import read_config
from export_scripts.ft.identity import served_identity
from inference.front.openai.answers import Array, Candidate
from inference.front.openai.prepare import ModelFacts

_TEXT_MODELS = ("preprocessing", "tokenizer")  # of models that generate, and of encoders
HIDDEN = "output_hidden_state"
_DEFAULT_CONTEXT = 4096  # of the engine, where neither model nor parameters say
_SCORES = ("token_log_probs", "top_token_ids", "top_token_log_probs")


def unit_vectors(rows: Array) -> Array:
    """Return rows, (B, E), scaled to length 1."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, np.finfo(np.float32).tiny))


def wanted_outputs(job: Mapping[str, Array]) -> list[str]:
    """Return the names of the outputs that a job needs."""
    wanted = ["output_ids", "sequence_length"]
    wanted += _SCORES if "num_log_probs" in job else ()
    return wanted + (["cum_log_probs"] if "is_return_log_probs" in job else [])


def candidates_of(outputs: Mapping[str, Array], prompt_len: int) -> list[Candidate]:
    """Return the candidates in a model's outputs, which return so many tokens of the prompt."""
    ids, lengths = outputs["output_ids"], outputs["sequence_length"]  # (n, 1, L), (n, 1)
    found = []
    for row in range(len(ids)):
        own, top_ids, top = (outputs[n][row, 0] if n in outputs else None for n in _SCORES)
        total = float(outputs["cum_log_probs"][row, 0]) if "cum_log_probs" in outputs else 0.0
        tokens = ids[row, 0, prompt_len : int(lengths[row, 0])].tolist()
        found.append(Candidate(tokens, own, top_ids, top, total))
    return found


def token_models(configs: Mapping[str, Any], repository: Path | None) -> list[ModelFacts]:
    """Return the models that complete or encode token ids, without sessions."""
    found = []
    for name, config in configs.items():
        inputs = frozenset(tensor.name for tensor in config.input)
        lengths = {"request_output_len", "max_output_len"} & inputs
        encodes = HIDDEN in (tensor.name for tensor in config.output)
        is_known = "input_ids" in inputs and (lengths or encodes)
        if not is_known or config.HasField("sequence_batching"):
            continue
        context_len, vocab_size = _model_limits(config, repository)
        facts = ModelFacts(
            name=name,
            inputs=inputs,
            max_rows=max(config.max_batch_size, 1),
            context_len=context_len,
            vocab_size=vocab_size,
            encoder_decoder="max_output_len" in inputs,
            streams=config.model_transaction_policy.decoupled,
            encodes=encodes,
            about=_about(config, repository),
        )
        found.append(facts)
    return found


def text_model(configs: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the name of the model that encodes texts, or "", and its parameters."""
    name = next((each for each in _TEXT_MODELS if each in configs), "")
    if not name:
        return "", {}
    parameters = configs[name].parameters
    return name, {key: value.string_value for key, value in parameters.items()}


def _model_limits(config: Any, repository: Path | None) -> tuple[int, int | None]:
    """Return the most tokens of a sequence, and the size of the vocabulary if it is known.

    They come from the model's parameters and its config.ini.
    """
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    limit, folder = (
        int(parameters.get("max_seq_len", _DEFAULT_CONTEXT)),
        _folder(config, repository),
    )
    if folder is None:
        return limit, None
    _, model = read_config(folder)
    positions = getattr(model.architecture(), "max_pos_seq_len", None)
    return min(limit, positions or limit), getattr(model, "vocab_size", None)


def _folder(config: Any, repository: Path | None) -> Path | None:
    """Return the folder of a model's weights, None if it cannot be read here."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    folder, tp_size = (parameters.get(key) for key in ("model_checkpoint_path", "tensor_para_size"))
    if folder is None and repository is not None and tp_size is not None:
        folder = str(repository / config.name / "1" / f"{tp_size}-gpu")
    return Path(folder) if folder is not None and (Path(folder) / "config.ini").is_file() else None


def _about(config: Any, repository: Path | None) -> tuple[tuple[str, str], ...]:
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    identity = served_identity(_folder(config, repository), parameters)
    return tuple(identity.items())
