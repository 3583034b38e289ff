"""The BERT layout: transformer layers only; embeddings, pooler and heads run outside.

Layout: FasterTransformer, models/bert/BertWeight.h and BertLayerWeight.cc (5.3 line).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from export_scripts.families.architecture import EncoderArchitecture, activation_choice
from export_scripts.families.spec import ModelConfig, ModelFamily, WeightSpec

LAYER = "model.encoder.layer.{layer}."


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """config.ini [bert].

    The loader reads neither layer_norm_eps (it assumes 1e-6) nor exact_gelu (it always takes the
    tanh form); engines that do agree with the original model to rounding.
    """

    SECTION: ClassVar[str] = "bert"

    model_name: str
    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    activation_type: str = "gelu"
    q_scaling: float = 1.0
    position_embedding_type: str | None = None
    hidden_size: int | None = None
    max_position_embeddings: int | None = None
    layer_norm_eps: float = 1e-6
    exact_gelu: bool = False

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.head_num * self.size_per_head


def bert_architecture(config: BertConfig) -> EncoderArchitecture:
    """Return the encoder a BERT config describes.

    Raises:
        ValueError: activation_type is one the loader aborts on, or gated.
    """
    activation, gated = activation_choice(config.activation_type)
    if gated:
        raise ValueError(f"activation_type = {config.activation_type}: BERT folders hold no gate")
    return EncoderArchitecture(
        head_num=config.head_num,
        size_per_head=config.size_per_head,
        hidden=config.hidden,
        inter_size=config.inter_size,
        num_layer=config.num_layer,
        activation=activation,
        exact_gelu=config.exact_gelu,
        norm_eps=config.layer_norm_eps,
        q_scaling=config.q_scaling,
    )


def _norm(name: str) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{LAYER}{name}.weight", ("hidden",)),
        WeightSpec(f"{LAYER}{name}.bias", ("hidden",)),
    )


def _column(name: str, width: str) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{LAYER}{name}.weight", ("hidden", width), 1),
        WeightSpec(f"{LAYER}{name}.bias", (width,), 0),
    )


def _row(name: str, width: str) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{LAYER}{name}.weight", (width, "hidden"), 0),
        WeightSpec(f"{LAYER}{name}.bias", ("hidden",)),
    )


LAYOUT: tuple[WeightSpec, ...] = (
    *_column("attention.self.query", "hidden"),
    *_column("attention.self.key", "hidden"),
    *_column("attention.self.value", "hidden"),
    *_row("attention.output.dense", "hidden"),
    *_norm("attention.output.LayerNorm"),
    *_column("intermediate.dense", "inter_size"),
    *_row("output.dense", "inter_size"),
    *_norm("output.LayerNorm"),
)

BERT = ModelFamily(
    name="bert",
    model_type="bert",
    config=BertConfig,
    architecture=bert_architecture,
    layout=LAYOUT,
)
