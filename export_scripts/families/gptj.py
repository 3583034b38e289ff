"""The GPT-J layout: rotary positions, and one layernorm for both attention and MLP.

Layout: FasterTransformer, models/gptj/GptJWeight.cc and GptJDecoderLayerWeight.cc (5.3 line).
CodeGen computes the same, with its projection's rows in another order.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import DecoderArchitecture, Rotary
from export_scripts.families.layout.decoder import LAYER, DecoderConfig, unrotatable
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.huggingface import Trait
from export_scripts.families.mapping.settings import HUGGINGFACE_ACTIVATIONS, Settings
from export_scripts.families.mapping.sources import Copy, Get, Parts, Sources, View, Views
from foundations.files.json_content import Fields, Table


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(DecoderConfig):
    """config.ini [gptj]; absent keys have the loader's defaults."""

    SECTION: ClassVar[str] = "gptj"

    rotary_embedding: int  # dimensions of each head that are rotated
    # Not an FT key, as NVIDIA's runtime always uses 1e-6: the model's value.
    layernorm_eps: float = 1e-6

    def architecture(self) -> DecoderArchitecture:
        """Return the decoder."""
        return self.build_architecture(
            DecoderArchitecture,
            kv_head_num=self.head_num,
            position="rotary_interleaved",
            rotary=Rotary(dims=self.rotary_embedding),
            residual="parallel_shared",
            head_bias=True,
        )


GPTJ = ModelFamily(name="gptj", model_type="GPT-J", config=GPTJConfig, layout=layout_table("gptj"))


def checked_rotary(settings: Settings, name: str, dims: int, size_per_head: int) -> int:
    """Return the number of rotated dimensions of a head, or 0 after noting a problem."""
    problems = unrotatable(name, dims, size_per_head)
    for problem in problems:
        settings.note(problem)
    return 0 if problems else dims


def _read(settings: Settings, values: Table) -> Fields:
    # The activations that FT's GPT-J computes.
    tanh = {name: each for name, each in HUGGINGFACE_ACTIVATIONS.items() if each == ("Gelu", False)}
    settings.activation("activation_function", default="gelu_new", known=tanh)
    # transformers rotates whole heads if the key is null, and 64 dimensions if it is absent.
    usual = values["size_per_head"] if "rotary_dim" in settings.source else 64
    dims = settings.integer("rotary_dim", default=usual, least=2)
    dims = checked_rotary(settings, "rotary_dim", dims, values["size_per_head"])
    return {"rotary_embedding": dims}


SETTINGS = Trait(
    _read,
    lambda config: {"activation_function": "gelu_new", "rotary_dim": config.rotary_embedding},
)

_RANKS = 4
_QUERY_VALUE_KEY = (0, 2, 1)


@dataclass(frozen=True)
class _CodeGenProjection(Copy):
    """CodeGen's projection (3h, h): queries, values and keys of each of its 4 training ranks.

    Source: transformers, models/codegen/modeling_codegen.py, mp_num.
    """

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the queries, keys and values of all ranks, (h, 1, h) each."""
        (stored,) = get(self.key)
        hidden = stored.shape[1]
        ranks = stored.reshape(_RANKS, 3, -1, hidden)
        parts = (ranks[:, place].reshape(-1, hidden).T for place in _QUERY_VALUE_KEY)
        return Parts(1, tuple(part[:, None] for part in parts))

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return a view for the rows of each part of each rank."""
        hidden = shape[0]
        rows = hidden // _RANKS
        fine, stored = (hidden, 3 * _RANKS, rows), (rows, hidden)
        return [
            (self.key, View(fine, (2, 0), stored, _RANKS * part + rank, 0, 3 * rank + place))
            for part, place in enumerate(_QUERY_VALUE_KEY)
            for rank in range(_RANKS)
        ]


def codegen_sources(*_: Any) -> Sources:
    """Return the source of CodeGen's projection."""
    key = "transformer.h.{layer}.attn.qkv_proj.weight"
    return {LAYER + "attention.query_key_value.weight": _CodeGenProjection(key)}
