"""The nodes of a served model, and the GPUs used on each.

The rule is that of NVIDIA's deployment guides for FasterTransformer: TP x PP GPUs, the same number
on every node, on as few nodes as possible.
"""

import math
from dataclasses import dataclass

INSTANCES_KEY = "export.triton_deployment.instance_count"
TP_KEY = "export.model.tensor_model_parallel_size"
PP_KEY = "export.triton_deployment.pipeline_model_parallel_size"
GPUS_KEY = "cluster.gpus_per_node"


@dataclass(frozen=True)
class NodeLayout:
    """The nodes and GPUs of a model's ranks.

    Attributes:
        visible_devices: value of CUDA_VISIBLE_DEVICES if the job has whole nodes; None if every GPU
            is used.
        warning: why the layout, though it works, is slow or wastes memory.
    """

    nodes: int
    gpus_per_node: int
    visible_devices: str | None = None
    warning: str | None = None


def place(*, tp_size: int, pp_size: int, gpus_per_node: int, instance_count: int = 1) -> NodeLayout:
    """Return the placement of TP x PP ranks on nodes with `gpus_per_node` GPUs.

    Several instances of a model run on one node; if they outnumber its groups of TP x PP GPUs, they
    share them.

    Raises:
        ValueError: the ranks cannot be divided evenly over nodes, or an instance does not fit one.
    """
    world_size, warning = tp_size * pp_size, None
    if instance_count > 1:
        nodes, groups = 1, gpus_per_node // world_size
        if not groups:
            raise ValueError(
                f"{INSTANCES_KEY}={instance_count}: all instances run on one node, and each needs "
                f"{world_size} of {GPUS_KEY}={gpus_per_node} GPUs; use 1, and start a server for "
                "each."
            )
        used = min(groups, instance_count) * world_size
        if groups < instance_count:
            warning = (
                f"{INSTANCES_KEY}={instance_count} instances share {groups} groups of {world_size} "
                "GPUs, each with its own copy of the weights"
            )
    else:
        fewest = math.ceil(world_size / gpus_per_node)
        nodes = next(count for count in range(fewest, world_size + 1) if world_size % count == 0)
        used = world_size // nodes
        if nodes > fewest and used == 1:
            raise ValueError(
                f"{TP_KEY}={tp_size} x {PP_KEY}={pp_size} asks for {world_size} GPUs, which cannot "
                f"be divided evenly over nodes of {GPUS_KEY}={gpus_per_node}; choose sizes whose "
                f"product is at most {gpus_per_node}, or a multiple of it."
            )
        if nodes > 1 and used % tp_size:  # each layer's all-reduces cross the network
            warning = (
                f"{TP_KEY}={tp_size} spreads groups of ranks that share each layer over nodes of "
                f"{used} GPUs; their traffic crosses the network. Fastest is a tensor size that "
                f"divides {used}, and as many pipeline groups as nodes."
            )
    shown = ",".join(map(str, range(used))) if used < gpus_per_node else None
    return NodeLayout(nodes, used, shown, warning)
