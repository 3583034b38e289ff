"""Speed of prompts: the time to the first token, against transformers on the same weights.

    python -m benchmarks.prefill --work-dir DIR [--input-len 32 128 512] [--data-type fp32 bf16]

In each round every contender reads the same random prompt and gives one token. Tokens/s counts
prompt tokens of the whole batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.contenders import (
    Contender,
    Program,
    hugging_face,
    measure,
    percentile,
    reference,
    slipway,
)
from benchmarks.models import Model, decoder_model

DATA_TYPES = {"cpu": ["fp32", "bf16"], "cuda": ["fp16", "bf16"]}


def programs(model: Model, args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of our engine and transformers for every type."""
    causal = transformers.AutoModelForCausalLM
    found: list[Callable[[], Program]] = []
    room = {"slots": max(args.batch), "max_len": max(args.input_len) + 1}
    for data_type in args.data_type or DATA_TYPES[args.device]:
        found.append(partial(slipway, model.ft_dir, data_type, args.device, **room))
        found.append(partial(hugging_face, causal, model, data_type, args.device))
    return found


def report(table: Sequence[Contender], batch: int, length: int, device: str) -> None:
    """Print one prompt length."""
    base = reference(table)
    print(f"\nbatch {batch}, prompts of {length} tokens, {device}")
    print(
        f"| | prompt tokens/s | times {base.name} | ms to the first token p50 | p99 |\n"
        "|---|---|---|---|---|"
    )
    for each in table:
        seconds = statistics.median(each.seconds)
        print(
            f"| {each.name} | {batch * length / seconds:.0f} "
            f"| {statistics.median(base.seconds) / seconds:.2f} "
            f"| {percentile(each.seconds, 50)} | {percentile(each.seconds, 99)} |"
        )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the models")
    parser.add_argument("--device", choices=tuple(DATA_TYPES), default="cpu")
    parser.add_argument("--model", choices=("gpt2", "gptj-6b"), default="gpt2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--input-len", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--data-type", nargs="+", help="of fp32, fp16, bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = decoder_model(args.model, args.work_dir, args.device)
    table = [Contender(make, threads=args.threads) for make in programs(model, args)]
    generator = torch.Generator().manual_seed(1)
    for batch in args.batch:
        for length in args.input_len:
            shape = (batch, length)
            prompts = torch.randint(1, model.vocab_size, shape, generator=generator).tolist()
            measure(table, prompts, 1, args.repeats)
            report(table, batch, length, args.device)
    for each in table:
        each.close()


if __name__ == "__main__":
    main()
