"""Settings of a source that a family's config has too: one table, read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.families.layout.architecture import activation_choice
from export_scripts.families.mapping.settings import ALL_ACTIVATIONS, Settings


def _rounded(value: float) -> float:
    """Return a value without what its computation and that of its inverse have left."""
    return float(f"{value:.12g}")


# For `inverse` of a setting.
reciprocal = (lambda value: 1 / value, lambda value: _rounded(1 / value))
inverse_root = (lambda value: value**-0.5, lambda value: _whole(_rounded(value**-2)))


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        field: Field or property of the config.
        names: Spellings in the source; the first is written.
        kind: Method of `Settings` that reads it: integer, number, optional, flag, activation
            or any_activation.
        default: Value that the source's library takes for an absent key, or a function of the
            values read so far; without one, the key is required.
        inverse: Makes the field's value of the source's, and the source's of the field's.
    """

    field: str
    names: tuple[str, ...]
    kind: str = "integer"
    default: Callable[[Mapping[str, Any]], Any] | None = None
    inverse: tuple[Callable[[float], float], Callable[[float], float]] | None = None


def key(
    field: str, *names: str, kind: str = "integer", inverse: Any = None, **default: Any
) -> Setting:
    """Return a setting; `default` is a value, or a function of the values read before."""
    if "default" not in default:
        return Setting(field, names, kind, inverse=inverse)
    usual = default["default"]
    return Setting(field, names, kind, usual if callable(usual) else lambda _: usual, inverse)


def read_keys(settings: Settings, keys: Sequence[Setting]) -> dict[str, Any]:
    """Return the fields in a configuration; problems are noted in `settings`."""
    values: dict[str, Any] = {}
    for each in keys:
        default = {} if each.default is None else {"default": each.default(values)}
        found = getattr(settings, each.kind)(*each.names, **default)
        if each.kind.endswith("activation"):
            values[each.field], values["exact_gelu"] = found
        else:
            values[each.field] = each.inverse[0](found) if each.inverse else found
    return values


def activation_name(spelling: str, *, exact_gelu: bool, usual: str = "") -> str:
    """Return transformers' name of an activation of config.ini, without its gate.

    Of several, the `usual` one.
    """
    activation, _ = activation_choice(spelling)
    wanted = activation, exact_gelu and activation == "gelu"
    names = [
        name for name, (ours, exact) in ALL_ACTIVATIONS.items() if (ours.lower(), exact) == wanted
    ]
    return usual if usual in names else names[0]


def written_keys(keys: Sequence[Setting], config: Any) -> dict[str, Any]:
    """Return the configuration of which `read_keys` makes the config's values."""
    out: dict[str, Any] = {}
    for each in keys:
        value = getattr(config, each.field)
        if each.kind.endswith("activation"):
            usual = "" if each.default is None else each.default({})
            value = activation_name(value, exact_gelu=config.exact_gelu, usual=usual)
        elif each.inverse is not None and value is not None:
            value = each.inverse[1](value)
        out[each.names[0]] = value
    return out
