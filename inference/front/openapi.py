"""OpenAPI descriptions of protocols, from the pydantic models of their requests."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from foundations import __version__

_FORM = "#/components/schemas/{model}"
_ANSWERS = {"200": "the answer", "400": "an error that names the fields"}


def schemas_of(kinds: Collection[type[BaseModel]]) -> dict[str, Any]:
    """Return the schemas of pydantic models and of the models nested in them, by name."""
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_FORM)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def openapi(
    calls: Mapping[tuple[str, str], type[BaseModel] | None], schemas: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the OpenAPI description of calls: (method, path) to the model of the body."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), kind in calls.items():
        paths.setdefault(path, {})[method] = _operation(path, kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(path: str, kind: type[BaseModel] | None) -> dict[str, Any]:
    found = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": {status: {"description": words} for status, words in _ANSWERS.items()},
    }
    if kind is not None:
        form = {"$ref": _FORM.format(model=kind.__name__)}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": form}}}
    return found
