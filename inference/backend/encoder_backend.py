"""Encoder models, which answer with hidden states, and models for NVIDIA's own backend."""

# Shapes: B rows, S padded length, E hidden, L layers

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES, torch_dtype
from export_scripts.triton.signature import hidden_states
from inference.backend.arguments import config_parameters
from inference.backend.engine_model import EngineModel
from inference.backend.python_backend import GenerationModel
from inference.backend.requests import InferRequest, Outputs, Submitted
from inference.backend.triton_model import triton_arguments

if TYPE_CHECKING:
    from inference.engine.encoder_engine import EncoderEngine
    from inference.engine.encoding import EncodingResult


class EncoderModel(EngineModel):
    """A converted model that answers with hidden states."""

    served_by: ClassVar = {"bert": ("bert",), "T5-Encoder": ("T5-Encoder", "T5")}
    engine_class = "inference.engine.encoder_engine:EncoderEngine"
    engine: EncoderEngine

    def submit(self, request: InferRequest, on_step: Callable[[Any], bool]) -> Submitted:
        """Queue a request, see `EngineModel`."""
        from inference.engine.encoding import parse_encoding

        del on_step  # an encoder has a single step
        parsed = parse_encoding(request.tensors, self.engine.architecture)
        kind = torch_dtype(self.settings.placement.data_type)

        def outputs_of(result: EncodingResult) -> Outputs:
            outputs = {"output_hidden_state": result.hidden.to(kind)}  # (B, S, E)
            if result.attentions is not None:  # (B, L, heads, S, S)
                outputs["output_attentions"] = result.attentions.to(kind)
            return outputs

        return self.engine.submit(parsed), outputs_of


def fastertransformer_model(parameters: Mapping[str, str]) -> type[EngineModel]:
    """Return the model for the parameters in a config.pbtxt of NVIDIA's backend."""
    kind = parameters.get("model_type", "GPT")
    return EncoderModel if kind in EncoderModel.served_by else GenerationModel


def complete_hidden_states(config: dict[str, Any]) -> None:
    """Set the types of an encoder's hidden states in a JSON configuration to its compute type.

    NVIDIA's templates leave the type out for BERT and always have FP32 for T5-Encoder; its backend
    corrects both (libfastertransformer.cc, ModelState::AutoCompleteConfig).
    """
    parameters = config_parameters(config)
    names, kind = hidden_states(parameters.get("model_type", "")), parameters.get("data_type")
    for tensor in (*config.get("input", ()), *config.get("output", ())):
        if tensor.get("name") in names and kind in WEIGHT_DATA_TYPES:
            tensor["data_type"] = f"TYPE_{kind.upper()}"


class FasterTransformerModel:
    """A generation model or an encoder for NVIDIA's FasterTransformer backend, by its model_type.

    Triton runs `export_scripts/triton/backends/fastertransformer/model.py` for every model whose
    config.pbtxt names that backend; the parameters are NVIDIA's own.
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Complete the types of hidden states (called by Triton)."""
        content = config.as_dict()
        complete_hidden_states(content)
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine (called by Triton); `EngineModel` provides the other methods."""
        model = fastertransformer_model(triton_arguments(args).parameters)()
        model.initialize(args)
        self.execute, self.finalize = model.execute, model.finalize
