"""Activations of an FT folder's shards, computed by the ranks that serve it, without a server.

All ranks run as threads of this process, on the CPU. Layers of the runtime are wrapped, so that the
output of each part is noted. A part adds the residual itself when it serves; here it is called
without one, which is added once it is noted.
"""

# Shapes: N tokens, E hidden, V vocabulary, W width of a part

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderArchitecture,
)
from export_scripts.ft.reader import FTReader
from inference.certify.activations import Activations, ModelInputs, Place
from inference.model.encoder_decoder import EncoderDecoder
from inference.model.layers import Sublayer
from inference.model.rotary import position_shift
from inference.model.stage import GeneratorModel
from inference.model.step import Segment, Step, Tokens
from inference.ranks.base import RankBase
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.processes import threads_per_rank
from inference.ranks.settings import RankSettings
from inference.ranks.startup import make_rank

_TIMEOUT_S = 600.0  # of a rank's wait for another


def run_shards(
    reader: FTReader, inputs: ModelInputs, *, data_type: str, states: torch.Tensor | None = None
) -> Activations:
    """Return what the folder's model computes, each place (N, E) or (N, V) fp32.

    All its ranks run, and compute in `data_type`: fp32, fp16 or bf16, as the runtime does on a CPU.
    `states` are the first layer's input (N, E), for a model whose embeddings run outside.

    Raises:
        ValueError: The sizes do not divide among the ranks, or a choice is not supported.
        CheckpointMismatchError: Tensors hold values that are not finite.
    """
    settings = RankSettings(
        tp_size=reader.tp_size,
        data_type=data_type,
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

    def run(rank: RankBase, own: RankSettings) -> _Notes:
        notes = _Notes(own.rank)
        _tap(rank.model, notes)
        result = rank.run(plan, states if own.rank == 0 else None)
        if result is not None and plan.output_rows:
            assert not isinstance(architecture, EncoderArchitecture)
            notes.add(Place("logits"), result.logits[:, : architecture.vocab_size])
        return notes

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
        notes = [each.result() for each in running]
    found = {} if states is None else {Place("embedding"): states}
    for place, x in notes[0].tensors.items():
        if place in notes[0].summands:
            x = torch.stack([each.tensors[place] for each in notes]).sum(0)
        found[place] = x
    return found


def _plan(architecture: Architecture, inputs: ModelInputs, states: torch.Tensor | None) -> StepPlan:
    """Return the step that computes all tokens at once."""
    if isinstance(architecture, EncoderArchitecture):
        assert states is not None, "nothing to begin with"
        row = EncoderRow(len(states))
        return StepPlan((), (), (), embedding_rows=row.count, encoder_rows=(row,))
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


@dataclass
class _Notes:
    """The activations of one rank by place; at `summands` those of all ranks add up."""

    rank: int
    tensors: dict[Place, torch.Tensor] = field(default_factory=dict)
    summands: set[Place] = field(default_factory=set)

    def add(self, place: Place, x: torch.Tensor) -> None:
        """Keep a copy of x (N, W)."""
        self.tensors[place] = x.to(torch.float32, copy=True)


def _tap(model: Any, notes: _Notes) -> None:
    """Let a rank's model note what it computes."""

    def note(run: Callable[..., torch.Tensor], where: str) -> _Noted:
        return _Noted(run, partial(notes.add, Place(where)))

    def tapped(layers: Sequence[Any], where: str) -> list[Any]:
        parts = [_with_parts(each, f"{where} {i}", notes) for i, each in enumerate(layers)]
        return [note(each, f"{where} {i}") for i, each in enumerate(parts)]

    has_encoder, generates = isinstance(model, EncoderDecoder), isinstance(model, GeneratorModel)
    stack = "decoder " if has_encoder else ""
    if has_encoder:
        model.encoder = tapped(model.encoder, "encoder layer")
        model.decoder = tapped(model.decoder, "decoder layer")
        model.finish_encoder = note(model.finish_encoder, "encoder final norm")
    else:
        model.layers = tapped(model.layers, "layer")
    if generates:
        embed = model.embed

        def embedded(tokens: Tokens) -> torch.Tensor:
            is_step = isinstance(tokens, Step)
            return note(embed, f"{stack if is_step else 'encoder '}embedding")(tokens)

        model.embed = embedded
        if model.head is not None and model.head.norm is not None:
            model.head.norm = note(model.head.norm, f"{stack}final norm")


# Parts of a layer: name, field of the layer, and the linear in it whose output is the part's.
_PARTS = (
    ("attention", "attention", "out"),
    ("cross attention", "cross", "out"),
    ("mlp", "mlp", "down"),
)


def _with_parts(layer: Any, where: str, notes: _Notes) -> Any:
    """Return a layer that notes its parts."""
    # Parallel halves share one sum over the ranks, after which their biases are added.
    is_shared = getattr(layer, "reduce", None) is not None

    def note(name: str, y: torch.Tensor) -> None:
        if is_shared and name == "mlp" and notes.rank == 0 and layer.bias is not None:
            y = y + layer.bias
        notes.add(Place(where, name), y)
        if is_shared:
            notes.summands.add(Place(where, name))

    def tapped(linear: Callable[[torch.Tensor], torch.Tensor], name: str) -> Any:
        def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            y = linear(x)
            note(name, y)
            return y if residual is None else y + residual

        return run

    parts = {}
    for name, attribute, end in _PARTS:
        if (part := getattr(layer, attribute, None)) is not None:
            inner = part.part if isinstance(part, Sublayer) else part
            inner = replace(inner, **{end: tapped(getattr(inner, end), name)})
            parts[attribute] = replace(part, part=inner) if isinstance(part, Sublayer) else inner
    return replace(layer, **parts)


@dataclass(frozen=True)
class _Noted:
    """A part of a model whose output is noted."""

    inner: Any
    note: Callable[[torch.Tensor], None]

    def __call__(self, *inputs: Any, **more: Any) -> torch.Tensor:
        y: torch.Tensor = self.inner(*inputs, **more)
        self.note(y)
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
