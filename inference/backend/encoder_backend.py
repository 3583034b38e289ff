"""Encoders in Triton's Python backend, which answer with hidden states; models of NVIDIA's own."""

# Shapes: B rows, S padded length, E hidden, L layers

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES, torch_dtype
from export_scripts.triton.signature import hidden_states
from inference.backend.engine_model import EngineModel, Exchange
from inference.backend.python_backend import GenerationModel
from inference.backend.triton_model import (
    ModelArguments,
    config_parameters,
    request_tensors,
    response,
)

if TYPE_CHECKING:
    from inference.engine.encoder_engine import EncoderEngine
    from inference.engine.encoding import EncodingResult


class EncoderModel(EngineModel):
    """Serves one converted model that answers with hidden states."""

    served_by: ClassVar = {"bert": ("bert",), "T5-Encoder": ("T5-Encoder", "T5")}
    engine_class = "inference.engine.encoder_engine:EncoderEngine"
    engine: EncoderEngine

    def submit(self, exchange: Exchange) -> tuple[Future[Any], Callable[[Any], None]]:
        """Queue a request, see `EngineModel`."""
        from inference.engine.encoding import parse_encoding

        tensors = request_tensors(exchange.request, bf16=self.bf16_inputs)
        request = parse_encoding(tensors, self.engine.architecture)
        kind = torch_dtype(self.settings.placement.data_type)

        def send(result: EncodingResult) -> None:
            outputs = {"output_hidden_state": result.hidden.to(kind)}  # (B, S, E)
            if result.attentions is not None:  # (B, L, heads, S, S)
                outputs["output_attentions"] = result.attentions.to(kind)
            exchange.send(response(outputs, exchange.wanted), final=True)

        return self.engine.submit(request), send


class FasterTransformerModel:
    """A generation model or an encoder, by its model_type, of NVIDIA's FasterTransformer backend.

    Triton runs `export_scripts/triton/backends/fastertransformer/model.py` for every model whose
    config.pbtxt names that backend; the parameters are NVIDIA's own.
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Give an encoder's hidden states the type that it computes in (called by Triton).

        NVIDIA's templates of BERT leave the type out, and those of T5-Encoder say FP32 whatever the
        model computes in; its backend sets both in the same place (libfastertransformer.cc,
        ModelState::AutoCompleteConfig).
        """
        content = config.as_dict()
        parameters = config_parameters(content)
        names, kind = hidden_states(parameters.get("model_type", "")), parameters.get("data_type")
        for tensor in (*content["input"], *content["output"]):
            if tensor["name"] in names and kind in WEIGHT_DATA_TYPES:
                tensor["data_type"] = f"TYPE_{kind.upper()}"
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine (called by Triton), see `EngineModel`, whose methods come next."""
        kind = ModelArguments(args).read("model_type", default="GPT")
        model = EncoderModel() if kind in EncoderModel.served_by else GenerationModel()
        model.initialize(args)
        self.execute, self.finalize = model.execute, model.finalize
