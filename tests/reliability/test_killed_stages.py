"""The command and its jobs, killed at random moments: the same command again ends whole."""

import contextlib
import json
import random
import re
import time
from pathlib import Path

import pytest

from inference.server.processes import descendants
from inference.server.segments import SHM_FOLDER
from tests.integration.command import FREE_PORTS, finish, processes_of, start
from tests.waiting import kill_all, lives, until

pytestmark = pytest.mark.triton

KILLS = 2  # in a row, of which `make soak` has 100; one in `make test`
PASSAGES = 4
RUN_LIMIT_S = 600.0
# Below the folder of the model's results, in the order in which they appear.
MOMENTS = (
    "convert/progress.json",
    "export/progress.json",
    "deploy/progress.json",
    "deploy/server-*.log",
    "deploy/endpoint.json",
    "evaluate/progress.json",
    "results/evaluate/report.json",
)
_SEGMENTS = re.compile(r"shm-region-prefix-name=(\S+)")


def killed(results: Path, words: list[str], chance: random.Random) -> set[str]:
    """Kill a run after a moment, or all of its processes; return its server's prefix of segments.

    No process may stay. Where all were killed, the next run removes the segments.
    """
    folder, moment = results / "gpt_books_5m" / "export_tp2_pp1_fp16_fp32", chance.choice(MOMENTS)
    began = time.time()

    def has_come() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_mtime > began for path in folder.glob(moment))
        return False

    command = start(*words)
    until(lambda: has_come() or command.poll() is not None, moment, limit_s=RUN_LIMIT_S)
    time.sleep(chance.random())
    everything = [command.pid, *descendants(command.pid)]
    prefixes = set(_SEGMENTS.findall(" ".join(processes_of(results).values())))
    kill_all(everything[: chance.choice((1, None))])
    command.communicate()
    until(lambda: not any(map(lives, everything)), f"the end of the jobs after {moment}")
    # A job that began after the processes were listed ends, too, since its owner has.
    until(lambda: not processes_of(results), f"the end of later jobs after {moment}")
    return prefixes


@pytest.mark.soak
def test_runs_killed_at_random_moments_end_whole_when_they_are_run_again(tmp_path, soak):
    chance = random.Random(5)
    for number in range(soak):
        results, prefixes = tmp_path / str(number), set()
        words = ["export=gpt3/sample", "stages=[convert,export,deploy,evaluate]", *FREE_PORTS]
        words += [f"base_results_dir={results}", "evaluate.latency.enabled=false"]
        words += [f"evaluate.limit={PASSAGES}", "evaluate.lambada.metrics=[lambada_last_token]"]
        for _ in range(min(KILLS, soak)):
            prefixes |= killed(results, words, chance)
            for path in results.rglob("report*.json"):
                assert json.loads(path.read_text())["tasks"], path
        command = start(*words)
        text = finish(command, timeout_s=RUN_LIMIT_S)
        assert command.returncode == 0, text
        folder = results / "gpt_books_5m" / "export_tp2_pp1_fp16_fp32"
        (task,) = json.loads((folder / "results/evaluate/report.json").read_text())["tasks"]
        assert task["dataset"]["count"] == PASSAGES
        assert not (folder / "deploy" / "endpoint.json").exists()
        assert not list(results.rglob("*.partial"))
        assert not processes_of(results)
        segments = [path.name for path in SHM_FOLDER.iterdir()]
        assert not [name for name in segments if name.startswith(tuple(prefixes or {"none"}))]
