"""Dense decoders in Hugging Face's form, as `decoders.yaml` describes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.families.layout.config import Layers
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.layout.spec import ModelFamily, Patterns
from export_scripts.families.mapping.huggingface import HuggingFaceDecoder
from export_scripts.families.mapping.rotary import FT_BASE, rotary_fields, rotary_fraction
from export_scripts.families.mapping.settings import Settings, half_precision_warnings
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import Keys
from foundations.files.json_content import Fields, Table

# Activation of a gated MLP -> activation_type.
GATED = {"silu": "gated-silu", "gelu": "geglu", "relu": "reglu", "relu2": "gated-relu2"}


def chosen_layers(flags: Sequence[bool]) -> Layers:
    """Return the numbers of the layers whose flag is set; None for all."""
    return None if all(flags) else tuple(number for number, flag in enumerate(flags) if flag)


def layer_flags(layers: Layers, count: int) -> list[bool]:
    """Return for each layer whether `layers` holds its number; None holds all."""
    return [layers is None or number in layers for number in range(count)]


SLIDING, FULL = "sliding_attention", "full_attention"
# (settings, values read before) -> whether each layer has the window.
Slides = Callable[[Settings, Table], Sequence[bool]]


@dataclass(frozen=True)
class Window:
    """The settings of a sliding window, read in both directions."""

    default: int | None = None  # the library's default of sliding_window; null: no window
    has_switch: bool = False  # whether use_sliding_window decides
    # The layers that have the window if there are no layer_types; None: always all.
    slides: Slides | None = None
    rotates_alone: bool = False  # whether only layers with the window rotate

    def read(self, settings: Settings, values: Table) -> Fields:
        """Return the fields of the window and its layers; none without a window."""
        source, count = settings.source, values["num_layer"]
        in_use = not self.has_switch or source.get("use_sliding_window")
        is_stated = in_use and source.get("sliding_window", self.default) is not None
        size = settings.integer("sliding_window", default=self.default) if is_stated else None
        kinds = source.get("layer_types")
        if kinds is None:
            usual = self.slides(settings, values) if self.slides else [True] * count
            kinds = [SLIDING if slides else FULL for slides in usual]
        if not isinstance(kinds, list) or len(kinds) != count:
            settings.note(
                f"layer_types = {kinds!r}: expected one entry for each of the {count} layers"
            )
            return {}
        if unknown := sorted({str(each) for each in kinds} - {FULL, SLIDING}):
            settings.note(
                f"layer_types: {', '.join(unknown)} cannot be represented; known: {FULL}, {SLIDING}"
            )
        layers = chosen_layers([kind == SLIDING for kind in kinds])
        if size is not None and layers is not None and not self.slides:
            settings.note(
                "layer_types: some layers lack the sliding window, which all layers have in "
                "transformers' model of this type"
            )
        if size is not None and layers == () and self.rotates_alone:
            settings.note(
                f"sliding_window = {size}, but no layer in layer_types has it: none would rotate"
            )
        if size is None or layers == ():
            return {}
        rotary = {"rotary_layers": layers} if self.rotates_alone else {}
        return {"sliding_window": size, "sliding_layers": layers, **rotary}

    def written(self, config: DenseConfig) -> Fields:
        """Return the settings that `read` turns into the config's fields."""
        size = config.sliding_window
        slides = layer_flags(() if size is None else config.sliding_layers, config.num_layer)
        kinds = [SLIDING if each else FULL for each in slides]
        return {
            "sliding_window": size,
            **({"use_sliding_window": size is not None} if self.has_switch else {}),
            **({"layer_types": kinds} if self.slides else {}),
        }


