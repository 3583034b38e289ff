"""Random models of real sizes, written as Hugging Face checkpoints, for benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def write_gpt2(folder: Path, *, hidden: int = 768, num_layer: int = 12, head_num: int = 12) -> None:
    """Write a GPT-2 of the given size (the default is GPT-2's own) with random weights."""
    config = transformers.GPT2Config(
        n_embd=hidden, n_layer=num_layer, n_head=head_num, bos_token_id=0, eos_token_id=0
    )
    _save(transformers.GPT2LMHeadModel, config, folder)


def write_t5(folder: Path, *, hidden: int = 512, num_layer: int = 6, head_num: int = 8) -> None:
    """Write a T5 of the given size (the default is t5-small's) with random weights."""
    config = transformers.T5Config(
        d_model=hidden, d_ff=4 * hidden, num_layers=num_layer, num_heads=head_num
    )
    _save(transformers.T5ForConditionalGeneration, config, folder)


def write_bert(folder: Path) -> None:
    """Write a BERT-base with random weights."""
    _save(transformers.BertModel, transformers.BertConfig(), folder)


def _save(model_class: type, config: transformers.PretrainedConfig, folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
