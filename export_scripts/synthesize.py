"""Command: python -m export_scripts.synthesize --help."""

import argparse
import contextlib
import os
import re
import shutil
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_type_hints

import numpy as np

from export_scripts.families.layout.config import FTConfig, ini_fields, parse_value
from export_scripts.families.layout.spec import FTTensor, ModelFamily
from export_scripts.families.table import FAMILIES
from export_scripts.ft.config_ini import write_config
from export_scripts.ft.layout import ft_directory, staging_directory
from export_scripts.numeric.arrays import DTYPES, Array, store
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from foundations.commands import command_parser, parse_pair, run_command, say
from foundations.files.json_content import Fields

# The standard deviation of GPT-2's initial weights; activations stay finite at any size.
_STD = 0.02
_MAX_AT_ONCE = 16
_NORM_SCALE = re.compile(r"layer_?norm\.weight$", re.IGNORECASE)
_BIAS = re.compile(r"\.bias(\.sum)?$")


def synthetic_config(
    family: ModelFamily,
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    inter_size: int | None = None,
    positions: int = 2048,
    weight_data_type: str = "fp16",
    tensor_para_size: int = 1,
    given: Sequence[tuple[str, str]] = (),
) -> FTConfig:
    """Return the config of a model of the given sizes, which the command's options explain.

    Raises:
        ValueError: The sizes do not divide, or a key is unknown; the message names it.
    """
    if min(hidden, layers, heads, vocab, tensor_para_size) < 1 or hidden % (2 * heads):
        raise ValueError(
            f"hidden={hidden}, layers={layers}, heads={heads}, vocab={vocab}, "
            f"tensor_para_size={tensor_para_size}: expected positive numbers, and an even number "
            "of dimensions for each head"
        )
    size_per_head, inter = hidden // heads, inter_size or 4 * hidden
    name = f"synthetic-{family.name}"
    decoder_layers = 0 if family.name == "t5_encoder" else layers
    values: Fields = {
        "model_name": name, "name_or_path": name,
        "hidden_size": hidden, "d_model": hidden,
        "head_num": heads, "num_heads": heads, "kv_head_num": heads,
        "size_per_head": size_per_head, "d_kv": size_per_head, "rotary_embedding": size_per_head,
        "inter_size": inter, "d_ff": inter,
        "num_layer": layers, "num_layers": layers, "num_decoder_layers": decoder_layers,
        "vocab_size": vocab, "max_pos_seq_len": positions,
        "start_id": vocab - 1, "end_id": vocab - 1,
        "decoder_start_token_id": 0, "eos_token_id": min(1, vocab - 1), "pad_id": 0,
        "feed_forward_proj": "relu", "relative_attention_num_buckets_or_max_pos_seq_len": 32,
        "layernorm_eps": 1e-5,
        "weight_data_type": weight_data_type, "tensor_para_size": tensor_para_size,
    }  # fmt: skip
    fields = {field.name for field in ini_fields(family.config)}
    values = {key: value for key, value in values.items() if key in fields}
    hints = get_type_hints(family.config)
    for key, text in given:
        if key not in fields:
            raise ValueError(f"--set {key}={text}: {family.name} has no such key in config.ini")
        values[key] = parse_value(text, hints[key])
    config = family.config(**values)
    if not family.is_divisible(config, tensor_para_size):
        sizes = ", ".join(map(str, family.tp_sizes(config)))
        raise ValueError(f"tensor_para_size={tensor_para_size} does not divide it; use {sizes}")
    return config


