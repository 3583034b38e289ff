"""Models in Hugging Face's form: a table of settings, and a record for each family of decoders.

Both are read in both directions.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export_scripts.families.layout.architecture import activation_choice
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.decoder import HEAD, LAYER
from export_scripts.families.layout.spec import ModelFamily, Patterns
from export_scripts.families.mapping.known_settings import huggingface_obstacles, huggingface_table
from export_scripts.families.mapping.names import Names, named_sources, whole_names
from export_scripts.families.mapping.settings import (
    ALL_ACTIVATIONS,
    REQUIRED,
    Settings,
    model_name,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Flat, Keys, Sources
from foundations.files.json_content import Fields, Table
from foundations.tables import read_cells


@dataclass(frozen=True)
class Setting:
    """A setting of transformers' configurations: our fields, its keys, and how it is read.

    Fields (or properties of the config) and keys are separated by spaces. The kind is a method of
    `Settings`, or "size" (a count that must be stated), or "count" (one that the family can
    derive). The table of known settings has the models of a setting, and its default.
    """

    fields: str
    names: str
    kind: str
    power: str  # exponent to which the setting is raised, or -


@functools.cache
def setting_table(models: str) -> tuple[Setting, ...]:
    """Return the settings of decoders, BERTs or T5s, from huggingface_fields.tsv."""
    rows = read_cells(Path(__file__).with_name("huggingface_fields.tsv"))
    return tuple(Setting(*columns) for whose, *columns in rows if whose == models)


@dataclass(frozen=True)
class HuggingFaceSettings:
    """The settings of a model type; `names` are their keys in the order of a new config.json."""

    model_type: str
    names: Sequence[str]
    models: str = "decoder"  # "decoder", "bert" or "t5"
    may_lack: Sequence[str] = ()  # sizes that default to the library's

    def __iter__(self) -> Iterator[tuple[Setting, list[str], Any]]:
        """Yield (setting, its keys with the one to write first, its default)."""
        types = huggingface_table()
        table = {**types["*"], **types[self.model_type]}
        for name in self.names:
            row = next(each for each in setting_table(self.models) if name in each.names.split())
            others = (
                other
                for other in row.names.split()
                if other != name and other in table and table[other].use == "read"
            )
            values = table[name].values
            yield row, [name, *others], values[0] if values else None

    def read(self, settings: Settings) -> Fields:
        """Return the fields of a configuration; problems are noted in `settings`."""
        values = {}
        for each, names, default in self:
            kind = "integer" if each.kind in ("size", "count") else each.kind
            if each.kind == "size" and names[0] not in self.may_lack:
                default = REQUIRED
            is_open = each.kind == "count" or (each.kind == "size" and default is None)
            if is_open and settings.get(names[0]) is None:
                continue
            found = getattr(settings, kind)(*names, default=default)
            if kind.endswith("activation"):
                found, values["exact_gelu"] = found
            elif each.power != "-":
                found **= float(each.power)
            values |= dict.fromkeys(each.fields.split(), found)
        return values

    def written(self, config: Any) -> Fields:
        """Return the settings that `read` turns into the config's values."""
        out = {}
        for each, names, default in self:
            value = getattr(config, each.fields.split()[-1])
            if each.kind.endswith("activation"):
                value = activation_name(value, exact_gelu=config.exact_gelu, usual=default)
            elif each.power != "-" and value is not None:
                # Removes rounding errors of the power and its inverse.
                value = float(f"{value ** (1 / float(each.power)):.12g}")
                value = int(value) if value.is_integer() and type(default) is int else value
            out[names[0]] = value
        return out


def activation_name(spelling: str, *, exact_gelu: bool, usual: str = "") -> str:
    """Return transformers' name for an activation of config.ini, without its gate.

    If there are several names, `usual` is preferred.
    """
    activation, _ = activation_choice(spelling)
    wanted = activation, exact_gelu and activation == "gelu"
    names = [
        name for name, (ours, exact) in ALL_ACTIVATIONS.items() if (ours.lower(), exact) == wanted
    ]
    return usual if usual in names else next(iter(names), activation)


# (facts, config, sources of tensors with names) -> further sources.
SourcesOf = Callable[[Facts, Any, Sources], Sources]


