"""From the configuration to the evaluation: whom it asks, and what."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from export_scripts.suggest import did_you_mean
from export_scripts.triton.repository import ENSEMBLE
from inference.evaluation.options import (
    REFERENCES,
    Bound,
    EvaluationOptions,
    IdentityOptions,
    LambadaOptions,
    LatencyOptions,
    PromptOptions,
    TextTaskOptions,
)
from inference.evaluation.record import RunFacts
from inference.evaluation.tasks.text_tasks import TEXT_TASKS
from inference.gateway.credentials import Credentials
from launcher_scripts.config import Config, TextTaskConfig
from launcher_scripts.export_config import has_ensemble
from launcher_scripts.server_config import server_config
from stages.convert import find_checkpoint
from stages.deploy_config import DeployConfig
from stages.endpoint import ENDPOINT_NAME
from stages.evaluate import EvaluateConfig

_Options = TypeVar("_Options")
# Fields of the options that are not copied as they are.
_SET_APART = ("credentials", "lambada", "identity", "latency", "gate", "reference", "output_dir")


def evaluation_config(
    config: Config, *, deploys: bool, command: str, git_revision: str
) -> EvaluateConfig:
    """Return whom the evaluation asks, and what.

    Args:
        config: The whole configuration.
        deploys: Whether the same pipeline deploys a server.
        command: The command line, for the report.
        git_revision: Of the checkout, for the report.

    Raises:
        ValueError: There is nobody who could be asked.
    """
    evaluate = config.evaluate
    gate, problems = _bounds(evaluate.gate)
    server = server_config(config)
    follows = deploys and evaluate.server is None
    if server.nodes > 1 and evaluate.server is None and not follows:
        raise ValueError(
            f"a model over {server.nodes} nodes needs a server job of its own; add deploy to "
            "stages, or name a running server in evaluate.server."
        )
    endpoint_path = Path(config.export.run.results_dir) / "deploy" / ENDPOINT_NAME
    return EvaluateConfig(
        options=_evaluation_options(config, server, gate),
        deploy=server,
        server=evaluate.server,
        endpoint_path=endpoint_path if follows else None,
        stops_server=follows and not config.deploy.keep,
        problems=tuple(problems),
        facts=replace(_facts(config), command=command, git_revision=git_revision),
    )


def _evaluation_options(
    config: Config, server: DeployConfig, gate: Mapping[str, Bound]
) -> EvaluationOptions:
    evaluate = config.evaluate
    # The conversion puts the tokenizer's files among the shards.
    weights_dir = None if evaluate.server else server.weights_dir
    return EvaluationOptions(
        output_dir=Path(evaluate.output_dir),
        data_dir=Path(config.data_dir),
        model_name=server.model_name,
        ensemble_name=ENSEMBLE if has_ensemble(config) else None,
        tokenizer_dir=weights_dir,
        weights_dir=weights_dir,
        source_path=find_checkpoint(Path(config.export.model.checkpoint_path)),
        lambada=_options(LambadaOptions, evaluate.lambada),
        text_tasks={name: _text_task(getattr(evaluate, name)) for name in TEXT_TASKS},
        identity=_identity(config),
        latency=_options(LatencyOptions, evaluate.latency),
        credentials=_credentials(config),
        gate=dict(gate),
        reference=_reference(evaluate.reference),
        **_fields(EvaluationOptions, evaluate, without=_SET_APART),
    )


def _credentials(config: Config) -> Credentials:
    ca, token_file = config.evaluate.ca, config.evaluate.token_file
    return Credentials(
        uses_tls=ca is not None,
        ca=None if ca is None else Path(ca),
        token_file=None if token_file is None else Path(token_file),
    )


def _facts(config: Config) -> RunFacts:
    """Return what the report says about the model."""
    model, triton = config.export.model, config.export.triton_deployment
    return RunFacts(
        name=config.export.run.model_train_name,
        checkpoint=model.checkpoint_path,
        engine=config.deploy.engine,
        tp_size=model.tensor_model_parallel_size,
        pp_size=triton.pipeline_model_parallel_size,
        weight_data_type=model.weight_data_type,
        data_type=triton.data_type,
        int8_mode=int(triton.int8_mode),
        max_batch_size=triton.max_batch_size,
        cluster=config.cluster_type,
    )


def _identity(config: Config) -> IdentityOptions:
    triton = config.export.triton_deployment
    types = [config.export.model.weight_data_type, triton.data_type]
    types += ["int8"] * (int(triton.int8_mode) > 0)
    options = _options(IdentityOptions, config.evaluate.identity)
    return replace(options, types=tuple(types))


def _options(kind: type[_Options], section: object) -> _Options:
    """Return an options record from the section of the configuration with the same names."""
    return kind(**_fields(kind, section))


def _fields(kind: type, section: object, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that a record and a section share: lists as tuples, paths as Path."""
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        if name in without or not hasattr(section, name):
            continue
        value = getattr(section, name)
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and (hint is Path or Path in typing.get_args(hint)):
            value = Path(value)
        found[name] = value
    return found


def _text_task(section: TextTaskConfig) -> TextTaskOptions:
    prompt = _options(PromptOptions, section.prompt)
    return TextTaskOptions(prompt=prompt, **_fields(TextTaskOptions, section, without=("prompt",)))


def _bounds(gate: Mapping[str, Any]) -> tuple[dict[str, Bound], list[str]]:
    """Return the bounds that are numbers by name, and what is wrong with the rest."""
    known = [each.name for each in fields(Bound)]
    bounds: dict[str, Bound] = {}
    problems = []
    for metric, limits in gate.items():
        key = f"evaluate.gate.{metric}"
        if not isinstance(limits, Mapping):
            problems.append(f"{key}={limits} is not a bound; write {key}.min={limits}, or .max.")
            continue
        good = {}
        for name, value in limits.items():
            if name not in known:
                hint = did_you_mean(str(name), known)
                problems.append(
                    f"{key}.{name}: there is no such bound{hint}; use {', '.join(known)}."
                )
            elif isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                problems.append(f"{key}.{name}={value}: expected a number.")
            else:
                good[str(name)] = value
        if good or not limits:
            bounds[metric] = Bound(**good)
    return bounds, problems


def _reference(text: str) -> str:
    """Return what to compare with: a word that is known, or a file's whole path."""
    return text if text in REFERENCES else str(Path(text).expanduser().absolute())
