"""Distributed checkpoints saved by megatron-core itself, by several gloo processes on the CPU."""

import argparse
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.megatron_ranks import be_ranks, run_ranks

ITERATION = 100


@dataclass(frozen=True)
class Save:
    """One checkpoint to save.

    Attributes:
        archive: A .nemo archive of one training rank, whose weights the model gets.
        folder: Where the checkpoint goes.
        whole: The folder of the same model as one rank has saved it, which megatron-core cuts.
        tp_size: Tensor-parallel ranks that save it.
        pp_size: Pipeline stages that save it.
        metadata: How megatron-core names and cuts tensors.
        prefix: Of the model's names.
        with_optimizer: Also save what else training leaves: optimizer state, random states.
    """

    archive: str
    folder: str
    whole: str = ""
    tp_size: int = 1
    pp_size: int = 1
    metadata: Mapping[str, bool] | None = None
    prefix: str = ""
    with_optimizer: bool = False

    @property
    def ranks(self) -> int:
        """The number of processes that save it."""
        return self.tp_size * self.pp_size


def save_all(saves: Sequence[Save], work_dir: Path) -> None:
    """Save checkpoints in processes of their own, which end when all is saved."""
    run_ranks("tests.megatron_core_checkpoints", saves, work_dir)


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as tar:
        (info,) = (each for each in tar if each.name.removeprefix("./") == name)
        member = tar.extractfile(info)
        assert member is not None
        return member.read()


def nemo_config(archive: Path) -> dict[str, Any]:
    config = yaml.safe_load(_member(archive, "model_config.yaml"))
    assert isinstance(config, dict)
    return config


def megatron_args(config: Mapping[str, Any], save: Save) -> argparse.Namespace:
    """Return what Megatron-LM would have called the settings of a NeMo configuration."""
    rope = config["position_embedding_type"] == "rope"
    groups = config["num_query_groups"]
    return argparse.Namespace(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        ffn_hidden_size=config["ffn_hidden_size"],
        max_position_embeddings=config["max_position_embeddings"],
        norm_epsilon=config["layernorm_epsilon"],
        position_embedding_type=config["position_embedding_type"],
        use_rotary_position_embeddings=rope,
        normalization="RMSNorm" if config["normalization"] == "rmsnorm" else "LayerNorm",
        swiglu=config["activation"] == "fast-swiglu",
        add_bias_linear=config["bias"],
        bias_gelu_fusion=True,
        group_query_attention=groups is not None,
        num_query_groups=groups or 1,
        untie_embeddings_and_output_weights=not config["share_embeddings_and_output_weights"],
        tensor_model_parallel_size=save.tp_size,
        pipeline_model_parallel_size=save.pp_size,
        params_dtype=torch.float32,
        kv_channels=config.get("kv_channels"),
    )


def _archive_weights(archive: Path) -> dict[str, torch.Tensor]:
    content = _member(archive, "model_weights.ckpt")
    state = torch.load(io.BytesIO(content), weights_only=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def _model(config: Mapping[str, Any], rows: int, save: Save) -> Any:
    """Return this rank's share of megatron-core's GPTModel."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    gated = config["activation"] == "fast-swiglu"
    functional = torch.nn.functional
    normalization = "RMSNorm" if config["normalization"] == "rmsnorm" else "LayerNorm"
    settings = TransformerConfig(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_query_groups"],
        ffn_hidden_size=config["ffn_hidden_size"],
        normalization=normalization,
        gated_linear_unit=gated,
        activation_func=functional.silu if gated else functional.gelu,
        add_bias_linear=config["bias"],
        tensor_model_parallel_size=save.tp_size,
        pipeline_model_parallel_size=save.pp_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        kv_channels=config.get("kv_channels"),
    )
    spec = get_gpt_layer_local_spec(normalization=normalization)
    return GPTModel(
        settings,
        spec,
        vocab_size=rows,
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=config["position_embedding_type"],
        share_embeddings_and_output_weights=config["share_embeddings_and_output_weights"],
    )


def _other_state() -> dict[str, Any]:
    """Return what training saves apart from the model: an optimizer's tensors, random states."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        "optimizer": ShardedTensor.from_rank_offsets(key, torch.ones(8), (0, rank, count)),
        "rng_state": ShardedObject("rng_state", {"seed": 1}, (1,), (0,), replica_id=rank),
    }


def _save(save: Save) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    config = nemo_config(Path(save.archive))
    weights = _archive_weights(Path(save.archive))
    if torch.distributed.get_rank() == 0:
        Path(save.folder).mkdir(parents=True)
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(save.tp_size, save.pp_size)
    model = _model(config, weights["embedding.word_embeddings.weight"].shape[0], save)
    if save.whole:
        wanted = {"model": model.sharded_state_dict()}
        weights = dist_checkpointing.load(wanted, save.whole)["model"]
    model.load_state_dict(weights, strict=False)
    state = {
        "model": model.sharded_state_dict(prefix=save.prefix, metadata=save.metadata),
        "args": megatron_args(config, save),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        **(_other_state() if save.with_optimizer else {}),
    }
    dist_checkpointing.save(state, save.folder)
    parallel_state.destroy_model_parallel()


def main(plan: Path) -> int:
    """Save the checkpoints of a plan."""
    return be_ranks(plan, lambda item: _save(Save(**item)))
