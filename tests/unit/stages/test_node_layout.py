"""The placement rule against the table of the deployment guide, and at its edges."""

import pytest

from stages.node_layout import place


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "nodes", "devices"),
    [
        (1, 1, 1, "0"),
        (2, 1, 1, "0,1"),
        (4, 1, 1, "0,1,2,3"),
        (8, 1, 1, None),
        (8, 2, 2, None),
        (16, 1, 2, None),
        (8, 3, 3, None),
        (8, 4, 4, None),
        (16, 2, 4, None),
        (32, 1, 4, None),
    ],
)
def test_placement_is_the_one_of_the_guide(tp_size, pp_size, nodes, devices):
    found = place(tp_size=tp_size, pp_size=pp_size, gpus_per_node=8)
    assert (found.nodes, found.visible_devices) == (nodes, devices)
    assert found.nodes * found.gpus_per_node == tp_size * pp_size


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "on", "expected"),
    [(4, 3, 8, (2, 6)), (3, 3, 8, (3, 3)), (8, 1, 4, (2, 4)), (7, 2, 8, (2, 7)), (2, 1, 1, (2, 1))],
)
def test_ranks_are_spread_evenly_over_the_fewest_nodes(tp_size, pp_size, on, expected):
    found = place(tp_size=tp_size, pp_size=pp_size, gpus_per_node=on)
    assert (found.nodes, found.gpus_per_node) == expected


def test_ranks_that_cannot_be_divided_are_refused_with_their_keys():
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=11 x .*=1 asks for 11 GPUs"):
        place(tp_size=11, pp_size=1, gpus_per_node=8)


def test_instances_take_groups_of_one_node_and_share_them_when_there_are_more():
    found = place(tp_size=2, pp_size=1, gpus_per_node=8, instance_count=3)
    assert (found.nodes, found.gpus_per_node, found.visible_devices) == (1, 6, "0,1,2,3,4,5")
    assert found.warning is None
    found = place(tp_size=4, pp_size=1, gpus_per_node=8, instance_count=3)
    assert (found.gpus_per_node, found.visible_devices) == (8, None)
    assert "3 instances share 2 groups of 4 GPUs" in str(found.warning)
    with pytest.raises(ValueError, match=r"instance_count=2: .* each needs 16 of .*=8 GPUs"):
        place(tp_size=8, pp_size=2, gpus_per_node=8, instance_count=2)


def test_layers_that_are_shared_across_nodes_are_warned_about():
    assert place(tp_size=4, pp_size=3, gpus_per_node=8).warning is not None
    assert place(tp_size=8, pp_size=2, gpus_per_node=8).warning is None
    assert place(tp_size=2, pp_size=3, gpus_per_node=8).warning is None
