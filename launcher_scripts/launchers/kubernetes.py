"""Manifests that serve a repository on Kubernetes; they are written, nothing is submitted.

One node becomes a Deployment, several a LeaderWorkerSet, whose pods hold the ranks of a node each.
The placement, the server's options and its environment are those of the other clusters.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.server_config import deploy_resources, image_of, server_config
from launcher_scripts.launchers.base import Dependency, Job, JobHandle, SubmissionError
from stages.base import Stage
from stages.deploy_config import FASTERTRANSFORMER, PYTRITON, DeployConfig

_DATA, _SECRETS, _PRIVATE = "/data", "/run/slipway-secrets", "/run/slipway"
_USER, _NVIDIAS_USER = 10001, 1000  # of docker/Dockerfile and docker/Dockerfile.fastertransformer
_RENDEZVOUS_PORT = 29500
_PROBE_S = 10
_UNLOAD_S = 30
_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
_Object = dict[str, Any]


class KubernetesLauncher:
    """Renders the server's objects for `kubectl apply`."""

    name = "kubernetes"
    in_foreground = False
    script_name = "manifests.yaml"
    only_renders = True

    def __init__(self, config: Config) -> None:
        self._config = config

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return what a pod could not do, or could not find."""
        return list(_problems(self._config, stages))

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return where the repository has to be before the pods start."""
        found = [stage for stage in stages if stage.name == "deploy"]
        config = server_config(self._config)
        if not found or config.store is not None:
            return []
        settings = self._config.cluster.kubernetes
        return [
            f"{config.repository} has to be in the claim {settings.claim}, as "
            f"{settings.claim_path or 'its root'}, before the pods start"
        ]

    def render(self, job: Job, after: Sequence[Dependency]) -> str:
        """Return the manifests of the server's job."""
        del after
        objects = manifests(job.name, self._config, job.environment)
        # Copied, so that what two pods share is written out for each, not as an alias.
        texts = [yaml.safe_dump(json.loads(json.dumps(each)), sort_keys=False) for each in objects]
        return "---\n".join(texts)

    def submit(self, job: Job, after: Sequence[Dependency]) -> JobHandle:
        """Refuse: applying the manifests is up to the user."""
        del after
        raise SubmissionError(f"{job.name}: cluster_type=kubernetes writes manifests only")


