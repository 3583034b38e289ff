"""Activations of an FT folder's shards, computed by the serving code without a server.

All ranks run as threads of this process, on the CPU. The layers are wrapped to record their output.
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
from inference.certify.activations import EMBEDDING, LOGITS, OUTPUT, Activations, ModelInputs
from inference.model.encoder import Encoder
from inference.model.encoder_decoder import EncoderDecoder
from inference.model.rotary import position_shift
from inference.model.step import Segment
from inference.ranks.base import RankBase
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.processes import threads_per_rank
from inference.ranks.settings import RankSettings
from inference.ranks.startup import make_rank

_TIMEOUT_S = 600.0  # a rank waits so long for another


def run_shards(
    reader: FTReader, inputs: ModelInputs, *, states: torch.Tensor | None = None
) -> Activations:
    """Run the folder's model on all ranks in fp32, and return its activations.

    `states` are the first layer's input (N, E), for a model without embeddings.

    Raises:
        ValueError: the sizes do not divide among the ranks, or a setting is not supported.
        CheckpointMismatchError: tensors hold non-finite values.
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
    rank_settings = [replace(settings, rank=rank) for rank in range(reader.tp_size)]
    architecture = reader.config.architecture()
    states = states if isinstance(architecture, EncoderArchitecture) else None
    plan = _plan(architecture, inputs, states)
    store = HashStore()

    activations: Activations = {}

    def run(rank: RankBase, settings: RankSettings) -> None:
        if settings.rank == 0:  # a layer's output is the same on every rank
            _record_layers(rank.model, activations)
        result = rank.run(plan, states if settings.rank == 0 else None)
        if result is not None and result.hidden is not None:
            activations[OUTPUT] = result.hidden.float()
        elif result is not None:
            assert not isinstance(architecture, EncoderArchitecture)
            activations[LOGITS] = result.logits[:, : architecture.vocab_size]

    with ThreadPoolExecutor(
        reader.tp_size, "rank", torch.set_num_threads, (settings.threads,)
    ) as threads:
        # All ranks load before any connects, so that none waits for one that cannot be loaded.
        ranks = list(threads.map(make_rank, rank_settings))
        groups = []
        if reader.tp_size > 1:
            groups = list(
                threads.map(lambda rank, its: rank.connect(store, its), ranks, rank_settings)
            )
        running = [threads.submit(run, *pair) for pair in zip(ranks, rank_settings, strict=True)]
        done, waiting = wait(running, return_when=FIRST_EXCEPTION)
        if waiting:  # they wait for the rank that failed; only its error is of interest
            for group in groups:
                group.abort()
            running = list(done)
        for future in running:
            future.result()
    return activations


def _plan(architecture: Architecture, inputs: ModelInputs, states: torch.Tensor | None) -> StepPlan:
    """Return one step that computes all tokens."""
    if isinstance(architecture, EncoderArchitecture):
        assert states is not None, "the model has no embeddings"
        row = EncoderRow(len(states))
        return StepPlan((), (), (), embedding_rows=row.tokens, encoder_rows=(row,))
    if isinstance(architecture, DecoderArchitecture):
        count = len(inputs.ids)
        segment = Segment(0, 0, count, position_shift(architecture.rotary, count))
        return StepPlan(inputs.ids, (segment,), range(count))
    count = len(inputs.decoder_ids)  # 0 for an encoder without a decoder
    return StepPlan(
        inputs.decoder_ids,
        (Segment(0, 0, count),) if count else (),
        range(count),
        encoder_rows=(EncoderRow(len(inputs.ids), slots=(0,)),),
        encoder_ids=inputs.ids,
    )


def _record_layers(model: Any, activations: Activations) -> None:
    """Wrap a model's layers to record the first layer's input and the output of each."""
    stacks = {"layers": ""}
    if isinstance(model, Encoder):
        stacks = {"encoder": ""}
    if isinstance(model, EncoderDecoder):
        stacks = {"encoder": "encoder ", "decoder": "decoder "}
    for name, stack in stacks.items():
        layers = enumerate(getattr(model, name))
        wrapped = [_RecordedLayer(layer, activations, stack, number) for number, layer in layers]
        setattr(model, name, wrapped)


@dataclass(frozen=True)
class _RecordedLayer:
    """A wrapper of a layer that records its output."""

    inner: Any
    activations: Activations
    stack: str
    number: int

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.number == 0:
            self.activations[self.stack + EMBEDDING] = x.to(torch.float32, copy=True)
        y: torch.Tensor = self.inner(x, *args, **kwargs)
        self.activations[f"{self.stack}layer {self.number}"] = y.to(torch.float32, copy=True)
        return y
