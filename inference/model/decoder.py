"""Decoder-only models: GPT, OPT, BLOOM, GPT-J, GPT-NeoX and Llama-like ones.

The architecture record states the differences; a pipeline stage holds only its layers, and only the
linears know how tensors are divided among ranks.
"""

# Shapes: N tokens of a step, n tokens whose logits are wanted, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from inference.model.layers import MLP, Attention, Embedding, JointHalves, Normalise
from inference.model.rotary import Angles, RotaryTable
from inference.model.step import AttentionRules, Step
from inference.parallel.linear import AllReduce, VocabParallelHead


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; `architecture.residual` says how its two halves are joined."""

    architecture: DecoderArchitecture
    attention_norm: Normalise
    mlp_norm: Normalise | None  # None: the attention's norm feeds both halves
    attention: Attention
    mlp: MLP
    attention_adapter: MLP | None
    mlp_adapter: MLP | None
    reduce: AllReduce | None  # of the parallel forms, which share one all-reduce
    bias: torch.Tensor | None  # added after it

    def __call__(
        self, x: torch.Tensor, step: Step, layer: int, angles: Angles | None
    ) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""

        def attend(h: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            return self.attention(h, step, layer=layer, angles=angles, residual=residual)

        if self.architecture.residual != "sequential":
            return self._parallel(x, attend)
        assert self.mlp_norm is not None
        if not self.architecture.norm_before:
            x = self.attention_norm(attend(x, x))
            return self.mlp_norm(self.mlp(x, x))
        if self.architecture.residual_from_norm:
            h = self.attention_norm(x)
            h = self.mlp_norm(attend(h, h))
            return self.mlp(h, h)
        if self.attention_adapter is None or self.mlp_adapter is None:
            x = attend(self.attention_norm(x), x)
            return self.mlp(self.mlp_norm(x), x)
        x = _adapted(attend(self.attention_norm(x), None), self.attention_adapter, x)
        return _adapted(self.mlp(self.mlp_norm(x)), self.mlp_adapter, x)

    def _parallel(
        self, x: torch.Tensor, attend: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    ) -> torch.Tensor:
        h = self.attention_norm(x)
        inner = h if self.mlp_norm is None else self.mlp_norm(x)
        if self.reduce is None:
            return self.mlp(inner, attend(h, x))
        return self.reduce(self.mlp(inner, attend(h, None)), bias=self.bias, residual=x)


@dataclass(frozen=True)
class JointLayer:
    """A layer whose attention and MLP share one norm, as two matrix products."""

    norm: Normalise
    halves: JointHalves

    def __call__(
        self, x: torch.Tensor, step: Step, layer: int, angles: Angles | None
    ) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""
        return self.halves(self.norm(x), step, layer=layer, angles=angles, residual=x)


def _adapted(y: torch.Tensor, adapter: MLP, x: torch.Tensor) -> torch.Tensor:
    """Return x + y + adapter(y): the adapter sees a half's output before the residual."""
    # Order: FasterTransformer, models/multi_gpu_gpt/ParallelGptDecoder.cc (4c014fb).
    return adapter(y, x + y)


@dataclass(frozen=True)
class Head:
    """The final norm and this rank's slice of the vocabulary."""

    norm: Normalise | None
    slice: VocabParallelHead

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, slice) fp32 for the last layer's output (n, E)."""
        return self.slice(x if self.norm is None else self.norm(x))


class Decoder:
    """One rank's part of a decoder-only model; `decoder_weights.load_decoder` makes it."""

    def __init__(
        self,
        architecture: DecoderArchitecture,
        *,
        embedding: Embedding | None,
        layers: Sequence[DecoderLayer | JointLayer],
        head: Head | None,
        rotary: RotaryTable | None,
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
        angles = self._rotary(step.positions) if self._rotary is not None else None
        for layer, run in enumerate(self.layers):
            x = run(x, step, layer, angles)
        return x

    def logits(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return this rank's slice of the logits of the wanted tokens, (n, slice) fp32."""
        assert self.head is not None, "only the last stage has a head"
        if len(step.output_rows) < len(x):
            x = x.index_select(0, step.output_rows)
        return self.head(x)
