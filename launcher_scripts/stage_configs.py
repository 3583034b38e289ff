"""From the configuration to the stages: the one place that knows both."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from export_scripts.ft.layout import ft_directory
from export_scripts.request import ConversionRequest
from export_scripts.triton.repository import ENSEMBLE, RepositoryRequest, repository_models
from inference.evaluation.gate import Bound
from inference.evaluation.options import (
    REFERENCES,
    EvaluationOptions,
    IdentityOptions,
    LambadaOptions,
    LatencyOptions,
    PromptOptions,
    TextTaskOptions,
)
from inference.evaluation.record import RunFacts
from inference.evaluation.text_task import TEXT_TASKS
from launcher_scripts.config import Config, TextTaskConfig
from launcher_scripts.server_config import deploy_resources, server_config, server_store
from launcher_scripts.suggest import did_you_mean
from launcher_scripts.time_limit import minutes
from stages.base import JobSettings, Resources, Stage
from stages.convert import ConvertStage, find_checkpoint
from stages.deploy import ENDPOINT_NAME, DeployConfig, DeployStage
from stages.evaluate import EvaluateConfig, EvaluateStage
from stages.export import ExportStage

_Options = TypeVar("_Options")

# Where each stage's time limit stands.
TIME_LIMIT_KEYS = {
    "convert": "export.run.time_limit",
    "export": "export.run.time_limit",
    "deploy": "deploy.time_limit",
    "evaluate": "evaluate.time_limit",
}


@dataclass(frozen=True)
class Context:
    """What a stage is told about the run that is not in the configuration.

    Attributes:
        deploys: whether the same pipeline deploys a server.
        exports: whether what it converts is exported and served.
        command: the command line.
    """

    deploys: bool = False
    exports: bool = False
    command: str = ""
    git_revision: str = ""


def results_dir(config: Config) -> Path:
    """Return the folder in which each stage has its own."""
    return Path(config.export.run.results_dir)


def build_stage(name: str, config: Config, context: Context) -> Stage:
    """Return a stage with its part of the configuration, as plain data.

    Raises:
        ValueError: the time limit is not one.
    """
    job = JobSettings(
        name=_job_name(name, config),
        folder=results_dir(config) / name,
        resources=_resources(name, config),
        overwrite=config.overwrite,
        warning_s=_warning_s(config),
    )
    return _BUILDERS[name](config, job, context)


def _warning_s(config: Config) -> float:
    """Return how long before its time limit a server stops."""
    if config.cluster_type == "local":
        return 45.0
    # Slurm's signal may come up to a minute early.
    return config.cluster.signal_delay_s + 60.0


def _job_name(name: str, config: Config) -> str:
    names = {"deploy": config.deploy.name, "evaluate": config.evaluate.name}
    return names.get(name, config.export.run.name)


def _resources(name: str, config: Config) -> Resources:
    key = TIME_LIMIT_KEYS[name]
    if name == "deploy":
        limit_min = minutes(config.deploy.time_limit, key=key)
        return deploy_resources(config, limit_min)
    if name == "evaluate":
        return Resources(
            cpus_per_task=config.evaluate.cpus_per_task,
            mem_gb=config.evaluate.mem_gb,
            time_limit_min=minutes(config.evaluate.time_limit, key=key),
        )
    run = config.export.run
    cpus = config.export.model.processes if name == "convert" else 1
    return Resources(
        gpus_per_node=run.gpus_per_node,
        cpus_per_task=run.cpus_per_task or cpus,
        mem_gb=run.mem_gb,
        time_limit_min=minutes(run.time_limit, key=key),
    )


def _convert(config: Config, job: JobSettings, context: Context) -> Stage:
    model = config.export.model
    extra = config.convert
    return ConvertStage(
        job,
        ConversionRequest(
            checkpoint_path=Path(model.checkpoint_path),
            output_dir=Path(config.export.triton_deployment.triton_model_dir) / "1",
            tp_size=model.tensor_model_parallel_size,
            pp_size=config.export.triton_deployment.pipeline_model_parallel_size,
            weight_data_type=model.weight_data_type,
            processes=model.processes,
            model_type=config.export.run.model_type,
            prompt_checkpoints=tuple(Path(each) for each in extra.prompt_checkpoints),
            ia3_checkpoints=tuple(Path(each) for each in extra.ia3_checkpoints),
            ia3_in_place=extra.ia3_in_place,
            adapter_checkpoints=tuple(Path(each) for each in extra.adapter_checkpoints),
            activation_ranges=_path(extra.activation_ranges),
            vocab_path=_path(extra.vocab_path),
            merges_path=_path(extra.merges_path),
            allow=tuple(extra.allow),
            given=tuple((name, str(value)) for name, value in extra.given.items()),
            for_text=context.exports and len(_model_folders(config)) > 1,
        ),
    )


def _export(config: Config, job: JobSettings, context: Context) -> Stage:
    del context
    return ExportStage(
        job, _repository(config), kind=config.export.run.model_type, publish_to=server_store(config)
    )


def _repository(config: Config) -> RepositoryRequest:
    triton = config.export.triton_deployment
    return RepositoryRequest(
        model_dir=Path(triton.triton_model_dir),
        tp_size=config.export.model.tensor_model_parallel_size,
        pp_size=triton.pipeline_model_parallel_size,
        max_batch_size=triton.max_batch_size,
        data_type=triton.data_type,
        int8_mode=int(triton.int8_mode),
        enable_custom_all_reduce=int(triton.enable_custom_all_reduce),
        engine=config.deploy.engine,
        decoupled=triton.decoupled,
        ensemble=triton.ensemble,
        portable=triton.portable,
        interactive=triton.interactive,
        answer_only=triton.answer_only,
        max_queue_delay_us=triton.max_queue_delay_us,
        instance_count=triton.instance_count,
        model_type=triton.model_type,
        parameters={name: _parameter(value) for name, value in triton.parameters.items()},
    )


def _parameter(value: object) -> str:
    """Return a parameter of config.pbtxt as text; truth values are digits there."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _model_folders(config: Config) -> list[Path]:
    """Return the folders of the exported repository: the model, and those that take text."""
    return repository_models(_repository(config), kind=config.export.run.model_type)


