"""T5 models: an encoder over whole rows, and a decoder whose tokens read the encoder's output.

Everything that differs among T5, T5-v1.1, flan, mT5, UL2 and Megatron T5 is read from the
architecture record. A pipeline stage holds its share of the layers of both stacks.
"""

# Shapes: N tokens, E hidden, H local heads

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.kv_cache import KVCache
from inference.model.ragged import RaggedRows, RowMasks
from inference.model.stage import GeneratorModel
from inference.model.step import AttentionRules, Segment, Step
from inference.model.t5_layers import T5Layer, T5Loader
from inference.model.weights import RankWeights
from inference.parallel.epilogue import GemmOptions
from inference.parallel.linear import AllReduce


@dataclass(frozen=True)
class EncoderBatch:
    """Rows of one encoder pass.

    With `has_virtual`, ids from the vocabulary's end on name rows of the loaded prompt tables and,
    after those, of `embeddings`.
    """

    ids: torch.Tensor  # (N,)
    masks: RowMasks
    has_virtual: bool = False
    embeddings: torch.Tensor | None = None  # (table rows, E)


@dataclass(frozen=True)
class EncodedRow:
    """The encoder's output that a sequence reads: `length` tokens in a slot of the cache."""

    slot: int
    length: int
    task: int  # of IA3


def reading_segments(segments: Sequence[Segment], encoded: Sequence[EncodedRow]) -> list[Segment]:
    """Return what the tokens of segments read, each segment its part of `encoded`.

    Their tokens are as the last of what they read, one segment for all that read the same.
    """
    reading: list[Segment] = []
    for segment, each in zip(segments, encoded, strict=True):
        count = segment.count
        if reading and reading[-1].slot == each.slot:
            count += reading.pop().count
        reading.append(Segment(each.slot, each.length - count, count))
    return reading


class EncoderDecoder(GeneratorModel):
    """One rank's part of a T5 model; without a decoder where the folder has none."""

    architecture: EncoderDecoderArchitecture

    def _load(self, weights: RankWeights, reduce: AllReduce | None, gemm: GemmOptions) -> None:
        layout, architecture = weights.layout, self.architecture
        self.encoder_layers = layout.layers(architecture.encoder.num_layer)
        loader = T5Loader(weights, architecture, reduce, gemm)
        self._embedding = loader.embedding() if layout.is_first_stage else None
        self.encoder = [loader.encoder_layer(number) for number in self.encoder_layers]
        self._encoder_bias = loader.relative_bias("encoder")  # (H, offsets)
        self._encoder_norm = loader.final_norm("encoder") if layout.is_last_stage else None
        self.decoder: list[T5Layer] = []
        self.head = None
        self.rules = AttentionRules()
        if architecture.decoder is not None:
            numbers = layout.layers(architecture.decoder.num_layer)
            self.decoder = [loader.decoder_layer(number) for number in numbers]
            self.rules = AttentionRules(
                distance_bias=loader.relative_bias("decoder"), scale=loader.score_scale
            )
            if layout.is_last_stage:
                self.head = loader.head()

    def embed_rows(self, batch: EncoderBatch) -> torch.Tensor:
        """Return the first encoder layer's input (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(
            batch.ids,
            batch.masks.rows.positions,
            has_virtual=batch.has_virtual,
            embeddings=batch.embeddings,
        )

    def encoder_masks(
        self,
        rows: RaggedRows,
        *,
        tasks: torch.Tensor | None = None,
        attentions: torch.Tensor | None = None,
    ) -> RowMasks:
        """Return what all layers of the encoder share for some rows."""
        return RowMasks(rows, self._encoder_bias, self.dtype, tasks, attentions)

    def run_encoder(self, x: torch.Tensor, masks: RowMasks, layers: range) -> torch.Tensor:
        """Return the output (N, E) of some of this stage's encoder layers for their input (N, E).

        `layers` are global numbers.
        """
        for number in layers:
            x = self.encoder[number - self.encoder_layers.start](x, masks)
        return x

    def encode(self, ids: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        """Return the encoder's output (N, E) for the ids (N,) of plain rows, of a single stage."""
        masks = self.encoder_masks(rows)
        x = self.embed_rows(EncoderBatch(ids, masks))
        return self.finish_encoder(self.run_encoder(x, masks, self.encoder_layers))

    def finish_encoder(self, x: torch.Tensor) -> torch.Tensor:
        """Return the encoder's output (N, E): the last layer's, normalised."""
        assert self._encoder_norm is not None, "only the last stage ends the encoder"
        return self._encoder_norm(x)

    def cache_encoded(
        self, encoded: torch.Tensor, batch: EncoderBatch, slots: Sequence[int], cache: KVCache
    ) -> None:
        """Store the keys and values of the encoder's output (N, E) for this stage's decoder layers.

        `slots` of the cache receive them, one for each row.
        """
        rows, tasks = batch.masks.rows, batch.masks.tasks
        cache_rows = cache.token_rows(rows.per_token(slots), rows.positions)
        for layer in self.decoder:
            assert layer.cross is not None
            layer.cross.part.cache_encoded(encoded, cache_rows, cache, tasks=tasks)

    def embed(self, step: Step) -> torch.Tensor:
        """Return the first decoder layer's input (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(step.ids, step.positions)

    def run_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the output of this stage's last decoder layer (N, E)."""
        for layer in self.decoder:
            x = layer(x, step)
        return x