@dataclass(frozen=True)
class Trait:
    """Fields that `read` derives from settings and values read before; `written` is the inverse."""

    read: Callable[[Settings, Fields], Table] = lambda *_: {}
    written: Callable[[Any], Table] = lambda _: {}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceDecoder:
    """A family of decoders: its settings, and the names of its tensors."""

    model_type: str  # in config.json
    model: str  # class in transformers
    title: str  # for the support table
    name: str = ""  # name of the mapping and of a model without one; empty: `model_type`
    family: ModelFamily
    keys: Sequence[str]  # `HuggingFaceSettings.names`
    may_lack: Sequence[str] = ()  # `HuggingFaceSettings.may_lack`
    # Fields that are the same in all models, or functions of the values read before.
    fixed: Table = field(default_factory=dict)
    layer: str  # the source's prefix of a layer
    names: Names  # module of the layout -> module of the source, for `whole_names`
    # Tensor of a layer -> key in the source's layer; with sizes of further axes, none for a number.
    tensors: Mapping[str, str | tuple[Any, ...]] = field(default_factory=dict)
    rows: str = "own"  # see `attention_heads`
    in_out: bool = False  # whether matrices are (in, out)
    # Sources of tensors that `names` does not describe; they take precedence.
    sources: SourcesOf = lambda *_: {}
    traits: Sequence[Trait] = ()  # further fields
    constants: Table = field(default_factory=dict)  # settings that only other programs read
    heads: Keys = ("lm_head.weight",)  # keys of the head; the first stored is used
    is_tied: bool = False  # the library's default of tie_word_embeddings
    stores_head: bool = False  # whether an FT folder holds the head of a tied model, too
    bos: int | None = None  # the library's default of bos_token_id
    eos: int | None = None  # the library's default of eos_token_id
    positions: str | None = None  # key of the longest sequence, if the config has no field for it
    ignored: Patterns = ()  # patterns of source tensors that are not converted
    prefix: str = "model."  # prefix that names lack in a model saved without its head
    accepts: tuple[str, ...] = ("prompt",)  # kinds of added archives
    warnings: Callable[[Facts, Any], list[str]] = lambda *_: []  # about a model that converts

    @property
    def read_settings(self) -> HuggingFaceSettings:
        """The settings that fields are read from."""
        return HuggingFaceSettings(self.model_type, self.keys, may_lack=self.may_lack)

    @property
    def embedding(self) -> str:
        """The key of the embedding."""
        return f"{self.names['model.wte']}.weight"

    def config(self, facts: Facts) -> FTConfig:
        """Return the config of a checkpoint.

        Raises:
            CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
        """
        settings = Settings(facts.config)
        values = self.read_settings.read(settings)
        values |= self.derived(settings, values)
        values |= {
            name: value(values) if callable(value) else value for name, value in self.fixed.items()
        }
        for trait in self.traits:
            values |= trait.read(settings, values)
        values["start_id"], values["end_id"] = settings.token_ids(facts, bos=self.bos, eos=self.eos)
        if not self.stores_head:
            tied = settings.flag("tie_word_embeddings", default=self.is_tied)
            both = self.heads[0], self.embedding
            # If both are stored, their values must be the same, too.
            tied = tied and (not all(map(facts.has, both)) or facts.same_values(*both))
            values["tie_word_embeddings"] = tied
        return settings.build_config(
            self.family.config,
            facts,
            **values,
            model_name=model_name(facts.config, self.name or self.model_type),
        )

    def derived(self, settings: Settings, values: Fields) -> Fields:
        """Return fields that depend on several settings; `values` loses what is not a field."""
        heads, hidden = values["head_num"], values.pop("hidden")
        what = f"{self.keys[1]} by {self.keys[0]}"
        values.setdefault("inter_size", 4 * hidden)
        return {"size_per_head": settings.divide(hidden, heads, what)}

    def written_derived(self, config: Any) -> Fields:  # noqa: ARG002 - subclasses use it
        """Return the settings, other than `keys`, that `derived` turns into fields."""
        return {}

    def settings(self, config: Any, is_tied: bool) -> list[Fields]:
        """Return candidates of a config.json that describes a model."""
        return [
            {
                "model_type": self.model_type,
                "architectures": [self.model],
                **self.read_settings.written(config),
                "bos_token_id": config.start_id,
                "eos_token_id": config.end_id,
                "tie_word_embeddings": is_tied if self.stores_head else config.tie_word_embeddings,
                **self.written_derived(config),
                **self.constants,
                **{
                    name: value
                    for trait in self.traits
                    for name, value in trait.written(config).items()
                },
            }
        ]

    def weights(self, facts: Facts, config: Any) -> Sources:
        """Return the source of each tensor."""
        layout = self.family.layout
        names = whole_names(self.layer, self.names)
        table = named_sources(names, layout, rows=self.rows, in_out=self.in_out)
        for name, key in self.tensors.items():
            table[LAYER + name] = (
                Copy(self.layer + key)
                if isinstance(key, str)
                else Flat(self.layer + key[0], outer=key[1:] or None)
            )
        if self.stores_head:
            table[HEAD] = Copy(self.stored_head(facts), cut=0)
        return {**table, **self.sources(facts, config, table)}

    def stored_head(self, facts: Facts) -> str:
        """Return the key of the head: the first stored, else a tied model's embedding."""
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
                names[0]
                for each, names, default in self.read_settings
                if each.kind == "optional" and default is not None
            ),
        )
