"""Keys that the section of every stage has: its job's name, time and resources."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is a valid default

from dataclasses import dataclass, fields
from typing import Any

from foundations.time_limit import minutes
from foundations.values import NODE_CPUS, NODE_MEMORY_GB, option


@dataclass(frozen=True)
class JobOptions:
    """Keys of a stage's job; `export.run` has them for `convert` and `export`."""

    name: str = option("name of the job", is_name=True)
    time_limit: Any = option("longest time of the job, which ends then", check=minutes)
    cpus_per_task: int | None = option("CPU cores of the job", None, within=(1, NODE_CPUS))
    mem_gb: float | None = option("memory of the job, in GB", None, within=(0, NODE_MEMORY_GB))


JOB_KEYS = tuple(each.name for each in fields(JobOptions))
