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
from inference.model.step import AttentionRules, EncodedSlots, Segment, Step, attention_groups
from inference.model.t5_layers import T5DecoderLayer, T5Loader
from inference.model.weights import RankWeights
from inference.parallel.epilogue import GemmOptions
from inference.parallel.linear import AllReduce


@dataclass(frozen=True)
class EncoderBatch:
    """Rows of one encoder pass.

    With `has_virtual`, ids from the vocabulary's end on name rows of the loaded prompt tables and,
    after those, of `embeddings`. `tasks` is the IA3 task of each token, None without IA3.
    """

    ids: torch.Tensor  # (N,)
    rows: RaggedRows
    tasks: torch.Tensor | None = None  # (N,)
    has_virtual: bool = False
    embeddings: torch.Tensor | None = None  # (table rows, E)


@dataclass(frozen=True)
class EncodedRow:
    """The encoder's output that a sequence reads: `length` tokens in a slot of the cache."""

    slot: int
    length: int
    task: int  # of IA3


def encoded_slots(
    segments: Sequence[Segment],
    encoded: Sequence[EncodedRow],
    *,
    rules: AttentionRules,
    dtype: torch.dtype,
    cache: KVCache,
) -> EncodedSlots:
    """Return what the tokens of segments read, each segment its part of `encoded`.

    Segments are in the order of their tokens; `rules` are those of the decoder.
    """
    # As the last tokens of what they read, one segment for all that read the same.
    reading: list[Segment] = []
    for segment, each in zip(segments, encoded, strict=True):
        count = segment.count
        if reading and reading[-1].slot == each.slot:
            count += reading.pop().count
        reading.append(Segment(each.slot, each.length - count, count))
    return EncodedSlots(attention_groups(reading, rules.across, dtype, cache))


class EncoderDecoder(GeneratorModel):
    """One rank's part of a T5 model; without a decoder where the folder has none."""

    architecture: EncoderDecoderArchitecture

    def _load(self, weights: RankWeights, reduce: AllReduce | None, gemm: GemmOptions) -> None:
        layout, architecture = weights.layout, self.architecture
        self.encoder_layers = layout.layers(architecture.num_layer)
        loader = T5Loader(weights, architecture, reduce, gemm)
        self._embedding = loader.embedding() if layout.is_first_stage else None
        self.encoder = [loader.encoder_layer(number) for number in self.encoder_layers]
        self._encoder_bias = loader.relative_bias("encoder")  # (H, offsets)
        self._encoder_norm = loader.final_norm("encoder") if layout.is_last_stage else None
        self.decoder: list[T5DecoderLayer] = []
        self.head = None
        self.rules = AttentionRules()
        if architecture.decoder_num_layer:
            numbers = layout.layers(architecture.decoder_num_layer)
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
            batch.rows.positions,
            has_virtual=batch.has_virtual,
            embeddings=batch.embeddings,
        )

    def encoder_masks(self, rows: RaggedRows) -> RowMasks:
        """Return the additions to the scores of attention, the same in every layer."""
        return RowMasks(rows, self._encoder_bias, self.dtype)

    def run_encoder(
        self,
        x: torch.Tensor,
        batch: EncoderBatch,
        masks: RowMasks,
        *,
        layers: range,
        attentions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output (N, E) of some of this stage's encoder layers for their input (N, E).

        `layers` are global numbers; `attentions`, if given, (rows, stage's layers, H, S, S),
        receives the weights.
        """
        for number in layers:
            index = number - self.encoder_layers.start
            weights_out = None if attentions is None else attentions[:, index]
            x = self.encoder[index](x, masks, batch.tasks, weights_out)
        return x

    def encode(self, ids: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        """Return the encoder's output (N, E) for the ids (N,) of plain rows, of a single stage."""
        batch = EncoderBatch(ids, rows)
        x, masks = self.embed_rows(batch), self.encoder_masks(rows)
        return self.finish_encoder(self.run_encoder(x, batch, masks, layers=self.encoder_layers))

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
        cache_rows = cache.token_rows(batch.rows.per_token(slots), batch.rows.positions)
        for index, layer in enumerate(self.decoder):
            layer.cross.part.cache_encoded(
                encoded, cache_rows, cache, layer=index, tasks=batch.tasks
            )

    def embed(self, step: Step) -> torch.Tensor:
        """Return the first decoder layer's input (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(step.ids, step.positions)

    def run_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the output of this stage's last decoder layer (N, E)."""
        for index, layer in enumerate(self.decoder):
            x = layer(x, step, index)
        return x
