"""The BERT layout, and Hugging Face's BERT as its source: only the transformer layers.

Layout: FasterTransformer, models/bert/BertWeight.h and BertLayerWeight.cc (5.3 line). Source names:
transformers, models/bert/modeling_bert.py.
"""

from dataclasses import dataclass
from typing import ClassVar

from export_scripts.families.layout.architecture import EncoderArchitecture, activation_choice
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.huggingface import HuggingFaceSettings
from export_scripts.families.mapping.known_settings import huggingface_obstacles
from export_scripts.families.mapping.names import named_sources
from export_scripts.families.mapping.settings import Settings, model_name
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Sources

LAYER = "model.encoder.layer.{layer}."


@dataclass(frozen=True, kw_only=True)
class BertConfig(FTConfig):
    """config.ini [bert].

    FT's loader ignores layer_norm_eps (it assumes 1e-6) and exact_gelu (it always computes the tanh
    form); an engine that reads them matches the original model to rounding.
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

    def architecture(self) -> EncoderArchitecture:
        """Return the encoder; a gated activation is refused, too."""
        activation, gated = activation_choice(self.activation_type)
        if gated:
            raise ValueError(f"activation_type = {self.activation_type}: BERT folders hold no gate")
        return self.build_architecture(
            EncoderArchitecture, activation=activation, layernorm_eps=self.layer_norm_eps
        )


LAYOUT = layout_table("bert")

BERT = ModelFamily(name="bert", model_type="bert", config=BertConfig, layout=LAYOUT)


_PREFIX = "bert."
_HF = _PREFIX + "encoder.layer.{layer}."
# Everything outside of the layers, and the heads of tasks.
_IGNORED = ("*embeddings.*", "*pooler.*", "cls.*", "classifier.*", "qa_outputs.*")

_SETTINGS = HuggingFaceSettings(
    "bert",
    (
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "hidden_act",
        "max_position_embeddings",
        "layer_norm_eps",
    ),
    models="bert",
)


def _config(facts: Facts) -> BertConfig:
    source = facts.config
    settings = Settings(source)
    values = _SETTINGS.read(settings)
    hidden = values.pop("hidden")
    return settings.build_config(
        BertConfig,
        facts,
        **values | {"activation_type": values["activation_type"].lower()},
        model_name=model_name(source, "bert"),
        size_per_head=settings.divide(
            hidden, values["head_num"], "hidden_size by num_attention_heads"
        ),
        position_embedding_type="absolute",
        hidden_size=hidden,
    )


def _weights(_: Facts, __: BertConfig) -> Sources:
    modules = (spec.name.rpartition(".")[0] for spec in LAYOUT)
    names = {module: module.replace(LAYER, _HF) for module in modules}
    return named_sources(names, LAYOUT)


BERT_HUGGINGFACE = SourceMapping(
    name="huggingface-bert",
    title="Hugging Face BERT (layers; embeddings, pooler and heads run outside)",
    family=BERT,
    format="huggingface",
    matches=lambda facts: facts.config.get("model_type") == "bert",
    config=_config,
    obstacles=huggingface_obstacles,
    written=lambda config, _: [{"model_type": "bert", **_SETTINGS.written(config)}],
    weights=_weights,
    ignored=_IGNORED,
    carried=_IGNORED,
    prefix=_PREFIX,
)
