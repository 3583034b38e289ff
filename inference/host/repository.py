"""Reads and loads a repository's models for this project's own server.

It runs no code of the repository: a model's script only selects one of this project's models.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import pickle
import pkgutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from graphlib import CycleError, TopologicalSorter
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from google.protobuf import json_format

from export_scripts.triton.model_config import parameters_of, parse_config
from inference.backend.arguments import ModelArguments
from inference.backend.encoder_backend import complete_hidden_states, fastertransformer_model
from inference.backend.engine_model import EngineModel
from inference.backend.instances import Instance
from inference.backend.metrics import exposition
from inference.backend.requests import Array, InferRequest, ModelError, Tensors, readable
from inference.backend.tensor_model import TensorModel
from inference.decoding.rows import SessionTurn
from inference.front.guard import RejectedError
from inference.front.workers import Workers
from inference.host.engine_process import LoadOrder
from inference.host.engine_start import end_early
from inference.host.engines import EngineProcess
from inference.host.hosted import Hosted, UnservedError
from inference.host.models import (
    HostedEngines,
    HostedEnsemble,
    HostedModel,
    HostedTextModel,
)

_MODULES = "inference.backend."
_USE_TRITON = "serve this repository with deploy.server=tritonserver"
# This project's models, as the scripts in repositories import them.
_SCRIPTS = {
    ("python_backend", "GenerationModel"),
    ("encoder_backend", "EncoderModel"),
    ("text_generation", "TextModel"),
    ("nemo_generation", "NemoModel"),
    ("nemo_generation", "NemoDeployModel"),
    ("text_models", "Preprocessing"),
    ("text_models", "Postprocessing"),
    ("text_models", "QueryTokenizer"),
}
# Configuration fields that this server implements, or can ignore because they only tune
# tritonserver's batching and copying: engines do their own batching.
_FIELDS = {
    *("name", "platform", "backend", "version_policy", "max_batch_size", "input", "output"),
    *("batch_input", "instance_group", "default_model_filename", "parameters"),
    *("model_transaction_policy", "dynamic_batching", "sequence_batching"),
    *("ensemble_scheduling", "optimization"),
}
_DEFAULT_IDLE_US = 1_000_000  # of a session, as in tritonserver
_ENSEMBLE, _NVIDIA = "ensemble", "fastertransformer"


class Repository(Hosted):
    """The models of a folder, in this project's own server.

    Attributes:
        configs: each model's configuration and the version that is served.
        orders: how to load each model; ensembles have no order.
    """

    def __init__(
        self, folder: Path, *, on_failure: Callable[[str], None], workers: Workers
    ) -> None:
        """Read the configurations in a folder; `on_failure` is called once a model has failed.

        Large requests to text models run in `workers`.

        Raises UnservedError for models that this server cannot serve.
        """
        super().__init__(folder)
        self._on_failure, self._workers = on_failure, workers
        self._loaded_ns = time.time_ns()
        self.configs: dict[str, tuple[Any, str]] = {}
        self.orders: dict[str, LoadOrder] = {}
        if not folder.is_dir():
            raise UnservedError([f"{folder} is not a folder"])
        problems = [
            problem
            for path in sorted(folder.glob("*/config.pbtxt"))
            if (problem := self._problem_of(path))
        ]
        if problems:
            raise UnservedError(problems)
        if not self.configs:
            raise UnservedError([f"{folder} holds no model"])

    async def _load(self, say: Callable[[str], None]) -> dict[str, HostedModel]:
        problems, models = [], dict[str, HostedModel]()
        # Start engines first: text models load while ranks start.
        simple = sorted(self.orders, key=lambda n: not issubclass(self.orders[n].kind, EngineModel))
        loads = [self._loaded(name, say) for name in simple]
        loaded = await asyncio.gather(*loads, return_exceptions=True)
        await asyncio.to_thread(end_early)
        if self.former is not None:
            await self.former.close()
            self.former = None
        for name, found in zip(simple, loaded, strict=True):
            if isinstance(found, HostedModel):
                models[name] = found
            else:  # an exception of any kind
                problems.append(f"model {name}: {readable(found)}")
        if not problems:
            ensembles = self._ensembles_in_order()
            problems += [self._ensemble_problem(name, models) for name in ensembles]
        if problems := list(filter(None, problems)):
            await self.close()
            raise UnservedError(problems)
        return dict(sorted(models.items()))

    async def metrics(self) -> list[str]:
        """Return the lines of the engines' metrics, see `Hosted`."""
        try:
            found = [
                metric for engine in self._engines.values() for metric in await engine.metrics()
            ]
        except ModelError as error:
            raise RejectedError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from None
        return list(exposition(found))

    def _problem_of(self, path: Path) -> str:
        """Read a configuration; return why it cannot be served, "" if it can."""
        folder = path.parent
        try:
            config = _read_config(path)
            fields = json_format.MessageToDict(config, preserving_proto_field_name=True)
            if config.backend == _NVIDIA:
                complete_hidden_states(fields)
                config = json_format.ParseDict(fields, config.__class__())
            kind = None if _is_ensemble(config) else _model_kind(folder, config)
            version = _version(folder, config)
        except (OSError, ValueError) as error:
            return f"model {folder.name}: {error}"
        self.configs[folder.name] = config, version
        if kind is not None:
            arguments = ModelArguments(fields, folder, version=version)
            self.orders[folder.name] = LoadOrder(kind, arguments)
        return ""

    def _ensemble_problem(self, name: str, models: dict[str, HostedModel]) -> str:
        """Add an ensemble to `models`; return the reason if it cannot be served, or else ""."""
        config, version = self.configs[name]
        steps = [step.model_name for step in config.ensemble_scheduling.step]
        if absent := [step for step in steps if step not in models]:
            return f"model {name}: the repository has no model {', '.join(absent)}"
        try:
            models[name] = HostedEnsemble(config, version, models)
        except ValueError as error:
            return f"model {name}: {error}"
        return ""

    def _ensembles_in_order(self) -> Iterator[str]:
        """Yield the names of the ensembles, each after the ensembles that it contains."""
        parts = {
            name: [step.model_name for step in config.ensemble_scheduling.step]
            for name, (config, _) in self.configs.items()
            if name not in self.orders
        }
        try:
            yield from filter(parts.__contains__, TopologicalSorter(parts).static_order())
        except CycleError as error:
            raise ValueError(f"the ensembles {', '.join(parts)} contain each other") from error

    async def _loaded(self, name: str, say: Callable[[str], None]) -> HostedModel:
        (config, version), order = self.configs[name], self.orders[name]
        say(f"loading {name}")
        if issubclass(order.kind, TensorModel):
            model = order.kind()
            # The time distinguishes a repository that is loaded again.
            source = pickle.dumps((order, self._loaded_ns))
            model.run_in_worker = partial(self._run_in_worker, source)
            await asyncio.to_thread(model.load, order.arguments)
            say(f"loaded {name}")
            return HostedTextModel(config, version, model)
        instances = []
        count = sum(group.count or 1 for group in config.instance_group) or 1
        for number in range(count):
            key, folder = f"{name}_{number}", order.arguments.model_folder
            engine = self.former._engines.pop(key, None) if self.former is not None else None
            engine = self._engines[key] = engine or EngineProcess(folder, self._on_failure)
            arguments = ModelArguments(
                order.arguments.config, folder, version=version, instance=Instance(number, count)
            )
            await engine.load(LoadOrder(order.kind, arguments))
            instances.append(engine)
        say(f"loaded {name}")
        return HostedEngines(config, version, instances)

    async def _run_in_worker(
        self, source: bytes, request: InferRequest, size_bytes: int
    ) -> dict[str, Array]:
        """Answer a request to a text model in a worker process. Raises ValueError."""
        work = answer_texts, source, request.tensors, request.turn
        try:
            return await self._workers.run(*work, size_bytes=size_bytes)
        except RejectedError as error:
            raise ValueError(str(error)) from None


