"""The engine of encoders: BERT, a T5 encoder, or the encoder of a whole T5, on all ranks."""

from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from export_scripts.families.layout.architecture import (
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.triton.parameters import DEFAULT_MAX_SEQ_LEN
from inference.decoding.rows import RequestError
from inference.engine.base import EngineBase
from inference.engine.capacity import available_bytes
from inference.engine.encoding import (
    EncodingRequest,
    EncodingResult,
    EncodingScheduler,
    RunningEncoding,
)
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.settings import RankSettings

_COPIES = 3  # of an answer in memory: the ranks', the engine's, the server's
_SMALL_BYTES = 64 << 20  # answers up to this size are not checked against the free memory


class EncoderEngine(EngineBase):
    """An engine that serves the encoder of one FT folder."""

    architecture: EncoderArchitecture | EncoderDecoderArchitecture

    def _served_architecture(self) -> EncoderArchitecture | EncoderDecoderArchitecture:
        architecture = self.config.architecture()
        if isinstance(architecture, EncoderArchitecture | EncoderDecoderArchitecture):
            return architecture
        raise ValueError(
            f"family {self.family.name} has no encoder; serve it with the engine that generates"
        )

    def _fit(self, settings: RankSettings) -> RankSettings:
        self.max_len = self.options.max_seq_len or DEFAULT_MAX_SEQ_LEN
        self.description = f"rows of up to {self.max_len} tokens"
        return replace(settings, encoder_only=True)

    def _warm_up(self) -> tuple[StepPlan, Tensor | None]:
        rows = (EncoderRow(1),)
        if isinstance(self.architecture, EncoderDecoderArchitecture):
            return StepPlan([], (), [], encoder_rows=rows, encoder_ids=[0]), None
        states = torch.zeros(1, self.architecture.hidden)
        return StepPlan([], (), [], encoder_rows=rows, embedding_rows=1), states

    def _make_scheduler(self) -> EncodingScheduler:
        return EncodingScheduler(on_gpu=self._settings.device == "cuda")

    def submit(self, request: EncodingRequest) -> Future[EncodingResult]:
        """Queue a request.

        Raises:
            RequestError: The rows are too long, or the answer would not fit in memory.
            EngineBusyError: The queue is full.
            EngineFailedError: The engine cannot answer.
        """
        problems = self._problems_of(request)
        if problems:
            raise RequestError(problems)
        future: Future[EncodingResult] = Future()
        self._queue(RunningEncoding(request, future))
        return future

    def _problems_of(self, request: EncodingRequest) -> list[str]:
        if request.width > self.max_len:
            takes_ids = isinstance(self.architecture, EncoderDecoderArchitecture)
            name = "input_ids" if takes_ids else "input_hidden_state"
            return [
                f"{name}: rows of {request.width} tokens, padding included; the limit is "
                f"{self.max_len}; raise max_seq_len"
            ]
        name, per_token = "output_hidden_state", self.architecture.hidden
        if request.attentions:
            assert isinstance(self.architecture, EncoderDecoderArchitecture)
            layers, heads = self.architecture.num_layer, self.architecture.head_num
            name = "is_return_attentions"
            per_token += layers * heads * request.width
        size = 4 * len(request.rows) * request.width * per_token
        if size <= _SMALL_BYTES or _COPIES * size <= (free := available_bytes()):
            return []
        return [
            f"{name}: the answer of {size / 2**20:.0f} MiB needs {_COPIES} times that memory, and "
            f"{free / 2**20:.0f} MiB are free; send fewer rows, or shorter ones"
        ]

    def encode(self, request: EncodingRequest) -> EncodingResult:
        """Submit a request and wait for its result."""
        return self.submit(request).result()
