"""The encoder model in Triton's Python backend: hidden states of BERT or of a T5 encoder."""

# Shapes: B rows, S padded length, E hidden, L layers

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from inference.backend.engine_model import (
    EngineModel,
    Exchange,
    check_model_type,
    engine_arguments,
)
from inference.backend.model_settings import ModelSettings
from inference.backend.triton_model import hidden_tensor, request_tensors, response

if TYPE_CHECKING:
    from inference.engine.encoder_engine import EncoderEngine
    from inference.engine.encoding import EncodingResult

# model_type of config.pbtxt -> the types of weights that can serve it.
SERVED_BY = {"bert": ("bert",), "T5-Encoder": ("T5-Encoder", "T5")}


class EncoderModel(EngineModel):
    """Serves one converted model that answers with hidden states."""

    engine: EncoderEngine

    def make_engine(self, settings: ModelSettings) -> EncoderEngine:
        """Return the engine. Raises ValueError if the weights are of another model type."""
        from inference.engine.encoder_engine import EncoderEngine  # imports torch, as Engine does

        check_model_type(settings, SERVED_BY.get(settings.model_type))
        self.engine = EncoderEngine(
            settings.checkpoint_path,
            **engine_arguments(settings),
        )
        return self.engine

    def submit(self, exchange: Exchange) -> tuple[Future[Any], Callable[[Any], None]]:
        """Queue a request, see `EngineModel`."""
        from inference.engine.encoding import parse_encoding

        tensors = request_tensors(exchange.request, bf16=self.bf16_inputs)
        request = parse_encoding(tensors, self.engine.limits)
        return self.engine.submit(request), lambda result: self._send(exchange, result)

    def _send(self, exchange: Exchange, result: EncodingResult) -> None:
        outputs = {"output_hidden_state": result.hidden}  # (B, S, E)
        if result.attentions is not None:
            outputs["output_attentions"] = result.attentions  # (B, L, heads, S, S)
        data_type = self.settings.placement.data_type
        tensors = [
            hidden_tensor(name, value, data_type)
            for name, value in outputs.items()
            if name in exchange.wanted
        ]
        exchange.send(response(tensors), final=True)
