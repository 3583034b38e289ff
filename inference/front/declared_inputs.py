"""The inputs of the served models, from the repository's config.pbtxt files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from export_scripts.triton.model_config import parse_config
from export_scripts.triton.signature import ENCODERS


@dataclass(frozen=True)
class DeclaredInputs:
    """The inputs that a model's configuration declares.

    Attributes:
        datatypes: Type of each input, in the spelling of requests: UINT32, BYTES.
        required: Names of those that are not optional.
    """

    datatypes: Mapping[str, str]
    required: tuple[str, ...]


def read_declared_inputs(repository: Path | None) -> dict[str, DeclaredInputs]:
    """Return the inputs of the models in a repository, by model name.

    A model without a readable config.pbtxt is left out: tritonserver knows its inputs, or reports
    what is wrong with it. So is an encoder made for NVIDIA's backend, whose config.pbtxt does not
    give the types of its tensors, or not the right ones.
    """
    paths = repository.glob("*/config.pbtxt") if repository else ()
    found = {path.parent.name: _inputs(path) for path in paths}
    return {name: inputs for name, inputs in found.items() if inputs is not None}


def _inputs(path: Path) -> DeclaredInputs | None:
    from tritonclient.grpc import model_config_pb2 as schema

    try:
        config = parse_config(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_encoder = config.parameters["model_type"].string_value in ENCODERS
    if config.backend == "fastertransformer" and is_encoder:
        return None
    names = {each.name: schema.DataType.Name(each.data_type) for each in config.input}
    return DeclaredInputs(
        datatypes={
            name: "BYTES" if kind == "TYPE_STRING" else kind.removeprefix("TYPE_")
            for name, kind in names.items()
        },
        required=tuple(each.name for each in config.input if not each.optional),
    )
