"""Rotary positions as Hugging Face configurations describe them, in the old and new spelling.

Before version 5: rope_theta, partial_rotary_factor (in GPT-NeoX rotary_emb_base, rotary_pct) and
rope_scaling; since then rope_parameters. Meanings: transformers, modeling_rope_utils.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from export_scripts.families.layout.architecture import ROTARY_SCALINGS
from export_scripts.families.mapping.settings import Settings
from foundations.files.json_content import Fields, Table

# The base that is hard-wired in FasterTransformer's GPT-J and GPT-NeoX.
FT_BASE = 10000.0

# Earlier names -> current names.
_RENAMED = {"su": "longrope", "default": None}
_OLDER = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}  # in GPT-NeoX


def rotary_fields(
    settings: Settings,
    size_per_head: int,
    *,
    fraction: float | None = None,
    base: float = FT_BASE,
    local_base: float | None = None,
    local_key: str = "",
    usual: Table | None = None,
) -> Fields:
    """Return the rotary keys of config.ini; problems are noted in `settings`.

    Args:
        settings: The configuration.
        size_per_head: Dimensions of a head.
        fraction: The default of the rotated part of a head; None if it is always the whole head.
        base: The default base.
        local_base: The default base of layers with a sliding window; None in families that have
            only one base.
        local_key: The older key of that base.
        usual: The library's default of all parameters, if that is not plain rotary positions.
    """
    source = settings.source
    # If both are set, transformers 4 reads only the second, and 5 prefers it.
    given = rotary_parameters(source) or usual or {}
    if given is usual and "rope_scaling" in source:
        settings.note(
            "rope_scaling = null without rope_parameters: transformers 4 uses plain rotary "
            f"positions, and 5 uses {usual}; state rope_parameters"
        )
    if not isinstance(given, Mapping):
        settings.note(f"rotary scaling {given!r} is not a table of parameters")
        given = {}
    elif local_base is not None:
        given, local = _parameters_by_kind(settings)
        local_base = _local_base(settings, local, local_key, local_base)
    if any(isinstance(value, Mapping) for value in given.values()):
        settings.note(
            f"rope_parameters (rope_scaling) = {given!r:.200}: layers have different rotary "
            "positions; expected one table of parameters for all layers of this family"
        )
        given = {}
    stated = given.get("rope_type") or given.get("type")
    if local_base is not None and not given.get("rope_type") and stated not in (None, "default"):
        settings.note(
            f"rotary scaling of type = {stated!r} without rope_type: transformers 4 applies it and "
            "5 does not; write rope_type in its place if it belongs to the model"
        )
    kind = _RENAMED.get(stated, stated) if isinstance(stated, str) else stated
    if kind is not None and (not isinstance(kind, str) or kind not in ROTARY_SCALINGS):
        settings.note(
            f"rotary scaling {kind!r} cannot be represented; known: default, "
            f"{', '.join(ROTARY_SCALINGS)}"
        )
        kind = None
    inner = Settings(given, f"{settings.label}: rotary scaling", settings.problems)
    older = _OLDER if source.get("model_type") == "gpt_neox" else {}
    base = _either(settings, inner, "rope_theta", older, base)
    part = _either(settings, inner, "partial_rotary_factor", older, fraction or 1.0)
    if part > 1:
        settings.note(f"partial_rotary_factor = {part:g}: expected at most 1")
        part = 1.0
    if part != 1 and fraction is None:
        settings.note(
            f"partial_rotary_factor = {part:g} cannot be represented: "
            "transformers rotates whole heads in these models"
        )
    fields = {"rotary_embedding": int(size_per_head * part), "rotary_base": base}
    if local_base is not None:
        fields["rotary_local_base"] = local_base
    if kind == "yarn" and local_base is not None and given.get("truncate") is False:
        settings.note(
            "rotary scaling yarn with truncate = false: if kinds of layers have different rotary "
            "positions, transformers 4 applies it and 5 does not; remove it if the model was "
            "trained with 5"
        )
    return fields if kind is None else fields | _scaling(kind, inner, settings)


def rotary_parameters(source: Table) -> Any:
    """Return the parameters of rotary positions that a configuration states in either spelling."""
    return source.get("rope_scaling") or source.get("rope_parameters")


def _either(
    settings: Settings, inner: Settings, name: str, older: Mapping[str, str], default: float
) -> float:
    """Return a number that is among the parameters or, in older files, next to them."""
    names = [name, *([older[name]] if name in older else ())]
    outside = settings.number(*names, default=default)
    inside = inner.number(name, default=outside)
    if inside != outside and not settings.source.keys().isdisjoint(names):
        settings.note(
            f"{name} = {outside:g}, but {inside:g} among the parameters of rotary positions: "
            "transformers 4 reads the first and 5 the second; remove the wrong one"
        )
    return inside


def _parameters_by_kind(settings: Settings) -> tuple[Table, Table]:
    """Return the parameters of layers with full attention, and of those with a window.

    transformers 5, Gemma3TextConfig.convert_rope_params_to_dict, which ignores all others.
    """
    scaling = settings.get("rope_scaling") or {}
    by_kind = settings.get("rope_parameters") or {}
    known = ("full_attention", "sliding_attention")
    is_known = isinstance(by_kind, Mapping) and all(
        name in known and isinstance(value, Mapping | None) for name, value in by_kind.items()
    )
    if not is_known:
        settings.note(
            f"rope_parameters = {by_kind!r:.200}: transformers 5 only reads {' and '.join(known)} "
            "in it, each a table of parameters"
        )
        return {}, {}
    full, local = (by_kind.get(name) or {} for name in known)
    return {**full, **scaling}, local


def _local_base(settings: Settings, given: Table, key: str, usual: float) -> float:
    """Return the base of layers with a window, whose rotary positions must be plain."""
    local = Settings(given, settings.label, settings.problems)
    if given.get("rope_type", "default") != "default":
        local.note(
            f"rope_type = {given['rope_type']!r}: layers with a window have plain rotary positions"
        )
    outside = settings.number(key, default=usual)
    if key == "rope_theta" and outside != usual and given.get(key) is None:
        settings.note(
            f"rope_theta = {outside:g}: transformers 4 uses it also for layers with a window, and "
            f"5 uses {usual:g}; state each base in rope_parameters"
        )
    return local.number("rope_theta", default=outside)


def scaling_fields(kind: str, scaling: Table) -> Fields:
    """Return the keys of config.ini for a kind of rotary scaling and its parameters."""
    return {
        "rotary_scaling_type": kind,
        **{f"rotary_{name}": value for name, value in scaling.items()},
    }


def rotary_fraction(dims: int, size_per_head: int) -> float:
    """Return a fraction of a head that, multiplied and rounded down, gives `dims` again."""
    fraction = dims / size_per_head
    return fraction if int(size_per_head * fraction) == dims else (dims + 0.5) / size_per_head


def _scaling(kind: str, given: Settings, settings: Settings) -> Fields:
    """Return the fields of a kind of scaling; none if a parameter is missing."""
    if missing := [name for name in ROTARY_SCALINGS[kind] if given.get(name) is None]:
        settings.note(f"{kind} rotary scaling without {', '.join(missing)}")
        return {}
    context = settings.integer("max_position_embeddings")
    read = given.numbers if kind == "longrope" else given.number
    out: Fields = {name: read(name) for name in ROTARY_SCALINGS[kind]}
    if kind == "dynamic":
        # Growth is relative to the model's longest sequence.
        out["original_max_position_embeddings"] = context
    if kind in ("llama3", "yarn", "longrope"):
        # A key next to rope_scaling takes precedence over one inside; the longest sequence is the
        # last resort.
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
        original = max(2, out["original_max_position_embeddings"])
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        out["attention_factor"] = given.number("attention_factor", default=usual)
    return scaling_fields(kind, out)


def _attention_factor(given: Settings) -> float:
    """Return YaRN's factor of sine and cosine.

    YaRN (arXiv 2309.00071), section 3.4; mscale and mscale_all_dim are DeepSeek's refinement.
    """
    if given.get("attention_factor") is not None:
        return given.number("attention_factor")
    factor = given.number("factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        scales = (given.number(name) for name in ("mscale", "mscale_all_dim"))
        return yarn_growth(factor, next(scales)) / yarn_growth(factor, next(scales))
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, weight: float) -> float:
    """Return YaRN's scale of sine and cosine, or of scores, for a factor of the length."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
