"""A loaded repository as the protocols use it: its models, their probes and their metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from export_scripts.ft.config_ini import CONFIG_NAME, read_config
from export_scripts.ft.identity import served_identity
from export_scripts.triton.model_config import parameters_of
from inference.backend.arguments import ModelArguments
from inference.backend.model_settings import read_settings
from inference.backend.requests import Array, InferRequest
from inference.front.rules import InferError
from inference.host.engines import EngineProcess
from inference.host.models import HostedModel
from inference.host.probe import is_interactive, probe_tensors


class UnservedError(ValueError):
    """A repository cannot be served; `problems` has a reason for each model."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Hosted:
    """The models of a repository; subclasses load them.

    Attributes:
        folder: the repository; None for one in an object store.
        models: by name; empty before they are loaded.
        endpoint: OpenAI's endpoint, None before it is opened.
        former: models whose engines `load` reuses for models that agree; it is closed.
    """

    former: Hosted | None = None

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.models: dict[str, HostedModel] = {}
        self.endpoint: Any = None
        self._engines: dict[str, EngineProcess] = {}  # by the instance of a model
        self._probes: dict[str, dict[str, Array] | None] = {}

    async def load(self, say: Callable[[str], None]) -> None:
        """Load and probe every model; `say` gets lines on the progress. Raises UnservedError."""
        models = await self._load(say)
        for name, model in models.items():
            hidden = _hidden_size(weights_of(model, self.folder))
            self._probes[name] = probe_tensors(model, hidden=hidden)
        say("sending first requests")
        problems = [await self._problem(model) for model in models.values()]
        if any(problems):
            raise UnservedError([*filter(None, problems)])
        self.models = models
        for version in self.all_versions():
            version.about = self._identity(version)

    async def _load(self, say: Callable[[str], None]) -> dict[str, HostedModel]:
        """Load every model; `say` gets a line for each.

        Raises UnservedError, after closing the models that did load.
        """
        raise NotImplementedError

    async def metrics(self) -> list[str]:
        """Return the lines of the models' own metrics. Raises RejectedError."""
        raise NotImplementedError

    def _identity(self, model: HostedModel) -> dict[str, str]:
        """Return which checkpoint a model serves; empty for a text model or an ensemble."""
        parameters = parameters_of(model.config)
        if "model_type" not in parameters:
            return {}
        return served_identity(weights_of(model, self.folder), parameters)

    async def _problem(self, model: HostedModel) -> str:
        """Return why a model does not answer, "" if it does."""
        try:
            await self.probe(model)
        except InferError as error:
            if model.is_known:
                return f"model {model.name} did not answer a first small request: {error}"
            model.takes_canaries = False  # a third-party model may not accept such a request
        return ""

    async def probe(self, model: HostedModel, *, is_canary: bool = False) -> None:
        """Send a model its small request, if it has one. Raises InferError.

        A model with sessions gets none: a canary would wait for a slot that sessions hold.
        """
        tensors = self._probes[model.name]
        if tensors is None or is_interactive(model):
            return
        if is_canary and not model.takes_canaries:
            return
        await model.answer(InferRequest(dict(tensors), is_canary=is_canary))

    def serves(self, name: str, version: str) -> bool:
        """Return whether a model is served in a version, "" for any version."""
        model = self.models.get(name)
        return model is not None and version in ("", *model.versions)

    def all_versions(self) -> list[HostedModel]:
        """Return every version of every model."""
        return [version for model in self.models.values() for version in model.versions.values()]

    def progress(self) -> int:
        """Return a progress counter: finished responses plus steps of the engines."""
        steps = sum(engine.steps for engine in self._engines.values())
        return steps + sum(model.responses for model in self.models.values())

    def open_sessions(self) -> int:
        """Return the number of open sessions."""
        return sum(model.sessions.count() for model in self.models.values())

    async def close(self) -> None:
        """End the models; may be called more than once."""
        self.models = {}
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))


def weights_of(model: HostedModel, repository: Path | None) -> Path | None:
    """Return the folder of a model's weights, None if this process cannot read it."""
    if repository is None and "model_checkpoint_path" not in parameters_of(model.config):
        return None
    fields = json_format.MessageToDict(model.config, preserving_proto_field_name=True)
    folder = (repository or Path()) / model.name
    try:
        settings = read_settings(ModelArguments(fields, folder, version=model.version))
    except ValueError:  # another project's model
        return None
    path = settings.checkpoint_path
    return path if (path / CONFIG_NAME).is_file() else None


def _hidden_size(weights: Path | None) -> int | None:
    """Return the width of the hidden states that an encoder takes, None if unknown."""
    if weights is None:
        return None
    _, config = read_config(weights)
    return getattr(config.architecture(), "hidden", None)
