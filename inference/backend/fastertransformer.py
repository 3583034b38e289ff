"""The models of a repository made for NVIDIA's FasterTransformer backend, served as they are.

Triton runs `export_scripts/triton/backends/fastertransformer/model.py` for every model whose
config.pbtxt names that backend; the parameters are NVIDIA's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from export_scripts.triton.signature import hidden_state_types
from inference.backend.encoder_backend import SERVED_BY, EncoderModel
from inference.backend.engine_model import EngineModel
from inference.backend.python_backend import GenerationModel
from inference.backend.triton_model import ModelArguments, config_parameters


class FasterTransformerModel:
    """A generation model or an encoder, by its model_type."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Give an encoder's hidden states the type that it computes in (called by Triton).

        NVIDIA's templates of BERT leave the type out, and those of T5-Encoder say FP32 whatever the
        model computes in; its backend sets both in the same place (libfastertransformer.cc,
        ModelState::AutoCompleteConfig).
        """
        content = config.as_dict()
        parameters = config_parameters(content)
        types = hidden_state_types(
            parameters.get("model_type", ""), data_type=parameters.get("data_type", "")
        )
        for tensor in (*content["input"], *content["output"]):
            if tensor["name"] in types:
                tensor["data_type"] = f"TYPE_{types[tensor['name']]}"
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine (called by Triton). Raises ValueError as `EngineModel` does."""
        is_encoder = ModelArguments(args).text("model_type", default="GPT") in SERVED_BY
        self._model: EngineModel = EncoderModel() if is_encoder else GenerationModel()
        self._model.initialize(args)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests, which are answered later (called by Triton)."""
        self._model.execute(requests)

    def finalize(self) -> None:
        """Stop the engine (called by Triton)."""
        self._model.finalize()
