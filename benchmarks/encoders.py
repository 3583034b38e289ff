"""Speed of T5 (generation, and its encoder alone) and BERT, against transformers on equal weights.

    python -m benchmarks.encoders --work-dir DIR [--batch 1 8] [--device cuda --data-type fp16]
    python -m benchmarks.encoders --work-dir DIR --batch 32 --input-len 384 --half-padded

Random t5-small and BERT-base are converted. In each round every contender does the same work for
the same random input. T5 generates greedily and without an end token, the encoder's pass included;
its rate counts generated tokens of the whole batch. The encoders' counts input tokens, padding
included. With --half-padded, of encoders alone, half of all tokens are padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.contenders import (
    Program,
    Prompts,
    cells,
    contenders,
    hugging_face,
    measure_rounds,
    slipway,
)
from benchmarks.models import Model, convert, save_random
from benchmarks.program import Cell, run
from export_scripts.numeric.dtypes import torch_dtype

_NAMES = ("t5", "t5-encoder", "bert")
# t5-small's and BERT-base's sizes.
_MODELS: dict[str, tuple[Any, Any]] = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config()),
    "bert": (transformers.BertModel, transformers.BertConfig()),
}
_VOCABULARY = 30000  # ids in both models' vocabularies


def programs(name: str, args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of our program and transformers' on a model, for every type."""
    kind = "t5" if name.startswith("t5") else name
    folder = save_random(*_MODELS[kind], args.work_dir / kind)
    ft_dir = convert(folder, args.work_dir / f"{kind}_ft")
    room = {"slots": max(args.batch), "max_len": max(args.input_len, args.output_len) + 1}
    found: list[Callable[[], Program]] = []
    for data_type in args.data_type:
        ours = (ft_dir, data_type, args.device)
        if name == "t5":
            model = Model(ft_dir, folder, None, _VOCABULARY)
            found.append(partial(slipway, *ours, encoder_decoder=True, **room))
            found.append(partial(hugging_face, _MODELS[kind][0], model, data_type, args.device))
        else:
            theirs = transformers_bert if name == "bert" else transformers_t5_encoder
            found += [partial(slipway_encoder, *ours), partial(theirs, folder, *ours[1:])]
    return found


@cache  # drawing them takes longer than the encoder
def states_of(*shape: int) -> torch.Tensor:
    """Return made-up input states (rows, tokens of the longest, hidden)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def mask_of(prompts: Prompts) -> torch.Tensor:
    """Return 1 for every token and 0 for padding, (rows, tokens of the longest)."""
    lengths = torch.tensor([len(row) for row in prompts]).unsqueeze(1)
    return (torch.arange(int(lengths.max())) < lengths).long()


def slipway_encoder(ft_dir: Path, data_type: str, device: str) -> Program:
    """Return this project's engine on an encoder."""
    from inference.engine.encoder_engine import EncoderEngine
    from inference.engine.encoding import EncodingRequest, EncodingRow
    from inference.ranks.settings import Placement

    engine = EncoderEngine(ft_dir, Placement(data_type=data_type, device=device))
    engine.start()

    def encode(prompts: Prompts, _: int) -> Any:
        width = max(map(len, prompts))
        rows = tuple(EncodingRow(tuple(row)) for row in prompts)
        if engine.limits.vocab_size is None:
            states = states_of(len(prompts), width, engine.limits.hidden).numpy()
            pairs = zip(states, prompts, strict=True)
            rows = tuple(EncodingRow((), row[: len(ids)]) for row, ids in pairs)
        return engine.encode(EncodingRequest(rows, width)).hidden

    return Program(f"slipway {data_type}", encode, close=engine.stop)


def transformers_bert(folder: Path, data_type: str, device: str) -> Program:
    """Return transformers' encoder layers, with inputs and outputs on the host like ours."""
    dtype = torch_dtype(data_type)
    model = transformers.BertModel.from_pretrained(folder, dtype=dtype).to(device).eval()

    def encode(prompts: Prompts, _: int) -> Any:
        states = states_of(len(prompts), max(map(len, prompts)), model.config.hidden_size)
        hidden = mask_of(prompts).to(device)[:, None, None, :] == 0
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            mask = mask.masked_fill(hidden, torch.finfo(dtype).min)
        with torch.inference_mode():
            output = model.encoder(states.to(device, dtype), attention_mask=mask)
        return output.last_hidden_state.float().cpu()

    return Program(f"transformers {transformers.__version__} {data_type}", encode)


def transformers_t5_encoder(folder: Path, data_type: str, device: str) -> Program:
    """Return transformers' encoder of T5, with its output on the host like ours."""
    dtype = torch_dtype(data_type)
    model = transformers.T5EncoderModel.from_pretrained(folder, dtype=dtype).to(device).eval()

    def encode(prompts: Prompts, _: int) -> Any:
        mask = mask_of(prompts)
        ids = torch.zeros_like(mask)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        with torch.inference_mode():
            states = model(ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        return states.float().cpu()

    return Program(f"transformers {transformers.__version__} {data_type}", encode)


def random_prompts(batch: int, length: int, *, half_padded: bool, seed: int) -> Prompts:
    """Return rows of `length` tokens, or of any lengths up to it, half of it on average."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, _VOCABULARY, (batch, length), generator=generator).tolist()
    if not half_padded:
        return rows
    if batch == 1:
        raise ValueError("--half-padded needs a batch of two rows or more")
    # The longest row has no padding, the shortest one token.
    return [row[: 1 + nth * (length - 1) // (batch - 1)] for nth, row in enumerate(rows)]


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield what every program does with each model and batch."""
    chosen = args.model or [each for each in _NAMES if not (args.half_padded and each == "t5")]
    for name in chosen:
        with contenders(programs(name, args), args.threads) as table:
            for batch in args.batch:
                prompts = random_prompts(
                    batch, args.input_len, half_padded=args.half_padded, seed=batch
                )
                measure_rounds(table, prompts, args.output_len, args.repeats)
                counted = args.output_len if name == "t5" else args.input_len
                title = f"{name}, batch {batch}, {args.input_len} in"
                title += ", half of them padding" if args.half_padded else ""
                yield from cells(table, title, batch * counted)


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        work_dir={},
        device={},
        data_type={"nargs": "+", "default": ["fp32", "bf16"]},
        model={"nargs": "+", "choices": _NAMES, "help": "all, if not given"},
        batch={},
        input_len={},
        half_padded={"action": "store_true"},
        output_len={},
        repeats={},
        threads={},
    )