def synthesize(
    family: ModelFamily, config: FTConfig, output_dir: Path, *, seed: int = 0, sparse: bool = False
) -> Path:
    """Write <output_dir>/<N>-gpu with random weights and return it; it appears complete.

    A seed gives the same model for every N. Sparse matrices are holes, which read as zeros and take
    no space on disk. Other matrices are in memory in fp32, at most one per processor and
    _MAX_AT_ONCE.

    Raises:
        ValueError: The folder exists.
    """
    final = ft_directory(output_dir, config.tensor_para_size)

    def write(tensor: FTTensor) -> None:
        if sparse and len(tensor.shape) > 1:
            size = tensor.file_bytes(config.tensor_para_size, config.weight_data_type)
            for name in tensor.file_names(config.tensor_para_size):
                with (staging / name).open("wb") as file:
                    file.truncate(size)
        else:
            write_values(staging, tensor, _values(tensor, seed), config)

    threads = min(len(os.sched_getaffinity(0)), _MAX_AT_ONCE)
    with whole_folder(final) as staging:
        write_config(staging, config)
        with ThreadPoolExecutor(threads) as pool:  # numpy releases Python's lock
            deque(pool.map(write, family.tensors(config)), maxlen=0)
    return final


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Yield a hidden folder to write in, which becomes `final` after the block.

    Raises:
        ValueError: The folder exists.
    """
    staging = staging_directory(final)
    if final.exists():
        raise ValueError(f"{final} exists; delete it, or choose another --output-dir")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_values(folder: Path, tensor: FTTensor, whole: Array, config: FTConfig) -> None:
    """Write the files of a tensor: one for each rank, or one for all if they share it."""
    names = tensor.file_names(config.tensor_para_size)
    parts = [whole] if tensor.split is None else np.split(whole, len(names), tensor.split)
    for name, part in zip(names, parts, strict=True):
        out = np.empty(part.shape, DTYPES[tensor.dtype or config.weight_data_type])
        store(out, part)
        out.tofile(folder / name)


def _values(tensor: FTTensor, seed: int) -> Array:
    """Return a tensor in fp32: scales of norms are 1, biases 0, others normally distributed."""
    if _NORM_SCALE.search(tensor.name):
        return np.ones(tensor.shape, np.float32)
    if _BIAS.search(tensor.name):
        return np.zeros(tensor.shape, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    values = random.standard_normal(tensor.shape, np.float32)
    values *= _STD
    return values


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "synthesize",
        """
        Write an FT folder of any size with random weights, <output-dir>/<N>-gpu, to test placement,
        loading, memory and latency of a model before its checkpoint exists.
        """,
        """
        example, GPT-J-6B:
          python -m export_scripts.synthesize --family gptj --hidden 4096 --layers 28 --heads 16 \\
              --vocab 50400 --set rotary_embedding=64 --output-dir out/1

        exit status: 0 when the folder is complete, 1 after a reported error.
        """,
    )
    add = parser.add_argument
    add("--family", required=True, choices=FAMILIES, help="family of the model")
    for flag, usual, text in (
        ("--hidden", None, "width of the residual stream"),
        ("--layers", None, "layers; for a T5, of each stack"),
        ("--heads", None, "attention heads"),
        ("--vocab", 51200, "tokens (default: 51200)"),
        ("--inter-size", 0, "width of the MLP (default: 4 x hidden)"),
        ("--positions", 2048, "longest sequence, if the family has a limit (default: 2048)"),
        ("--tensor-model-parallel-size", 1, "tensor-parallel ranks (default: 1)"),
        ("--seed", 0, "seed of the weights (default: 0)"),
    ):
        add(flag, type=int, required=usual is None, default=usual, metavar="N", help=text)
    add("--weight-data-type", default="fp16", choices=WEIGHT_DATA_TYPES, help="(default: fp16)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="given",
        help="any other key of the family's config.ini, such as kv_head_num=8")  # fmt: skip
    add("--sparse", action="store_true",
        help="leave matrices as holes: zeros that take no space on disk")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR",
        help="folder in which <N>-gpu is created")  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""

    def handler(options: argparse.Namespace) -> None:
        values = vars(options)
        family = FAMILIES[values.pop("family")]
        values["tensor_para_size"] = values.pop("tensor_model_parallel_size")
        values["given"] = [parse_pair(text, "--set") for text in options.given]
        output_dir, seed, sparse = (values.pop(key) for key in ("output_dir", "seed", "sparse"))
        config = synthetic_config(family, **values)
        say(str(synthesize(family, config, output_dir, seed=seed, sparse=sparse)))

    return run_command(_parser(), handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
