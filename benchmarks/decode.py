"""Decoding speed of the runtime, beside transformers and CTranslate2, on the same weights.

    python -m benchmarks.decode --work-dir DIR [--batch 1 8] [--data-type fp32 bf16 int8]

A random GPT-2 is converted for every contender. In each round every contender generates the same
number of tokens for the same random prompts, greedily and without an end token; prefill is part of
the time, as it is for a user. Tokens/s counts generated tokens of the whole batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Prompts = Sequence[Sequence[int]]


@dataclass
class Contender:
    """One program that generates; `step_times` receives the seconds between tokens."""

    name: str
    generate: Callable[[Prompts, int], Sequence[Sequence[int]]]
    step_times: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


class StepClock:
    """Records the time between calls."""

    def __init__(self, into: list[float]) -> None:
        self._into = into
        self._last: float | None = None

    def __call__(self, *_: object) -> None:
        """Note one generated token."""
        now = time.perf_counter()
        if self._last is not None:
            self._into.append(now - self._last)
        self._last = now


def slipway(ft_dir: Path, data_type: str, int8_mode: int) -> Contender:
    """Return this project's engine in its own process group of one rank."""
    from inference.decoding.options import RowOptions
    from inference.decoding.request import GenerationRequest, RowRequest
    from inference.serving.engine import Engine

    engine = Engine(ft_dir, data_type=data_type, int8_mode=int8_mode)
    engine.start()
    step_times: list[float] = []

    def generate(prompts: Prompts, tokens: int) -> Sequence[Sequence[int]]:
        never = engine.limits.vocab_size + 1
        rows = tuple(
            RowRequest(
                input_ids=tuple(ids),
                output_len=tokens,
                options=RowOptions(start_id=0, end_id=never),
            )
            for ids in prompts
        )
        request = GenerationRequest(rows=rows, padded_len=max(map(len, prompts)))
        future = engine.submit(request, on_step=StepClock(step_times))
        return [row.output_ids[0] for row in future.result().rows]

    name = f"slipway {'int8' if int8_mode else data_type}"
    return Contender(name, generate, step_times, close=engine.stop)


def hugging_face(folder: Path, data_type: str) -> Contender:
    """Return transformers' own generate."""
    import torch
    import transformers

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[data_type]
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).eval()
    step_times: list[float] = []

    class Clock(transformers.LogitsProcessor):
        def __init__(self) -> None:
            self.clock = StepClock(step_times)

        def __call__(self, input_ids: object, scores: object) -> object:
            self.clock(input_ids)
            return scores

    def generate(prompts: Prompts, tokens: int) -> Sequence[Sequence[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                logits_processor=transformers.LogitsProcessorList([Clock()]),
            )
        return output[:, ids.shape[1] :].tolist()

    return Contender(f"transformers {transformers.__version__} {data_type}", generate, step_times)


def ctranslate(folder: Path, work_dir: Path, data_type: str, threads: int) -> Contender:
    """Return CTranslate2's generator."""
    import ctranslate2
    import tokenizers
    import transformers

    # The converter asks for the vocabulary of a tokenizer; random weights have none.
    size = transformers.AutoConfig.from_pretrained(folder).vocab_size
    words = {f"t{i}": i for i in range(size)}
    words["<|endoftext|>"] = words.pop("t0")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    ).save_pretrained(folder)
    kind = {"fp32": "float32", "int8": "int8"}[data_type]
    target = work_dir / f"ctranslate2_{kind}"
    if not target.exists():
        converter = ctranslate2.converters.TransformersConverter(str(folder))
        converter.convert(str(target), quantization=kind)
    generator = ctranslate2.Generator(
        str(target), device="cpu", compute_type=kind, intra_threads=threads, inter_threads=1
    )
    step_times: list[float] = []

    def generate(prompts: Prompts, tokens: int) -> Sequence[Sequence[int]]:
        texts = [[f"t{i}" for i in ids] for ids in prompts]
        results = generator.generate_batch(
            texts,
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    return Contender(f"CTranslate2 {ctranslate2.__version__} {data_type}", generate, step_times)


def convert(folder: Path, output_dir: Path) -> Path:
    """Convert a checkpoint to fp32 shards for one rank."""
    command = [
        *(sys.executable, "-m", "export_scripts.convert"),
        *("--checkpoint-path", str(folder), "--output-dir", str(output_dir)),
        *("--tensor-model-parallel-size", "1", "--weight-data-type", "fp32"),
    ]
    if not (output_dir / "1-gpu").exists():
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return output_dir / "1-gpu"


def contenders(args: argparse.Namespace, folder: Path, ft_dir: Path) -> list[Contender]:
    """Return every contender for every type it has."""
    found = []
    for data_type in args.data_type:
        if data_type == "int8":
            found.append(slipway(ft_dir, "fp32", 1))
        else:
            found.append(slipway(ft_dir, data_type, 0))
            found.append(hugging_face(folder, data_type))
        if data_type != "bf16" and not args.no_ctranslate2:
            found.append(ctranslate(folder, args.work_dir, data_type, args.threads))
    return found


def measure(table: Sequence[Contender], prompts: Prompts, args: argparse.Namespace) -> None:
    """Time every contender in turn, after one round that is not counted."""
    for each in table:
        each.generate(prompts, args.output_len)
        each.seconds.clear()
        each.step_times.clear()
    for _ in range(args.repeats):
        for each in table:
            start = time.perf_counter()
            each.generate(prompts, args.output_len)
            each.seconds.append(time.perf_counter() - start)


def report(table: Sequence[Contender], batch: int, args: argparse.Namespace) -> None:
    """Print one batch size."""
    tokens = batch * args.output_len
    base = next((each for each in table if each.name.startswith("transformers")), table[0])
    reference = tokens / statistics.median(base.seconds)
    print(f"\nbatch {batch}, {args.input_len} tokens in, {args.output_len} out")
    print("| | tokens/s | min..max | times transformers fp32 | ms per token p50 | p99 |")
    print("|---|---|---|---|---|---|")
    for each in table:
        rate = tokens / statistics.median(each.seconds)
        slow, fast = tokens / max(each.seconds), tokens / min(each.seconds)
        print(
            f"| {each.name} | {rate:.1f} | {slow:.1f}..{fast:.1f} | {rate / reference:.2f} "
            f"| {_percentile(each.step_times, 50)} | {_percentile(each.step_times, 99)} |"
        )


def _percentile(values: Sequence[float], percent: int) -> str:
    if len(values) < 2:
        return "-"
    return f"{statistics.quantiles(values, n=100)[percent - 1] * 1e3:.1f}"


def run_batches(table: Sequence[Contender], args: argparse.Namespace, *, vocab_size: int) -> None:
    """Measure and report every batch size on the same random prompts, then close the contenders."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for batch in args.batch:
        shape = (batch, args.input_len)
        prompts = torch.randint(1, vocab_size, shape, generator=generator).tolist()
        measure(table, prompts, args)
        report(table, batch, args)
    for each in table:
        each.close()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the models")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--data-type", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-ctranslate2", action="store_true")
    args = parser.parse_args()

    import torch

    from benchmarks.models import write_gpt2

    torch.set_num_threads(args.threads)
    folder = args.work_dir / "gpt2"
    write_gpt2(folder)
    ft_dir = convert(folder, args.work_dir / "gpt2_ft")
    table = contenders(args, folder, ft_dir)
    run_batches(table, args, vocab_size=50000)


if __name__ == "__main__":
    main()
