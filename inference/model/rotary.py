"""Rotary position embedding: the angles of a model, and the rotation of queries and keys.

Su et al., RoFormer, section 3.2.2. GPT-J rotates neighbouring pairs, GPT-NeoX and Llama the halves.
"""

# Shapes: N tokens, H heads, D head size, R rotated dimensions of a head

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export_scripts.families.layout.architecture import Rotary

# Shift of the positions of sequences that take LongRoPE's long factors.
_LONG = 1 << 30


def position_shift(rotary: Rotary | None, tokens: int) -> int:
    """Return the shift of the positions of a sequence of `tokens` tokens.

    LongRoPE uses other factors, for all positions, in sequences that exceed the original length
    (Ding et al., LongRoPE, section 3.3); the shift marks their positions. As in transformers, a
    sequence that grows beyond that length recomputes its keys. Beams and conversations cannot, and
    use the long factors from the start if they may exceed it.
    """
    if rotary is None or rotary.kind != "longrope":
        return 0
    return _LONG if tokens > rotary.scaling["original_max_position_embeddings"] else 0


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of a step's tokens, each (N, 1, R).

    With `interleaved`, adjacent dimensions are rotated as pairs, else the two halves. `growth` is a
    factor on queries (N, 1, 1), None for none.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    growth: Tensor | None = None

    def rotate(self, x: Tensor) -> Tensor:
        """Return x (N, H, D) with the first R dimensions of each head rotated."""
        width = self.cos.shape[-1]
        part = x[..., :width]
        if self.interleaved:  # every pair (a, b) turned into (-b, a)
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = part.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        rotated = part * self.cos + turned * self.sin
        return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


class RotaryTable:  # hashed by identity, as a key of `Step.angles`
    """The angles of positions, computed on demand from the model's frequencies."""

    def __init__(
        self, rotary: Rotary, *, interleaved: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        frequencies, self._scale = _frequencies(rotary)
        self._frequencies = frequencies.to(device)  # (R/2,); LongRoPE: short and long, (2, R/2)
        self._interleaved = interleaved
        self._dtype = dtype
        self._scaling = rotary.scaling

    def __call__(self, positions: Tensor) -> Angles:
        """Return the angles at `positions` (N,)."""
        frequencies = self._frequencies
        if frequencies.ndim == 2:
            frequencies = frequencies[positions // _LONG]  # (N, R/2)
        # Layers without LongRoPE ignore the shift.
        angles = (positions % _LONG).unsqueeze(1).float() * frequencies  # (N, R/2)
        if self._interleaved:
            angles = angles.repeat_interleave(2, dim=1)  # (N, R)
        else:
            angles = torch.cat((angles, angles), dim=1)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        cos, sin = (each.unsqueeze(1).to(self._dtype) for each in (cos, sin))
        growth = None
        if "llama_4_scaling_beta" in self._scaling:
            lengths = (positions % _LONG) // self._scaling["original_max_position_embeddings"]
            growth = 1 + self._scaling["llama_4_scaling_beta"] * torch.log1p(lengths)
            growth = growth.view(-1, 1, 1).to(self._dtype)
        return Angles(cos, sin, self._interleaved, growth)


# The angles of a step's tokens, for each of a model's tables.
AnglesOf = Mapping[RotaryTable, Angles]


def _frequencies(rotary: Rotary) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, and a factor on cosine and sine.

    The angles are (R/2,), for LongRoPE (2, R/2).
    """
    exponents = torch.arange(0, rotary.dims, 2, dtype=torch.float32) / rotary.dims
    scaling, base = rotary.scaling, rotary.base
    if "alpha" in scaling:
        base *= scaling["alpha"] ** (rotary.dims / (rotary.dims - 2))
    frequencies = 1.0 / base**exponents
    if rotary.kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if rotary.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if rotary.kind == "yarn":
        return _yarn(frequencies, rotary)
    if rotary.kind == "longrope":
        factors = torch.tensor([scaling["short_factor"], scaling["long_factor"]])
        return frequencies / factors, scaling["attention_factor"]
    # "dynamic" changes angles only beyond the trained context, which the engine exceeds only in
    # sessions with `memory_len`.
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Divide the frequencies of long waves by the factor, keep short ones, blend between."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (float(scaling[name]) for name in names)
    # As in Llama 3.1, by the turns of each pair over the original length.
    turns = original * frequencies / math.tau
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


def _yarn(frequencies: Tensor, rotary: Rotary) -> tuple[Tensor, float]:
    """Interpolate long waves, keep short ones, sharpen attention (Peng et al., YaRN, 3.2-3.4)."""
    scaling = rotary.scaling
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns over the original length."""
        waves = math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))
        return rotary.dims * waves

    low, high = pair(scaling.get("beta_fast", 32.0)), pair(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dims - 1)
    index = torch.arange(len(frequencies), dtype=torch.float32)
    # Negative if every pair turns less often than that; the ramp then falls.
    span = high - low or 1e-3
    interpolated = ((index - low) / span).clamp(0, 1)
    frequencies = frequencies * (1 - interpolated) + frequencies / factor * interpolated
    sharpened = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return frequencies, scaling.get("attention_factor", sharpened)
