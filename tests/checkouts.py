"""NVIDIA's templates from a checkout, with small random weights of the vocabulary each expects."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families import FAMILIES
from tests.conftest import ROOT
from tests.ft_folders import write_random

_SIZES: dict[str, Any] = {
    "model_name": "tiny",
    "head_num": 4,
    "size_per_head": 16,
    "inter_size": 64,
    "num_layer": 2,
    "weight_data_type": "fp32",
}
_GPT2 = {"vocab_size": 50257, "start_id": 50256, "end_id": 50256, "max_pos_seq_len": 1024}
# Template -> family, and what its text models and clients take for granted.
_GENERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", _GPT2),
    "gpt-interactive-text-generation": ("gpt", _GPT2),
    "bloom": (
        "gpt",
        {
            "vocab_size": 250880,
            "start_id": 1,
            "end_id": 2,
            "has_positional_encoding": False,
            "has_pre_decoder_layernorm": True,
            "use_attention_linear_bias": True,
            "layernorm_eps": 1e-5,
        },
    ),
    "gptj": (
        "gptj",
        {"vocab_size": 50400, "start_id": 50256, "end_id": 50256, "rotary_embedding": 8},
    ),
    "gptneox": (
        "gptneox",
        {"vocab_size": 50432, "start_id": 0, "end_id": 2, "rotary_embedding": 4},
    ),
}
# Tokenizers that text models download, each by a copy as a download leaves it: where, and its name.
_DOWNLOADED = {
    "gptj": ("preprocessing/1/.cache", "EleutherAI/gpt-j-6B"),
    "bloom": ("../hub", "bigscience/bloom"),
    "t5-encoder": ("tokenizer/1/.cache", "t5-small"),
}
_END = "<|endoftext|>"
_SPECIAL = (
    f'"eos_token": "{_END}", "bos_token": "{_END}", "unk_token": "{_END}", "pad_token": "{_END}"'
)


def copy_template(checkout: Path, name: str, home: Path, *, changes: Mapping[str, str]) -> Path:
    """Copy a template and give it weights; return the repository.

    Only what NVIDIA's create_*_config.sh set is changed: the sizes and the path of the weights.
    `changes` are further texts to replace, such as `decoupled`.
    """
    repository = home / "all_models"
    shutil.copytree(checkout / "all_models" / name, repository)
    weights = _weights(name, home / "c-model")
    config = repository / "fastertransformer" / "config.pbtxt"
    text = config.read_text()
    values = {
        "tensor_para_size": "1",
        "pipeline_para_size": "1",
        "model_checkpoint_path": f"{weights}/",
    }
    for key, value in values.items():
        pattern = rf'("{key}"\s+value:?\s*\{{\s*string_value:\s*)"[^"]*"'
        text, count = re.subn(pattern, rf'\g<1>"{value}"', text)
        assert count == 1, key
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    for script in repository.glob("*/config.pbtxt"):
        # Relative paths begin in the checkout; the template is one folder higher here.
        script.write_text(script.read_text().replace(f"all_models/{name}/", "all_models/"))
    if name in _DOWNLOADED:
        folder, repo_id = _DOWNLOADED[name]
        _add_download(repository / folder, repo_id, checkout / "all_models/gpt/preprocessing/1")
    return repository


def write_lambada(checkout: Path, folder: Path) -> None:
    """Write what evaluate_lambada.py reads: passages, and GPT-2's vocabulary."""
    folder.mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(checkout / "all_models/gpt/preprocessing/1" / name, folder)
    with (ROOT / "examples" / "passages.jsonl").open() as passages:
        (folder / "lambada_test.jsonl").write_text("".join(itertools.islice(passages, 3)))


def _weights(name: str, folder: Path) -> Path:
    if name in _GENERATORS:
        family, own = _GENERATORS[name]
        config = FAMILIES[family].config(**_SIZES, tensor_para_size=1, **own)
        return write_random(FAMILIES[family], config, folder)
    torch.manual_seed(0)
    if name == "bert":
        sizes = {"num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 100}
        BertModel(BertConfig(**sizes)).save_pretrained(folder / "source")
    else:
        small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
        model = T5ForConditionalGeneration(
            T5Config(**small, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
        )
        model.save_pretrained(folder / "source")
    return convert(
        ConversionRequest(folder / "source", folder, tp_size=1, weight_data_type="fp32")
    ).ft_dir


def _add_download(cache: Path, repo_id: str, gpt2: Path) -> None:
    root = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = root / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(gpt2 / f"gpt2-{name}", snapshot / name)
    (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    kind = f'{{"tokenizer_class": "GPT2Tokenizer", {_SPECIAL}}}'
    (snapshot / "tokenizer_config.json").write_text(kind)
