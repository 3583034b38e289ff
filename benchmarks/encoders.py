"""Speed of T5 (generation) and BERT (hidden states), beside transformers on the same weights.

    python -m benchmarks.encoders --work-dir DIR [--batch 1 8]

Random t5-small and BERT-base are converted. In each round every contender does the same work for
the same random input. T5 generates greedily and without an end token, the encoder's pass included;
its rate counts generated tokens of the whole batch. BERT's counts input tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import Contender, StepClock, convert, run_batches
from benchmarks.models import write_bert, write_t5


def slipway_t5(ft_dir: Path) -> Contender:
    """Return this project's engine on a T5."""
    from inference.decoding.options import RowOptions
    from inference.decoding.request import GenerationRequest, RowRequest
    from inference.serving.engine import Engine

    engine = Engine(ft_dir)
    engine.start()
    step_times: list[float] = []

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> Sequence[Sequence[int]]:
        options = RowOptions(start_id=0, end_id=engine.limits.vocab_size + 1)
        rows = tuple(
            RowRequest(input_ids=tuple(ids), output_len=tokens, options=options, context_ids=(0,))
            for ids in prompts
        )
        request = GenerationRequest(
            rows=rows, padded_len=max(map(len, prompts)), encoder_decoder=True
        )
        future = engine.submit(request, on_step=StepClock(step_times))
        return [row.output_ids[0] for row in future.result().rows]

    return Contender("slipway fp32", generate, step_times, close=engine.stop)


def transformers_t5(folder: Path) -> Contender:
    """Return transformers' own generate."""
    import transformers

    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    step_times: list[float] = []

    class Clock(transformers.LogitsProcessor):
        def __init__(self) -> None:
            self.clock = StepClock(step_times)

        def __call__(self, input_ids: object, scores: object) -> object:
            self.clock(input_ids)
            return scores

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> Sequence[Sequence[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                decoder_start_token_id=0,
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([Clock()]),
            )
        return output[:, 1:].tolist()

    return Contender(f"transformers {transformers.__version__} fp32", generate, step_times)


def states_of(prompts: Sequence[Sequence[int]], hidden: int) -> torch.Tensor:
    """Return made-up input states (rows, tokens, hidden) for rows of one length."""
    generator = torch.Generator().manual_seed(len(prompts))
    return torch.randn(len(prompts), len(prompts[0]), hidden, generator=generator)


def slipway_bert(ft_dir: Path) -> Contender:
    """Return this project's engine on a BERT."""
    from inference.serving.encoder_engine import EncoderEngine
    from inference.serving.encoding import EncodingRequest, EncodingRow

    engine = EncoderEngine(ft_dir)
    engine.start()

    def encode(prompts: Sequence[Sequence[int]], _: int) -> Any:
        states = states_of(prompts, engine.limits.hidden).numpy()
        rows = tuple(EncodingRow((), row) for row in states)
        return engine.encode(EncodingRequest(rows, states.shape[1])).hidden

    return Contender("slipway fp32", encode, close=engine.stop)


def transformers_bert(folder: Path) -> Contender:
    """Return transformers' encoder layers."""
    import transformers

    model = transformers.BertModel.from_pretrained(folder).eval()

    def encode(prompts: Sequence[Sequence[int]], _: int) -> Any:
        states = states_of(prompts, model.config.hidden_size)
        with torch.inference_mode():
            return model.encoder(states).last_hidden_state

    return Contender(f"transformers {transformers.__version__} fp32", encode)


Contenders = Callable[[], list[Contender]]


def t5_contenders(work_dir: Path) -> list[Contender]:
    """Return the contenders on t5-small."""
    folder = work_dir / "t5"
    write_t5(folder)
    ft_dir = convert(folder, work_dir / "t5_ft")
    return [slipway_t5(ft_dir), transformers_t5(folder)]


def bert_contenders(work_dir: Path) -> list[Contender]:
    """Return the contenders on BERT-base."""
    folder = work_dir / "bert"
    write_bert(folder)
    ft_dir = convert(folder, work_dir / "bert_ft")
    return [slipway_bert(ft_dir), transformers_bert(folder)]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the models")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds: dict[str, Contenders] = {
        "T5": partial(t5_contenders, args.work_dir),
        "BERT": partial(bert_contenders, args.work_dir),
    }
    for name, contenders in kinds.items():
        print(f"\n# {name}")
        table = contenders()
        if name == "BERT":  # tokens are those put in
            args.output_len = args.input_len
        run_batches(table, args, vocab_size=30000)


if __name__ == "__main__":
    main()
