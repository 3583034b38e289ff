"""Decoder-only models: GPT, OPT, BLOOM, GPT-J, GPT-NeoX, and today's dense ones.

The architecture record states the differences; a pipeline stage holds only its layers, and only the
linears know how tensors are divided among ranks.
"""

# Shapes: N tokens of a step, n tokens whose logits are wanted, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from inference.model.layers import MLP, Attention, Embedding, JointHalves, Normalise
from inference.model.rotary import AnglesOf, RotaryTable
from inference.model.step import AttentionRules, Step
from inference.parallel.linear import AllReduce, VocabParallelHead


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; `architecture.residual` says how its two halves are joined."""

    architecture: DecoderArchitecture
    attention_norm: Normalise | None  # None: attention reads the residual as it is
    mlp_norm: Normalise | None  # None: likewise; of parallel halves, attention's norm feeds both
    attention: Attention
    mlp: MLP
    attention_adapter: MLP | None
    mlp_adapter: MLP | None
    attention_output_norm: Normalise | None
    mlp_output_norm: Normalise | None
    reduce: AllReduce | None  # of the parallel forms, which share one all-reduce
    bias: torch.Tensor | None  # added after it

    def __call__(self, x: torch.Tensor, step: Step, layer: int, angles: AnglesOf) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""

        def attend(h: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            return self.attention(h, step, layer=layer, angles=angles, residual=residual)

        choice = self.architecture
        if choice.residual != "sequential":
            return self._parallel(x, attend)
        if not choice.norm_before:
            x = _normalised(attend(x, x), self.attention_norm)
            return _normalised(self.mlp(x, x), self.mlp_norm)
        if choice.residual_from_norm:
            h = _normalised(x, self.attention_norm)
            h = _normalised(attend(h, h), self.mlp_norm)
            return self.mlp(h, h)
        norm, adapter = self.attention_output_norm, self.attention_adapter
        x = self._add(x, _normalised(x, self.attention_norm), attend, norm, adapter)
        norm, adapter = self.mlp_output_norm, self.mlp_adapter
        return self._add(x, _normalised(x, self.mlp_norm), self.mlp, norm, adapter)

    def _add(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        half: _Half,
        norm: Normalise | None,
        adapter: MLP | None,
    ) -> torch.Tensor:
        """Return x plus a half's output for its input h, normalised, scaled or adapted."""
        scale = self.architecture.residual_scale
        if norm is None and adapter is None and scale == 1:
            return half(h, x)
        y = half(h, None)
        if adapter is not None:
            # The adapter sees the output before the residual.
            # Order: FasterTransformer, models/multi_gpu_gpt/ParallelGptDecoder.cc (4c014fb).
            return adapter(y, x + y)
        return torch.add(x, _normalised(y, norm), alpha=scale)

    def _parallel(self, x: torch.Tensor, attend: _Half) -> torch.Tensor:
        h = _normalised(x, self.attention_norm)
        inner = h if self.mlp_norm is None else self.mlp_norm(x)
        if self.reduce is None:
            return self.mlp(inner, attend(h, x))
        return self.reduce(self.mlp(inner, attend(h, None)), bias=self.bias, residual=x)


# Attention or MLP: an input (N, E) and a residual, which is added.
_Half = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def _normalised(x: torch.Tensor, norm: Normalise | None) -> torch.Tensor:
    return x if norm is None else norm(x)


@dataclass(frozen=True)
class JointLayer:
    """A layer whose attention and MLP share one norm, as two matrix products."""

    norm: Normalise
    halves: JointHalves

    def __call__(self, x: torch.Tensor, step: Step, layer: int, angles: AnglesOf) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""
        return self.halves(self.norm(x), step, layer=layer, angles=angles, residual=x)


@dataclass(frozen=True)
class Head:
    """The final norm and this rank's slice of the vocabulary."""

    norm: Normalise | None
    slice: VocabParallelHead

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, slice) fp32 for the last layer's output (n, E)."""
        return self.slice(_normalised(x, self.norm))


class Decoder:
    """One rank's part of a decoder-only model; `decoder_weights.load_decoder` makes it."""

    def __init__(
        self,
        architecture: DecoderArchitecture,
        *,
        embedding: Embedding | None,
        layers: Sequence[DecoderLayer | JointLayer],
        head: Head | None,
        rotary: Collection[RotaryTable],
        rules: AttentionRules,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the layers of a stage; the embedding is the first stage's, the head the last's."""
        self.architecture = architecture
        self.dtype, self.device = dtype, device
        self.rules = rules
        self._embedding = embedding
        self.layers = list(layers)
        self.head = head
        self._rotary = rotary

    def embed(self, step: Step) -> torch.Tensor:
        """Return the first layer's input (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(
            step.ids, step.positions, has_virtual=step.has_virtual, embeddings=step.embeddings
        )

    def empty_hidden(self, step: Step) -> torch.Tensor:
        """Return an uninitialised (N, E) for the hidden states of the stage before."""
        shape = (len(step.ids), self.architecture.hidden)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def run_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the output of this stage's last layer (N, E)."""
        angles = {table: table(step.positions) for table in self._rotary}
        for layer, run in enumerate(self.layers):
            x = run(x, step, layer, angles)
        return x

    def logits(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return this rank's slice of the logits of the wanted tokens, (n, slice) fp32."""
        assert self.head is not None, "only the last stage has a head"
        if len(step.output_rows) < len(x):
            x = x.index_select(0, step.output_rows)
        return self.head(x)
