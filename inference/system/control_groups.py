"""Limits that a container or a job sets to this process: its control groups, version 2.

A machine's own figures ignore them: /proc/meminfo is the host's, and the cores of a process do not
show its share of their time. Files: kernel documentation, admin-guide/cgroup-v2.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the cores of this process, at most as many as its share of CPU time fills."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups():
        quota, _, period = _text(group / "cpu.max").partition(" ")  # microseconds
        if quota.isdecimal() and period.isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def memory_room() -> int | None:
    """Return the bytes that this process may still take, None without a limit.

    Cached files do not count: the kernel drops them when memory is needed.
    """
    rooms = []
    for group in _groups():
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            cached = re.findall(r"^(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.M)
            rooms.append(max(int(limit) - int(used) + sum(map(int, cached)), 0))
    return min(rooms, default=None)


def _groups() -> Iterator[Path]:
    """Yield the folder of this process's group and of each one around it."""
    found = re.search(r"^0::/(.*)$", _text(_OWN), re.M)
    path = Path(found[1] if found else "")
    # Paths above the root of a namespace are not shown.
    yield from (_MOUNT / each for each in (path, *path.parents) if ".." not in each.parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
