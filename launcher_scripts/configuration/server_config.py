"""Settings and resources of the server, built from the configuration."""

from pathlib import Path

from export_scripts.triton.model_config import ModelSizes, served_model_of
from foundations.time_limit import minutes
from inference.system.launch_environment import visible_gpus
from launcher_scripts.configuration.export_config import conversion_request
from launcher_scripts.configuration.schema import Config
from stages.deploy_config import OPENAI, VLLM, DeployConfig, is_store_url
from stages.node_layout import NodeLayout, place

# Clusters whose jobs run on other machines, in a container if an image is named.
_STARTS_CONTAINERS = ("bcm", "kubernetes")


def server_config(config: Config) -> DeployConfig:
    """Return the settings of the server. Raises ValueError if its ranks do not fit."""
    deploy = config.deploy
    model_dir = config.export.triton_deployment.triton_model_dir
    sizes = _served_sizes(config)
    placement = _placement(config, sizes)
    # Ids of the visible GPUs if this machine serves and has any.
    is_here = config.cluster_type == "local" and sizes.device != "cpu"
    shown = (visible_gpus() or None) if is_here else None
    # CUDA_VISIBLE_DEVICES of the server; None leaves it as it is. A scheduler that grants single
    # GPUs already shows only those; on a whole node all are visible.
    visible = None
    if shown is not None:
        needed = sizes.world_size * sizes.instance_count
        visible = ",".join(shown[:needed]) if needed < len(shown) else None
    elif config.cluster_type == "bcp" or config.cluster.exclusive:
        visible = placement.visible_devices
    store = deploy.store
    folder = Path(deploy.repository) if deploy.repository and store is None else model_dir.parent
    name = model_dir.name
    made = conversion_request(config, exports=False).folder
    if deploy.engine in (VLLM, OPENAI):
        is_in_claim = config.cluster_type == "kubernetes"
        folder = folder if deploy.repository or is_in_claim else made
        # Most servers name a model by its folder.
        name = config.export.run.model_train_name if deploy.engine == VLLM else str(folder)
    has_adapter = config.convert.is_adapter and config.evaluate.server is None
    is_remote = config.plans_remotely and not folder.exists()
    # The job requests GPUs only if the cluster has a GPU resource.
    gpus_per_node = placement.gpus_per_node if config.cluster.gpus_per_node else None
    return DeployConfig(
        **vars(deploy),
        gpus_per_node=gpus_per_node,
        folder=folder,
        adapter=made if has_adapter else None,
        model_name=name,
        max_seq_len=stated_max_seq_len(config),
        uptime_s=None if deploy.uptime is None else 60.0 * minutes(deploy.uptime),
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        instance_count=sizes.instance_count,
        data_type=config.export.triton_deployment.data_type,
        nodes=placement.nodes,
        is_mpi_step=config.cluster_type == "bcm" and config.cluster.mpi is not None,
        visible_devices=visible,
        serves_here=config.cluster_type not in _STARTS_CONTAINERS and not config.is_dry_run,
        local_gpus=None if shown is None else len(shown),
        remarks=[*filter(None, [placement.warning])],
        is_remote=is_remote,
    )


def stated_max_seq_len(config: Config) -> int | None:
    """Return the configured maximum number of tokens of a sequence; None for the model's own."""
    stated = str(config.export.triton_deployment.parameters.get("max_seq_len", ""))
    return int(stated) if stated.isdigit() else None


def _served_sizes(config: Config) -> ModelSizes:
    """Return the sizes of the served model; those of an existing repository are read from it."""
    model, triton = config.export.model, config.export.triton_deployment
    folder = config.deploy.repository
    if folder and not is_store_url(folder) and (found := served_model_of(Path(folder))):
        return found
    return ModelSizes(
        tp_size=model.tensor_model_parallel_size,
        pp_size=triton.pipeline_model_parallel_size,
        device=str(triton.parameters.get("device", "auto")),
        instance_count=triton.instance_count,
    )


def _placement(config: Config, sizes: ModelSizes) -> NodeLayout:
    """Return the nodes and GPUs of the ranks; one node if the cluster has no GPU resource.

    Raises:
        ValueError: the ranks do not fit.
    """
    per_node = config.cluster.gpus_per_node
    if not per_node:
        return NodeLayout(nodes=1, gpus_per_node=0)
    return place(
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        gpus_per_node=per_node,
        instance_count=sizes.instance_count,
    )
