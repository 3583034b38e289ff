"""Decoding speed of the runtime, against transformers and CTranslate2 on the same weights.

    python -m benchmarks.decode --work-dir DIR [--batch 1 8] [--data-type fp32 int8 bf16]
    python -m benchmarks.decode --work-dir DIR --device cuda --model gptj-6b \
        --batch 1 --input-len 128 --output-len 128

In each round every contender generates the same number of tokens for the same random prompts,
greedily and without an end token; prefill is part of the time, as it is for a user. Tokens/s counts
generated tokens of the whole batch. The bare loop is the model without the engine, in a process of
its own. The engine's overhead is the time of its own steps minus the model time in the same step,
which cancels machine noise. "of bandwidth" is the time to read a step's weights, keys and
values once, by the memory bandwidth measured in the same run, over the median time of a step. On
CPU every contender has threads of its own, and with more threads than cores OpenMP lets them
sleep at each wait: leave others out (--no-...) to measure one program alone. int8 computes in
fp32 on CPU and in fp16 on CUDA. GPT-2's weights are representable in fp16: with --weight-data-type
fp16 the FT folder has the same model in half the bytes, also in the memory of the CPU runtime.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.bandwidth import measured_bandwidth
from benchmarks.contenders import (
    Contender,
    Program,
    bare_loop,
    ctranslate,
    hugging_face,
    measure,
    percentile,
    reference,
    slipway,
)
from benchmarks.models import Model, decoder_model
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from inference.process_memory import memory_variables

DATA_TYPES = {"cpu": ["fp32", "int8", "bf16"], "cuda": ["fp16", "int8", "bf16"]}
_COMPUTED_WITH_INT8 = {"cpu": "fp32", "cuda": "fp16"}


def programs(model: Model, args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of every program, for every type it supports."""
    import transformers

    found: list[Callable[[], Program]] = []
    room = {"slots": max(args.batch), "max_len": args.input_len + args.output_len}
    for kind in args.data_type or DATA_TYPES[args.device]:
        int8 = kind == "int8"
        data_type = _COMPUTED_WITH_INT8[args.device] if int8 else kind
        ours = (model.ft_dir, data_type, args.device)
        found.append(partial(slipway, *ours, int8=int8, **room))
        if not args.no_bare_loop:
            found.append(partial(bare_loop, *ours, int8=int8, **room))
        if not int8 and not args.no_transformers:
            causal = transformers.AutoModelForCausalLM
            found.append(partial(hugging_face, causal, model, data_type, args.device))
        peer = args.device == "cpu" and kind in ("fp32", "int8") and not args.no_ctranslate2
        if peer and model.checkpoint is not None:
            found.append(partial(ctranslate, model.checkpoint, args.work_dir, kind, args.threads))
    return found


def report(
    table: Sequence[Contender], batch: int, bandwidth: float, args: argparse.Namespace
) -> None:
    """Print one batch size."""
    tokens = batch * args.output_len
    base = reference(table)
    base_rate = tokens / statistics.median(base.seconds)
    print(f"\nbatch {batch}, {args.input_len} tokens in, {args.output_len} out, {args.device}")
    print(
        f"| | tokens/s | min..max | times {base.name} | ms per token p50 | p99 | of bandwidth |\n"
        "|---|---|---|---|---|---|---|"
    )
    for each in table:
        rate = tokens / statistics.median(each.seconds)
        slow, fast = tokens / max(each.seconds), tokens / min(each.seconds)
        print(
            f"| {each.name} | {rate:.1f} | {slow:.1f}..{fast:.1f} | {rate / base_rate:.2f} "
            f"| {percentile(each.step_times, 50)} | {percentile(each.step_times, 99)} "
            f"| {_of_bandwidth(each, batch, bandwidth, args)} |"
        )
    for each in table:
        if args.device == "cpu" and each.model_times:  # on CUDA the model's calls return early
            pairs = zip(each.step_times, each.model_times, strict=True)
            more = statistics.median(step / model - 1 for step, model in pairs)
            print(f"{each.name}: the engine adds {more:.1%} to the model's time of a step")


def _of_bandwidth(each: Contender, batch: int, bandwidth: float, args: argparse.Namespace) -> str:
    if each.step_bytes is None or not each.step_times:
        return "-"
    least = each.step_bytes(batch, args.input_len + args.output_len // 2) / bandwidth
    return f"{least / statistics.median(each.step_times):.0%}"


def run(table: Sequence[Contender], args: argparse.Namespace, *, vocab_size: int) -> None:
    """Measure and report every batch size on the same random prompts."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for batch in args.batch:
        shape = (batch, args.input_len)
        prompts = torch.randint(1, vocab_size, shape, generator=generator).tolist()
        measure(table, prompts, args.output_len, args.repeats)
        bandwidth = measured_bandwidth(args.device)
        print(f"\nmemory bandwidth: {bandwidth / 1e9:.1f} GB/s")
        report(table, batch, bandwidth, args)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the models")
    parser.add_argument("--device", choices=tuple(DATA_TYPES), default="cpu")
    parser.add_argument("--model", choices=("gpt2", "gptj-6b"), default="gpt2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--data-type", nargs="+", help="of fp32, fp16, bf16, int8")
    parser.add_argument(
        "--weight-data-type", choices=WEIGHT_DATA_TYPES, default="fp32", help="of GPT-2's FT folder"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-ctranslate2", action="store_true")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-bare-loop", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    """Run."""
    args = parse()

    import torch

    torch.set_num_threads(args.threads)
    os.environ.update(memory_variables())  # as a server has them; every contender's process too
    model = decoder_model(args.model, args.work_dir, args.device, args.weight_data_type)
    table = [Contender(make, threads=args.threads) for make in programs(model, args)]
    # Ids in every contender's vocabulary.
    run(table, args, vocab_size=model.vocab_size - 300)
    for each in table:
        each.close()


if __name__ == "__main__":
    main()
