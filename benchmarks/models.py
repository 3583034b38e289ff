"""Random models of real sizes for benchmarks, as Hugging Face checkpoints or as FT folders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest
from export_scripts.conversion.convert import convert as converted
from export_scripts.families import FAMILIES
from export_scripts.ft.layout import ft_directory
from export_scripts.synthesize import synthesize, synthetic_config

_LLAMA_POSITIONS = 32768


@dataclass(frozen=True)
class Model:
    """A model for every contender; `checkpoint` is the folder of transformers that it came from."""

    ft_dir: Path
    vocab_size: int
    checkpoint: Path | None = None


def decoder_model(name: str, work_dir: Path, *, weight_data_type: str = "fp16") -> Model:
    """Return the model called `name`, gpt2 or one of `SIZES`, written unless it is there.

    `weight_data_type` is that of gpt2's FT folder; the others have one in fp16 only.
    """
    if name != "gpt2":
        return sized_model(SIZES[name], work_dir)
    folder = save_random(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(bos_token_id=0, eos_token_id=0),
        work_dir / "gpt2",
    )
    ft_dir = convert(folder, work_dir / f"gpt2_{weight_data_type}", weight_data_type)
    return Model(ft_dir, transformers.GPT2Config().vocab_size, folder)


def convert(folder: Path, output_dir: Path, weight_data_type: str = "fp32") -> Path:
    """Convert a checkpoint to shards for one rank, unless they are there; return their folder."""
    ft_dir = ft_directory(output_dir, 1)
    if not ft_dir.exists():
        request = ConversionRequest(folder, output_dir, 1, weight_data_type=weight_data_type)
        ft_dir = converted(request).ft_dir
    return ft_dir


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder with random weights; GPT and GPT-J have none from `kv_heads` on.

    The Qwen2 models of these sizes use one table for embedding and head.
    """

    family: Literal["gpt", "gptj", "llama", "mistral", "gemma2", "qwen2", "qwen3"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int = 0
    inter_size: int = 0
    vocab_size: int = 0
    more: Mapping[str, object] = field(default_factory=dict)  # keys of config.ini

    @property
    def vocab(self) -> int:
        """Tokens; of GPT and GPT-J as trained ones pad them."""
        return self.vocab_size or (50400 if self.family == "gptj" else 50304)


_GEMMA2 = {
    "size_per_head": 256,
    "rotary_embedding": 256,
    "norm_one_plus": 1,
    "has_output_norms": 1,
    "activation_type": "gated-gelu",
    "attention_scale": 256**-0.5,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "embedding_scale": 3584**0.5,
    "sliding_window": 4096,
    "sliding_layers": ",".join(map(str, range(0, 42, 2))),
    "tie_word_embeddings": 1,
}
# Those of FasterTransformer's tables, of Llama 3 8B and 3.2 3B, of Mistral 7B 0.1 with its window,
# of Gemma 2 9B, of Qwen2.5 1.5B and 0.5B, and of Qwen3 8B and 14B.
SIZES = {
    "gpt-350m": Size("gpt", 1024, 24, 16),
    "gpt-1.3b": Size("gpt", 2048, 24, 16),
    "gpt-6.7b": Size("gpt", 4096, 32, 32),
    "gptj-6b": Size("gptj", 4096, 28, 16),
    "llama-8b": Size("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-3b": Size("llama", 3072, 28, 24, 8, 8192, 128256, {"tie_word_embeddings": 1}),
    "mistral-7b": Size("mistral", 4096, 32, 32, 8, 14336, 32768, {"sliding_window": 4096}),
    "gemma2-9b": Size("gemma2", 3584, 42, 16, 8, 14336, 256000, _GEMMA2),
    "qwen-1.5b": Size("qwen2", 1536, 28, 12, 2, 8960, 151936),
    "qwen-0.5b": Size("qwen2", 896, 24, 14, 2, 4864, 151936),
    "qwen3-8b": Size("qwen3", 4096, 36, 32, 8, 12288, 151936),
    "qwen3-14b": Size("qwen3", 5120, 40, 40, 8, 17408, 151936),
}


def sized_model(size: Size, work_dir: Path, *, tp_size: int = 1) -> Model:
    """Return a model of some size in fp16 with random weights, written unless it is there."""
    folder = work_dir / f"{size.family}_{size.hidden}x{size.layers}x{size.heads}"
    ft_dir = ft_directory(folder, tp_size)
    if not ft_dir.exists():
        family = FAMILIES["llama" if size.kv_heads else size.family]
        given: dict[str, Any] = {"rotary_embedding": 64} if size.family == "gptj" else {}
        if size.kv_heads:
            is_qwen2 = int(size.family == "qwen2")
            given = {"has_qkv_bias": is_qwen2, "tie_word_embeddings": is_qwen2}
            given["kv_head_num"] = size.kv_heads
        if size.family == "qwen3":
            given["query_key_norm"] = "head"
        given |= size.more
        config = synthetic_config(
            family,
            hidden=size.hidden,
            layers=size.layers,
            heads=size.heads,
            vocab=size.vocab,
            inter_size=size.inter_size or None,
            positions=_LLAMA_POSITIONS if size.kv_heads else 2048,
            tensor_para_size=tp_size,
            given=[(key, str(value)) for key, value in given.items()],
        )
        synthesize(family, config, folder)
    return Model(ft_dir, size.vocab)


def huggingface_folder(model: Model) -> Path:
    """Return a model's weights as a folder of transformers, converted unless it is there."""
    if model.checkpoint is not None:
        return model.checkpoint
    request = ConversionRequest(
        model.ft_dir, model.ft_dir.parent, 1, "fp16", processes=2, output_format="huggingface"
    )
    if not request.folder.exists():
        converted(request)
    return request.folder


def save_random(model_class: type, config: transformers.PretrainedConfig, folder: Path) -> Path:
    """Write a checkpoint of transformers with random weights, unless it is there; return it."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        # Values that fp16 represents: shards in fp16 and in fp32 are the same model.
        model_class(config).half().float().save_pretrained(folder)
    return folder
