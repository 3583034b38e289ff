"""Requests to a text model, without the server."""

from collections.abc import Sequence
from typing import Any, TypeVar

from inference.backend.text_generation import TextModel
from inference.backend.tokenizer import Tokenizer
from inference.engine.engine import Engine

_Model = TypeVar("_Model", bound=TextModel)


def text_model(
    kind: type[_Model], engine: Engine, tokenizer: Tokenizer, tasks: Sequence[str] = ()
) -> _Model:
    """Return a model that has been started with an engine."""
    model = kind()
    model.engine, model.tokenizer, model.tasks = engine, tokenizer, tasks
    return model


def infer(model: TextModel, requests: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the outputs of requests that run together."""
    begun = [model.begin(request) for request in requests]
    return [model.answer(future.result()) for future in begun]
