"""The table of stages: how each stage is built from the configuration."""

from collections.abc import Callable
from typing import Any

from foundations.time_limit import minutes
from launcher_scripts.configuration.evaluation_config import (
    Context,
    certify_stage,
    evaluation_stage,
)
from launcher_scripts.configuration.export_config import (
    conversion_request,
    repository_request,
)
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.server_config import server_config
from launcher_scripts.launchers.base import settings_section
from stages.base import JobSettings, Resources, Stage
from stages.convert import ConvertStage
from stages.deploy import DeployStage
from stages.export import ExportStage


def build_stage(name: str, config: Config, context: Context) -> Stage:
    """Return a stage with the settings of its job.

    Raises:
        ValueError: the stage does not fit on the cluster.
    """
    settings = config.at(settings_section(name))
    job = JobSettings(
        name=settings.name,
        folder=config.results_dir / name,
        resources=_resources(name, config, settings, deploys="deploy" in context.stages),
        overwrite=config.overwrite,
        # Slurm may send its signal up to a minute early.
        warning_s=45.0 if config.cluster_type == "local" else config.cluster.signal_delay_s + 60.0,
    )
    return STAGE_TABLE[name](config, job, context)


def _resources(name: str, config: Config, settings: Any, *, deploys: bool) -> Resources:
    """Return the resources of a stage's job; a stage that starts the server needs the server's."""
    limit_min = minutes(settings.time_limit)
    usual_cpus = {"convert": config.export.model.processes, "export": 1}
    nodes = tasks = 1
    gpus = config.export.run.gpus_per_node if name in ("convert", "export") else None
    serves = {
        "deploy": True,
        "certify": config.certify.serve,
        "evaluate": not (deploys or config.evaluate.server or config.evaluate.shared_server),
    }
    if serves.get(name):  # the server runs within this job
        server = server_config(config)
        nodes, tasks, gpus = server.nodes, server.tasks_per_node, server.gpus_per_node
        settings = server if name == "deploy" else settings
    return Resources(
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_task=settings.cpus_per_task or usual_cpus.get(name),
        mem_gb=settings.mem_gb,
        time_limit_min=limit_min,
    )


# Stage -> function that builds it from the configuration.
STAGE_TABLE: dict[str, Callable[[Config, JobSettings, Context], Stage]] = {
    "convert": lambda config, job, context: ConvertStage(
        job,
        conversion_request(config, exports="export" in context.stages),
        may_be_remote=config.plans_remotely,
    ),
    "certify": certify_stage,
    "export": lambda config, job, _: ExportStage(
        job,
        repository_request(config),
        kind=config.export.run.model_type,
        publish_to=config.deploy.store,
    ),
    "deploy": lambda config, job, context: DeployStage(
        job,
        server_config(config),
        ends_with_evaluation="evaluate" in context.stages and not config.deploy.keep,
    ),
    "evaluate": evaluation_stage,
}
