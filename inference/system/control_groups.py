"""Limits that a container or a job sets for this process through control groups, version 2.

Other figures ignore them: /proc/meminfo is the host's, and a process's cores do not show its CPU
quota. Files: kernel documentation, admin-guide/cgroup-v2.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of cores of this process, limited by its CPU quota, at least 1."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups():
        quota, _, period = _text(group / "cpu.max").partition(" ")  # microseconds
        if quota.isdecimal() and period.isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate, None without a limit.

    Cached files count as free: the kernel drops them when memory is needed.
    """
    rooms = []
    for group in _groups():
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            cached = re.findall(r"^(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.M)
            rooms.append(max(int(limit) - int(used) + sum(map(int, cached)), 0))
    return min(rooms, default=None)


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's group and of its parent groups."""
    found = re.search(r"^0::/(.*)$", _text(_OWN), re.M)
    path = Path(found[1] if found else "")
    # A path with ".." leads outside of the namespace, where groups are not visible.
    yield from (_MOUNT / group for group in (path, *path.parents) if ".." not in group.parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
