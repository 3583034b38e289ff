"""Instances of one model in a server: each is an engine with its own GPUs or CPU cores.

As in NVIDIA's backend, instances are assigned to groups of GPUs round robin, and share them if
there are more instances than groups. The server sends each request to an instance, and all requests
of a session to the same one.
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
    """The index of an instance among the `count` instances of its model."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> Instance:
        """Return the instance for Triton's instance name, `<group>_<number>`.

        Triton has named every group in the configuration that it passes to the model.
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

        With fewer GPUs than ranks it is GPU 0, and the engine reports the problem.
        """
        groups = max(visible // world_size, 1)
        group = self.index % groups
        return group * world_size, len(range(group, self.count, groups))

    def cores(self, ordered: Sequence[int]) -> list[int]:
        """Return the cores of this instance; all cores if there are fewer than instances."""
        size = len(ordered) // self.count
        return list(ordered[self.index * size :][:size]) or list(ordered)


ONLY = Instance()


def occupy(instance: Instance, *, world_size: int, device: str) -> tuple[int, int]:
    """Return the first GPU of an instance, and how many instances share its memory.

    Without GPUs it confines this thread, and the threads and processes that it starts, to the
    instance's cores. An instance has `world_size` ranks; `device` is cpu, cuda or auto.
    """
    if instance.count == 1:
        return 0, 1
    if device != "cpu" and (count := len(visible_gpus())):
        return instance.gpus(count, world_size)
    os.sched_setaffinity(0, instance.cores(by_socket(os.sched_getaffinity(0))))
    return 0, instance.count


def by_socket(cores: Iterable[int], *, folder: Path = _CPUS) -> list[int]:
    """Return hardware threads ordered by NUMA node and, within each, by core."""

    def place(thread: int) -> tuple[int, int, int]:
        cpu = folder / f"cpu{thread}"
        node = min((int(path.name[4:]) for path in cpu.glob("node[0-9]*")), default=0)
        siblings = cpu / "topology" / "thread_siblings_list"
        first = re.match(r"\d+", siblings.read_text()) if siblings.is_file() else None
        return node, int(first[0]) if first else thread, thread

    return sorted(cores, key=place)
