"""Speed of prompts and of decoding, against transformers and CTranslate2 on the same weights.

    python -m benchmarks.decode --work-dir DIR [--batch 1 8] [--data-type fp32 int8 bf16]
    python -m benchmarks.decode --work-dir DIR --input-len 128 512 --output-len 1
    python -m benchmarks.decode --work-dir DIR --device cuda --model gptj-6b \
        --batch 1 --input-len 128 --output-len 128

In each round every contender generates the same number of tokens for the same random prompts,
greedily and without an end token; prefill is part of the time, as it is for a user. Tokens/s are
generated tokens of the whole batch, with --output-len 1 those of the prompts instead. "of
bandwidth" is the time to read a step's weights, keys and values once, by the memory bandwidth
measured in the same run, over the median time of a step. On CPU every contender has threads of its
own, and with more threads than cores OpenMP lets them sleep at each wait: leave others out
(--no-...) to measure one program alone. int8 computes in fp32 on CPU and in fp16 on CUDA. GPT-2's
weights are representable in fp16: with --weight-data-type fp16 the FT folder has the same model in
half the bytes, also in the memory of the CPU runtime.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.contenders import (
    Program,
    cells,
    contenders,
    ctranslate,
    hugging_face,
    measure_rounds,
    measured_bandwidth,
    slipway,
)
from benchmarks.models import SIZES, Model, decoder_model
from benchmarks.program import Cell, run
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from inference.process_memory import memory_variables

_DATA_TYPES = {"cpu": ["fp32", "int8", "bf16"], "cuda": ["fp16", "int8", "bf16"]}
_COMPUTED_WITH_INT8 = {"cpu": "fp32", "cuda": "fp16"}


def programs(model: Model, args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of every program, for every type it supports."""
    found: list[Callable[[], Program]] = []
    room = {"slots": max(args.batch), "max_len": max(args.input_len) + args.output_len}
    for kind in args.data_type or _DATA_TYPES[args.device]:
        int8 = kind == "int8"
        data_type = _COMPUTED_WITH_INT8[args.device] if int8 else kind
        found.append(partial(slipway, model.ft_dir, data_type, args.device, int8=int8, **room))
        if not int8 and not args.no_transformers:
            found.append(partial(hugging_face, model, data_type, args.device))
        peer = args.device == "cpu" and kind in ("fp32", "int8") and not args.no_ctranslate2
        if peer and model.checkpoint is not None:
            found.append(partial(ctranslate, model.checkpoint, args.work_dir, kind, args.threads))
    return found


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield what every program does with each batch and each length of prompts."""
    os.environ.update(memory_variables())  # as a server has them; every contender's process too
    model = decoder_model(args.model, args.work_dir, weight_data_type=args.weight_data_type)
    generator = torch.Generator().manual_seed(1)
    ids = model.vocab_size - 300  # in every contender's vocabulary
    with contenders(programs(model, args), args.threads) as table:
        for batch in args.batch:
            for length in args.input_len:
                prompts = torch.randint(1, ids, (batch, length), generator=generator).tolist()
                measure_rounds(table, prompts, args.output_len, args.repeats)
                title = f"batch {batch}, {length} in, {args.output_len} out"
                counted = length if args.output_len == 1 else args.output_len
                yield from cells(table, title, batch * counted)
                bandwidth = measured_bandwidth(args.device)
                cached = length + args.output_len // 2
                for each in table:
                    if each.step_bytes is not None and each.step_times:
                        least = each.step_bytes(batch, cached) / bandwidth
                        share = least / statistics.median(each.step_times)
                        yield f"{title}, of bandwidth", each.name, f"{share * 100:.0f} %"


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        common=("work_dir", "device", "batch", "output_len", "repeats", "threads"),
        model={"choices": ("gpt2", *SIZES), "default": "gpt2"},
        input_len={"nargs": "+", "default": [32]},
        data_type={"nargs": "+", "choices": ("fp32", "fp16", "bf16", "int8")},
        weight_data_type={
            "choices": WEIGHT_DATA_TYPES,
            "default": "fp32",
            "help": "of GPT-2's FT folder",
        },
        no_ctranslate2={"action": "store_true"},
        no_transformers={"action": "store_true"},
    )
