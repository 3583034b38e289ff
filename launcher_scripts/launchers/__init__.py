"""The clusters that jobs can be sent to."""

from __future__ import annotations

from collections.abc import Callable

from launcher_scripts.config import Config
from launcher_scripts.launchers.base import Launcher


def make_launcher(config: Config) -> Launcher:
    """Return the launcher for `cluster_type`.

    Raises:
        ValueError: there is no launcher for it.
    """
    make = LAUNCHERS.get(config.cluster_type)
    if make is None:
        raise ValueError(
            f"cluster_type={config.cluster_type} is not available in this version; "
            f"use one of {', '.join(LAUNCHERS)}."
        )
    return make(config)


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


LAUNCHERS: dict[str, Callable[[Config], Launcher]] = {"local": _local, "bcm": _slurm, "bcp": _bcp}
