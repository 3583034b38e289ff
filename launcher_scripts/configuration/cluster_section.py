"""The `cluster` section of the configuration: scheduler options of every job."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from export_scripts.values import option

CLUSTERS = ("local", "bcm", "bcp", "kubernetes")
CLUSTER_ALIASES = {"interactive": "local", "slurm": "bcm", "k8s": "kubernetes"}


@dataclass
class KubernetesSection:
    """`cluster.kubernetes`: further settings of the server's manifests."""

    namespace: str | None = option("namespace of all objects; null: that of kubectl", None)
    replicas: int = option("servers, or groups of pods of one server each", 1, within=(1, 1024))
    strategy: str = option(
        "how a new server takes over", "Recreate", choices=("Recreate", "RollingUpdate")
    )
    claim: str | None = option("PersistentVolumeClaim that holds the repository", None)
    claim_path: str | None = option("folder of the repository in the claim", None)
    token_secret: str | None = option("Secret whose key `tokens` holds accepted tokens", None)
    tls_secret: str | None = option("Secret of type kubernetes.io/tls", None)
    s3_secret: str | None = option("Secret with the variables of an object store", None)
    pull_secret: str | None = option("Secret for the registry of the image", None)
    gpu_resource: str = option("name of the GPU resource", "nvidia.com/gpu")
    node_selector: dict[str, str] = option("labels that a node must have", {})
    service_type: str = option(
        "type of the Service", "ClusterIP", choices=("ClusterIP", "NodePort", "LoadBalancer")
    )


@dataclass
class ClusterSection:
    """`cluster`: scheduler options of every job (conf/cluster/<name>.yaml)."""

    partition: str | None = option("partition to submit to", None)
    account: str | None = option("account to charge", None)
    qos: str | None = option("quality of service", None)
    reservation: str | None = option("reservation to use", None)
    constraint: str | None = option("node features that are required", None)
    nodelist: str | None = option("nodes that must be used", None)
    exclude: str | None = option("nodes that must not be used", None)
    gres: str | None = option("generic resources, as sbatch takes them", None)
    comment: str | None = option("comment on each job", None)
    dependency: str | None = option("added to the dependencies of every job", None)
    exclusive: bool | None = option("take whole nodes", None)
    overcommit: bool | None = option("more than one task per processor", None)
    gpus_per_node: int | None = option(
        "GPUs of one node; null: the cluster has no GPU resource", within=(1, 64)
    )
    gpus_per_task: int | None = option("GPUs bound to each task", None, within=(1, 64))
    mem: Any = option("memory per node: 0 is all of it, other numbers are GB", None)
    job_name_prefix: str = option("put in front of every job's name")
    srun_args: list[str] = option("appended to every srun", [])
    mpi: str | None = option("MPI flavour of multi-node steps", "pmix")
    setup: list[str] = option("shell lines that run before the job", [])
    additional_parameters: dict[str, Any] = option("further sbatch options by name", {})
    container_workdir: str | None = option("working directory inside the container", None)
    container_python: str = option("interpreter inside the container", "python3")
    signal_delay_s: int = option(
        "seconds of warning before the time limit", 120, within=(1, 24 * 3600)
    )
    server_host: str = option(
        "address that servers listen on; see deploy.host", "${server_host:${cluster_type}}"
    )
    probe: bool = option(
        "before submitting, check from the nodes that they see the folders and Python", False
    )
    bcprun: str = option("Base Command's multi-node runner", "bcprun")
    bcprun_args: list[str] = option("appended to every bcprun, ahead of its --cmd", [])
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)
