"""The OpenAPI description of the endpoint, from the pydantic models of its requests."""

from typing import Any

from inference.front.openai.requests import (
    SPELLINGS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RequestRecord,
    TokenizeRequest,
)
from inference.front.openapi import openapi, schemas_of

KINDS: dict[str, type[RequestRecord]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def openai_description() -> dict[str, Any]:
    """Return the description; fields without effect list the values that are accepted."""
    schemas = schemas_of(KINDS.values())
    for kind in KINDS.values():
        properties = schemas[kind.__name__]["properties"]
        for name, names in SPELLINGS.items():
            if name in properties:
                properties |= dict.fromkeys(names, properties[name])
        for name in properties:
            if name.startswith("guided_"):
                properties[name] = {"type": ["string", "array", "object"]}
        for name, (values, reason) in kind.fixed().items():
            accepted = {} if values is None else {"enum": [*values, None]}
            properties[name] = {"description": reason, **accepted}
    return openapi({("post", path): kind for path, kind in KINDS.items()}, schemas)
