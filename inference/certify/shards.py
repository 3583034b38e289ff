"""Activations of an FT folder's shards, computed by the ranks that serve it, without a server.

All ranks run as threads of this process, on the CPU. Layers of the runtime are wrapped, so that the
output of each is noted.
"""

# Shapes: N tokens, E hidden

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderArchitecture,
)
from export_scripts.ft.reader import FTReader
from inference.certify.activations import (
    EMBEDDING,
    LOGITS,
    OUTPUT,
    Activations,
    ModelInputs,
)
from inference.model.encoder import Encoder
from inference.model.encoder_decoder import EncoderDecoder
from inference.model.rotary import position_shift
from inference.model.step import Segment
from inference.ranks.base import RankBase
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.processes import threads_per_rank
from inference.ranks.settings import RankSettings
from inference.ranks.startup import make_rank

_TIMEOUT_S = 600.0  # of a rank's wait for another


def run_shards(
    reader: FTReader, inputs: ModelInputs, *, states: torch.Tensor | None = None
) -> Activations:
    """Return what the folder's model computes, all its ranks in fp32.

    `states` are the first layer's input (N, E), for a model whose embeddings run outside.

    Raises:
        ValueError: The sizes do not divide among the ranks, or a choice is not supported.
        CheckpointMismatchError: Tensors hold values that are not finite.
    """
    settings = RankSettings(
        tp_size=reader.tp_size,
        data_type="fp32",
        device="cpu",
        ft_dir=str(reader.path),
        rank=0,
        threads=threads_per_rank(reader.tp_size),
        max_len=max(len(inputs.ids), len(inputs.decoder_ids)),
        rank_timeout_s=_TIMEOUT_S,
    )
    every = [replace(settings, rank=rank) for rank in range(reader.tp_size)]
    architecture = reader.config.architecture()
    states = states if isinstance(architecture, EncoderArchitecture) else None
    plan = _plan(architecture, inputs, states)
    store = HashStore()

    noted: Activations = {}

    def run(rank: RankBase, own: RankSettings) -> None:
        if own.rank == 0:  # a layer's output is the same on every rank
            _tap(rank.model, noted)
        result = rank.run(plan, states if own.rank == 0 else None)
        if result is not None and result.hidden is not None:
            noted[OUTPUT] = result.hidden.float()
        elif result is not None:
            assert not isinstance(architecture, EncoderArchitecture)
            noted[LOGITS] = result.logits[:, : architecture.vocab_size]

    with ThreadPoolExecutor(
        len(every), "rank", torch.set_num_threads, (settings.threads,)
    ) as threads:
        ranks = list(threads.map(make_rank, every))  # none waits for one that cannot be loaded
        groups = []
        if len(every) > 1:
            groups = list(threads.map(lambda rank, own: rank.connect(store, own), ranks, every))
        running = [threads.submit(run, *pair) for pair in zip(ranks, every, strict=True)]
        done, waiting = wait(running, return_when=FIRST_EXCEPTION)
        if waiting:  # for a rank that has failed, whose error is the reason
            for group in groups:
                group.abort()
            running = list(done)
        for each in running:
            each.result()
    return noted


def _plan(architecture: Architecture, inputs: ModelInputs, states: torch.Tensor | None) -> StepPlan:
    """Return the step that computes all tokens at once."""
    if isinstance(architecture, EncoderArchitecture):
        assert states is not None, "nothing to begin with"
        row = EncoderRow(len(states))
        return StepPlan((), (), (), embedding_rows=row.tokens, encoder_rows=(row,))
    if isinstance(architecture, DecoderArchitecture):
        count = len(inputs.ids)
        segment = Segment(0, 0, count, position_shift(architecture.rotary, count))
        return StepPlan(inputs.ids, (segment,), range(count))
    count = len(inputs.decoder_ids)  # none for an encoder alone
    return StepPlan(
        inputs.decoder_ids,
        (Segment(0, 0, count),) if count else (),
        range(count),
        encoder_rows=(EncoderRow(len(inputs.ids), slots=(0,)),),
        encoder_ids=inputs.ids,
    )


def _tap(model: Any, noted: Activations) -> None:
    """Let a rank's model note its first layer's input, and every layer's output."""
    stacks = {"layers": ""}
    if isinstance(model, Encoder):
        stacks = {"encoder": ""}
    if isinstance(model, EncoderDecoder):
        stacks = {"encoder": "encoder ", "decoder": "decoder "}
    for name, stack in stacks.items():
        layers = enumerate(getattr(model, name))
        setattr(model, name, [_Watched(each, noted, stack, number) for number, each in layers])


@dataclass(frozen=True)
class _Watched:
    """A layer of a model, whose output is noted."""

    inner: Any
    noted: Activations
    stack: str
    number: int

    def __call__(self, x: torch.Tensor, *inputs: Any, **more: Any) -> torch.Tensor:
        if self.number == 0:
            self.noted[self.stack + EMBEDDING] = x.to(torch.float32, copy=True)
        y: torch.Tensor = self.inner(x, *inputs, **more)
        self.noted[f"{self.stack}layer {self.number}"] = y.to(torch.float32, copy=True)
        return y