def answer_texts(source: bytes, tensors: Tensors, turn: SessionTurn | None) -> dict[str, Array]:
    """Return the outputs of a text model; runs in a worker process. Raises ValueError."""
    return _text_model(source).answer(tensors, turn)


@functools.lru_cache(maxsize=8)  # enough for a repository and its successor
def _text_model(source: bytes) -> TensorModel:
    """Load a text model by its pickled order, on first use."""
    order, _ = pickle.loads(source)
    model: TensorModel = order.kind()
    model.load(order.arguments)
    return model


def check_text_models(folder: Path) -> None:
    """Read a repository and load its text models. Raises ValueError if one cannot be served."""
    found = Repository(folder, on_failure=lambda _: None, workers=Workers(1))
    for order in found.orders.values():
        if issubclass(order.kind, TensorModel):
            order.kind().load(order.arguments)


def _read_config(path: Path) -> Any:
    config = parse_config(path.read_text(encoding="utf-8"))
    folder = path.parent
    config.name = config.name or folder.name
    if config.name != folder.name:
        raise ValueError(f"config.pbtxt names it {config.name}; a model has the name of its folder")
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        idle_us = batching.max_sequence_idle_microseconds
        batching.max_sequence_idle_microseconds = idle_us or _DEFAULT_IDLE_US
    unknown = sorted(field.name for field, _ in config.ListFields() if field.name not in _FIELDS)
    if unknown:
        raise ValueError(
            f"config.pbtxt sets {', '.join(unknown)}, which this server does not follow; remove "
            f"that, or {_USE_TRITON}"
        )
    return config


