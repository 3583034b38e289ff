"""Limits of control groups, from a copy of their files."""

import os

import pytest

from inference.system import control_groups
from inference.system.control_groups import available_memory, usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def group(tmp_path, monkeypatch):
    """The folder of this process's group, two below the mount."""
    folder = tmp_path / "mount" / "job" / "step"
    folder.mkdir(parents=True)
    (tmp_path / "own").write_text("1:cpu:/elsewhere\n0::/job/step\n")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path / "mount")
    return folder


def test_there_is_no_limit_without_files(group):
    assert available_memory() is None
    assert usable_cores() == CORES


def test_the_tightest_group_decides(group):
    for folder, limit, used in ((group, "max", 10), (group.parent, 1000, 400)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    assert available_memory() == 600
    stat = "anon 100\ninactive_file 50\nactive_file 25\nworkingset_refault_file 9\n"
    (group.parent / "memory.stat").write_text(stat)
    assert available_memory() == 675
    (group.parent / "memory.current").write_text("2000\n")
    assert available_memory() == 0


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", CORES), ("50000 100000", 1)])
def test_a_share_of_time_limits_the_cores(group, quota, cores):
    (group / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == cores


def test_a_group_outside_of_the_namespace_is_passed_over(group, tmp_path):
    (tmp_path / "own").write_text("0::/../other\n")
    (tmp_path / "mount" / "memory.max").write_text("500\n")
    (tmp_path / "mount" / "memory.current").write_text("100\n")
    assert available_memory() == 400
