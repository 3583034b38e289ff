"""The place of a process among those of mpirun, srun, torchrun and PMI launchers."""

import pytest

from inference.system.launch_environment import (
    LaunchEnvironment,
    read_launch_environment,
    rendezvous_address,
)

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "77",
}
# As srun sets them for the third task of a step over two nodes.
STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "run",
}


def test_a_process_of_no_launcher_is_alone():
    assert read_launch_environment({}) == LaunchEnvironment()
    assert read_launch_environment({}).world_size == 1


def test_mpirun():
    assert read_launch_environment(MPIRUN) == LaunchEnvironment(5, 8, 1, 4, "mpirun", "77", None)


def test_step_of_slurm():
    assert read_launch_environment(STEP) == LaunchEnvironment(2, 3, 0, 1, "slurm", "12.0", "gpu07")


def test_tasks_of_equal_nodes_are_counted():
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_TASKS": "8"}
    assert read_launch_environment(STEP | tasks).local_size == 4


def test_torchrun():
    assert read_launch_environment(TORCHRUN) == LaunchEnvironment(
        3, 4, 1, 2, "torchrun", "run", None
    )


def test_plain_torch_variables():
    plain = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert read_launch_environment(plain) == LaunchEnvironment(1, 2, 1, 2, "torch", "", None)


def test_other_pmi_launchers():
    place = read_launch_environment({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"})
    assert (place.rank, place.world_size, place.local_size, place.launcher) == (1, 4, 2, "pmi")


def test_mpirun_inside_an_allocation_counts_not_the_allocation():
    assert read_launch_environment(STEP | MPIRUN).launcher == "mpirun"


def test_torchrun_inside_a_step_counts_and_variables_left_in_a_shell_do_not():
    assert read_launch_environment(STEP | TORCHRUN).launcher == "torchrun"
    stale = {"RANK": "0", "WORLD_SIZE": "1"}
    assert read_launch_environment(STEP | stale).launcher == "slurm"


def test_the_shell_of_a_batch_job_is_no_task_of_a_step():
    shell = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert read_launch_environment(shell) == LaunchEnvironment()


def test_launcher_can_be_named():
    assert read_launch_environment(STEP | MPIRUN | {"SLIPWAY_LAUNCHER": "slurm"}).rank == 2
    with pytest.raises(ValueError, match="SLIPWAY_LAUNCHER=flux is unknown; use mpirun, "):
        read_launch_environment({"SLIPWAY_LAUNCHER": "flux"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PMIX_RANK": "1"}, "PMI_SIZE or WORLD_SIZE is not set"),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, "rank 5 of 4 processes"),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE='many' is not a number"),
    ],
)
def test_contradictions_are_reported(variables, message):
    with pytest.raises(ValueError, match=message):
        read_launch_environment(variables)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4],m9", "n1"),
        ("n[07,09-12]", "n07"),
        ("rack[2,4]node[10-12],x", "rack2node10"),
        ("gpu-a[003-004]-x", "gpu-a003-x"),
    ],
)
def test_first_host_of_a_list(nodes, host):
    assert read_launch_environment(STEP | {"SLURM_STEP_NODELIST": nodes}).head == host


def address(
    place: LaunchEnvironment, environment: dict[str, str], **given: object
) -> tuple[str, int]:
    options = {"host": None, "port": None} | given
    return rendezvous_address(place, environment, **options)  # type: ignore[arg-type]


def test_processes_of_one_node_meet_on_loopback():
    assert address(LaunchEnvironment(1, 4, 1, 4), {}) == ("127.0.0.1", 29500)


def test_variables_and_options_name_the_rendezvous():
    variables = {"MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    assert address(read_launch_environment(MPIRUN), variables) == ("head", 4000)
    assert address(read_launch_environment(MPIRUN), variables, host="other", port=5000) == (
        "other",
        5000,
    )


def test_nodes_of_slurm_meet_on_the_first():
    assert address(read_launch_environment(STEP), STEP) == ("gpu07", 29500)


def test_several_nodes_without_a_head_are_refused():
    with pytest.raises(ValueError, match=r"4 of 8 processes run on this node.*MASTER_ADDR"):
        address(read_launch_environment(MPIRUN), {})


def test_port_must_be_one():
    with pytest.raises(ValueError, match="70000; it must be between"):
        address(LaunchEnvironment(), {"MASTER_PORT": "70000"})