@dataclass(frozen=True, kw_only=True)
class DenseDecoder(HuggingFaceDecoder):
    """A family of dense decoders."""

    family: ModelFamily = DENSE
    layer: str = LAYER
    head_dim: int | None = None  # the library's default; None: hidden size by heads
    head_dim_key: str = "head_dim"
    is_gated: bool = True  # whether the MLP has a gate
    # The library's default of rope_theta; None: no dimensions are rotated.
    rotary_base: float | None = FT_BASE
    rotary_local_base: float | None = None  # base of layers with a sliding window, if different
    rotary_local_key: str = "rope_local_base_freq"  # the key of that before transformers 5
    # The library's default of partial_rotary_factor; None: whole heads are always rotated.
    rotary_fraction: float | None = None
    rotary_usual: Table | None = None  # the library's default of all parameters, if not plain
    # The keys that transformers 4 accepts in rope_scaling, with the kind as `type`; empty: any.
    scaling_keys: Keys = ()
    window: Window | None = None  # None: no layer has a window
    ignored: Patterns = ("*rotary_emb.inv_freq",)
    accepts: tuple[str, ...] = ()
    # A model trained in bf16 may overflow in fp16.
    warnings: Callable[[Facts, Any], list[str]] = half_precision_warnings

    def derived(self, settings: Settings, values: Fields) -> Fields:
        """Return sizes of heads, the activation, rotary positions and a sliding window."""
        heads, hidden = values["head_num"], values.pop("hidden")
        values.setdefault("kv_head_num", heads)
        values.setdefault("inter_size", 4 * hidden)
        settings.divide(heads, values["kv_head_num"], "num_attention_heads by num_key_value_heads")
        size = (
            settings.integer(self.head_dim_key, default=self.head_dim)
            if self.head_dim or settings.get(self.head_dim_key) is not None
            else settings.divide(hidden, heads, "hidden_size by num_attention_heads")
        )
        activation = values.get("activation_type", "").lower()
        return {
            "hidden_size": hidden,
            "size_per_head": size,
            "activation_type": GATED[activation] if self.is_gated else activation,
            **self._rotary(settings, size),
            **(self.window.read(settings, values) if self.window else {}),
        }

    def _rotary(self, settings: Settings, size_per_head: int) -> Fields:
        if self.rotary_base is None:
            return {"rotary_embedding": 0}
        return rotary_fields(
            settings,
            size_per_head,
            fraction=self.rotary_fraction,
            base=self.rotary_base,
            local_base=self.rotary_local_base,
            local_key=self.rotary_local_key,
            usual=self.rotary_usual,
        )

    def written_derived(self, config: DenseConfig) -> Fields:
        """Return the settings that `derived` turns into fields.

        They have the older spelling, the only one that transformers 4 reads; 5 reads it, too.
        """
        window = self.window.written(config) if self.window else {}
        if self.rotary_base is None:
            return window
        fraction = rotary_fraction(config.rotary_embedding, config.size_per_head)
        is_whole = fraction in (0, 1) and self.rotary_fraction in (None, 1)
        return {
            self.head_dim_key: config.size_per_head,
            self.rotary_local_key: config.rotary_local_base,
            "rope_theta": config.rotary_base,
            **({} if is_whole else {"partial_rotary_factor": fraction}),
            **self._scaling(config),
            **window,
        }

    def _scaling(self, config: DenseConfig) -> Fields:
        kind = config.rotary_scaling_type
        if kind is None:
            return {"rope_scaling": {"rope_type": "default"} if self.rotary_usual else None}
        whole = {"rope_type": kind, **config.rotary_scaling}
        original = whole.get("original_max_position_embeddings")
        # transformers 4 reads LongRoPE's only there.
        next_to_it = {"original_max_position_embeddings": original} if kind == "longrope" else {}
        if self.scaling_keys:
            named = {"type": kind, **whole}
            short = {key: named[key] for key in self.scaling_keys if key in named}
            context = {"max_position_embeddings": config.max_pos_seq_len, **next_to_it}
            meanings = [
                rotary_fields(Settings({**context, "rope_scaling": scaling}), config.size_per_head)
                for scaling in (short, whole)
            ]
            if meanings[0] == meanings[1]:
                whole = short
        return {**next_to_it, "rope_scaling": whole}
