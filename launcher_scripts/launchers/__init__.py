"""Launchers: one or more modules for each kind of cluster.

The submission, following and stopping of jobs belong here; the choice of jobs belongs above. A
launcher is imported when its cluster is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher_scripts.configuration.schema import Config
    from launcher_scripts.launchers.base import Launcher


def make_launcher(config: Config) -> Launcher:
    """Return the launcher for `cluster_type`."""
    match config.cluster_type:
        case "bcm":
            from launcher_scripts.launchers.slurm import SlurmLauncher

            return SlurmLauncher(config)
        case "bcp":
            from launcher_scripts.launchers.bcp import BcpLauncher

            return BcpLauncher(config)
        case "kubernetes":
            from launcher_scripts.launchers.kubernetes import KubernetesLauncher

            return KubernetesLauncher(config)
        case _:
            from launcher_scripts.launchers.local import LocalLauncher

            return LocalLauncher(config)
