"""A small Llama as fully sharded training saves it, by gloo processes on the CPU."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.megatron_ranks import run_forked

WORLD_SIZE = 3


def save_all(folder: Path, log: Path) -> None:
    """Save the model in `folder`/model in every way, each in a folder next to it."""
    run_forked(_save_all, folder, log)


def _save_all(folder: Path) -> int:
    # Imported once for all ranks.
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.multiprocessing.spawn import start_processes

    start_processes(_rank, (folder,), WORLD_SIZE, start_method="fork")
    return 0


def _model(folder: Path, version: int) -> Any:
    """Return the model fully sharded, each layer separately, as accelerate and trainers do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    layers = model.model.layers
    if version == 1:
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
        )
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    return model


def _save(folder: Path, version: int, rank: int) -> None:
    """Save a sharded model as accelerate, verl, torch's own users and AutoModel do."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    accelerate = importlib.import_module("accelerate")
    save_fsdp_model = accelerate.utils.save_fsdp_model
    model = _model(folder, version)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = SimpleNamespace(process_index=rank, num_processes=WORLD_SIZE)
    name = f"fsdp{version}"
    save_fsdp_model(plugin, accelerator, model, str(folder / f"accelerate_{name}"))
    save_fsdp_model(
        plugin, accelerator, model, str(folder / f"accelerate_ranks_{name}"), use_dcp=False
    )
    ranks = folder / f"verl_{name}" / "actor"
    ranks.mkdir(parents=True, exist_ok=True)
    if version == 1:
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for kind, state in (("model", model.state_dict()), ("optim", optimizer.state_dict())):
        torch.save(state, ranks / f"{kind}_world_size_{WORLD_SIZE}_rank_{rank}.pt")
    if version == 2:
        weights, moments = get_state_dict(model, optimizer)
        save({"app": {"model": weights, "optim": moments}}, checkpoint_id=str(folder / "torch"))
        save(
            get_model_state_dict(model),
            storage_writer=HuggingFaceStorageWriter(
                str(folder / "automodel"), save_distributed=True
            ),
        )
        _save_titan(folder / "titan" / "step-1000", weights, moments)


def _save_titan(folder: Path, weights: Mapping[str, Any], moments: Mapping[str, Any]) -> None:
    """Save a Llama under torchtitan's names; its rows are turned where whole tensors are."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from tests.unit.export_scripts.checkpoints.test_sharded_huggingface import titan

    whole = {name: tensor.full_tensor() for name, tensor in weights.items()}
    turned = titan(whole, {"q": 4, "k": 2}, older=False)
    state = {}
    for (name, tensor), source in zip(turned.items(), weights.values(), strict=True):
        from torch.distributed.tensor import distribute_tensor

        state[name] = distribute_tensor(tensor, source.device_mesh, source.placements)
    save({**state, "optimizer": moments}, checkpoint_id=str(folder))


def _rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    accelerate = importlib.import_module("accelerate")
    accelerate.PartialState(cpu=True)  # for its log
    for version in (1, 2):
        _save(folder, version, rank)
    torch.distributed.destroy_process_group()
