"""The generation model: a single response, or one response per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export_scripts.ft.tokenizer_files import find_tokenizer
from inference.backend.engine_model import EngineModel
from inference.backend.requests import TOKENS, InferRequest, Outputs, Submitted
from inference.backend.tokenizer import load_tokenizer
from inference.decoding.grammars import Grammars, TokenTexts
from inference.decoding.outputs import FrameStream
from inference.decoding.request import parse_request
from inference.decoding.rows import ModelLimits, RequestError

if TYPE_CHECKING:
    from inference.engine.engine import Engine
    from inference.engine.sequence import GenerationResult, GenerationStep


class GenerationModel(EngineModel):
    """A converted model that answers with tokens."""

    engine_class = "inference.engine.engine:Engine"
    engine: Engine

    @cached_property
    def _limits(self) -> ModelLimits:
        """The engine's limits, with structured output if there is a tokenizer."""
        limits, folder = self.engine.limits, self.settings.checkpoint_path
        if find_tokenizer(folder) is None:
            return limits
        grammars = Grammars(
            partial(_token_texts, folder), vocab_size=limits.vocab_size, end_ids=limits.end_ids
        )
        return replace(limits, grammars=grammars)

    def submit(self, request: InferRequest, on_step: Callable[[Any], bool]) -> Submitted:
        """Queue a request, see `EngineModel`."""
        tensors, turn = request.tensors, request.turn if self.interactive else None
        if self.interactive:
            # Session requests have an additional first axis of size 1.
            tensors = {name: value[0] for name, value in tensors.items()}
        try:
            parsed = parse_request(tensors, self._limits)
        except RequestError:
            self.engine.end_refused(turn)
            raise
        for warning in parsed.warnings:
            self.host.warn(warning)
        as_declared = request.streams is None
        frames = FrameStream(
            parsed,
            strict_lengths=self.settings.strict_lengths,
            omit_prefix=self.settings.stream_new_tokens and self.decoupled and as_declared,
        )

        def tokens_of(state: Sequence[Sequence[int]] | GenerationResult) -> Outputs:
            """Return the new tokens of a step, or all tokens of a result."""
            if isinstance(state, Sequence):
                return {TOKENS: state}
            return {TOKENS: [row.output_ids[0] for row in state.rows]}

        def outputs_of(state: GenerationStep) -> Outputs | None:
            """Return the answer so far, None if the step has not added to it."""
            # In a session the prompt is the whole conversation.
            frames.request = state.request
            frame = frames.frame(state.rows)
            if frame is not None and self.interactive:
                frame = {name: value[None] for name, value in frame.items()}
            return frame

        streams = self.decoupled if as_declared else request.streams
        on_each = on_step if streams else None
        future = self.engine.submit(
            parsed, on_step=on_each, only_tokens=request.wants_tokens, turn=turn
        )
        return future, tokens_of if request.wants_tokens else outputs_of


def _token_texts(folder: Path) -> TokenTexts:
    tokenizer = load_tokenizer(folder)
    return TokenTexts(tokenizer.vocabulary(), sorted(tokenizer.special_ids), tokenizer.encode)
