"""The OpenAPI description of the endpoint, made of the records of its requests."""

from typing import Any

from pydantic.json_schema import models_json_schema

from inference.front.openai.requests import (
    SPELLINGS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RequestRecord,
    TokenizeRequest,
)

KINDS: dict[str, type[RequestRecord]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def described(version: str) -> dict[str, Any]:
    """Return the description; fields that change nothing here have the values that are taken."""
    form = "#/components/schemas/{model}"
    inputs: list[Any] = [(kind, "validation") for kind in KINDS.values()]
    _, schemas = models_json_schema(inputs, ref_template=form)
    for kind in KINDS.values():
        properties = schemas["$defs"][kind.__name__]["properties"]
        for name, names in SPELLINGS.items():
            if name in properties:
                properties |= dict.fromkeys(names, properties[name])
        for name in properties:
            if name.startswith("guided_"):
                properties[name] = {"type": ["string", "array", "object"]}
        for name, (values, reason) in kind.fixed().items():
            taken = {} if values is None else {"enum": [*values, None]}
            properties[name] = {"description": reason, **taken}
    paths = {path: {"post": _operation(form.format(model=kind.__name__))}
             for path, kind in KINDS.items()}  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipway", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": schema}}}
    answers = {"200": "the answer", "400": "an error that names the fields"}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": {status: {"description": words} for status, words in answers.items()},
    }
