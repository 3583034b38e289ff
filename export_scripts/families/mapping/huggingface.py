"""Models in Hugging Face's form: tables of settings, and one record a family of decoders.

Both are read in both directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from export_scripts.families.layout.architecture import activation_choice
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.decoder import HEAD
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.mapping.known_settings import huggingface_obstacles
from export_scripts.families.mapping.names import Names, named_sources, whole_names
from export_scripts.families.mapping.settings import (
    ALL_ACTIVATIONS,
    REQUIRED,
    Settings,
    model_name,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Sources
from export_scripts.files.json_content import Fields, Table


def _rounded(value: float) -> float:
    """Return a value without what its computation and that of its inverse have left."""
    return float(f"{value:.12g}")


# For `inverse` of a setting.
reciprocal = (lambda value: 1 / value, lambda value: _rounded(1 / value))
inverse_root = (lambda value: value**-0.5, lambda value: _whole(_rounded(1 / value / value)))


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


@dataclass(frozen=True)
class Setting:
    """One setting."""

    field: str  # or a property of the config
    names: tuple[str, ...]  # spellings in the source; the first is written
    kind: str = "integer"  # method of `Settings` that reads it
    # The source library's value for an absent key, or a function of the values read so far.
    default: Any = REQUIRED
    # Make the field's value of the source's, and the source's of the field's.
    inverse: tuple[Callable[[float], float], Callable[[float], float]] | None = None


def key(field: str, *names: str, **more: Any) -> Setting:
    """Return a setting of some spellings, and of the further fields of `Setting`."""
    return Setting(field, names, **more)


def read_keys(settings: Settings, keys: Sequence[Setting]) -> Fields:
    """Return the fields in a configuration; problems are noted in `settings`."""
    values: Fields = {}
    for each in keys:
        default = each.default(values) if callable(each.default) else each.default
        found = getattr(settings, each.kind)(*each.names, default=default)
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


def written_keys(keys: Sequence[Setting], config: Any) -> Fields:
    """Return the configuration of which `read_keys` makes the config's values."""
    out: Fields = {}
    for each in keys:
        value = getattr(config, each.field)
        if each.kind.endswith("activation"):
            value = activation_name(value, exact_gelu=config.exact_gelu, usual=each.default)
        elif each.inverse is not None and value is not None:
            value = each.inverse[1](value)
        out[each.names[0]] = value
    return out


