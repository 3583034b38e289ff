"""Metadata, configuration and statistics of a server and its models, as KServe's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from inspect import signature
from typing import Any

from google.protobuf import json_format

from inference.front import rules
from inference.front.openapi import openapi, schemas_of
from inference.front.rules import InferError
from inference.front.validation import GenerateRequest, IndexRequest, SentRequest
from inference.host.models import HostedModel

_EXTENSIONS = (
    *("sequence", "model_repository", "model_configuration", "binary_tensor_data", "parameters"),
    *("statistics", "generate"),
)
# Protobuf 5.26 renamed the option that prints default values.
_PRINT_DEFAULTS = next(
    name
    for name in ("always_print_fields_with_no_presence", "including_default_value_fields")
    if name in signature(json_format.MessageToDict).parameters
)


def api_description() -> dict[str, Any]:
    """Return the OpenAPI description of KServe's protocol over HTTP as this server speaks it."""
    schemas = schemas_of((SentRequest, GenerateRequest, IndexRequest))
    calls = dict.fromkeys(
        ("get", path)
        for path in ("/v2", rules.LIVE_PATH, rules.READY_PATH, rules.STATS_PATH, rules.OPENAPI_PATH)
    )
    calls["post", rules.INDEX_PATH] = IndexRequest
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        calls |= {("get", model + action): None for action in ("", "/ready", "/config", "/stats")}
        calls["post", f"{model}/infer"] = SentRequest
        calls["post", f"{model}/generate"] = calls["post", f"{model}/generate_stream"] = (
            GenerateRequest
        )
    return openapi(calls, schemas)


def server_metadata() -> dict[str, Any]:
    """Return name, version and extensions of this server."""
    return {
        "name": "slipway",
        "version": metadata.version("slipway-serving"),
        "extensions": list(_EXTENSIONS),
    }


def find_model(models: Mapping[str, HostedModel], name: str, version: str) -> HostedModel:
    """Return a model; version "" stands for its default version. Raises InferError."""
    first = models.get(name)
    model = first.versions.get(version or first.version) if first is not None else None
    if model is None:
        of_version = f" version {version}" if version else ""
        raise InferError(
            f"Request for unknown model: '{name}'{of_version} is not found", "NOT_FOUND"
        )
    return model


def model_metadata(model: HostedModel) -> dict[str, Any]:
    """Return the inputs and outputs of a model."""

    def described(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
        forms = {name: model.form(tensor) for name, tensor in tensors.items()}
        return [
            {"name": name, "datatype": datatype, "shape": shape}
            for name, (datatype, shape) in forms.items()
        ]

    return {
        "name": model.name,
        "versions": sorted(model.versions),
        "platform": model.config.platform or model.config.backend,
        "inputs": described(model.inputs),
        "outputs": described(model.outputs),
        **({"parameters": dict(model.about)} if model.about else {}),
    }


def config_message(model: HostedModel) -> Any:
    """Return a model's configuration message; parameters `slipway_...` say what it serves."""
    config = model.config.__class__()
    config.CopyFrom(model.config)
    for key, value in model.about.items():
        config.parameters[f"slipway_{key}"].string_value = value
    return config


def config_json(model: HostedModel) -> Mapping[str, Any]:
    """Return the configuration of a model as JSON."""
    options: dict[str, Any] = {"preserving_proto_field_name": True, _PRINT_DEFAULTS: True}
    found = json_format.MessageToDict(config_message(model), **options)
    for tensor in (*found["input"], *found["output"]):  # protobuf's JSON has int64 as strings
        tensor["dims"] = [int(size) for size in tensor["dims"]]
    return found


def statistics_json(
    models: Mapping[str, HostedModel], name: str = "", version: str = ""
) -> dict[str, Any]:
    """Return the statistics of all models, or of one. Raises InferError."""
    if not name:
        found = [version for model in models.values() for version in model.versions.values()]
    else:
        try:
            model = find_model(models, name, version)
        except InferError:
            raise InferError(f"requested model '{name}' is not available") from None
        found = [model] if version else [*model.versions.values()]
    return {"model_stats": [model.statistics.as_json() for model in found]}


def index_json(models: Mapping[str, HostedModel]) -> list[dict[str, str]]:
    """Return the repository index; every model of a loaded repository is ready."""
    return [
        {"name": name, "version": version, "state": "READY"}
        for name, model in models.items()
        for version in model.versions
    ]
