"""Connect an evaluation to a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from export_scripts.ft.config_ini import read_config
from export_scripts.ft.tokenizer_files import find_tokenizer
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from inference.evaluation.options import OPENAI, EvaluationOptions
from inference.evaluation.run.openai_model import open_model
from inference.evaluation.run.requests import ServedTokenizer
from inference.evaluation.run.served_model import ServedModel
from inference.evaluation.run.task_run import EvaluationError
from inference.evaluation.task import TextGenerator
from inference.server.client import TritonClient


@contextmanager
def connect(options: EvaluationOptions) -> Iterator[TextGenerator]:
    """Yield the model served at `options.url`, connected.

    Raises:
        EvaluationError: nothing answers there, or it is not ready.
    """
    if options.protocol == OPENAI:
        yield open_model(options)[0]
        return
    with TritonClient(
        options.url,
        protocol=options.protocol,
        timeout_s=options.request_timeout_s,
        credentials=options.credentials,
    ) as client:
        _check_ready(client, options)
        tokenizer: Tokenizer | ServedTokenizer = ServedTokenizer(client)
        if options.tokenizer_dir is not None and _needs_tokenizer(options, options.tokenizer_dir):
            tokenizer = load_tokenizer(options.tokenizer_dir)
        yield ServedModel(
            client,
            tokenizer,
            model_name=options.model_name,
            ensemble_name=options.ensemble_name,
            end_id=_end_id(options.weights_dir),
        )


def _needs_tokenizer(options: EvaluationOptions, folder: Path) -> bool:
    """Return False where nothing is there and nothing is asked for, as with an encoder."""
    return set(options.tasks) != {"identity"} or find_tokenizer(folder) is not None


def _end_id(weights_dir: Path | None) -> int | None:
    """Return the token that ends answers, from the converted folder's config.ini."""
    if weights_dir is None or not (weights_dir / "config.ini").is_file():
        return None
    _, config = read_config(weights_dir)
    end_id = getattr(config, "end_id", None)
    return None if end_id is None else int(end_id)


def _check_ready(client: TritonClient, options: EvaluationOptions) -> None:
    """Raise EvaluationError if a model that will be asked is not ready."""
    if not client.is_ready():
        raise EvaluationError(
            f"no ready server answers {options.protocol} requests at {options.url}; start one "
            "with the stage deploy, or set evaluate.server to the address of a running one."
        )
    needed = {options.model_name, options.ensemble_name or options.model_name}
    if missing := [name for name in sorted(needed) if not client.is_ready(name)]:
        served = ", ".join(_described(model) for model in client.models()) or "no model"
        raise EvaluationError(
            f"the server at {options.url} has no ready model {' and '.join(missing)}; it serves "
            f"{served}. Its log says why a model is not ready."
        )


def _described(model: dict[str, str]) -> str:
    return f"{model['name']} ({model['state'].lower() or 'not loaded'})"