def _version(folder: Path, config: Any) -> str:
    """Return the version to serve: the latest, or the one in the version_policy."""
    found = sorted(int(e.name) for e in folder.iterdir() if e.is_dir() and e.name.isdigit())
    if not found:
        raise ValueError(f"{folder} has no version, a folder such as {folder}/1")
    policy = config.version_policy
    chosen = found[-max(policy.latest.num_versions, 1) :]
    if policy.HasField("all"):
        chosen = found
    elif policy.HasField("specific"):
        chosen = sorted(policy.specific.versions)
    if len(chosen) != 1 or chosen[0] not in found:
        raise ValueError(
            f"its version_policy asks for the versions {', '.join(map(str, chosen)) or 'none'} of "
            f"{', '.join(map(str, found))}; this server serves one of each model: name that, or "
            f"{_USE_TRITON}"
        )
    return str(chosen[0])


def _is_ensemble(config: Any) -> bool:
    return bool(config.platform == _ENSEMBLE or config.HasField("ensemble_scheduling"))


def _model_kind(folder: Path, config: Any) -> type[Any]:
    """Return the model in a folder, an engine's or a text model. Raises ValueError for others."""
    if config.backend == _NVIDIA:
        return fastertransformer_model(parameters_of(config))
    if config.backend != "python":
        raise ValueError(
            f"backend {config.backend or config.platform!r} is not supported; {_USE_TRITON}"
        )
    name = config.default_model_filename or "model.py"
    for script in sorted(folder.glob(f"*/{name}")):
        if found := _imported_model(script.read_text(encoding="utf-8")):
            return cast("type[Any]", pkgutil.resolve_name(f"{_MODULES}{found[0]}:{found[1]}"))
    raise ValueError(
        f"{name} is not a model of this project, and this server runs no other code; {_USE_TRITON}"
    )


def _imported_model(text: str) -> tuple[str, str] | None:
    """Return (module, class) if a script does nothing but import one of this project's models."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if len(body) != 1 or not isinstance(body[0], ast.ImportFrom) or len(body[0].names) != 1:
        return None
    module, (name,) = str(body[0].module), body[0].names
    found = module.removeprefix(_MODULES), name.name
    is_own = module.startswith(_MODULES) and name.asname == "TritonPythonModel"
    return found if is_own and found in _SCRIPTS else None
