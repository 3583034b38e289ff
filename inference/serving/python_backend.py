"""The generation model in Triton's Python backend: whole answers, or one response per token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from export_scripts.ft.config_ini import read_config
from inference.decoding.outputs import FrameStream
from inference.decoding.request import parse_request
from inference.serving.engine import Engine
from inference.serving.engine_model import EngineModel, Exchange
from inference.serving.model_settings import ModelSettings
from inference.serving.running import GenerationResult, GenerationStep
from inference.serving.started_rank import open_meeting
from inference.serving.triton_model import output_tensors, request_tensors, response


class GenerationModel(EngineModel):
    """Serves one converted model that answers with tokens."""

    engine: Engine

    def make_engine(self, settings: ModelSettings) -> Engine:
        """Return the engine. Raises ValueError if the weights are those of another model."""
        family, _ = read_config(settings.checkpoint_path)
        if settings.model_type != family.model_type:
            raise ValueError(
                f"model_type={settings.model_type}, but {settings.checkpoint_path} holds a "
                f"{family.model_type} model; export it again."
            )
        self.engine = Engine(
            settings.checkpoint_path,
            tp_size=settings.tp_size,
            pp_size=settings.pp_size,
            data_type=settings.data_type,
            int8_mode=settings.int8_mode,
            device=settings.device,
            options=settings.engine,
            # Given where the ranks are on several nodes, started by the scheduler.
            meeting=open_meeting(
                settings.tp_size * settings.pp_size, timeout_s=settings.engine.rank_timeout_s
            ),
        )
        return self.engine

    def submit(self, exchange: Exchange) -> tuple[Future[Any], Callable[[Any], None]]:
        """Queue a request, see `EngineModel`."""
        request = parse_request(request_tensors(exchange.request), self.engine.limits)
        frames = FrameStream(
            request,
            strict_lengths=self.settings.strict_lengths,
            omit_prefix=self.settings.stream_new_tokens and self.decoupled,
        )

        def on_step(step: GenerationStep) -> None:
            self.later(lambda: _send(exchange, frames, step, final=False))

        future = self.engine.submit(request, on_step=on_step if self.decoupled else None)
        return future, lambda result: _send(exchange, frames, result, final=True)


def _send(
    exchange: Exchange,
    frames: FrameStream,
    state: GenerationStep | GenerationResult,
    *,
    final: bool,
) -> None:
    """Send what a request has so far; between steps that brought nothing new, nothing."""
    frames.context_embeddings = state.context_embeddings
    frame = frames.frame(state.rows)
    if frame is None and not final:
        return
    assert frame is not None, "the last step is never reported on its own"
    exchange.send(response(output_tensors(frame, exchange.wanted)), final=final)