def _problems(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    others = [stage.name for stage in stages if stage.name != "deploy"]
    if others:
        yield (
            f"cluster_type=kubernetes serves alone, and {', '.join(others)} would run too; run "
            "them with another cluster_type first, and ask for stages=[deploy]."
        )
    server, settings = server_config(config), config.cluster.kubernetes
    if image_of("deploy", config) is None:
        yield "deploy.container is not set; give the image that the pods run (docs/docker.md)."
    if server.store is None and settings.claim is None:
        yield (
            "cluster.kubernetes.claim is not set; give the PersistentVolumeClaim that holds the "
            "repository, or deploy.repository=s3://bucket/prefix."
        )
    if server.nodes > 1 and server.store is not None:
        yield (
            f"{server.nodes} nodes share the key of their launch through a volume; set "
            "cluster.kubernetes.claim and serve the repository in it, not deploy.repository="
            f"{config.deploy.repository}."
        )
    if config.deploy.server == PYTRITON:
        yield "deploy.server=pytriton: pods run tritonserver; use deploy.server=triton."
    if server.nodes > 1 and server.engine == FASTERTRANSFORMER:
        yield (
            "deploy.engine=fastertransformer needs MPI over several nodes, which pods do not have; "
            "use deploy.engine=pytorch, or sizes that fit one node."
        )
    if server.engine == FASTERTRANSFORMER and _secrets(config):
        yield (
            "cluster.kubernetes.token_secret and tls_secret have no effect with "
            "deploy.engine=fastertransformer, whose server listens itself; set them to null, and "
            "put a proxy in front of it."
        )
    files = (
        ("token_file", config.deploy.token_file, "token_secret"),
        ("tls_cert", config.deploy.tls_cert, "tls_secret"),
    )
    for key, value, secret in files:
        if value is not None:
            yield (
                f"deploy.{key}={value} is a file of this machine; name a Secret with its content "
                f"in cluster.kubernetes.{secret}, and set deploy.{key}=null."
            )


def manifests(job_name: str, config: Config, environment: Mapping[str, str]) -> list[_Object]:
    """Return the objects of a server: its workload and its Service."""
    server = server_config(config)
    name = object_name(job_name)
    workload = (
        _deployment(name, config, server, environment)
        if server.nodes == 1
        else _leader_worker_set(name, config, server, environment)
    )
    return [workload, _service(name, config, server)]


def object_name(text: str) -> str:
    """Return a name as Kubernetes takes it (RFC 1123, 63 characters, letter first)."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:52].rstrip("-")


def _metadata(name: str, config: Config) -> _Object:
    found: _Object = {"name": name, "labels": _labels(name)}
    if config.cluster.kubernetes.namespace:
        found["namespace"] = config.cluster.kubernetes.namespace
    return found


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "slipway", "app.kubernetes.io/instance": name}


def _deployment(
    name: str, config: Config, server: DeployConfig, environment: Mapping[str, str]
) -> _Object:
    container = _container(config, server, environment)
    container["command"] = ["python3", "-m", "inference.server"]
    container["args"] = _server_options(config, server)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(name, config),
        "spec": {
            "replicas": config.cluster.kubernetes.replicas,
            "selector": {"matchLabels": _labels(name)},
            # A new server takes over once it is ready; where no GPU is left for it, Recreate.
            "strategy": {"type": config.cluster.kubernetes.strategy},
            "template": _pod(name, config, server, container),
        },
    }


def _leader_worker_set(
    name: str, config: Config, server: DeployConfig, environment: Mapping[str, str]
) -> _Object:
    """Return groups of pods, a node each, that start and end together."""
    leader = _container(config, server, environment)
    leader |= {"command": ["bash", "-c"], "args": [_ranks_script(name, config, server)]}
    leader["env"] += [
        _from_field("POD_IP", "status.podIP"),
        _from_field("GROUP_INDEX", f"metadata.labels['{_GROUP_LABEL}']"),
    ]
    probes = ("startupProbe", "readinessProbe", "livenessProbe", "ports")
    worker = {key: value for key, value in leader.items() if key not in probes}
    leader_pod = _pod(name, config, server, leader)
    leader_pod["metadata"]["labels"] |= {"role": "leader"}
    worker_pod = _pod(name, config, server, worker)
    del worker_pod["metadata"]["annotations"]
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(name, config),
        "spec": {
            "replicas": config.cluster.kubernetes.replicas,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": server.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader_pod,
                "workerTemplate": worker_pod,
            },
        },
    }


def _ranks_script(name: str, config: Config, server: DeployConfig) -> str:
    """Return the shell lines of a node's pod: a process for each rank; the end of one ends all."""
    ranks = server.tp_size * server.pp_size
    local = ranks // server.nodes
    options = shlex.join(_server_options(config, server))
    return "\n".join(
        [
            "set -euo pipefail",
            f"export WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={local}",
            f"export SLIPWAY_RENDEZVOUS_KEY_FILE={_DATA}/.{name}-$GROUP_INDEX.key",
            "head=$LWS_LEADER_ADDRESS",
            '[ "$LWS_WORKER_INDEX" -ne 0 ] || head=$POD_IP',
            f"export SLIPWAY_RENDEZVOUS=$head:{_RENDEZVOUS_PORT}",
            "asked=",
            "trap 'asked=1; kill -TERM $(jobs -p) 2>/dev/null || true' TERM",
            f"for local in $(seq 0 {local - 1}); do",
            f"  export LOCAL_RANK=$local RANK=$((LWS_WORKER_INDEX * {local} + local))",
            '  if [ "$RANK" -eq 0 ]; then',
            f"    python3 -m inference.server {options} &",
            "  else",
            "    python3 -u -m inference.ranks.launched_rank &",
            "  fi",
            "done",
            "status=0",
            "wait -n || status=$?",
            "kill -TERM $(jobs -p) 2>/dev/null || true",
            "wait || true",
            # The end that was asked for is not a failure.
            '[ -z "$asked" ] || status=0',
            "exit $status",
            "",
        ]
    )


def _server_options(config: Config, server: DeployConfig) -> list[str]:
    settings = config.cluster.kubernetes
    repository = str(Path(_DATA, settings.claim_path or ""))
    options = [
        f"--model-repository={server.source if server.store is not None else repository}",
        f"--host={server.host}",
        *(f"--{name}-port={port}" for name, port in _ports(server).items()),
        f"--engine={server.engine}",
        f"--ready-timeout-s={server.ready_timeout_s:g}",
        f"--drain-s={server.drain_s:g}",
    ]
    if server.engine != FASTERTRANSFORMER:
        options.append(f"--max-request-mb={server.access.max_request_mb}")
    if server.openai is not None and server.openai.tokenizer is not None:
        options.append(f"--openai-tokenizer={server.openai.tokenizer}")
    if settings.token_secret:
        options.append(f"--token-file={_PRIVATE}/tokens")
    if settings.tls_secret:
        options += [f"--tls-cert={_PRIVATE}/tls.crt", f"--tls-key={_PRIVATE}/tls.key"]
    return options


def _ports(server: DeployConfig) -> dict[str, int]:
    """Return the ports of the pod; one that is free anywhere is Triton's usual one here."""
    usual = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 8003}
    return {name: port or usual[name] for name, port in server.ports.items()}