@dataclass(frozen=True, kw_only=True)
class HuggingFaceDecoder:
    """A family of decoders: its settings and the names of its tensors."""

    model_type: str  # in config.json
    model: str  # class of transformers
    title: str  # for the support table
    name: str = ""  # of a model without one, and of the mapping; `model_type` if empty
    family: ModelFamily
    # Settings of one field each, and `hidden`, which divided by `head_num` is the size of a head.
    keys: Sequence[Setting]
    # Fields that all models have alike; a function is one of the values read before.
    fixed: Table = field(default_factory=dict)
    layer: str  # the source's prefix of a layer
    names: Names  # of a layer's modules, and of those outside, as `whole_names` takes them
    rows: str = "own"  # see `attention_heads`
    in_out: bool = False  # whether matrices are (in, out)
    # For tensors that have none by their names, or another one.
    sources: Callable[[Facts, Any], Sources] = lambda *_: {}
    # Further fields, from the settings and the values read before, and the way back.
    read: Callable[[Settings, Fields], Table] = lambda *_: {}
    written: Callable[[Any], Table] = lambda _: {}
    heads: tuple[str, ...] = ("lm_head.weight",)  # the first stored one counts
    is_tied: bool = False  # the library's default of tie_word_embeddings
    stores_head: bool = False  # whether a folder holds the head of a tied model too
    bos: int | None = None  # the library's default of bos_token_id
    eos: int | None = None  # of eos_token_id
    positions: str | None = None  # key of the longest sequence, where the config has none
    ignored: tuple[str, ...] = ()  # patterns of source tensors without anything to convert
    prefix: str = "model."  # of names in a model saved without its head
    accepts: tuple[str, ...] = ("prompt",)  # added archives
    warnings: Callable[[Facts, Any], list[str]] = lambda *_: []  # of a model that converts

    @property
    def embedding(self) -> str:
        """Key of the embedding."""
        return f"{self.names['model.wte']}.weight"

    def config(self, facts: Facts) -> FTConfig:
        """Return the config of a checkpoint.

        Raises:
            CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
        """
        settings = Settings(facts.config)
        values = read_keys(settings, self.keys)
        values |= self.derived(settings, values)
        values |= {
            name: value(values) if callable(value) else value for name, value in self.fixed.items()
        }
        values |= self.read(settings, values)
        values["start_id"], values["end_id"] = settings.token_ids(facts, bos=self.bos, eos=self.eos)
        if not self.stores_head:
            tied = settings.flag("tie_word_embeddings", default=self.is_tied)
            both = self.heads[0], self.embedding
            # Where both are stored, their values decide too.
            tied = tied and (not all(map(facts.has, both)) or facts.same_values(*both))
            values["tie_word_embeddings"] = tied
        return settings.built(
            self.family.config,
            facts,
            **values,
            model_name=model_name(facts.config, self.name or self.model_type),
        )

    def derived(self, settings: Settings, values: Fields) -> Fields:
        """Return fields made of several settings; `values` keeps only fields of the config."""
        names = {each.field: each.names[0] for each in self.keys}
        what = f"{names['hidden']} by {names['head_num']}"
        return {"size_per_head": settings.divide(values.pop("hidden"), values["head_num"], what)}

    def written_derived(self, config: Any) -> Fields:  # noqa: ARG002 - of a subclass
        """Return the settings, other than `keys`, of which `derived` makes its fields."""
        return {}

    def settings(self, config: Any, is_tied: bool) -> list[Fields]:
        """Return the config.json that may describe a model."""
        return [
            {
                "model_type": self.model_type,
                "architectures": [self.model],
                **written_keys(self.keys, config),
                "bos_token_id": config.start_id,
                "eos_token_id": config.end_id,
                "tie_word_embeddings": is_tied if self.stores_head else config.tie_word_embeddings,
                **self.written_derived(config),
                **self.written(config),
            }
        ]

    def weights(self, facts: Facts, config: Any) -> Sources:
        """Return the source of each tensor."""
        layout = self.family.layout
        names = whole_names(self.layer, self.names)
        table = named_sources(names, layout, rows=self.rows, in_out=self.in_out)
        if self.stores_head:
            table[HEAD] = Copy(self.stored_head(facts), cut=0)
        return {**table, **self.sources(facts, config)}

    def stored_head(self, facts: Facts) -> str:
        """Return the key that holds the head: the first one stored, or a tied model's embedding."""
        stated = facts.config.get("tie_word_embeddings")
        is_tied = self.is_tied if stated is None else stated
        stored = (key for key in self.heads if facts.has(key))
        return next(stored, self.embedding if is_tied else self.heads[0])

    def mapping(self) -> SourceMapping:
        """Return the mapping from and to Hugging Face folders."""
        return SourceMapping(
            name=f"huggingface-{self.name or self.model_type}",
            title=f"Hugging Face {self.title}",
            family=self.family,
            format="huggingface",
            matches=lambda facts: facts.config.get("model_type") == self.model_type,
            config=self.config,
            obstacles=huggingface_obstacles,
            written=self.settings,
            weights=self.weights,
            ignored=self.ignored,
            copies=lambda _, config: (
                self.heads if not self.stores_head and config.tie_word_embeddings else ()
            ),
            prefix=self.prefix,
            accepts=self.accepts,
            warnings=self.warnings,
            positions=self.positions,
            nulls=tuple(
                each.names[0]
                for each in self.keys
                if each.kind == "optional" and each.default is not None
            ),
        )
