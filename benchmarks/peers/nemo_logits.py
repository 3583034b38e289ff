"""Logits of a NeMo 1 GPT archive, restored and computed by NeMo itself in fp32 on the CPU.

    python nemo_logits.py model.nemo --prompt-ids 43,133,54 --output logits.npy

It runs in an environment of its own: Python 3.11, torch, nemo_toolkit 2.0.0 and megatron-core
0.11.0 installed with --no-deps, the packages that their imports ask for, and the Python part of
NVIDIA's apex (of a release that has apex/transformer). Where NeMo takes a GPU or Transformer Engine
for granted, what it would not use on the CPU is left out.
"""

import argparse
import builtins
import contextlib
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

_END = "<|endoftext|>"
_TOKENIZER = {"tokenizer_class": "GPT2Tokenizer"} | {
    f"{name}_token": _END for name in ("eos", "bos", "unk")
}


def _settings(archive: Path, given: Any, folder: Path) -> Any:
    """Return NeMo's settings of a model, for one CPU process and the archive's own vocabulary."""
    from omegaconf import OmegaConf

    with tarfile.open(archive) as members:
        for member in members:
            for name in ("vocab.json", "merges.txt"):
                if member.name.endswith(name):
                    (folder / name).write_bytes(members.extractfile(member).read())  # type: ignore[union-attr]
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
    OmegaConf.set_struct(given, False)
    given.update(
        precision=32,
        optim={"name": "adam", "lr": 1e-4},
        use_cpu_initialization=True,
        megatron_amp_O2=False,
        micro_batch_size=1,
        global_batch_size=1,
        make_vocab_size_divisible_by=8,
        normalization="low_precision_layernorm",  # torch's, where apex has a CUDA kernel
        masked_softmax_fusion=False,
        bias_dropout_add_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tokenizer={"library": "huggingface", "type": str(folder)},
    )
    return given


def logits(archive: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return the logits (N, V) of a model that was saved by one rank."""
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "24.05")
    # nemo/.../megatron/bert/bert_spec.py reads it without defining it where there is no TE.
    builtins.ApexGuardDefaults = type("ApexGuardDefaults", (), {})  # type: ignore[attr-defined]
    from megatron.core.tensor_parallel import random
    from nemo.collections.nlp.models import nlp_model
    from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
    from pytorch_lightning import Trainer

    nlp_model.get_megatron_pretrained_bert_models = list  # imports what needs TE
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    path = str(archive)
    given = MegatronGPTModel.restore_from(path, trainer=trainer, return_config=True)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = MegatronGPTModel.restore_from(
            path,
            trainer=trainer,
            override_config_path=_settings(archive, given, Path(folder)),
            map_location="cpu",
        ).eval()
        # Its states are on CUDA; nothing is drawn here.
        tracker = type(random.get_cuda_rng_tracker())
        tracker.fork = lambda *_, **__: contextlib.nullcontext()
        later = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).triu(1)
        found = model.model(torch.tensor([ids]), torch.arange(len(ids))[None], later, labels=None)
    return np.asarray((found[0] if isinstance(found, tuple) else found).float().squeeze().numpy())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--prompt-ids", required=True, metavar="ID,ID,...")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.npy")
    options = parser.parse_args()
    np.save(
        options.output, logits(options.archive, [int(i) for i in options.prompt_ids.split(",")])
    )


if __name__ == "__main__":
    main()
