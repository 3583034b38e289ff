"""Jobs as Slurm judges them beforehand: `sbatch --test-only`, and limits that this leaves out.

Slurm takes some jobs that exceed the limits of a partition, an association or a QOS, and never
starts those.
"""

import functools
import getpass
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress

from foundations.time_limit import minutes, slurm_notation
from launcher_scripts.configuration.schema import Config
from launcher_scripts.launchers.base import Job, Room, clean_environment, settings_section
from launcher_scripts.launchers.slurm_script import sbatch_options, words_of
from launcher_scripts.launchers.slurm_state import SlurmAnswer, ask_slurm
from stages.base import Stage

# Answers that hold at the moment alone. Slurm, src/common/slurm_errno.c
_NO_NODES = "Requested node configuration is not available"
_QUEUE_IS_FULL = "Job violates accounting/QOS policy"
_AWAY = "down,drain,fail,maint,no_respond,unknown"  # states of nodes that may come back


def refusals(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield why sbatch would refuse the jobs of stages, in its own words."""
    refused: dict[str, list[str]] = {}
    for stage in stages:
        options = sbatch_options(Job(stage, config), "")
        logs = {"output", "error", "job-name"}
        words = words_of({name: each for name, each in options.items() if name not in logs})
        answer = _tested(tuple(words))
        if answer.status in (None, 0) or _QUEUE_IS_FULL in answer.error:
            continue
        if _NO_NODES in answer.error and _has_nodes_away():
            continue
        # The options without which sbatch takes the job; together they may be too many.
        wrong = [
            word
            for word in words
            if _tested(tuple(each for each in words if each != word)).status == 0
        ]
        said = " ".join(answer.error.split())
        reason = f"sbatch refuses {shlex.join(wrong or words)}: {said}"
        refused.setdefault(reason, []).append(stage.name)
    for reason, names in refused.items():
        yield (
            f"{', '.join(names)}: {reason}; correct the keys of cluster or of the stage "
            "(cluster.gpus_per_node=null where Slurm manages no GPUs)."
        )


@functools.cache
def _tested(words: Sequence[str]) -> SlurmAnswer:
    command = ["sbatch", "--test-only", *words, "--wrap=true"]
    return ask_slurm(command, environment=clean_environment(os.environ))


def _has_nodes_away() -> bool:
    answer = ask_slurm(["sinfo", "-h", "-t", _AWAY, "-o", "%D"])
    return answer.status != 0 or bool(answer.text.strip())


def problems_of_partition(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the times that no partition that the jobs name, or the default one, allows."""
    # Partition (the default one with *), and its longest job.
    rows = _table(["sinfo", "-h", "-o", "%P|%l"], 2)
    default = ",".join({row[0].rstrip("*") for row in rows if row[0].endswith("*")})
    partition = config.cluster.partition or os.environ.get("SBATCH_PARTITION") or default
    limits = {row[0].rstrip("*"): row[1] for row in rows}
    named = [(name, limits[name]) for name in str(partition).split(",") if name in limits]
    # A QOS may replace the limit of a partition by its own.
    if not any("PartitionTimeLimit" in row[1] for row in _qos(config, "flags")):
        yield from _too_long(stages, named)


def _too_long(stages: Sequence[Stage], limits: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the time limits of stages that exceed each of some limits, given with their owners."""
    for stage in stages:
        asked = stage.job.resources.time_limit_min
        if not limits or any(asked <= _minutes(limit) for _, limit in limits):
            continue
        owner, limit = limits[0]
        more = ", or let a chain of jobs serve longer (deploy.uptime)" * (stage.name == "deploy")
        yield (
            f"{settings_section(stage.name)}.time_limit={slurm_notation(asked)}: {owner} takes "
            f"jobs of at most {limit}; lower it, choose another partition, account or QOS{more}."
        )


def _minutes(limit: str) -> float:
    with suppress(ValueError):
        return minutes(limit)
    return math.inf  # empty, or infinite


def problems_of_accounting(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the times that neither an association of the user nor the QOS allows.

    One association has to fit, and the QOS as well. A cluster without accounting has neither.
    """
    for names, limits in _owners(config):
        yield from _too_long(stages, [(names, row[1]) for row in limits])


def room_in_queue(config: Config) -> Room | None:
    """Return the room for further jobs; None where nothing limits it."""
    limited = [
        (max(int(row[2]) for row in limits), names)
        for names, limits in _owners(config)
        if limits and all(row[2].isdigit() for row in limits)
    ]
    if not limited:
        return None
    most, names = min(limited)
    return Room(most - len(_table(["squeue", "-h", "-r", "--me", "-o", "%i"], 1)), most, names)


def _owners(config: Config) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the user's accounts, and the QOS, each with the longest time and the most jobs."""
    account = config.cluster.account or os.environ.get("SBATCH_ACCOUNT")
    user = f"user={getpass.getuser()}"
    rows = _sacctmgr(["assoc", "where", user], "account,maxwall,maxsubmit")
    accounts = [row for row in rows if account in (None, row[0])]
    for kind, limits in (("account", accounts), ("QOS", _qos(config, "maxwall,maxsubmitpu"))):
        yield f"{kind} {', '.join(row[0] for row in limits)}", limits


def _qos(config: Config, fields: str) -> list[list[str]]:
    """Return the name of the QOS that the configuration names, and fields of it."""
    name = config.cluster.qos or os.environ.get("SBATCH_QOS")
    return _sacctmgr(["qos", "where", f"name={name}"], f"name,{fields}") if name else []


def _sacctmgr(words: Sequence[str], fields: str) -> list[list[str]]:
    command = ["sacctmgr", "-n", "-P", "show", *words, f"format={fields}"]
    return _table(command, fields.count(",") + 1)


def _table(command: Sequence[str], width: int) -> list[list[str]]:
    """Return the lines of `width` fields that a command prints; none where it fails."""
    answer = ask_slurm(command)
    rows = [line.split("|") for line in answer.text.splitlines()]
    return [row for row in rows if len(row) == width and answer.status == 0]
