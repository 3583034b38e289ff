"""Traits of a NeMo 2 or Megatron Bridge decoder, from the configuration of its model.

Key names: NVIDIA/NeMo 2, nemo/collections/llm/gpt/model/base.py; NVIDIA-NeMo/Megatron-Bridge,
src/megatron/bridge/models/gpt_provider.py; megatron-core,
megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from export_scripts.families.mapping.megatron_traits import MegatronTraits, traits_of
from export_scripts.families.mapping.source_mapping import Facts

# The classes of a format whose models compute only what their configuration states, without the
# size that may end a name; others add, for example, a scaled embedding.
KNOWN_MODELS = {
    "nemo2": ("GPTModel", "LlamaModel", "MistralModel", "MixtralModel", "NemotronModel",
              "Qwen2Model", "Qwen3Model", "Starcoder2Model", "StarcoderModel"),
    "bridge": ("BridgeGPTModelConfig", "CodeLlamaModelProvider", "GPTModelConfig",
               "GPTModelProvider", "GPTProvider", "Gemma2ModelProvider", "Gemma3ModelProvider",
               "GemmaModelProvider", "Llama2ModelProvider", "Llama3ModelProvider",
               "Llama31ModelProvider", "Llama32ModelProvider", "LlamaModelProvider",
               "MistralModelProvider", "MistralSmall3ModelProvider", "MixtralModelProvider",
               "Nemotron3ModelProvider", "Nemotron4ModelProvider", "NemotronModelProvider",
               "Qwen2ModelProvider", "Qwen25ModelProvider", "Qwen3ModelProvider",
               "Qwen3MoEModelProvider", "Starcoder2ModelProvider"),
}  # fmt: skip
# As in Qwen2ModelProvider1P5B, MixtralModelProvider8x7B, Qwen3MoEModelProvider30B_A3B.
_SIZE = re.compile(r"(?:\d+x)?\d+(?:P\d+)?[MB](?:_A\d+B)?$")

# The functions of Megatron Bridge that build megatron-core's own layers.
_KNOWN_LAYERS = ("default_layer_spec", "get_gpt_layer_local_spec",
                 "get_gpt_layer_with_transformer_engine_spec", "local_layer_spec",
                 "modelopt_transformer_layer_spec", "transformer_engine_full_layer_spec",
                 "transformer_engine_layer_spec")  # fmt: skip

# Those of a class whose layers are of another kind.
_OWN_LAYERS = {
    "Gemma2ModelProvider": ("gemma2_layer_spec",),
    "Gemma3ModelProvider": ("gemma3_layer_spec",),
}

# Activation functions by name -> kind; only torch's own gelu is by erf.
_ACTIVATIONS = {
    "gelu": "gelu",
    "fast_gelu": "gelu",
    "openai_gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "squared_relu": "relu2",
}


def nemo2_traits(config: Mapping[str, Any]) -> MegatronTraits:
    """Return the traits of a NeMo 2 model's configuration.

    Raises:
        CheckpointMismatchError: A size is malformed.
    """
    # Only configurations that scale positions have a scale_factor.
    return _traits(config, "context/model.yaml", scaled=config.get("scale_factor") is not None)


def bridge_traits(config: Mapping[str, Any]) -> MegatronTraits:
    """Return the traits of a Megatron Bridge provider's settings.

    Raises:
        CheckpointMismatchError: A size is malformed.
    """
    return _traits(config, "run_config.yaml", scaled=bool(config.get("rope_scaling")))


def _traits(config: Mapping[str, Any], label: str, *, scaled: bool) -> MegatronTraits:
    """Return the traits; `scaled` says whether positions are scaled as Llama 3.1's."""
    bases = config.get("rotary_base")
    if isinstance(bases, list) and len(bases) == 2:  # of the layers with a window, and the others
        config = {**config, "rotary_local_base": bases[0], "rotary_base": bases[1]}
    word = _function_name(config.get("activation_func")) or "gelu"
    fused = word == "gelu" and bool(config.get("bias_activation_fusion"))
    return traits_of(
        {**config, "use_rope_scaling": scaled},
        label,
        "seq_length",
        activation=_ACTIVATIONS.get(word, word),
        gated=bool(config.get("gated_linear_unit")),
        fused_gelu=fused,
        exact_gelu=word == "gelu" and not fused,
    )


def _function_name(value: Any) -> str:
    """Return the last part of the path under which a configuration keeps a function."""
    path = value.get("_target_") if isinstance(value, Mapping) else value
    return str(path or "").rpartition(".")[2]


def unknown_model(facts: Facts) -> list[str]:
    """Return every reason the computation of a class of models is unknown."""
    name = _SIZE.sub("", str(facts.config.get("model_class") or ""))
    known = KNOWN_MODELS.get(facts.reader.format, ())
    reasons = []
    if known and name and name not in known:
        reasons.append(
            f"its configuration is of a {name}, which may compute more than it says; known: "
            f"{', '.join(known)}"
        )
    layers = _function_name(facts.config.get("transformer_layer_spec"))
    known_layers = _OWN_LAYERS.get(name, _KNOWN_LAYERS)
    if layers and layers not in known_layers:
        reasons.append(
            f"transformer_layer_spec = {layers}: layers of its own, which may compute something "
            f"else; known: {', '.join(known_layers)}"
        )
    return reasons
