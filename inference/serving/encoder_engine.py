"""The engine of encoders: BERT, a T5 encoder, or the encoder of a whole T5, on all their ranks."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from export_scripts.families.architecture import (
    Architecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.config_ini import read_config
from inference.decoding.request import RequestError
from inference.serving.capacity import EngineOptions, check_ranks
from inference.serving.encoding import (
    EncoderLimits,
    EncodingRequest,
    EncodingResult,
    EncodingScheduler,
    RunningEncoding,
)
from inference.serving.engine_loop import EngineLoop
from inference.serving.plan import EncoderRow, StepPlan
from inference.serving.rank import RankSettings
from inference.serving.ranks import threads_per_rank

logger = logging.getLogger(__name__)

# Most tokens of a row unless max_seq_len says otherwise: attention grows with their square.
_DEFAULT_MAX_LEN = 4096


class EncoderEngine:
    """Serves one FT folder's encoder. Futures are answered from the engine's own thread."""

    def __init__(
        self,
        ft_dir: Path | str,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        data_type: str = "fp32",
        int8_mode: int = 0,
        device: str = "auto",
        remove_padding: bool = True,
        options: EngineOptions | None = None,
    ) -> None:
        """Read the folder's description; nothing is loaded before `start`.

        Args:
            ft_dir: The folder of weights, cut for `tp_size` ranks.
            tp_size: Tensor-parallel size.
            pp_size: Pipeline-parallel size; divides the layers.
            data_type: What is computed in: fp32, fp16 or bf16.
            int8_mode: 0; weights are not quantised.
            device: cpu, cuda, or auto for CUDA where there is a device.
            remove_padding: Compute true tokens only (BERT; other encoders always do).
            options: Bounds; those of caches do not apply.

        Raises:
            ValueError: Sizes or types do not fit the model or the machine, or it has no encoder.
        """
        self.options = options or EngineOptions()
        self.family, self.config = read_config(Path(ft_dir))
        self.architecture = encoder_of(self.family.architecture(self.config), self.family.name)
        kind = check_ranks(
            self.architecture,
            tp_size=tp_size,
            pp_size=pp_size,
            data_type=data_type,
            int8_mode=int8_mode,
            device=device,
        )
        self.limits = encoder_limits(self.architecture)
        self.max_len = self.options.max_seq_len or _DEFAULT_MAX_LEN
        settings = RankSettings(
            ft_dir=str(ft_dir),
            rank=0,
            tp_size=tp_size,
            pp_size=pp_size,
            data_type=data_type,
            device=kind,
            lanes=1,
            max_len=1,
            int8_mode=int8_mode,
            threads=self.options.threads or threads_per_rank(tp_size * pp_size),
            rank_timeout_s=self.options.rank_timeout_s,
            encoder_only=True,
            remove_padding=remove_padding,
        )
        takes_ids = self.limits.vocab_size is not None
        self._loop: EngineLoop[RunningEncoding] = EngineLoop(
            settings,
            self.options,
            make_scheduler=EncodingScheduler,
            # One token through all ranks, so that the first request finds everything ready.
            warm_up=StepPlan(
                ids=[],
                segments=(),
                output_rows=[],
                embedding_rows=0 if takes_ids else 1,
                encoder_rows=(EncoderRow(1),),
                encoder_ids=[0] if takes_ids else [],
            ),
            warm_up_embeddings=None if takes_ids else torch.zeros(1, self.limits.hidden),
        )

    def __enter__(self) -> EncoderEngine:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Load the model on every rank; return when it can answer.

        Raises:
            EngineFailedError: Some rank could not load or connect; every reason is given.
        """
        self._loop.start()
        logger.info("ready: rows of up to %d tokens", self.max_len)

    def stop(self) -> None:
        """Fail what is in flight and end every rank."""
        self._loop.stop()

    def healthy(self) -> str | None:
        """Return None if requests can be answered, else the reason why not."""
        return self._loop.healthy()

    def submit(self, request: EncodingRequest) -> Future[EncodingResult]:
        """Queue a request.

        Raises:
            RequestError: A row is too long.
            EngineBusyError: The queue is full.
            EngineFailedError: The engine cannot answer.
        """
        problems = [
            f"row {index} has {row.length} tokens, the limit is {self.max_len}; raise max_seq_len"
            for index, row in enumerate(request.rows)
            if row.length > self.max_len
        ]
        if problems:
            raise RequestError(problems)
        future: Future[EncodingResult] = Future()
        self._loop.queue(RunningEncoding(request, future))
        return future

    def cancel(self, future: Future[Any]) -> None:
        """Give up a request: rows that are not begun never run."""
        future.cancel()

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
    """Return what requests to the encoder must respect."""
    if isinstance(architecture, EncoderArchitecture):
        return EncoderLimits(hidden=architecture.hidden)
    absolute = architecture.position == "absolute"
    return EncoderLimits(
        hidden=architecture.hidden,
        vocab_size=architecture.vocab_size,
        max_pos_seq_len=architecture.num_buckets_or_max_pos_seq_len if absolute else None,
        ia3_num_tasks=architecture.ia3_num_tasks,
    )
