"""Launchers: one or more modules for each kind of cluster.

The submission, following and stopping of jobs belong here; the choice of jobs belongs above. A
launcher is imported when its cluster is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher_scripts.configuration.schema import Config
    from launcher_scripts.launchers.base import Launcher, Queue


def make_launcher(config: Config) -> Launcher:
    """Return the launcher for `cluster_type`."""
    return LAUNCHERS[config.cluster_type](config)


def queue_of(cluster: str) -> Queue | None:
    """Return the queue of a cluster; None where jobs are processes of the command."""
    find = _QUEUES.get(cluster)
    return find() if find is not None else None


def _local(config: Config) -> Launcher:
    from launcher_scripts.launchers.local import LocalLauncher

    del config
    return LocalLauncher()


def _slurm(config: Config) -> Launcher:
    from launcher_scripts.launchers.slurm import SlurmLauncher

    return SlurmLauncher(config)


def _bcp(config: Config) -> Launcher:
    from launcher_scripts.launchers.bcp import BcpLauncher

    return BcpLauncher(config)


def _kubernetes(config: Config) -> Launcher:
    from launcher_scripts.launchers.kubernetes import KubernetesLauncher

    return KubernetesLauncher(config)


def _slurm_queue() -> Queue:
    from launcher_scripts.launchers import slurm_state

    return slurm_state


LAUNCHERS: dict[str, Callable[[Config], Launcher]] = {
    "local": _local,
    "bcm": _slurm,
    "bcp": _bcp,
    "kubernetes": _kubernetes,
}
# Only of clusters whose jobs outlive the command.
_QUEUES: dict[str, Callable[[], Queue]] = {"bcm": _slurm_queue}
