"""PyTriton's server over the nodes of a real Slurm, with the same options as under mpirun."""

import pytest

from tests.integration.test_pytriton import (
    END_S,
    LENGTHS,
    PROMPTS,
    SAMPLE,
    ask,
    assert_same,
    expected,
    running,
)
from tests.waiting import lives, until

pytestmark = [pytest.mark.slurm, pytest.mark.triton]
__all__ = ["expected"]  # a fixture


@pytest.mark.long  # ranks under mpirun are tested in test_pytriton, two nodes in test_multi_node
def test_two_nodes_answer_as_one_process_and_end_together(slurm_cluster, tmp_path, expected):
    options = ("--tp", "2", "--pp", "2", "--instances", "1", "--device", "cpu")
    with running(tmp_path, SAMPLE, *options) as run:
        run.environment |= {key: slurm_cluster.environment[key] for key in ("SLURM_CONF", "PATH")}
        step = ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
        # The nodes of this cluster are one machine, and their names are in no address book.
        launcher = run.start([*step, *run.command], MASTER_ADDR="127.0.0.1")
        run.wait_until_ready()
        assert_same(ask(run, PROMPTS, LENGTHS), expected[0])
        assert_same(ask(run, PROMPTS, LENGTHS, beam_width=3), expected[1])
        pids = [int(pid) for pid in slurm_cluster.run("pgrep", "-f", str(run.rendezvous)).split()]
        assert len(pids) >= 4
        slurm_cluster.kill_node("n2")
        assert launcher.wait(2 * END_S) != 0
        until(lambda: not any(map(lives, pids)), limit_s=END_S)
