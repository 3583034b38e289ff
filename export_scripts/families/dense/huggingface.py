"""Dense decoders in Hugging Face's form: the kind of the records in `decoders.yaml`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.families.layout.config import Layers
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.mapping.huggingface import HuggingFaceDecoder
from export_scripts.families.mapping.rotary import FT_BASE, rotary_fields, rotary_fraction
from export_scripts.families.mapping.settings import Settings, half_precision_warnings
from export_scripts.families.mapping.source_mapping import Facts
from foundations.files.json_content import Fields, Table

# Activation of a gated MLP -> activation_type.
GATED = {"silu": "gated-silu", "gelu": "geglu", "relu": "reglu", "relu2": "gated-relu2"}


def chosen_layers(flags: Sequence[bool]) -> Layers:
    """Return the numbers of the layers whose flag is set; None: all."""
    return None if all(flags) else tuple(number for number, flag in enumerate(flags) if flag)


SLIDING, FULL = "sliding_attention", "full_attention"
# From settings and the values read before: whether each layer has the window.
Slides = Callable[[Settings, Table], Sequence[bool]]


@dataclass(frozen=True)
class Window:
    """The settings of a sliding window, read in both directions."""

    default: int | None = None  # of the library for sliding_window; null is none
    has_switch: bool = False  # whether use_sliding_window decides
    # Which layers have it without layer_types; None: all, whatever layer_types says.
    slides: Slides | None = None
    rotates_alone: bool = False  # whether layers without it do not rotate

    def read(self, settings: Settings, values: Table) -> Fields:
        """Return the window, if there is one, and the layers that have it."""
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
                "layer_types: not all layers have the sliding window, which they have in "
                "transformers' model of this type"
            )
        if size is not None and layers == () and self.rotates_alone:
            settings.note(
                f"sliding_window = {size} and no layer of layer_types has it: no layer would rotate"
            )
        if size is None or layers == ():
            return {}
        rotary = {"rotary_layers": layers} if self.rotates_alone else {}
        return {"sliding_window": size, "sliding_layers": layers, **rotary}

    def written(self, config: DenseConfig) -> Fields:
        """Return the settings of which `read` makes the config's fields."""
        size, count = config.sliding_window, config.num_layer
        layers = range(count) if config.sliding_layers is None else config.sliding_layers
        layers = () if size is None else layers
        kinds = [SLIDING if number in layers else FULL for number in range(count)]
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
    head_dim: int | None = None  # where the configuration names none; None: hidden size by heads
    head_dim_key: str = "head_dim"
    is_gated: bool = True  # whether the MLP is
    # The library's default of rope_theta; None: no dimensions are rotated.
    rotary_base: float | None = FT_BASE
    rotary_local_base: float | None = None  # of layers with a sliding window, if another
    rotary_local_key: str = "rope_local_base_freq"  # its spelling before transformers 5
    # The library's default of partial_rotary_factor; None where it always rotates whole heads.
    rotary_fraction: float | None = None
    rotary_usual: Table | None = None  # the library's default of all parameters, if not plain
    # Keys of rope_scaling, where transformers 4 refuses others and calls its kind `type`.
    scaling_keys: tuple[str, ...] = ()
    window: Window | None = None  # None: no layer has one
    ignored: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    accepts: tuple[str, ...] = ()
    # One trained in bf16 may overflow in fp16.
    warnings: Callable[[Facts, Any], list[str]] = half_precision_warnings

    def derived(self, settings: Settings, values: Fields) -> Fields:
        """Return sizes of heads, the activation, rotary positions and a sliding window."""
        heads, hidden = values["head_num"], values.pop("hidden")
        values.setdefault("kv_head_num", heads)
        values.setdefault("inter_size", 4 * hidden)
        settings.divide(heads, values["kv_head_num"], "num_attention_heads by num_key_value_heads")
        size = (
            settings.integer(self.head_dim_key, default=self.head_dim)
            if self.head_dim or settings.source.get(self.head_dim_key) is not None
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
        """Return the settings of which `derived` makes the fields.

        In the older spelling, which transformers 5 takes as well, and 4 alone.
        """
        window = self.window.written(config) if self.window else {}
        if self.rotary_base is None:
            return window
        fraction = rotary_fraction(config.rotary_embedding, config.size_per_head)
        is_whole = fraction == 1 and self.rotary_fraction in (None, 1)
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
        # transformers 4 looks there alone for LongRoPE's.
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
