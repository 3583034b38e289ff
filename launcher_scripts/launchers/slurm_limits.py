"""The limits of partitions and of a user's association, compared with the jobs of a run.

Slurm takes some jobs that exceed them, and never starts those.
"""

import getpass
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.time_limit import minutes, slurm_notation
from launcher_scripts.launchers.base import Room, settings_section
from launcher_scripts.launchers.slurm_script import further_options, memory
from launcher_scripts.launchers.slurm_state import ask_slurm
from stages.base import Stage

# From sinfo: partition (the default one with *), its longest job, smallest and largest number of
# nodes; and of nodes that are alike: their number, generic resources and MB.
_SINFO = "%P|%l|%s|%D|%G|%m"
_MEMORY = "MB"  # among the generic resources
_MB_OF = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_MOST_OF_ARRAY = 1001  # Slurm's default of MaxArraySize


def problems_of_partition(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield why no partition that the jobs name, or the default one, would ever start them."""
    rows = _table(["sinfo", "-h", "-e", "-o", _SINFO])
    known = sorted({row[0].rstrip("*") for row in rows})
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), "")
    partition = config.cluster.partition or further_options(config).get("partition") or default
    wanted = str(partition).split(",") if partition else []
    if unknown := [name for name in wanted if known and name not in known]:
        yield (
            f"cluster.partition={partition}: unknown partition {', '.join(unknown)}; known "
            f"partitions: {', '.join(known)}."
        )
        return
    # A QOS may replace the limit of a partition by its own.
    is_lifted = any("PartitionTimeLimit" in row[1] for row in _qos(config, "flags"))
    described = [row for row in rows if len(row) == _SINFO.count("|") + 1]
    nodes_of = {
        name: [row[1:] for row in described if row[0].rstrip("*") == name] for name in wanted
    }
    for stage in stages:
        reasons = [
            _too_long(stage, name, nodes[0][0], is_lifted) or _too_large(config, stage, name, nodes)
            for name, nodes in nodes_of.items()
            if nodes
        ]
        if all(reasons):
            yield from reasons


def _too_long(stage: Stage, owner: str, limit: str, is_lifted: bool = False) -> str:
    """Return why a stage's time limit exceeds another one, empty if it does not."""
    longest, asked = None, stage.job.resources.time_limit_min
    with suppress(ValueError):  # empty, or infinite
        longest = minutes(limit, key="")
    if is_lifted or longest is None or asked <= longest:
        return ""
    more = ", or let a chain of jobs serve longer (deploy.uptime)" if stage.name == "deploy" else ""
    return (
        f"{settings_section(stage.name)}.time_limit={slurm_notation(asked)}: {owner} takes jobs of "
        f"at most {limit}; lower it, choose another partition, account or QOS{more}."
    )


def _too_large(config: Config, stage: Stage, partition: str, nodes: Sequence[Sequence[str]]) -> str:
    """Return why a partition has not the nodes that a stage needs, empty if it has."""
    asked = stage.job.resources
    wanted = generic_resources(config.cluster.gres or "")
    wanted["gpu"] = max(wanted["gpu"], asked.gpus_per_node or 0)
    wanted[_MEMORY] = _megabytes(config.cluster.mem if asked.mem_gb is None else asked.mem_gb)
    fitting, kinds = 0, []
    for _, _, count, resources, size_mb in nodes:
        have = generic_resources(resources)
        have[_MEMORY] = _number(size_mb)
        fitting += _number(count) * (wanted <= have)
        kinds.append(f"{_number(count)} of {_shown(have)}")
    most = nodes[0][1].rpartition("-")[2]
    largest = min(fitting, int(most)) if most.isdigit() else fitting
    if asked.nodes <= largest:
        return ""
    return (
        f"{stage.name} needs {asked.nodes} nodes of {_shown(wanted)}, and partition {partition} "
        f"gives a job at most {largest} (its nodes: {'; '.join(kinds)}); change the parallel "
        "sizes, cluster.gpus_per_node (null where Slurm manages no GPUs), cluster.gres, "
        "cluster.mem, the stage's mem_gb, or cluster.partition."
    )


def generic_resources(text: str) -> Counter[str]:
    """Return the numbers of generic resources by name and by `name:type`.

    Slurm writes them as `gpu:8`, `gpu:a100:8(S:0-1)`, `gpu:a100:2,gpu:v100:2`, `gpu`, and others
    with a unit or a flag: `mps:1K`, `lustre:no_consume:4G`; `(null)` is none.
    """
    found: Counter[str] = Counter()
    for each in re.sub(r"\([^)]*\)", "", text).split(","):
        words = [word for word in re.split("[:/]", each) if word not in ("", "gres", "no_consume")]
        number = re.fullmatch(r"(\d+)[KMGT]?", words[-1]) if len(words) > 1 else None
        for count in range(1, len(words) + (number is None)):
            found[":".join(words[:count])] += int(number[1]) if number else 1
    return found


def _shown(resources: Counter[str]) -> str:
    words = [f"{count} {name}" for name, count in resources.items() if count]
    return ", ".join(words) or "any kind"


def _megabytes(amount: object) -> int:
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", (memory(amount) or "0").upper())
    return int(int(found[1]) * _MB_OF[found[2] or "M"]) if found else 0


def _number(text: str) -> int:
    """Return a number of sinfo, where `+` says that some have more."""
    return int("".join(filter(str.isdigit, text)) or 0)


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
    # An array counts with each of its jobs.
    return Room(most - len(_table(["squeue", "-h", "-r", "--me", "-o", "%i"])), most, names)


def _owners(config: Config) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the user's accounts, and the QOS, each with the longest time and the most jobs."""
    account = config.cluster.account or further_options(config).get("account")
    user = f"user={getpass.getuser()}"
    rows = _sacctmgr(["assoc", "where", user, "format=account,maxwall,maxsubmit"])
    accounts = [row for row in rows if account in (None, row[0])]
    for kind, limits in (("account", accounts), ("QOS", _qos(config, "maxwall,maxsubmitpu"))):
        yield f"{kind} {', '.join(row[0] for row in limits)}", limits


def _qos(config: Config, fields: str) -> list[list[str]]:
    """Return the name of the QOS that the configuration names, and fields of it."""
    name = config.cluster.qos or further_options(config).get("qos")
    return _sacctmgr(["qos", "where", f"name={name}", f"format=name,{fields}"]) if name else []


def _sacctmgr(words: Sequence[str]) -> list[list[str]]:
    return _table(["sacctmgr", "-n", "-P", "show", *words])


def _table(command: Sequence[str]) -> list[list[str]]:
    """Return the fields of each line that a command prints; none where it fails."""
    answer = ask_slurm(command)
    return [line.split("|") for line in answer.text.splitlines()] if answer.status == 0 else []


def largest_array() -> int:
    """Return how many jobs an array can have here (MaxArraySize)."""
    answer = ask_slurm(["scontrol", "show", "config"])
    found = re.search(r"MaxArraySize\s*= (\d+)", answer.text) if answer.status == 0 else None
    return max(int(found[1]), 1) if found else _MOST_OF_ARRAY
