"""Layers of the runtime with their parts wrapped, so that each part's output is noted.

A part adds the residual itself when it serves; here it is called without one, and the residual is
added once its output is noted.
"""

# Shapes: N tokens, E hidden

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from inference.model import decoder, encoder, t5_layers
from inference.model.layers import MLP
from inference.parity.activations import Place
from inference.parity.ranks import Notes

_Part = Callable[..., torch.Tensor]
_Note = Callable[[torch.Tensor], None]


def tapped_decoder_layer(layer: decoder.DecoderLayer, where: str, notes: Notes) -> _Part:
    """Return a layer of a decoder-only model that notes attention, MLP and its output."""
    attention, mlp = Place(where, "attention"), Place(where, "mlp")
    if layer.reduce is None:
        taps = _noting(notes, attention), _noting(notes, mlp)
    else:
        # Parallel halves share one sum over the ranks, after which their biases are added.
        bias = layer.bias if notes.rank == 0 and layer.bias is not None else 0
        taps = (
            lambda y: notes.add(attention, y, "sum"),
            lambda y: notes.add(mlp, y + bias, "sum"),
        )
    tapped = replace(
        layer,
        attention=replace(layer.attention, out=_sum(layer.attention.out, taps[0])),
        mlp=replace(layer.mlp, down=_sum(layer.mlp.down, taps[1])),
    )
    return _TappedLayer(tapped, _noting(notes, Place(where)))


def tapped_bert_layer(layer: encoder.EncoderLayer, where: str, notes: Notes) -> _Part:
    """Return a layer of BERT that notes attention, MLP and its output."""
    tapped = replace(
        layer,
        attention=_tapped_attention(layer.attention, Place(where, "attention"), notes),
        mlp=replace(layer.mlp, down=_sum(layer.mlp.down, _noting(notes, Place(where, "mlp")))),
    )
    return _TappedLayer(tapped, _noting(notes, Place(where)))


def tapped_t5_encoder_layer(
    layer: t5_layers.T5EncoderLayer, where: str, notes: Notes
) -> t5_layers.T5EncoderLayer:
    """Return an encoder layer of T5 that notes attention, MLP and its output."""
    return replace(
        layer,
        attention=_tapped_attention(layer.attention, Place(where, "attention"), notes),
        mlp=_tapped_t5_mlp(layer.mlp, where, notes),
    )


def tapped_t5_decoder_layer(
    layer: t5_layers.T5DecoderLayer, where: str, notes: Notes
) -> t5_layers.T5DecoderLayer:
    """Return a decoder layer of T5 that notes both attentions, MLP and its output."""
    return replace(
        layer,
        attention=_tapped_attention(layer.attention, Place(where, "attention"), notes),
        cross=_tapped_attention(layer.cross, Place(where, "cross attention"), notes),
        mlp=_tapped_t5_mlp(layer.mlp, where, notes),
    )


def _tapped_attention(attention: Any, place: Place, notes: Notes) -> Any:
    return replace(attention, out=_sum(attention.out, _noting(notes, place)))


def _tapped_t5_mlp(mlp: MLP, where: str, notes: Notes) -> MLP:
    # The MLP is the layer's last part: with the residual it is the layer's output.
    note, note_total = _noting(notes, Place(where, "mlp")), _noting(notes, Place(where))
    return replace(mlp, down=_sum(mlp.down, note, note_total))


def _noting(notes: Notes, place: Place) -> _Note:
    return lambda y: notes.add(place, y)


def _sum(part: _Part, note: _Note, note_total: _Note | None = None) -> Any:
    """Return what stands in for a linear of the runtime, whose type it does not have."""
    return _TappedSum(part, note, note_total)


@dataclass(frozen=True)
class _TappedSum:
    """A linear: its output is noted, and what it makes with the residual if asked for."""

    inner: _Part
    note: _Note
    note_total: _Note | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.inner(x)
        self.note(y)
        total = y if residual is None else y + residual
        if self.note_total is not None:
            self.note_total(total)
        return total


@dataclass(frozen=True)
class _TappedLayer:
    inner: _Part
    note: _Note

    def __call__(self, *inputs: Any) -> torch.Tensor:
        y = self.inner(*inputs)
        self.note(y)
        return y
