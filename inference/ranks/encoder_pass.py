"""One batch in the encoder, whose layers may be spread over several steps.

An encoder's rows cannot be split like a decoder's prompts, since every token sees all others. Its
layers can: a long row then does not delay the rows that decode.
"""

# Shapes: N tokens of the batch, E hidden, H local heads, S longest row

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inference.model.encoder_decoder import EncoderBatch, EncoderDecoder
from inference.parallel.groups import RankGroups
from inference.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from inference.model.gpu.encoder_graph import EncoderGraphs


class EncoderPass:
    """One rank's part of the pass; every rank advances in the same steps."""

    def __init__(
        self,
        model: EncoderDecoder,
        batch: EncoderBatch,
        *,
        layout: ParallelLayout,
        groups: RankGroups | None,
        graphs: EncoderGraphs | None = None,
        with_attentions: bool = False,
    ) -> None:
        """Begin before the first layer; `graphs` are those of whole passes, if there are any."""
        self.batch = batch
        self.attentions: torch.Tensor | None = None  # (rows, stage's layers, H, S, S)
        if with_attentions:
            width = max(batch.rows.lengths)
            heads = model.architecture.encoder.head_num // layout.tp_size
            shape = (len(batch.rows.lengths), len(model.encoder_layers), heads, width, width)
            self.attentions = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.output: torch.Tensor | None = None  # (N, E) on the last stage, once done
        self._model = model
        self._layout = layout
        self._groups = groups
        plain = batch.tasks is None and not batch.has_virtual and not with_attentions
        self._graphs = graphs if plain else None
        self._masks = model.encoder_masks(batch.rows)
        self._x: torch.Tensor | None = None  # (N, E), while this stage computes
        self._next = 0  # layer, of all stages

    @property
    def is_done(self) -> bool:
        """Return whether all layers of all stages have run."""
        return self._next == self._model.architecture.encoder.num_layer

    def advance(self, count: int) -> None:
        """Run the next `count` layers, or all that are left if they are fewer.

        A stage sends its result in the step that ends its layers.
        """
        mine, layout = self._model.encoder_layers, self._layout
        start = self._next
        stop = min(start + count, self._model.architecture.encoder.num_layer)
        if self._graphs is not None and stop - start == self._model.architecture.encoder.num_layer:
            output = self._graphs.run(self.batch.ids, self.batch.rows)
            if output is not None:
                self.output = output
                self._next = stop
                return
        if start == 0 and layout.is_first_stage:
            self._x = self._model.embed_rows(self.batch)
        elif start < mine.start <= stop:
            assert self._groups is not None
            room = self._model.empty_hidden(len(self.batch.ids))
            self._x = self._groups.receive(room, layout.previous_rank)
        layers = range(max(start, mine.start), min(stop, mine.stop))
        if layers:
            assert self._x is not None
            self._x = self._model.run_encoder(
                self._x, self.batch, self._masks, layers=layers, attentions=self.attentions
            )
        if start < mine.stop <= stop:
            assert self._x is not None
            if layout.is_last_stage:
                self.output = self._model.finish_encoder(self._x)
            else:
                assert self._groups is not None
                self._groups.send(self._x, layout.next_rank).wait()
            self._x = None
        self._next = stop
