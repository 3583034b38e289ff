"""Speed of T5 (generation, and its encoder alone) and BERT, against transformers on equal weights.

    python -m benchmarks.encoders --work-dir DIR [--batch 1 8] [--device cuda --data-type fp16]
    python -m benchmarks.encoders --work-dir DIR --batch 32 --input-len 384 --half-padded
    python -m benchmarks.encoders --work-dir DIR --model bert-layers [--device cuda ...]

Random t5-small and BERT-base are converted. In each round every contender does the same work for
the same random input. T5 generates greedily and without an end token, the encoder's pass included;
its rate counts generated tokens of the whole batch. The encoders' counts input tokens, padding
included. With --half-padded, of encoders alone, half of all tokens are padding. "bert-layers" is
BERT with inputs and outputs that stay on the device, and gelu by tanh: what FasterTransformer
measures.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.contenders import (
    Contender,
    Program,
    Prompts,
    hugging_face,
    measure,
    percentile,
    reference,
    slipway,
)
from benchmarks.models import Model, convert, write_bert, write_t5
from export_scripts.numeric.dtypes import torch_dtype

_VOCABULARY = 30000  # ids in both models' vocabularies


def t5_programs(args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of the programs on t5-small."""
    folder = args.work_dir / "t5"
    write_t5(folder)
    model = Model(convert(folder, args.work_dir / "t5_ft"), folder, None, _VOCABULARY)
    found: list[Callable[[], Program]] = []
    room = {"slots": max(args.batch), "max_len": max(args.input_len, args.output_len) + 1}
    for data_type in args.data_type:
        ours = (model.ft_dir, data_type, args.device)
        found.append(partial(slipway, *ours, encoder_decoder=True, **room))
        theirs = transformers.T5ForConditionalGeneration
        found.append(partial(hugging_face, theirs, model, data_type, args.device))
    return found


