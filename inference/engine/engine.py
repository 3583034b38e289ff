"""The engine of generating models: it answers many requests at once, on all ranks."""

import itertools
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.families.layout.config import FTConfig
from inference.decoding.rows import (
    PREFIX_PROMPT,
    GenerationRequest,
    ModelLimits,
    RequestError,
    SessionTurn,
)
from inference.decoding.sampler import Sampler
from inference.engine.base import EngineBase
from inference.engine.blocks import BlockPool
from inference.engine.capacity import (
    Capacity,
    GeneratorArchitecture,
    model_limits,
    plan_capacity,
)
from inference.engine.errors import EngineBusyError, EngineFailedError
from inference.engine.options import EngineOptions
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import (
    GenerationResult,
    OnStep,
    RunningRequest,
    make_sequence,
)
from inference.engine.sequence_cache import SequenceCache
from inference.engine.sessions import turn_problems
from inference.engine.step_budget import ChunkSize
from inference.model.step import Segment
from inference.ranks.base import MAX_PROMPT_TOKENS
from inference.ranks.plan import StepPlan
from inference.ranks.settings import Placement, RankSettings

# The names for use from Python, without a server.
__all__ = ["Engine", "EngineOptions", "Placement"]

_GPU_CHUNK = {"first": 2048, "most": MAX_PROMPT_TOKENS}


class Engine(EngineBase):
    """An engine that serves one FT folder with a decoder; `on_step` callbacks must be quick."""

    architecture: GeneratorArchitecture

    def _served_architecture(self) -> GeneratorArchitecture:
        architecture = self.config.architecture()
        if isinstance(architecture, DecoderArchitecture) or (
            isinstance(architecture, EncoderDecoderArchitecture) and architecture.decoder_num_layer
        ):
            return architecture
        raise ValueError(f"family {self.family.name} has no decoder; this engine generates text")

    def _fit(self, settings: RankSettings) -> RankSettings:
        self.capacity: Capacity = plan_capacity(self.architecture, settings, self.options)
        self.description = self.capacity.describe()
        self._read_limits(settings.ft_dir)
        table_rows, table_size = _table_rows(self.config)
        vocab_size = self.architecture.vocab_size
        self._make_sequence = partial(make_sequence, vocab_size=vocab_size, table_rows=table_rows)
        self._embedding_base = vocab_size + table_size
        return replace(
            settings,
            slots=self.capacity.slots,
            max_len=self.capacity.max_len,
            block_tokens=self.capacity.block_tokens,
            blocks=self.capacity.blocks,
        )

    def _read_limits(self, folder: str) -> None:
        self.limits: ModelLimits = model_limits(
            self.config, self.architecture, Path(folder), self.options.end_ids
        )

    def _warm_up(self) -> tuple[StepPlan, None]:
        return StepPlan(ids=[0], segments=(Segment(0, 0, 1),), output_rows=[0]), None

    def submit(
        self,
        request: GenerationRequest,
        *,
        on_step: OnStep | None = None,
        only_tokens: bool = False,
        turn: SessionTurn | None = None,
    ) -> Future[GenerationResult]:
        """Queue a request.

        Args:
            request: Parsed by `parse_request` with this engine's `limits`.
            on_step: Called with the results so far after each step that produced tokens for the
                request but did not finish it. If it returns True, the request ends with them, or
                later if a sequence waits.
            only_tokens: Call `on_step` with the new tokens only, a list for each sequence.
            turn: The request's turn of a session. If the request does not fit the session, or
                other sessions hold the slots it needs, its future fails with one of the errors
                below. A last turn ends its session even if it is refused.

        Raises:
            RequestError: The request does not fit the engine's cache.
            EngineBusyError: The queue is full.
            EngineFailedError: The engine cannot answer.
        """
        if turn is not None:
            problems = turn_problems(request, turn, capacity=self.capacity, limits=self.limits)
        else:
            problems = self.capacity.problems_of(request)
            for name in ("session_len", "memory_len"):
                if getattr(request, name) is not None:
                    problems.append(f"{name}: the request is not part of a session; leave it out")
        if problems:
            self.end_refused(turn)
            raise RequestError(problems)
        future: Future[GenerationResult] = Future()
        running = RunningRequest(
            request, future, on_step=on_step, only_tokens=only_tokens, turn=turn
        )
        running.waiting = [self._make_sequence(running, *each) for each in enumerate(request.rows)]
        frames_line_up = on_step is not None and len(request.rows) > 1
        if frames_line_up:
            running.lock_step = not self.capacity.concurrency_problems(request, request.rows)
        try:
            self._queue(running)
        except (EngineBusyError, RequestError):
            self.end_refused(turn)
            raise
        return future

    def end_refused(self, turn: SessionTurn | None) -> None:
        """End a session whose last turn cannot be submitted; other turns may be sent again."""
        if turn is None or not turn.ends:
            return
        # A turn without rows ends its session; it is queued since the START may still be queued.
        last = SessionTurn(turn.session_id, ends=True)
        empty = RunningRequest(GenerationRequest((), padded_len=0), Future(), turn=last)
        with suppress(EngineFailedError):  # a failed engine has no sessions
            self._queue(empty)

    def generate(
        self, request: GenerationRequest, *, turn: SessionTurn | None = None
    ) -> GenerationResult:
        """Submit a request and wait for its result; arguments as for `submit`."""
        return self.submit(request, turn=turn).result()

    def _make_scheduler(self) -> Scheduler:
        sampler = Sampler(
            self.limits.vocab_size,
            hypothesis_pool=self.limits.encoder_decoder,
            output_log_probs_mode=self.options.output_log_probs_mode,
            nucleus_include_boundary=self.options.nucleus_include_boundary,
        )
        capacity, architecture = self.capacity, self.architecture
        has_encoder = isinstance(architecture, EncoderDecoderArchitecture)
        on_gpu = capacity.device == "cuda"
        size = _GPU_CHUNK if on_gpu else {}
        cache = SequenceCache(
            capacity.slots,
            BlockPool(
                blocks=capacity.blocks if capacity.is_paged else None,
                block_tokens=capacity.block_tokens,
            ),
            shares_prefixes=self.options.share_prefixes,
            rotary=getattr(architecture, "rotary", None),
        )
        return Scheduler(
            sampler,
            cache,
            embedding_base=self._embedding_base,
            chunk_size=ChunkSize(self.options.max_stall_s, **size),
            encoder_layers=architecture.num_layer if has_encoder else 0,
            session_idle_s=self.options.session_idle_s,
            ranks_choose=on_gpu and self._settings.pp_size == 1,
        )


def _table_rows(config: FTConfig) -> tuple[dict[int, int], int]:
    """Return each prompt task's first row in the concatenated prompt tables, and all their rows."""
    # A prefix prompt is keys and values, not embeddings.
    tasks = () if config.prompt_learning_type == PREFIX_PROMPT else config.tasks
    *first, total = itertools.accumulate((task.prompt_length for task in tasks), initial=0)
    return dict(enumerate(first)), total
