"""All ranks of a model as threads of this process, talking over gloo: what they compute."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from inference.model.rotary import position_shift
from inference.model.step import Segment
from inference.ranks.base import RankBase
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.settings import RankSettings
from inference.ranks.startup import make_rank

_TIMEOUT_S = 60.0
ResultT = TypeVar("ResultT")


def on_ranks(
    ft_dir: Path,
    work: Callable[[RankBase], ResultT],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    shared_memory: bool = True,
    **settings: Any,
) -> ResultT:
    """Return what `work` gives on rank 0, with all ranks doing it at the same time."""
    world_size = tp_size * pp_size
    store = HashStore()
    values = {"data_type": "fp32", "device": "cpu", "slots": 4, "max_len": 64, **settings}

    def run(number: int) -> ResultT:
        torch.set_num_threads(1)
        place = RankSettings(
            ft_dir=str(ft_dir),
            rank=number,
            tp_size=tp_size,
            pp_size=pp_size,
            rank_timeout_s=_TIMEOUT_S,
            shared_memory=shared_memory,
            threads=1,
            **values,
        )
        rank = make_rank(place)
        if world_size > 1:
            rank.connect(store, place)
        return work(rank)

    with ThreadPoolExecutor(world_size) as pool:
        tasks = [pool.submit(run, number) for number in range(world_size)]
        results = [task.result(_TIMEOUT_S) for task in tasks]
    return results[0]


def logits_of(
    ft_dir: Path,
    prompt: Sequence[int],
    *,
    tp_size: int,
    pp_size: int,
    chunks: Sequence[int] = (),
    **settings: Any,
) -> torch.Tensor:
    """Return a decoder's (tokens, vocabulary) fp32, the prompt cut into `chunks` if given."""

    def work(rank: Any) -> torch.Tensor | None:
        parts, start = [], 0
        shift = position_shift(rank.architecture.rotary, len(prompt))
        for count in chunks or (len(prompt),):
            plan = StepPlan(
                ids=list(prompt[start : start + count]),
                segments=(Segment(1, start, count, shift),),
                output_rows=range(count),
            )
            start += count
            result = rank.run(plan)
            if result is not None:
                parts.append(result.logits[:, : rank.architecture.vocab_size])
        return torch.cat(parts) if parts else None

    logits = on_ranks(
        ft_dir, work, tp_size=tp_size, pp_size=pp_size, slots=2, max_len=len(prompt), **settings
    )
    assert logits is not None
    return logits


def encoded_by(
    ft_dir: Path, prompt: Sequence[int], *, task: int | None = None, **settings: Any
) -> torch.Tensor:
    """Return the encoder's output (tokens, hidden)."""
    plan = StepPlan(
        ids=[],
        segments=(),
        output_rows=[],
        encoder_rows=(EncoderRow(len(prompt), task=task),),
        encoder_ids=list(prompt),
    )

    def work(rank: RankBase) -> torch.Tensor | None:
        result = rank.run(plan)
        return None if result is None else result.hidden

    hidden = on_ranks(ft_dir, work, encoder_only=True, **settings)
    assert hidden is not None
    return hidden


def logits_by(
    ft_dir: Path,
    prompt: Sequence[int],
    decoder_ids: Sequence[int],
    *,
    vocab_size: int,
    task: int | None = None,
    has_virtual: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """Return an encoder-decoder's logits after each token, fed one by one, (tokens, vocabulary)."""

    def work(rank: RankBase) -> list[torch.Tensor]:
        parts = []
        for position, token in enumerate(decoder_ids):
            first = position == 0
            plan = StepPlan(
                ids=[token],
                segments=(Segment(1, position, 1),),
                output_rows=[0],
                has_virtual=has_virtual and first,
                encoder_rows=(EncoderRow(len(prompt), (1,), task),) if first else (),
                encoder_ids=list(prompt) if first else [],
            )
            result = rank.run(plan)
            if result is not None:
                parts.append(result.logits[:, :vocab_size])
        return parts

    return torch.cat(on_ranks(ft_dir, work, **settings))


def states_by(
    ft_dir: Path, states: torch.Tensor, lengths: Sequence[int], **settings: Any
) -> torch.Tensor:
    """Return a BERT's output for padded hidden states (rows, S, hidden), zero where padded."""
    inputs = torch.cat([row[:length] for row, length in zip(states, lengths, strict=True)])
    plan = StepPlan(
        ids=[],
        segments=(),
        output_rows=[],
        embedding_rows=len(inputs),
        encoder_rows=tuple(EncoderRow(length) for length in lengths),
    )

    def work(rank: RankBase) -> torch.Tensor | None:
        result = rank.run(plan, inputs.clone())
        return None if result is None else result.hidden

    hidden = on_ranks(ft_dir, work, **settings)
    assert hidden is not None
    out = torch.zeros(states.shape)
    for row, part in enumerate(hidden.split(list(lengths))):
        out[row, : len(part)] = part
    return out
