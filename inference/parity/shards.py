"""Activations of an FT folder's shards, computed by the serving code without a server.

The layers are loaded and run by the code that serves, on the CPU.
"""

# Shapes: N tokens, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.reader import FTReader
from inference.model.decoder_weights import load_decoder
from inference.model.encoder import Encoder
from inference.model.encoder_decoder import (
    EncodedRow,
    EncoderBatch,
    EncoderDecoder,
    encoded_slots,
)
from inference.model.kv_cache import CacheShape, KVCache, encoder_slot
from inference.model.ragged import ragged_rows
from inference.model.rotary import position_shift
from inference.model.step import Segment, make_step
from inference.model.weights import RankWeights
from inference.parallel.layout import ParallelLayout
from inference.parallel.linear import AllReduce
from inference.parity.activations import Activations, ModelInputs, Place
from inference.parity.ranks import Notes, on_ranks, tapped
from inference.ranks.base import rank_weights

_CPU = torch.device("cpu")


def run_shards(
    reader: FTReader, inputs: ModelInputs, *, data_type: str, states: torch.Tensor | None = None
) -> Activations:
    """Return what the folder's model computes, each place (N, E) or (N, V) fp32.

    All its ranks run, as threads, and compute in `data_type`: fp32, fp16 or bf16, as the runtime
    does on a CPU. `states` are the first layer's input (N, E), for a model whose embeddings run
    outside.

    Raises:
        ValueError: The sizes do not divide among the ranks, or a choice is not supported.
        CheckpointMismatchError: Tensors hold values that are not finite.
    """

    def run(notes: Notes, reduce: AllReduce | None) -> None:
        layout = ParallelLayout(notes.rank, reader.tp_size)
        weights = rank_weights(reader, layout, data_type=data_type, device=_CPU)
        rank = _Rank(weights, reduce, notes)
        architecture = reader.family.architecture(reader.config)
        if isinstance(architecture, DecoderArchitecture):
            rank.run_decoder(architecture, inputs)
        elif isinstance(architecture, EncoderDecoderArchitecture):
            rank.run_encoder_decoder(architecture, inputs)
        else:
            assert states is not None, "nothing to begin with"
            rank.run_encoder(architecture, states)

    return on_ranks(reader.tp_size, run)


@dataclass(frozen=True)
class _Rank:
    """One rank: its files, its sums with the others, and where it notes."""

    weights: RankWeights
    reduce: AllReduce | None
    notes: Notes

    def run_decoder(self, architecture: DecoderArchitecture, inputs: ModelInputs) -> None:
        """Run a decoder-only model over all tokens at once."""
        model = load_decoder(self.weights, architecture, reduce=self.reduce)
        model.layers = self._tapped(model.layers, "layer")
        count = len(inputs.ids)
        step = make_step(
            torch.tensor(inputs.ids),
            [Segment(0, 0, count, position_shift(architecture.rotary, count))],
            torch.arange(count),
            cache=self._cache(
                architecture.num_layer,
                architecture.kv_head_num,
                architecture.size_per_head,
                max_len=count,
            ),
            rules=model.rules,
            dtype=model.dtype,
        )
        x = model.embed(step)
        self.notes.add(Place("embedding"), x)
        x = model.run_layers(x, step)
        assert model.head is not None, "the whole model is one stage"
        if model.head.norm is not None:
            self.notes.add(Place("final norm"), model.head.norm(x))
        self._note_logits(model.logits(x, step), architecture.vocab_size)

    def run_encoder_decoder(
        self, architecture: EncoderDecoderArchitecture, inputs: ModelInputs
    ) -> None:
        """Run a T5: the encoder over all its tokens, then the decoder."""
        model = EncoderDecoder(self.weights, architecture, reduce=self.reduce)
        model.encoder = self._tapped(model.encoder, "encoder layer")
        rows = ragged_rows([len(inputs.ids)], _CPU)
        batch = EncoderBatch(torch.tensor(inputs.ids), rows)
        x = model.embed_rows(batch)
        self.notes.add(Place("encoder embedding"), x)
        masks = model.encoder_masks(rows)
        x = model.run_encoder(x, batch, masks, layers=model.encoder_layers)
        encoded = model.finish_encoder(x)
        self.notes.add(Place("encoder final norm"), encoded)
        if architecture.decoder is not None:
            self._decode(model, batch, encoded, inputs)

    def _decode(
        self,
        model: EncoderDecoder,
        batch: EncoderBatch,
        encoded: torch.Tensor,
        inputs: ModelInputs,
    ) -> None:
        stack = model.architecture.decoder
        assert stack is not None
        model.decoder = self._tapped(model.decoder, "decoder layer")
        count, length = len(inputs.decoder_ids), len(inputs.ids)
        sizes = stack.num_layer, stack.head_num, stack.size_per_head
        cache = self._cache(*sizes, max_len=max(count, length), parts=2)
        no_task = model.architecture.ia3_num_tasks
        row = EncodedRow(encoder_slot([0], 1), length, no_task)
        model.cache_encoded(encoded, batch, [row.slot], cache)
        segments, rules, dtype = [Segment(0, 0, count)], model.rules, model.dtype
        step = make_step(
            torch.tensor(inputs.decoder_ids),
            segments,
            torch.arange(count),
            cache=cache,
            rules=rules,
            dtype=dtype,
            encoded=encoded_slots(segments, [row], rules=rules, dtype=dtype, cache=cache),
        )
        x = model.embed(step)
        self.notes.add(Place("decoder embedding"), x)
        x = model.run_layers(x, step)
        assert model.head is not None, "the whole model is one stage"
        assert model.head.norm is not None
        self.notes.add(Place("decoder final norm"), model.head.norm(x))
        self._note_logits(model.logits(x, step), model.architecture.vocab_size)

    def run_encoder(self, architecture: EncoderArchitecture, states: torch.Tensor) -> None:
        """Run a BERT over one row of hidden states (N, E)."""
        model = Encoder(self.weights, architecture, reduce=self.reduce)
        model.layers = self._tapped(model.layers, "layer")
        self.notes.add(Place("embedding"), states)
        model.run_layers(states.to(model.dtype), ragged_rows([len(states)], _CPU))

    def _tapped(self, layers: Sequence[Any], where: str) -> list[Any]:
        return [tapped(each, f"{where} {i}", self.notes) for i, each in enumerate(layers)]

    def _note_logits(self, part: torch.Tensor, vocab_size: int) -> None:
        """Note this rank's slice of the logits (N, slice), without what fills the last one up."""
        rows = self.weights.layout.vocab_rows(vocab_size)
        self.notes.add(Place("logits"), part[:, : len(rows)], "columns")

    def _cache(
        self, num_layer: int, head_num: int, size_per_head: int, *, max_len: int, parts: int = 1
    ) -> KVCache:
        heads = head_num // self.weights.layout.tp_size
        shape = CacheShape(num_layer, 1, heads, max_len, size_per_head, parts=parts)
        return KVCache(shape, dtype=self.weights.dtype, device=_CPU)
