"""Jobs as Slurm judges them beforehand: `sbatch --test-only`, and limits that this leaves out.

Slurm takes some jobs that exceed the limits of a partition, an association or a QOS, and never
starts those.
"""

import functools
import getpass
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
    for stage in stages:
        options = sbatch_options(Job(stage, config), "")
        logs = {"output", "error", "job-name"}
        words = words_of({name: each for name, each in options.items() if name not in logs})
        answer = _tested(tuple(words))
        if answer.status in (None, 0) or _QUEUE_IS_FULL in answer.error:
            continue
        if _NO_NODES in answer.error and _has_nodes_away():
            continue
        command = shlex.join(["sbatch", "--test-only", *words])
        yield (
            f"{stage.name}: {' '.join(answer.error.split())}, says {command}; correct the keys of "
            "cluster or of the stage (cluster.gpus_per_node=null where Slurm manages no GPUs)."
        )


@functools.cache
def _tested(words: Sequence[str]) -> SlurmAnswer:
    command = ["sbatch", "--test-only", *words, "--wrap=true"]
    return ask_slurm(command, environment=clean_environment(os.environ))


def _has_nodes_away() -> bool:
    answer = ask_slurm(["sinfo", "-h", "-t", _AWAY, "-o", "%D"])
    return answer.status != 0 or bool(answer.text.strip())


def problems_of_partition(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield why no partition that the jobs name, or the default one, would ever start them."""
    # Partition (the default one with *), its longest job, smallest and largest number of nodes of
    # one, and nodes of a kind.
    rows = _table(["sinfo", "-h", "-o", "%P|%l|%s|%D"], 4)
    default = ",".join({row[0].rstrip("*") for row in rows if row[0].endswith("*")})
    partition = config.cluster.partition or os.environ.get("SBATCH_PARTITION") or default
    # A QOS may replace the limit of a partition by its own.
    is_lifted = any("PartitionTimeLimit" in row[1] for row in _qos(config, "flags"))
    of_each = [
        [row for row in rows if row[0].rstrip("*") == name] for name in str(partition).split(",")
    ]
    for stage in stages:
        reasons = [
            ("" if is_lifted else _too_long(stage, own[0][0].rstrip("*"), own[0][1]))
            or _too_many(stage, own)
            for own in filter(None, of_each)
        ]
        if all(reasons):
            yield from reasons


def _too_long(stage: Stage, owner: str, limit: str) -> str:
    """Return why a stage's time limit exceeds another one, empty if it does not."""
    longest, asked = None, stage.job.resources.time_limit_min
    with suppress(ValueError):  # empty, or infinite
        longest = minutes(limit)
    if longest is None or asked <= longest:
        return ""
    more = ", or let a chain of jobs serve longer (deploy.uptime)" if stage.name == "deploy" else ""
    return (
        f"{settings_section(stage.name)}.time_limit={slurm_notation(asked)}: {owner} takes jobs of "
        f"at most {limit}; lower it, choose another partition, account or QOS{more}."
    )


def _too_many(stage: Stage, rows: Sequence[Sequence[str]]) -> str:
    """Return why a partition has not the nodes that a stage needs, empty if it has."""
    asked, most = stage.job.resources.nodes, rows[0][2].rpartition("-")[2]
    largest = sum(int(row[3]) for row in rows)
    if most.isdigit():
        largest = min(largest, int(most))
    if asked <= largest:
        return ""
    return (
        f"{stage.name} needs {asked} nodes, and partition {rows[0][0].rstrip('*')} gives a job at "
        f"most {largest}; change the parallel sizes, cluster.gpus_per_node or cluster.partition."
    )


def problems_of_accounting(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the times that neither an association of the user nor the QOS allows.

    One association has to fit, and the QOS as well. A cluster without accounting has neither.
    """
    for names, limits in _owners(config):
        for stage in stages:
            if limits and all(reasons := [_too_long(stage, names, row[1]) for row in limits]):
                yield reasons[0]


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