def bert_programs(args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of the programs on BERT-base."""
    write_bert(args.work_dir / "bert")
    return encoder_programs(args, "bert", transformers_bert)


def bert_layers_programs(args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of the programs on BERT-base's layers, FasterTransformer's form."""
    folder = args.work_dir / "bert_tanh"
    write_bert(folder, hidden_act="gelu_pytorch_tanh")
    ft_dir = convert(folder, args.work_dir / "bert_tanh_ft")
    found: list[Callable[[], Program]] = []
    for data_type in args.data_type:
        found.append(partial(slipway_layers, ft_dir, data_type, args.device))
        found.append(partial(transformers_bert, folder, data_type, args.device, resident=True))
    return found


def t5_encoder_programs(args: argparse.Namespace) -> list[Callable[[], Program]]:
    """Return the factories of the programs on t5-small's encoder."""
    write_t5(args.work_dir / "t5")
    return encoder_programs(args, "t5", transformers_t5_encoder)


def encoder_programs(
    args: argparse.Namespace, name: str, theirs: Callable[[Path, str, str], Program]
) -> list[Callable[[], Program]]:
    """Return the factories of our program and transformers' for every type."""
    folder = args.work_dir / name
    ft_dir = convert(folder, args.work_dir / f"{name}_ft")
    found: list[Callable[[], Program]] = []
    for data_type in args.data_type:
        found.append(partial(slipway_encoder, ft_dir, data_type, args.device))
        found.append(partial(theirs, folder, data_type, args.device))
    return found


def states_of(prompts: Prompts, hidden: int, **place: Any) -> torch.Tensor:
    """Return made-up input states (rows, tokens of the longest, hidden), by default on the host."""
    return _states(len(prompts), max(map(len, prompts)), hidden, **place)


@cache  # drawing them takes longer than the encoder
def _states(*shape: int, **place: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(**place)


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
            states = states_of(prompts, engine.limits.hidden).numpy()
            pairs = zip(states, prompts, strict=True)
            rows = tuple(EncodingRow((), row[: len(ids)]) for row, ids in pairs)
        return engine.encode(EncodingRequest(rows, width)).hidden

    return Program(f"slipway {data_type}", encode, close=engine.stop)


def slipway_layers(ft_dir: Path, data_type: str, device: str) -> Program:
    """Return a rank of this project with an encoder, its inputs and outputs on the device."""
    from inference.ranks.encoder_rank import EncoderRank
    from inference.ranks.plan import EncoderRow, StepPlan
    from inference.ranks.settings import RankSettings

    rank = EncoderRank(
        RankSettings(
            ft_dir=str(ft_dir),
            rank=0,
            data_type=data_type,
            device=device,
            slots=1,
            max_len=1,
            encoder_only=True,
            threads=torch.get_num_threads(),
        )
    )
    rank.prepare()
    dtype = torch_dtype(data_type)

    def encode(prompts: Prompts, _: int) -> Any:
        tokens = sum(map(len, prompts))
        rows = tuple(EncoderRow(len(row)) for row in prompts)
        plan = StepPlan([], (), [], embedding_rows=tokens, encoder_rows=rows)
        states = _states(tokens, rank.architecture.hidden, device=device, dtype=dtype)
        result = rank.run(plan, states)
        assert result is not None
        return _waited_for(result.hidden)

    return Program(f"slipway {data_type}", encode, close=rank.close)


def _waited_for(result: Any) -> Any:
    if result.is_cuda:
        torch.cuda.synchronize()
    return result


def transformers_bert(
    folder: Path, data_type: str, device: str, *, resident: bool = False
) -> Program:
    """Return transformers' encoder layers, with inputs and outputs on the host like ours.

    With `resident` they stay on the device.
    """
    dtype = torch_dtype(data_type)
    model = transformers.BertModel.from_pretrained(folder, dtype=dtype).to(device).eval()
    place: dict[str, Any] = {"device": device, "dtype": dtype} if resident else {}

    def encode(prompts: Prompts, _: int) -> Any:
        states = states_of(prompts, model.config.hidden_size, **place).to(device, dtype)
        hidden = mask_of(prompts).to(device)[:, None, None, :] == 0
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            mask = mask.masked_fill(hidden, torch.finfo(dtype).min)
        with torch.inference_mode():
            output = model.encoder(states, attention_mask=mask).last_hidden_state
            return _waited_for(output) if resident else output.float().cpu()

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


def report(table: Sequence[Contender], title: str, tokens: int) -> None:
    """Print one model at one batch size; `tokens` are those of a round."""
    base = reference(table)
    print(f"\n{title}")
    print(
        f"| | tokens/s | min..max | times {base.name} | ms | ms per token p50 | p99 |\n"
        "|---|---|---|---|---|---|---|"
    )
    for each in table:
        seconds = statistics.median(each.seconds)
        print(
            f"| {each.name} | {tokens / seconds:.1f} "
            f"| {tokens / max(each.seconds):.1f}..{tokens / min(each.seconds):.1f} "
            f"| {statistics.median(base.seconds) / seconds:.2f} | {seconds * 1e3:.2f} "
            f"| {percentile(each.step_times, 50)} | {percentile(each.step_times, 99)} |"
        )


def main() -> None:
    """Parse the command line and run."""
    models = {
        "t5": t5_programs,
        "t5-encoder": t5_encoder_programs,
        "bert": bert_programs,
        "bert-layers": bert_layers_programs,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data-type", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--model", nargs="+", choices=tuple(models), help="all, if not given")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--half-padded", action="store_true")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.model or [name for name in models if not (args.half_padded and name == "t5")]:
        table = [Contender(make, threads=args.threads) for make in models[name](args)]
        for batch in args.batch:
            prompts = random_prompts(
                batch, args.input_len, half_padded=args.half_padded, seed=batch
            )
            measure(table, prompts, args.output_len, args.repeats)
            each = args.output_len if name == "t5" else args.input_len
            title = f"{name}, batch {batch}, {args.input_len} tokens in, {args.device}"
            title += ", half of them padding" if args.half_padded else ""
            report(table, title, batch * each)
        for contender in table:
            contender.close()


if __name__ == "__main__":
    main()
