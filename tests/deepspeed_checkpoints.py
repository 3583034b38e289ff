"""Small Llamas saved by DeepSpeed, by gloo processes on the CPU, and its universal form.

Three processes are data-parallel, two tensor-parallel.

Run as a program, with an interpreter of an environment with torch, transformers and deepspeed:
`DS_ACCELERATOR=cpu python -m tests.deepspeed_checkpoints FOLDER`. tests/reference/deepspeed was
made so, with deepspeed 0.19.8 and torch 2.13.
"""

import importlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

WORLD_SIZE, TP_SIZE = 3, 2
SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _rank(rank: int, folder: Path, world_size: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    from transformers import AutoModelForCausalLM

    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    is_tensor_parallel = world_size == TP_SIZE
    for stage in (1, 3) if is_tensor_parallel else (1, 2, 3):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        for parameter in model.model.layers[0].self_attn.parameters():
            parameter.requires_grad = False
        # Two groups, as trainers make them for the decay of weights.
        groups = [
            {"params": [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == wide]}
            for wide in (True, False)
        ]
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.Adam(groups, lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                **({"tensor_parallel": {"autotp_size": TP_SIZE}} if is_tensor_parallel else {}),
                # Groups that cut through a parameter.
                "zero_optimization": {"stage": stage, "sub_group_size": 500},
            },
        )
        ids = torch.arange(8)[None]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(str(folder / f"{'tp' if is_tensor_parallel else 'stage'}{stage}"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(folder: Path) -> None:
    """Save the model at each stage, then the universal forms of stages 1 and 3."""
    from torch.multiprocessing.spawn import start_processes
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(folder / "model")
    for world_size in (WORLD_SIZE, TP_SIZE):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        start_processes(_rank, (folder, world_size), world_size)
    for stage in (1, 3):
        command = [
            sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
            "--input_folder", str(folder / f"stage{stage}" / "global_step1"),
            "--output_folder", str(folder / f"universal{stage}"),
            "--num_extract_workers", "1", "--num_merge_workers", "1",
        ]  # fmt: skip
        subprocess.run([*command, *(["--inject_missing_state"] if stage < 3 else [])], check=True)
    for pattern in ("*/zero_to_*.py", "universal*/zero/*/exp_avg*.pt", "universal*/zero/*/step.pt"):
        for unneeded in folder.glob(pattern):
            unneeded.unlink()
    for name in ("stage1", "stage2", "stage3", "universal1", "universal3", "tp1", "tp3"):
        shutil.copy(folder / "model" / "config.json", folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
