"""Rotary positions as Hugging Face configurations describe them, old spelling and new.

Before version 5: rope_theta (rotary_emb_base), partial_rotary_factor (rotary_pct) and rope_scaling;
since then one rope_parameters. Meanings: transformers, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from export_scripts.families.mapping.settings import Settings

# Built into FasterTransformer's GPT-J and GPT-NeoX.
FT_BASE = 10000.0

# Parameters of each kind, in addition to its base.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
# Earlier names.
_RENAMED = {"su": "longrope"}


@dataclass(frozen=True)
class RotarySettings:
    """Rotary positions of a source: base, rotated fraction of a head, scaling.

    `scaling` is empty for the default kind; for yarn and longrope it includes the computed
    attention_factor. `local_base` is that of layers with a sliding window, if another.
    """

    kind: str = "default"
    base: float = 10000.0
    fraction: float = 1.0
    local_base: float | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)


def rotary_settings(
    settings: Settings,
    *,
    fraction: float = 1.0,
    base: float = FT_BASE,
    local_base: float | None = None,
) -> RotarySettings:
    """Return a configuration's rotary positions; problems are noted in `settings`.

    Args:
        settings: The configuration.
        fraction: The rotated fraction where the configuration names none.
        base: The base where it names none.
        local_base: That of layers with a sliding window, in a family where it is another.
    """
    source = settings.source
    # With both, transformers 4 reads the second only and 5 prefers it.
    given = source.get("rope_scaling") or source.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        settings.problems.append(
            f"{settings.label}: rotary scaling {given!r} is not a table of parameters"
        )
        return RotarySettings()
    if local_base is not None:
        local_base = settings.number("rope_local_base_freq", default=local_base)
    if any(isinstance(value, Mapping) for value in given.values()):
        if local_base is None or not set(given) <= {"full_attention", "sliding_attention"}:
            settings.problems.append(f"{settings.label}: layers with rotary positions of their own")
            return RotarySettings()
        local = Settings(given.get("sliding_attention") or {}, settings.label, settings.problems)
        local.expect("rope_type", "default", why="layers with a window have plain rotary positions")
        local_base = local.number("rope_theta", default=local_base)
        given = given.get("full_attention") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = _RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _REQUIRED:
        known = ", ".join(_REQUIRED)
        settings.problems.append(
            f"{settings.label}: rotary scaling {kind!r} cannot be represented; known: {known}"
        )
        return RotarySettings()
    base = settings.number("rope_theta", "rotary_emb_base", default=base)
    part = settings.number("partial_rotary_factor", "rotary_pct", default=fraction)
    inner = Settings(given, f"{settings.label}: rotary scaling", settings.problems)
    base = inner.number("rope_theta", default=base)
    part = inner.number("partial_rotary_factor", default=part)
    missing = [name for name in _REQUIRED[kind] if given.get(name) is None]
    if missing:
        settings.problems.append(
            f"{settings.label}: {kind} rotary scaling without {', '.join(missing)}"
        )
        return RotarySettings()
    return RotarySettings(kind, base, part, local_base, _scaling(kind, inner, settings))


def plain_rotary_dims(settings: Settings, size_per_head: int, *, fraction: float) -> int:
    """Return the rotated dimensions of a head for a family with fixed rotary positions."""
    rotary = rotary_settings(settings, fraction=fraction)
    if rotary.kind != "default" or rotary.base != FT_BASE:
        settings.problems.append(
            f"{settings.label}: rotary positions of kind {rotary.kind} and base {rotary.base:g} "
            f"cannot be represented: FT has only plain ones of base {FT_BASE:g}"
        )
    return int(size_per_head * rotary.fraction)


def rotary_fraction(dims: int, size_per_head: int) -> float:
    """Return the fraction of a head whose rounding down gives `dims` again."""
    fraction = dims / size_per_head
    return fraction if int(size_per_head * fraction) == dims else (dims + 0.5) / size_per_head


def _scaling(kind: str, given: Settings, settings: Settings) -> dict[str, Any]:
    if kind == "default":
        return {}
    context = settings.integer("max_position_embeddings")
    read = given.numbers if kind == "longrope" else given.number
    out: dict[str, Any] = {name: read(name) for name in _REQUIRED[kind]}
    if kind == "dynamic":
        # The growth is measured against the model's own limit.
        out["original_max_position_embeddings"] = context
    if kind in ("llama3", "yarn", "longrope"):
        # A key next to rope_scaling takes precedence over one inside; the limit is the last resort.
        inside = given.integer("original_max_position_embeddings", default=context)
        original = settings.integer("original_max_position_embeddings", default=inside)
        out["original_max_position_embeddings"] = original
    if kind == "yarn":
        out |= {
            "beta_fast": given.number("beta_fast", default=32.0),
            "beta_slow": given.number("beta_slow", default=1.0),
            "attention_factor": _attention_factor(given),
            "truncate": given.flag("truncate", default=True),
        }
    if kind == "longrope":
        factor = given.number("factor", default=context / out["original_max_position_embeddings"])
        # LongRoPE (arXiv 2402.13753), appendix A.
        growth = math.log(factor) / math.log(out["original_max_position_embeddings"])
        usual = math.sqrt(1 + growth) if factor > 1 else 1.0
        out["attention_factor"] = given.number("attention_factor", default=usual)
    return out


def _attention_factor(given: Settings) -> float:
    """Return yarn's factor of sine and cosine.

    YaRN (arXiv 2309.00071), section 3.4; mscale and mscale_all_dim are DeepSeek's refinement.
    """
    if given.source.get("attention_factor") is not None:
        return given.number("attention_factor")
    factor = given.number("factor")

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.source.get("mscale") and given.source.get("mscale_all_dim"):
        return growth(given.number("mscale")) / growth(given.number("mscale_all_dim"))
    return growth(1.0)
