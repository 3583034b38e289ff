"""Kubernetes manifests that serve a repository; they are written, not submitted.

A server on one node becomes a Deployment; one over several nodes becomes a LeaderWorkerSet, each
pod of which holds the ranks of one node. Placement, server options and environment are the same as
on other clusters.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from foundations.files.json_content import Fields
from inference.system.launch_environment import KEY_FILE_VARIABLE, RENDEZVOUS_VARIABLE
from inference.system.ports import DEFAULT_PORTS
from launcher_scripts.configuration.schema import Config
from launcher_scripts.launchers.base import Job, Launcher, as_options, fill
from stages.base import Stage
from stages.deploy import DeployStage
from stages.deploy_config import (
    DEFAULT_SERVER,
    FASTERTRANSFORMER,
    OPENAI,
    VLLM,
    DeployConfig,
)
from stages.engines import TOKEN_VARIABLE

_DATA, _PRIVATE = "/data", "/run/slipway"
# Keys of `deploy` that `python -m inference.server` takes as options.
_SAME_OPTIONS = (
    "engine",
    "ready_timeout_s",
    "drain_s",
    "max_request_mb",
    "otlp_collector",
)


class KubernetesLauncher(Launcher):
    """Renders the server's objects for `kubectl apply`."""

    name = "kubernetes"
    in_foreground = False
    script_name = "manifests.yaml"
    only_renders = True

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return the problems that a pod would have."""
        return [problem for server in _servers(stages) for problem in _problems(server)]

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return notes on where the repository must be before the pods start."""
        settings = self.config.cluster.kubernetes
        return [
            f"copy {'a Hugging Face folder' if server.is_other_engine else server.folder} to "
            f"{settings.claim_path or 'the root'} of the claim {settings.claim} before the pods "
            "start"
            for server in _servers(stages)
            if server.store is None
        ]

    def render(self, job: Job, after: str) -> str:
        """Return the manifests of a server as YAML: its workload and its Service."""
        del after
        config = self.config
        (server,) = _servers([job.stage])
        command = ["python3", "-m", "inference.server"]
        options = _server_options(config, server)
        if is_vllm := server.engine == VLLM:
            command, options = [server.executable], _vllm_options(config, server)
        return fill(
            "kubernetes.yaml.j2",
            name=object_name(job.name),
            settings=config.cluster.kubernetes,
            server=server,
            is_vllm=is_vllm,
            is_interactive=config.export.triton_deployment.interactive,
            image=config.image_of("deploy"),
            environment=job.environment,
            command=command,
            options=options,
            ports=_ports(server),
            resources=_resources(job, server),
            data_dir=_DATA,
            private_dir=_PRIVATE,
            token_variable=TOKEN_VARIABLE,
            rendezvous_variable=RENDEZVOUS_VARIABLE,
            key_variable=KEY_FILE_VARIABLE,
        )


def _servers(stages: Sequence[Stage]) -> list[DeployConfig]:
    """Return the server among the stages; none if it was not requested or cannot be placed."""
    return [stage.config for stage in stages if isinstance(stage, DeployStage)]


def _problems(server: DeployConfig) -> Iterator[str]:
    if server.nodes > 1 and server.store is not None:
        yield (
            f"{server.nodes} nodes share the key of their launch through a volume; set "
            "cluster.kubernetes.claim and serve a repository in it instead of deploy.repository="
            f"{server.repository}."
        )
    if server.engine == OPENAI or (server.engine == VLLM and server.nodes > 1):
        over = f" over {server.nodes} nodes" * (server.nodes > 1)
        yield (
            f"deploy.engine={server.engine}{over}: use the manifests of that engine's publisher, "
            "and name its server in evaluate.server."
        )
    if server.nodes > 1 and server.engine == FASTERTRANSFORMER:
        yield (
            "deploy.engine=fastertransformer needs MPI over several nodes, which pods do not have; "
            "use deploy.engine=pytorch, or sizes that fit one node."
        )
    files = (
        ("token_file", server.token_file, "token_secret"),
        ("tls_cert", server.tls_cert, "tls_secret"),
    )
    for key, value, secret in files:
        if value is not None:
            yield (
                f"deploy.{key}={value} is a file of this machine; name a Secret with its content "
                f"in cluster.kubernetes.{secret}, and set deploy.{key}=null."
            )


def object_name(text: str) -> str:
    """Return a valid name for Kubernetes (RFC 1123: at most 63 characters, a letter first)."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:52].rstrip("-")


def _server_options(config: Config, server: DeployConfig) -> list[str]:
    settings = config.cluster.kubernetes
    repository = str(Path(_DATA, settings.claim_path or ""))
    options = {
        "model_repository": repository if server.store is None else server.source,
        "host": server.host,
        **{f"{name}_port": port for name, port in _ports(server).items()},
        **{name: getattr(server, name) for name in _SAME_OPTIONS},
        "server": None if server.server == DEFAULT_SERVER else server.server,
    }
    if settings.token_secret:
        options["token_file"] = f"{_PRIVATE}/tokens"
    if settings.tls_secret:
        options |= {"tls_cert": f"{_PRIVATE}/tls.crt", "tls_key": f"{_PRIVATE}/tls.key"}
    return [*as_options(options), *(server.openai.arguments() if server.openai.enabled else ())]


def _vllm_options(config: Config, server: DeployConfig) -> list[str]:
    """Return the arguments of `vllm` in a pod."""
    settings = config.cluster.kubernetes
    folder = str(Path(_DATA, settings.claim_path or ""))
    words = server.filled_command(folder, port=_ports(server)["http"])[1:]
    if settings.tls_secret:
        words += ["--ssl-certfile", f"{_PRIVATE}/tls.crt", "--ssl-keyfile", f"{_PRIVATE}/tls.key"]
    return words


def _ports(server: DeployConfig) -> dict[str, int]:
    """Return the ports of the pod; port 0, any free one, becomes Triton's default port."""
    return {name: port or DEFAULT_PORTS[name] for name, port in server.ports.items()}


def _resources(job: Job, server: DeployConfig) -> Fields:
    """Return the resources of one pod, which all ranks of a node share."""
    wanted, ranks = job.stage.job.resources, server.tp_size * server.pp_size // server.nodes
    limits: Fields = {}
    if wanted.gpus_per_node:
        limits["nvidia.com/gpu"] = wanted.gpus_per_node
    requests = dict(limits)
    if wanted.cpus_per_task:
        per_pod = wanted.cpus_per_task * (ranks if server.nodes > 1 else 1)
        requests["cpu"] = str(per_pod)
    if wanted.mem_gb:
        requests["memory"] = limits["memory"] = f"{wanted.mem_gb:g}G"
    return {"requests": requests, "limits": limits}
