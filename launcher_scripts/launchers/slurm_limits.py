"""Checks of jobs by `sbatch --test-only`, and of limits that it leaves out.

Slurm accepts some jobs that exceed the limits of a partition, an association or a QOS, but never
starts them.
"""

import getpass
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache

from foundations.time_limit import minutes, slurm_notation
from launcher_scripts.configuration.schema import Config
from launcher_scripts.launchers.base import (
    Job,
    QueueSlots,
    as_options,
    settings_section,
)
from launcher_scripts.launchers.slurm_script import sbatch_options
from launcher_scripts.launchers.slurm_state import SlurmAnswer, ask_slurm
from stages.base import Stage

# Errors that may be temporary. Slurm, src/common/slurm_errno.c
_NO_NODES = "Requested node configuration is not available"
_QUEUE_IS_FULL = "Job violates accounting/QOS policy"
# There is neither a slurm.conf nor a controller that serves one. Slurm, src/common/read_config.c
_NO_CONFIGURATION = "Could not establish a configuration source"
# States of nodes that may come back.
_UNAVAILABLE_STATES = "down,drain,fail,maint,no_respond,unknown"


def refusals(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield why sbatch would refuse the jobs of the stages, quoting its message."""
    refused: dict[str, list[str]] = {}
    for stage in stages:
        options = sbatch_options(Job(stage, config), "")
        logs = {"output", "error", "job-name"}
        words = as_options({name: each for name, each in options.items() if name not in logs})
        answer = _test_only(tuple(words))
        if answer.status in (None, 0) or _QUEUE_IS_FULL in answer.error:
            continue
        if _NO_NODES in answer.error and _has_unavailable_nodes():
            continue
        said = " ".join(answer.error.split())
        if _NO_CONFIGURATION in answer.error:
            yield (
                f"Slurm cannot be used from this machine: {said}; run where sinfo works, or use "
                "cluster_type=local or dry_run=true."
            )
            return
        # Name the options without any one of which sbatch would accept the job.
        wrong = [
            word
            for word in words
            if _test_only(tuple(each for each in words if each != word)).status == 0
        ]
        reason = f"sbatch refuses {shlex.join(wrong or words)}: {said}"
        refused.setdefault(reason, []).append(stage.name)
    for reason, names in refused.items():
        yield (
            f"{', '.join(names)}: {reason}; correct the keys of cluster or of the stage "
            "(cluster.gpus_per_node=null where Slurm manages no GPUs)."
        )


@cache
def _test_only(words: Sequence[str]) -> SlurmAnswer:
    return ask_slurm(["sbatch", "--test-only", *words, "--wrap=true"])


def _has_unavailable_nodes() -> bool:
    answer = ask_slurm(["sinfo", "-a", "-h", "-t", _UNAVAILABLE_STATES, "-o", "%D"])
    return answer.status != 0 or bool(answer.text.strip())


def problems_of_partition(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the time limits that none of the jobs' partitions allows."""
    # Each row: a partition, the default one with *, and its longest time limit.
    rows = _table(["sinfo", "-a", "-h", "-o", "%P|%l"], 2)
    default = ",".join({row[0].rstrip("*") for row in rows if row[0].endswith("*")})
    partition = config.cluster.partition or os.environ.get("SBATCH_PARTITION") or default
    limits = {row[0].rstrip("*"): row[1] for row in rows}
    named = [(name, limits[name]) for name in str(partition).split(",") if name in limits]
    # A QOS with this flag overrides the limit of the partition.
    if not any("PartitionTimeLimit" in row[1] for row in _qos(config, "flags")):
        yield from _too_long(stages, named)


def _too_long(stages: Sequence[Stage], limits: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the stages' time limits that exceed all of `limits`, pairs of owner and limit."""
    for stage in stages:
        asked = stage.job.resources.time_limit_min
        if not limits or any(asked <= _minutes(limit) for _, limit in limits):
            continue
        owner, limit = limits[0]
        more = ", or let a chain of jobs serve longer (deploy.uptime)" * (stage.name == "deploy")
        yield (
            f"{settings_section(stage.name)}.time_limit={slurm_notation(asked)}: {owner} allows "
            f"at most {limit}; lower it, choose another partition, account or QOS{more}."
        )


def _minutes(limit: str) -> float:
    with suppress(ValueError):
        return minutes(limit)
    return math.inf  # an empty string, or "infinite"


def problems_of_accounting(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the time limits that no association of the user, or not the QOS, allows.

    A cluster without accounting has neither.
    """
    for names, limits in _account_limits(config):
        yield from _too_long(stages, [(names, row[1]) for row in limits])


def free_queue_slots(config: Config) -> QueueSlots | None:
    """Return how many more jobs the user may queue; None if nothing limits it."""
    limited = [
        (max(int(row[2]) for row in limits), names)
        for names, limits in _account_limits(config)
        if limits and all(row[2].isdigit() for row in limits)
    ]
    if not limited:
        return None
    most, names = min(limited)
    return QueueSlots(
        most - len(_table(["squeue", "-a", "-h", "-r", "--me", "-o", "%i"], 1)), most, names
    )


def _account_limits(config: Config) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the user's accounts, then the QOS: a label, and rows of name, max. time, max. jobs."""
    account = config.cluster.account or os.environ.get("SBATCH_ACCOUNT")
    user = f"user={getpass.getuser()}"
    rows = _sacctmgr(["assoc", "where", user], "account,maxwall,maxsubmit")
    accounts = [row for row in rows if account in (None, row[0])]
    for kind, limits in (("account", accounts), ("QOS", _qos(config, "maxwall,maxsubmitpu"))):
        yield f"{kind} {', '.join(row[0] for row in limits)}", limits


def _qos(config: Config, fields: str) -> list[list[str]]:
    """Return a row with the name and `fields` of the configured QOS; no row without a QOS."""
    name = config.cluster.qos or os.environ.get("SBATCH_QOS")
    return _sacctmgr(["qos", "where", f"name={name}"], f"name,{fields}") if name else []


def _sacctmgr(words: Sequence[str], fields: str) -> list[list[str]]:
    command = ["sacctmgr", "-n", "-P", "show", *words, f"format={fields}"]
    return _table(command, fields.count(",") + 1)


def _table(command: Sequence[str], width: int) -> list[list[str]]:
    """Return the rows of `width` fields that a command prints; none if it fails."""
    answer = ask_slurm(command)
    rows = [line.split("|") for line in answer.text.splitlines()]
    return [row for row in rows if len(row) == width and answer.status == 0]
