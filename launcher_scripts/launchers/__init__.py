"""Launchers: one or more modules for each kind of cluster.

Submitting, following and stopping jobs belongs here; choosing them belongs in the caller.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher_scripts.configuration.schema import Config
    from launcher_scripts.launchers.base import Launcher

# Cluster -> launcher class, imported on demand.
_LAUNCHERS = {
    "local": "local:LocalLauncher",
    "bcm": "slurm:SlurmLauncher",
    "bcp": "bcp:BcpLauncher",
    "kubernetes": "kubernetes:KubernetesLauncher",
}


def make_launcher(config: Config) -> Launcher:
    """Return the launcher for `cluster_type`."""
    launcher: Launcher = resolve_name(f"{__name__}.{_LAUNCHERS[config.cluster_type]}")(config)
    return launcher
