"""The engine of encoders: BERT, a T5 encoder, or the encoder of a whole T5, on all their ranks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from export_scripts.families.layout.architecture import (
    Architecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.config_ini import read_config
from export_scripts.triton.parameters import DEFAULT_MAX_SEQ_LEN
from inference.decoding.request import RequestError
from inference.engine.base import EngineBase, rank_settings
from inference.engine.capacity import available_bytes
from inference.engine.encoding import (
    EncoderLimits,
    EncodingRequest,
    EncodingResult,
    EncodingScheduler,
    RunningEncoding,
)
from inference.engine.options import EngineOptions
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.rendezvous import Rendezvous
from inference.ranks.settings import Placement

_COPIES = 3  # of an answer: those of the ranks, the answer, and the server's
_SMALL_BYTES = 64 << 20  # an answer that is not compared with the free memory


class EncoderEngine(EngineBase[RunningEncoding]):
    """Serves one FT folder's encoder."""

    def __init__(
        self,
        ft_dir: Path | str,
        placement: Placement | None = None,
        *,
        options: EngineOptions | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Read the folder's description; nothing is loaded before `start`.

        Arguments are those of `Engine`.

        Raises:
            ValueError: Sizes or types do not fit the model or the machine, or it has no encoder.
        """
        options = options or EngineOptions()
        self.family, self.config = read_config(Path(ft_dir))
        self.architecture = encoder_of(self.family.architecture(self.config), self.family.name)
        self.limits = encoder_limits(self.architecture)
        self.max_len = options.max_seq_len or DEFAULT_MAX_SEQ_LEN
        settings = rank_settings(ft_dir, self.architecture, placement, options, rendezvous)
        takes_ids = self.limits.vocab_size is not None
        super().__init__(
            replace(settings, encoder_only=True),
            options,
            # One token through all ranks warms them up for the first request.
            warm_up=StepPlan(
                ids=[],
                segments=(),
                output_rows=[],
                embedding_rows=0 if takes_ids else 1,
                encoder_rows=(EncoderRow(1),),
                encoder_ids=[0] if takes_ids else [],
            ),
            warm_up_embeddings=None if takes_ids else torch.zeros(1, self.limits.hidden),
            rendezvous=rendezvous,
        )

    def describe(self) -> str:
        """Return a description of the engine's capacity."""
        return f"rows of up to {self.max_len} tokens"

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
            name = "input_hidden_state" if self.limits.vocab_size is None else "input_ids"
            return [
                f"{name}: rows of {request.width} tokens, padding included; the limit is "
                f"{self.max_len}; raise max_seq_len"
            ]
        name, per_token = "output_hidden_state", self.limits.hidden
        if request.attentions:
            assert isinstance(self.architecture, EncoderDecoderArchitecture)
            stack = self.architecture.encoder
            name = "is_return_attentions"
            per_token += stack.num_layer * stack.head_num * request.width
        size = 4 * len(request.rows) * request.width * per_token
        if size <= _SMALL_BYTES or _COPIES * size <= (free := available_bytes()):
            return []
        return [
            f"{name}: the answer of {size / 2**20:.0f} MiB takes {_COPIES} times as much to make, "
            f"{free / 2**20:.0f} MiB are free; send fewer rows, or shorter ones"
        ]

    def encode(self, request: EncodingRequest) -> EncodingResult:
        """Return the result of a request, waiting for it."""
        return self.submit(request).result()


def encoder_of(
    architecture: Architecture, family: str
) -> EncoderArchitecture | EncoderDecoderArchitecture:
    """Return the architecture of a model that has an encoder.

    Raises:
        ValueError: It has none.
    """
    if isinstance(architecture, EncoderArchitecture | EncoderDecoderArchitecture):
        return architecture
    raise ValueError(f"family {family} has no encoder; serve it with the engine that generates")


def encoder_limits(architecture: EncoderArchitecture | EncoderDecoderArchitecture) -> EncoderLimits:
    """Return the limits of requests to the encoder."""
    if isinstance(architecture, EncoderArchitecture):
        return EncoderLimits(hidden=architecture.hidden)
    return EncoderLimits(
        hidden=architecture.hidden,
        vocab_size=architecture.vocab_size,
        max_pos_seq_len=architecture.max_pos_seq_len,
        ia3_num_tasks=architecture.ia3_num_tasks,
    )
