"""Random models of real sizes for benchmarks, as Hugging Face checkpoints or as FT folders."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from export_scripts.families.gpt.layout import GPT, GPTConfig
from export_scripts.families.gptj import GPTJ, GPTJConfig
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.llama.layout import LLAMA, LlamaConfig
from export_scripts.ft.config_ini import CONFIG_NAME, format_ini

_LLAMA_POSITIONS = 16384
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Model:
    """A model for every contender.

    `checkpoint` is a folder of transformers, None where only the size is shared: transformers then
    builds a model from `config` with random weights of its own, which take as long.
    """

    ft_dir: Path
    checkpoint: Path | None
    config: Any
    vocab_size: int


def decoder_model(name: str, work_dir: Path, device: str, weight_data_type: str = "fp32") -> Model:
    """Return the model called `name`, written to `work_dir` if it is not there yet.

    `weight_data_type` is that of the FT folder; gptj-6b has one in fp16 only.
    """
    if name == "gpt2":
        folder = work_dir / "gpt2"
        write_gpt2(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        ft_dir = convert(folder, work_dir / f"gpt2_{weight_data_type}", weight_data_type)
        return Model(ft_dir, folder, config, config.vocab_size)
    ft_dir = work_dir / "gptj_6b_ft" / "1-gpu"
    write_gptj_6b(ft_dir, device)
    config = transformers.GPTJConfig(bos_token_id=0, eos_token_id=0)
    return Model(ft_dir, None, config, config.vocab_size)


def convert(folder: Path, output_dir: Path, weight_data_type: str = "fp32") -> Path:
    """Convert a checkpoint to shards for one rank."""
    command = [
        *(sys.executable, "-m", "export_scripts.convert"),
        *("--checkpoint-path", str(folder), "--output-dir", str(output_dir)),
        *("--tensor-model-parallel-size", "1", "--weight-data-type", weight_data_type),
    ]
    if not (output_dir / "1-gpu").exists():
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return output_dir / "1-gpu"


def write_gpt2(folder: Path) -> None:
    """Write a GPT-2 of 124M parameters, all random."""
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0)
    save_random(transformers.GPT2LMHeadModel, config, folder)


def write_t5(folder: Path) -> None:
    """Write a T5 of t5-small's size with random weights."""
    save_random(transformers.T5ForConditionalGeneration, transformers.T5Config(), folder)


def write_bert(folder: Path, **choices: Any) -> None:
    """Write a BERT-base with random weights and other `choices` of its config."""
    save_random(transformers.BertModel, transformers.BertConfig(**choices), folder)


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder with random weights; those from `kv_heads` on are Llama's alone."""

    family: Literal["gpt", "gptj", "llama"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int = 0
    inter_size: int = 0
    vocab_size: int = 0
    qkv_bias: bool = False  # and one table for embedding and head, as in Qwen2


# Those of FasterTransformer's tables, of Llama 3 8B, and of Qwen2.5 1.5B and 0.5B.
SIZES = {
    "gpt-350m": Size("gpt", 1024, 24, 16),
    "gpt-1.3b": Size("gpt", 2048, 24, 16),
    "gpt-6.7b": Size("gpt", 4096, 32, 32),
    "gptj-6b": Size("gptj", 4096, 28, 16),
    "llama-8b": Size("llama", 4096, 32, 32, 8, 14336, 128256),
    "qwen-1.5b": Size("llama", 1536, 28, 12, 2, 8960, 151936, qkv_bias=True),
    "qwen-0.5b": Size("llama", 896, 24, 14, 2, 4864, 151936, qkv_bias=True),
}


def sized_model(args: argparse.Namespace) -> Model:
    """Return the model that the options `model`, or `family` and sizes, describe; in fp16.

    It is written to `work_dir` if it is not there yet.
    """
    size = SIZES.get(args.model) or Size(args.family, args.hidden, args.layers, args.heads)
    name = f"{size.family}_{size.hidden}x{size.layers}x{size.heads}"
    ft_dir = args.work_dir / name / f"{args.tp}-gpu"
    if size.family == "gptj":
        shape = {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads}
        config: Any = transformers.GPTJConfig(**shape, bos_token_id=0, eos_token_id=0)
        config.architectures = ["GPTJForCausalLM"]
    elif size.family == "llama":
        config = _llama_config(size)
    else:
        config = transformers.GPT2Config(
            n_embd=size.hidden, n_layer=size.layers, n_head=size.heads, n_positions=2048
        )
        config.architectures = ["GPT2LMHeadModel"]
    write_sized(size, config.vocab_size, ft_dir, args.device, tp_size=args.tp)
    return Model(ft_dir, None, config, config.vocab_size)


def _llama_config(size: Size) -> Any:
    kind = transformers.Qwen2Config if size.qkv_bias else transformers.LlamaConfig
    config = kind(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.inter_size,
        vocab_size=size.vocab_size,
        max_position_embeddings=_LLAMA_POSITIONS,
        tie_word_embeddings=size.qkv_bias,
    )
    config.architectures = ["Qwen2ForCausalLM" if size.qkv_bias else "LlamaForCausalLM"]
    return config


def write_gptj_6b(ft_dir: Path, device: str) -> None:
    """Write an FT folder of GPT-J-6B's size in fp16 (12 GB) with random weights."""
    write_sized(SIZES["gptj-6b"], 50400, ft_dir, device)


def write_sized(
    size: Size, vocab_size: int, ft_dir: Path, device: str, *, tp_size: int = 1
) -> None:
    """Write an FT folder of some size in fp16 with random weights, drawn on a device."""
    values: dict[str, Any] = {
        "model_name": size.family,
        "head_num": size.heads,
        "size_per_head": size.hidden // size.heads,
        "inter_size": 4 * size.hidden,
        "num_layer": size.layers,
        "vocab_size": vocab_size,
        "start_id": 0,
        "end_id": 0,
        "tensor_para_size": tp_size,
        "weight_data_type": "fp16",
    }
    if size.family == "gptj":
        write_shards(GPTJ, GPTJConfig(**values, rotary_embedding=64), ft_dir, device)
    elif size.family == "llama":
        config = LlamaConfig(
            **(values | {"inter_size": size.inter_size}),
            kv_head_num=size.kv_heads,
            hidden_size=size.hidden,
            max_pos_seq_len=_LLAMA_POSITIONS,
            layernorm_eps=1e-5,
            rotary_embedding=size.hidden // size.heads,
            has_qkv_bias=size.qkv_bias,
            tie_word_embeddings=size.qkv_bias,
        )
        write_shards(LLAMA, config, ft_dir, device)
    else:
        write_shards(GPT, GPTConfig(**values, max_pos_seq_len=2048), ft_dir, device)


def write_shards(family: ModelFamily, config: FTConfig, ft_dir: Path, device: str) -> None:
    """Write an FT folder in fp16 with random weights, drawn on a device."""
    if (ft_dir / CONFIG_NAME).exists():
        return
    ft_dir.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in family.tensors(config):
        shape = tensor.local_shape(config.tensor_para_size)
        for name in tensor.file_names(config.tensor_para_size):
            values = torch.randn(shape, generator=generator, device=device).mul_(0.02)
            values.half().cpu().numpy().tofile(ft_dir / name)
    # Last: its presence marks the folder as complete.
    (ft_dir / CONFIG_NAME).write_text(format_ini(config.sections()))


def save_random(model_class: type, config: transformers.PretrainedConfig, folder: Path) -> None:
    """Write a checkpoint of transformers with random weights, unless it is there."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    # Values that fp16 represents: shards in fp16 and in fp32 are the same model.
    model_class(config).half().float().save_pretrained(folder)
