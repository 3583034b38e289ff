"""Random two-to-four-layer checkpoints in the layouts that training frameworks leave on disk.

Dimensions all differ, so that a wrong axis cannot pass. QKV rows are ordered [heads][q, k, v][d].
"""

import argparse
import base64
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.json_files import write_json

NEMO = "model.language_model."

# Axis on which training ranks cut a tensor, by the end of its name; others are replicated.
_CUTS = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "query_key_value.weight": 0,
    "query_key_value.bias": 0,
    "attention.dense.weight": 1,
    "dense_h_to_4h.weight": 0,
    "dense_h_to_4h.bias": 0,
    "dense_4h_to_h.weight": 1,
}


@dataclass(frozen=True)
class TinyGPT:
    """Sizes of a GPT."""

    head_num: int = 6
    size_per_head: int = 5
    inter_size: int = 66
    num_layer: int = 4
    vocab_size: int = 54
    positions: int = 20

    @property
    def hidden(self) -> int:
        return self.head_num * self.size_per_head


def gpt_tensors(
    model: TinyGPT = TinyGPT(), *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return a whole GPT in NeMo 1.x names, layers numbered globally."""
    generator = torch.Generator().manual_seed(seed)
    h, f = model.hidden, model.inter_size
    shapes = {
        "embedding.word_embeddings.weight": (model.vocab_size, h),
        "embedding.position_embeddings.weight": (model.positions, h),
        "encoder.final_layernorm.weight": (h,),
        "encoder.final_layernorm.bias": (h,),
    }
    for layer in range(model.num_layer):
        prefix = f"encoder.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (h,),
            prefix + "input_layernorm.bias": (h,),
            prefix + "self_attention.query_key_value.weight": (3 * h, h),
            prefix + "self_attention.query_key_value.bias": (3 * h,),
            prefix + "self_attention.dense.weight": (h, h),
            prefix + "self_attention.dense.bias": (h,),
            prefix + "post_attention_layernorm.weight": (h,),
            prefix + "post_attention_layernorm.bias": (h,),
            prefix + "mlp.dense_h_to_4h.weight": (f, h),
            prefix + "mlp.dense_h_to_4h.bias": (f,),
            prefix + "mlp.dense_4h_to_h.weight": (h, f),
            prefix + "mlp.dense_4h_to_h.bias": (h,),
        }
    return {
        NEMO + name: (torch.randn(shape, generator=generator) * 0.3).to(dtype)
        for name, shape in shapes.items()
    }


def nemo_config(model: TinyGPT = TinyGPT(), *, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "max_position_embeddings": model.positions,
        "num_layers": model.num_layer,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.inter_size,
        "num_attention_heads": model.head_num,
        "layernorm_epsilon": 1e-5,
        "activation": "gelu",
        "position_embedding_type": "learned_absolute",
        "normalization": "layernorm",
        "tokenizer": {
            "library": "megatron",
            "type": "GPT2BPETokenizer",
            "model": None,
            "vocab_file": "nemo:0123_vocab.json",
            "merge_file": "nemo:0123_merges.txt",
        },
    }


def rank_states(
    tensors: Mapping[str, torch.Tensor], model: TinyGPT = TinyGPT(), *, tp: int = 1, pp: int = 1
) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Return what each (tensor rank, stage) of a training run holds, layers numbered per stage."""
    per_stage = model.num_layer // pp
    states: dict[tuple[int, int], dict[str, torch.Tensor]] = {
        (t, p): {} for t in range(tp) for p in range(pp)
    }
    for name, tensor in tensors.items():
        stage, local = _place(name, per_stage, pp)
        axis = next((a for end, a in _CUTS.items() if name.endswith(end)), None)
        parts = [tensor] * tp if axis is None else list(tensor.chunk(tp, axis))
        for t in range(tp):
            states[t, stage][local] = parts[t].contiguous().clone()
    return states


def _place(name: str, per_stage: int, pp: int) -> tuple[int, str]:
    before, layers, after = name.partition(".layers.")
    if not layers:
        return (0 if "embedding" in name else pp - 1), name
    number, _, rest = after.partition(".")
    stage, local = divmod(int(number), per_stage)
    return stage, f"{before}.layers.{local}.{rest}"


def rank_folder(t: int, p: int, *, tp: int, pp: int) -> str:
    """Return NeMo's folder name of a rank ("" for a lone one)."""
    if pp > 1:
        return f"tp_rank_{t:02d}_pp_rank_{p:03d}/"
    return f"mp_rank_{t:02d}/" if tp > 1 else ""


def nemo_members(
    tensors: Mapping[str, torch.Tensor],
    model: TinyGPT = TinyGPT(),
    *,
    tp: int = 1,
    pp: int = 1,
    config: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    settings = nemo_config(model, tp=tp, pp=pp) | dict(config or {})
    members = {
        "model_config.yaml": json.dumps(settings).encode(),  # JSON is YAML
        "0123_vocab.json": json.dumps({"a": 0, "<|endoftext|>": model.vocab_size - 2}).encode(),
        "0123_merges.txt": b"#version: 0.2\n",
    }
    for (t, p), state in rank_states(tensors, model, tp=tp, pp=pp).items():
        name = rank_folder(t, p, tp=tp, pp=pp) + "model_weights.ckpt"
        members[name] = torch_bytes(state)
    return members


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], *, gzip: bool = False) -> Path:
    with tarfile.open(path, "w:gz" if gzip else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_archive(
    path: Path, config: Mapping[str, Any], state: Any, members: Mapping[str, bytes] = {}
) -> Path:
    """Write an archive of NeMo with the state of a single rank."""
    own = {
        "model_config.yaml": json.dumps(config).encode(),  # JSON is YAML
        "model_weights.ckpt": torch_bytes(state),
    }
    return write_tar(path, {**own, **members})


def write_nemo(
    path: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    model: TinyGPT = TinyGPT(),
    *,
    gzip: bool = False,
    **layout: Any,
) -> Path:
    tensors = gpt_tensors(model) if tensors is None else tensors
    return write_tar(path, nemo_members(tensors, model, **layout), gzip=gzip)


def write_megatron(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    model: TinyGPT = TinyGPT(),
    *,
    version: float = 3.0,
    tp: int = 1,
    pp: int = 1,
    stack: str = "encoder",
    attention: str = "self_attention",
    args: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Megatron-LM checkpoint; version 0 has neither arguments nor a version."""
    arguments = {
        "num_layers": model.num_layer,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.inter_size,
        "num_attention_heads": model.head_num,
        "max_position_embeddings": model.positions,
        "padded_vocab_size": model.vocab_size,
        "layernorm_epsilon": 1e-5,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        **(args or {}),
    }
    for (t, p), state in rank_states(tensors, model, tp=tp, pp=pp).items():
        language: dict[str, Any] = {"embedding": {}, stack: {}}
        for name, tensor in state.items():
            group, _, rest = name.removeprefix(NEMO).partition(".")
            if group == "embedding":
                language["embedding"][rest.split(".")[0]] = {"weight": tensor}
            elif group == "encoder":
                language[stack][rest.replace("self_attention", attention)] = tensor
            else:
                language[group] = {rest: tensor}
        content = {"iteration": 7, "model": {"language_model": language}}
        if version:
            content |= {
                "checkpoint_version": version,
                "args": argparse.Namespace(**arguments),
            }
        file = folder / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
        file.mkdir(parents=True)
        torch.save(content, file / "model_optim_rng.pt")
    write_json(folder / "gpt2-vocab.json", {"<|endoftext|>": 3})
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")
    return folder


def tiktoken_list(*more: bytes) -> bytes:
    """Return a vocabulary as Megatron's TikTokenizer reads it: all bytes, and more tokens."""
    tokens = [*(bytes([value]) for value in range(256)), *more]
    return json.dumps(
        [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(token).decode(),
                "token_str": token.decode(errors="replace"),
            }
            for rank, token in enumerate(tokens)
        ]
    ).encode()