def _has_ensemble(config: Config) -> bool:
    """Whether the exported repository answers text with text."""
    return any(folder.name == ENSEMBLE for folder in _model_folders(config))


def _deploy(config: Config, job: JobSettings, context: Context) -> Stage:
    del context
    return DeployStage(job, server_config(config))


def _evaluate(config: Config, job: JobSettings, context: Context) -> Stage:
    evaluate = config.evaluate
    gate, gate_problems = _bounds(evaluate.gate)
    server = server_config(config)
    options = EvaluationOptions(
        output_dir=Path(evaluate.output_dir),
        data_dir=Path(config.data_dir),
        model_name=server.model_name,
        ensemble_name=ENSEMBLE if _has_ensemble(config) else None,
        # The conversion puts the tokenizer's files among the shards.
        tokenizer_dir=None if evaluate.server else _weights_dir(server),
        weights_dir=None if evaluate.server else _weights_dir(server),
        source_path=find_checkpoint(Path(config.export.model.checkpoint_path)),
        lambada=_options(LambadaOptions, evaluate.lambada),
        text_tasks={name: _text_task(getattr(evaluate, name)) for name in TEXT_TASKS},
        identity=_identity(config),
        latency=_options(LatencyOptions, evaluate.latency),
        gate=gate,
        reference=_reference(evaluate.reference),
        **_fields(EvaluationOptions, evaluate, without=_SET_APART),
    )
    follows = context.deploys and evaluate.server is None
    if server.nodes > 1 and evaluate.server is None and not follows:
        raise ValueError(
            f"a model over {server.nodes} nodes needs a server job of its own; add deploy to "
            "stages, or name a running server in evaluate.server."
        )
    endpoint_path = results_dir(config) / "deploy" / ENDPOINT_NAME
    return EvaluateStage(
        job,
        EvaluateConfig(
            options=options,
            deploy=server,
            server=evaluate.server,
            endpoint_path=endpoint_path if follows else None,
            stops_server=follows and not config.deploy.keep,
            problems=tuple(gate_problems),
            facts=RunFacts(
                name=config.export.run.model_train_name,
                checkpoint=config.export.model.checkpoint_path,
                engine=config.deploy.engine,
                tp_size=server.tp_size,
                pp_size=server.pp_size,
                weight_data_type=config.export.model.weight_data_type,
                data_type=config.export.triton_deployment.data_type,
                int8_mode=int(config.export.triton_deployment.int8_mode),
                max_batch_size=config.export.triton_deployment.max_batch_size,
                cluster=config.cluster_type,
                command=context.command,
                git_revision=context.git_revision,
            ),
        ),
    )


def _identity(config: Config) -> IdentityOptions:
    triton = config.export.triton_deployment
    types = [config.export.model.weight_data_type, triton.data_type]
    types += ["int8"] * (int(triton.int8_mode) > 0)
    options = _options(IdentityOptions, config.evaluate.identity)
    return replace(options, types=tuple(types))


def _weights_dir(server: DeployConfig) -> Path:
    """Return the folder of shards that a server serves."""
    return ft_directory(server.repository / server.model_name / "1", server.tp_size)


_BUILDERS: dict[str, Callable[[Config, JobSettings, Context], Stage]] = {
    "convert": _convert,
    "export": _export,
    "deploy": _deploy,
    "evaluate": _evaluate,
}


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


# Fields of the options that are not copied as they are.
_SET_APART = ("lambada", "identity", "latency", "gate", "reference", "output_dir")


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


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
