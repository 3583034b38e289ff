"""The GPUs and cores of each of a model's instances."""

import os

from inference.backend.instances import Instance, by_socket, occupy
from inference.system.launch_environment import VISIBLE_VARIABLE


def test_an_instance_is_known_by_its_name():
    one = {"instance_group": [{"name": "gpt_0", "count": 2}]}
    assert Instance.of(one, "gpt_0_1") == Instance(1, 2)
    groups = {"instance_group": [{"name": "first", "count": 2}, {"name": "b_1", "count": 3}]}
    assert Instance.of(groups, "first_0") == Instance(0, 5)
    assert Instance.of(groups, "b_1_2") == Instance(4, 5)
    assert Instance.of({}, "") == Instance()


def test_instances_take_groups_of_gpus_in_turn_as_nvidias_do():
    # "8 GPUs, 8 model instances (T = 2, P = 1)" of the backend's README.
    assert [Instance(i, 8).gpus(8, 2) for i in range(8)] == [(0, 2), (2, 2), (4, 2), (6, 2)] * 2
    assert [Instance(i, 3).gpus(8, 4) for i in range(3)] == [(0, 2), (4, 1), (0, 2)]
    assert Instance(1, 2).gpus(1, 4) == (0, 2)


def test_cores_are_divided_by_socket_with_both_threads_of_a_core(tmp_path):
    # Two sockets of two cores with two threads each, numbered as Linux does.
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}"
        (folder / f"node{cpu // 2 % 2}").mkdir(parents=True)
        (folder / "topology").mkdir()
        siblings = f"{cpu % 4},{cpu % 4 + 4}\n"
        (folder / "topology" / "thread_siblings_list").write_text(siblings)
    ordered = by_socket(range(8), folder=tmp_path)
    assert ordered == [0, 4, 1, 5, 2, 6, 3, 7]
    assert Instance(0, 2).cores(ordered) == [0, 4, 1, 5]
    assert Instance(3, 4).cores(ordered) == [3, 7]
    assert Instance(1, 9).cores(ordered) == ordered
    assert by_socket([3, 1], folder=tmp_path / "absent") == [1, 3]


def test_an_instance_has_devices_or_cores_of_its_own(monkeypatch):
    taken: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: taken.append(len(cores)))
    monkeypatch.setenv(VISIBLE_VARIABLE, "4,5,6,7")
    assert occupy(Instance(1, 2), world_size=2, device="auto") == (2, 1)
    assert not taken
    assert occupy(Instance(1, 2), world_size=2, device="cpu") == (0, 2)
    assert taken == [2]
    assert occupy(Instance(0, 1), world_size=2, device="cpu") == (0, 1)
    assert taken == [2]
