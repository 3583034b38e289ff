"""Instances of one model in a server: each is an engine on GPUs, or CPU cores, of its own.

As in NVIDIA's backend, instances take groups of GPUs in turn and begin again at the first when
there are more of them than groups. The server gives a request to whichever instance is ready to
take it, and those of one session to the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.system.launch_environment import visible_gpus

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Instance:
    """The place of an instance among those of its model."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> Instance:
        """Return the place of an instance by its name, Triton's `<group>_<number>`.

        In the model's configuration Triton has named every group.
        """
        groups = config.get("instance_group", [])
        counts = [int(group.get("count", 1)) for group in groups]
        group_name, _, number = name.rpartition("_")
        names = [group.get("name", "") for group in groups]
        if group_name not in names or not number.isdigit():
            return cls(0, max(sum(counts), 1))
        return cls(sum(counts[: names.index(group_name)]) + int(number), sum(counts))

    def gpus(self, visible: int, world_size: int) -> tuple[int, int]:
        """Return the first GPU of this instance, and how many instances share its GPUs.

        Of fewer GPUs than ranks it is the first: the engine refuses them with its own words.
        """
        groups = max(visible // world_size, 1)
        group = self.index % groups
        return group * world_size, len(range(group, self.count, groups))

    def cores(self, ordered: Sequence[int]) -> list[int]:
        """Return the cores of this instance; all where there are fewer than instances."""
        each = len(ordered) // self.count
        return list(ordered[self.index * each :][:each]) or list(ordered)


ONLY = Instance()


def occupy(instance: Instance, *, world_size: int, device: str) -> tuple[int, int]:
    """Return the first GPU of an instance, and among how many its memory is to be divided.

    Without GPUs this thread, and those and the processes that it starts, are confined to the cores
    of the instance. An instance has `world_size` ranks; `device` is cpu, cuda or auto.
    """
    if instance.count == 1:
        return 0, 1
    if device != "cpu" and (count := len(visible_gpus())):
        return instance.gpus(count, world_size)
    os.sched_setaffinity(0, instance.cores(by_socket(os.sched_getaffinity(0))))
    return 0, instance.count


def by_socket(cores: Iterable[int], *, folder: Path = _CPUS) -> list[int]:
    """Return hardware threads ordered by memory node and, within each, by core."""

    def place(thread: int) -> tuple[int, int, int]:
        cpu = folder / f"cpu{thread}"
        node = min((int(path.name[4:]) for path in cpu.glob("node[0-9]*")), default=0)
        siblings = cpu / "topology" / "thread_siblings_list"
        first = re.match(r"\d+", siblings.read_text()) if siblings.is_file() else None
        return node, int(first[0]) if first else thread, thread

    return sorted(cores, key=place)
