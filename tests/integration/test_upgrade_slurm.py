"""An upgrade whose rows are jobs of a real Slurm, and whose command is killed."""

import json

import pytest

from tests.integration.command import FREE_PORTS, ROOT, finish, start
from tests.integration.slurm_runs import CLUSTER
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.usefixtures("reachable")]
_SAMPLES = 6


def test_rows_outlive_a_killed_command_and_are_judged_by_the_next(tmp_path, slurm_cluster):
    page = tmp_path / "upgrade"
    words = [
        "action=upgrade", "export=gpt3/sample", "stages=[export,evaluate]", *CLUSTER, *FREE_PORTS,
        f"base_results_dir={tmp_path}", f"upgrade.output_dir={page}",
        "upgrade.rows={now:{},int8:{export.triton_deployment.int8_mode:1}}",
        "evaluate.tasks=[lambada]", f"evaluate.limit={_SAMPLES}", "evaluate.latency.enabled=false",
        f"evaluate.lambada.data_path={ROOT}/examples/passages.jsonl",
        "export.model.tensor_model_parallel_size=1",
    ]  # fmt: skip
    command = start(*words, "wait=true")
    # At this moment its last jobs are announced, and perhaps not all of them submitted.
    until((page / "int8" / "evaluate" / "job.json").exists, "the rows in the queue")
    command.kill()
    command.communicate()
    again = start(*words, "wait=true")
    text = finish(again, timeout_s=300)
    assert "is still running; waiting for its end" in text
    until(lambda: not slurm_cluster.run("squeue", "-h"), "the end of the rows")
    verdict = json.loads((page / "upgrade.json").read_text())
    assert verdict["exit_status"] == again.returncode in (0, 3, 5), text
    assert [*verdict["runs"]] == ["int8"]
    files = [page / row / "results" / "evaluate" / "predictions.jsonl" for row in ("now", "int8")]
    now, other = ([json.loads(line)["index"] for line in f.read_text().splitlines()] for f in files)
    assert (now, len({*now})) == (other, _SAMPLES)