def _container(config: Config, server: DeployConfig, environment: Mapping[str, str]) -> _Object:
    settings = config.cluster.kubernetes
    found: _Object = {
        "name": "server",
        "image": image_of("deploy", config),
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"name": name, "containerPort": port} for name, port in _ports(server).items()],
        "resources": _resources(config, server),
        "startupProbe": _probe(
            config, "ready", failures=math.ceil(server.ready_timeout_s / _PROBE_S)
        ),
        "readinessProbe": _probe(config, "ready", failures=3),
        "livenessProbe": _probe(config, "live", failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if settings.claim:
        found["volumeMounts"].append(
            {"name": "data", "mountPath": _DATA, "readOnly": server.nodes == 1}
        )
    if settings.s3_secret:
        found["envFrom"] = [{"secretRef": {"name": settings.s3_secret}}]
    if _secrets(config):
        found["volumeMounts"].append({"name": "private", "mountPath": _PRIVATE, "readOnly": True})
    return found


def _resources(config: Config, server: DeployConfig) -> _Object:
    """Return what one pod takes: all ranks of a node share it."""
    deploy = config.deploy
    ranks = server.tp_size * server.pp_size // server.nodes
    gpus = deploy_resources(config, 0).gpus_per_node
    limits: _Object = {config.cluster.kubernetes.gpu_resource: gpus} if gpus else {}
    requests = dict(limits)
    if deploy.cpus_per_task:
        per_pod = deploy.cpus_per_task * (ranks if server.nodes > 1 else 1)
        requests["cpu"] = str(per_pod)
    if deploy.mem_gb:
        requests["memory"] = limits["memory"] = f"{deploy.mem_gb:g}G"
    return {"requests": requests, "limits": limits}


def _probe(config: Config, question: str, *, failures: int) -> _Object:
    uses_tls = bool(config.cluster.kubernetes.tls_secret)
    return {
        "httpGet": {
            "path": f"/v2/health/{question}",
            "port": "http",
            "scheme": "HTTPS" if uses_tls else "HTTP",
        },
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": 5,
        "failureThreshold": max(failures, 1),
    }


def _pod(name: str, config: Config, server: DeployConfig, container: _Object) -> _Object:
    settings = config.cluster.kubernetes
    user = _NVIDIAS_USER if server.engine == FASTERTRANSFORMER else _USER
    spec: _Object = {
        "terminationGracePeriodSeconds": int(server.drain_s) + _UNLOAD_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if settings.claim:
        spec["volumes"].append(
            {"name": "data", "persistentVolumeClaim": {"claimName": settings.claim}}
        )
    if secrets := _secrets(config):
        spec["initContainers"] = [_private_files(container["image"])]
        sources = [{"secret": {"name": each}} for each in secrets]
        spec["volumes"] += [
            {"name": "secrets", "projected": {"sources": sources, "defaultMode": 0o440}},
            {"name": "private", "emptyDir": {"medium": "Memory"}},
        ]
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.pull_secret}]
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(_ports(server)["metrics"]),
        "prometheus.io/path": "/metrics",
    }
    return {"metadata": {"labels": _labels(name), "annotations": annotations}, "spec": spec}


def _secrets(config: Config) -> list[str]:
    settings = config.cluster.kubernetes
    return [each for each in (settings.token_secret, settings.tls_secret) if each]


def _private_files(image: str) -> _Object:
    """Return what copies secrets to files that the server's user alone can read, as it asks."""
    return {
        "name": "secrets",
        "image": image,
        "command": ["sh", "-c", f"umask 077; cp -L {_SECRETS}/* {_PRIVATE}/"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
            {"name": "private", "mountPath": _PRIVATE},
        ],
    }


def _from_field(name: str, path: str) -> _Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _service(name: str, config: Config, server: DeployConfig) -> _Object:
    selector = _labels(name)
    if server.nodes > 1:
        selector |= {"role": "leader"}
    spec: _Object = {
        "type": config.cluster.kubernetes.service_type,
        "selector": selector,
        "ports": [
            {"name": each, "port": port, "targetPort": each}
            for each, port in _ports(server).items()
        ],
    }
    if config.export.triton_deployment.interactive:
        spec["sessionAffinity"] = "ClientIP"  # a conversation is kept by one server
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, config),
        "spec": spec,
    }
