"""The arguments to load a model with: its configuration and its place in a repository."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from export_scripts.triton.parameters import FLAG, TEXT, Kind
from inference.backend.instances import ONLY, Instance
from inference.backend.requests import Array


def config_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters in a model's JSON configuration."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


class ModelArguments:
    """The arguments of one instance of a model.

    Attributes:
        config: JSON configuration with the keys of config.pbtxt.
        instance: this instance's index among the model's instances.
        decoupled: whether a request may get more than one response.
        session_idle_s: idle limit of a session in seconds, None for a model without sessions.
        bf16_inputs: names of the BF16 inputs.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model_folder: Path | str,
        *,
        version: str = "1",
        instance: Instance = ONLY,
    ) -> None:
        self.config = config
        self.model_folder = Path(model_folder)
        self.version_folder = self.model_folder / version
        self.name = str(config.get("name") or self.model_folder.name)
        self.parameters = config_parameters(config)
        self.instance = instance
        policy = config.get("model_transaction_policy", {})
        self.decoupled = bool(policy.get("decoupled", False))
        batching = config.get("sequence_batching")
        # protobuf's JSON writes 64-bit numbers as strings.
        idle_us = None if batching is None else batching["max_sequence_idle_microseconds"]
        self.session_idle_s = None if idle_us is None else int(idle_us) / 1e6
        inputs = (e for e in config.get("input", ()) if e.get("data_type") == "TYPE_BF16")
        self.bf16_inputs = frozenset(e["name"] for e in inputs)

    def read(self, key: str, kind: Kind = TEXT, *, default: str | None = None) -> Any:
        """Return a parameter. Raises ValueError if it is invalid, or absent without a default."""
        text = self.parameters.get(key, default)
        try:
            if text is None:
                raise ValueError("is missing")
            return kind.read(text)
        except ValueError as error:
            shown = key if text is None else f"{key}={text!r}"
            raise ValueError(
                f"config.pbtxt of {self.model_folder.name}: parameter {shown} {error}"
            ) from None

    def flag(self, key: str) -> bool:
        """Return a 0/1 parameter, False if absent. Raises ValueError for anything else."""
        return bool(self.read(key, FLAG, default="0"))


class RequestInputs(dict[str, Array]):
    """The inputs of one request by name. Raises ValueError if one is missing."""

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(f"{name}: required input is missing")
