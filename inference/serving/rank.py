"""One rank of the runtime: its part of the model, its cache, and the steps it is told to run."""

# Shapes: n tokens whose logits are wanted, V vocabulary, E hidden

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from export_scripts.families.architecture import DecoderArchitecture
from export_scripts.ft.dtypes import torch_dtype
from export_scripts.ft.reader import FTReader
from inference.decoding.kv_cache import CacheShape, KVCache
from inference.model.decode_graph import DecodeGraphs
from inference.model.decoder_weights import load_decoder
from inference.model.step import Segment, Step, make_step
from inference.model.weights import RankWeights
from inference.parallel.groups import RankGroups
from inference.parallel.layout import ParallelLayout
from inference.parallel.pipeline import run_stage
from inference.serving.plan import ReceivedPlan

logger = logging.getLogger(__name__)

# Fewest tokens for which a pipeline micro-batch is computation, not reading of weights.
_MICRO_BATCH_TOKENS = 128


@dataclass(frozen=True)
class RankSettings:
    """All that a rank must know to load its part and to join the others."""

    ft_dir: str
    rank: int
    tp_size: int
    pp_size: int
    data_type: str  # fp32, fp16 or bf16
    device: str  # cpu or cuda
    lanes: int
    max_len: int  # tokens a lane holds
    threads: int  # of the CPU, for this rank
    int8_mode: int = 0  # 1: the layers' matrices are kept in 8 bits
    store: tuple[str, int] = ("127.0.0.1", 0)  # host and port of the rendezvous
    shared_memory: bool = True  # False: CPU ranks talk over gloo even on one host
    rank_timeout_s: float = 8.0
    encoder_only: bool = False  # serve the encoder of a whole encoder-decoder
    remove_padding: bool = True  # encoders: compute true tokens only
    device_index: int | None = None  # of the visible GPUs, where a launcher numbered the processes

    @property
    def layout(self) -> ParallelLayout:
        """This rank's place among the others."""
        return ParallelLayout(self.rank, self.tp_size, self.pp_size)

    def for_rank(self, rank: int) -> RankSettings:
        """Return the settings of another rank of the same engine."""
        return replace(self, rank=rank)

    def at(self, host: str, port: int) -> RankSettings:
        """Return the same settings with the rendezvous found."""
        return replace(self, store=(host, port))

    def to_json(self) -> str:
        """Return the settings as text, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSettings:
        """Return the settings that `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "store": tuple(values["store"])})


@dataclass(frozen=True)
class StepResult:
    """What rank 0 gets from a step.

    An encoder alone gives `hidden`, all rows' tokens one after the other, and, where wanted,
    `attentions` (rows, layers, heads, S, S), zero beyond each row's length.
    """

    logits: torch.Tensor  # (n, V or more) fp32
    pooled: torch.Tensor | None = None  # (segments, E) fp32
    hidden: torch.Tensor | None = None  # (N, E)
    attentions: torch.Tensor | None = None


def compute_dtype(data_type: str, device: torch.device) -> torch.dtype:
    """Return the type a rank computes in.

    A CPU without 16-bit matrix products computes in fp32 instead; weights keep the values of
    their stored type.
    """
    dtype = torch_dtype(data_type)
    if device.type == "cuda" or dtype == torch.float32:
        return dtype
    onednn = torch.ops.mkldnn if torch.backends.mkldnn.is_available() else None  # type: ignore[no-untyped-call]
    native = onednn is not None and (
        onednn._is_mkldnn_bf16_supported()
        if dtype == torch.bfloat16
        else onednn._is_mkldnn_fp16_supported()
    )
    if native and dtype == torch.bfloat16:
        return dtype
    logger.warning("data_type=%s: this CPU computes it in fp32", data_type)
    return torch.float32


class Rank:
    """Loads strictly, then runs steps. Ranks other than 0 learn of steps from rank 0."""

    def __init__(self, settings: RankSettings) -> None:
        """Load this rank's part of the model.

        Raises:
            CheckpointMismatchError: The folder is not exactly what its config.ini describes.
            ValueError: The model does not divide among the ranks, or is of a kind not run here.
        """
        self.layout = settings.layout
        self.device = rank_device(settings)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._groups: RankGroups | None = None
        reader = FTReader(Path(settings.ft_dir))
        self.family, self.config = reader.family, reader.config
        architecture = self.family.architecture(self.config)
        if not isinstance(architecture, DecoderArchitecture):
            raise ValueError(f"{settings.ft_dir}: family {self.family.name} is not decoder-only")
        self.architecture = architecture
        dtype = compute_dtype(settings.data_type, self.device)
        weights = RankWeights(reader, self.layout, dtype=dtype, device=self.device)
        reduce = self._all_reduce if self.layout.tp_size > 1 else None
        int8 = settings.int8_mode == 1
        self.model = load_decoder(weights, architecture, reduce=reduce, int8=int8)
        self.cache = KVCache(cache_shape(architecture, settings), dtype=dtype, device=self.device)
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and self.layout.world_size == 1:
            self._graphs = DecodeGraphs(self.model, self.cache)

    def connect(self, groups: RankGroups) -> None:
        """Join the other ranks."""
        self._groups = groups

    def ping(self) -> None:
        """Return once every rank has answered."""
        if self._groups is not None:
            self._groups.meet()

    def run(self, plan: ReceivedPlan, embeddings: torch.Tensor | None = None) -> StepResult | None:
        """Run one step; rank 0 gets the result.

        Args:
            plan: What to run.
            embeddings: (plan.embedding_rows, E) fp32 on rank 0, if there are any; the others
                receive them.
        """
        with torch.inference_mode():
            embeddings = self._share_embeddings(plan, embeddings)
            if plan.moves:
                self.cache.copy(plan.moves)
            if self._graphs is not None and is_plain_decoding(plan):
                return StepResult(self._graphs.run(plan.ids.tolist(), plan.segments), None)
            steps = self._micro_batches(plan, embeddings)
            hidden = run_stage(self.model, steps, layout=self.layout, groups=self._groups)
            logits = self._logits(hidden, steps, len(plan.output_rows))
            pooled = self._pooled(hidden, plan) if plan.pool else None
            return None if logits is None else StepResult(logits, pooled)

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert self._groups is not None, "ranks are not connected"
        return self._groups.all_reduce(x)

    def _share_embeddings(
        self, plan: ReceivedPlan, embeddings: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not plan.embedding_rows:
            return None
        if embeddings is None:
            embeddings = torch.empty(plan.embedding_rows, self.architecture.hidden)
        if self._groups is not None:
            embeddings = self._groups.share(embeddings)
        return embeddings.to(self.device)

    def _micro_batches(self, plan: ReceivedPlan, embeddings: torch.Tensor | None) -> list[Step]:
        parts = min(self.layout.pp_size, max(1, len(plan.ids) // _MICRO_BATCH_TOKENS))
        ids, outputs = plan.ids.to(self.device), plan.output_rows.to(self.device)
        steps, first = [], 0
        for segments in split_segments(plan.segments, parts):
            stop = first + sum(segment.count for segment in segments)
            mine = outputs
            if parts > 1:
                mine = outputs[(outputs >= first) & (outputs < stop)] - first
            step = make_step(
                ids[first:stop],
                segments,
                mine,
                cache=self.cache,
                rules=self.model.rules,
                dtype=self.model.dtype,
                has_virtual=plan.has_virtual,
                embeddings=embeddings,
            )
            steps.append(step)
            first = stop
        return steps

    def _logits(
        self, hidden: Sequence[torch.Tensor], steps: Sequence[Step], count: int
    ) -> torch.Tensor | None:
        """Return all logits on rank 0, (n, V or more)."""
        if not count:
            empty = torch.empty(0, self.architecture.vocab_size)
            return empty if self.layout.rank == 0 else None
        part = None
        if hidden:
            wanted = [(x, s) for x, s in zip(hidden, steps, strict=True) if len(s.output_rows)]
            slices = [self.model.logits(x, step) for x, step in wanted]
            part = slices[0] if len(slices) == 1 else torch.cat(slices)
        return gather_slices(part, count, self.architecture.vocab_size, self.layout, self._groups)

    def _pooled(self, hidden: Sequence[torch.Tensor], plan: ReceivedPlan) -> torch.Tensor | None:
        """Return on rank 0 the sum of each segment's last hidden states, (segments, E) fp32."""
        layout = self.layout
        sums = None
        if hidden:
            counts = [segment.count for segment in plan.segments]
            parts = torch.split(torch.cat(list(hidden)).float(), counts)
            sums = torch.stack([part.sum(0) for part in parts])
        if layout.pp_size == 1:
            return sums
        assert self._groups is not None
        source = layout.world_size - layout.tp_size  # first rank of the last stage
        if layout.rank == source:
            assert sums is not None
            self._groups.send(sums, 0).wait()
        if layout.rank != 0:
            return None
        room = torch.empty(
            len(plan.segments), self.architecture.hidden, dtype=torch.float32, device=self.device
        )
        return self._groups.receive(room, source)


def is_plain_decoding(plan: ReceivedPlan) -> bool:
    """Return whether a step is one real token per sequence, the logits of all of them wanted."""
    return (
        len(plan.output_rows) == len(plan.segments) == len(plan.ids)
        and not plan.has_virtual
        and not plan.pool
    )


def gather_slices(
    part: torch.Tensor | None,
    count: int,
    vocab_size: int,
    layout: ParallelLayout,
    groups: RankGroups | None,
) -> torch.Tensor | None:
    """Return on rank 0 the logits (count, V or more) of which the last stage holds slices."""
    if groups is None:
        return part
    gathered = groups.gather_logits(part, (count, layout.vocab_rows_per_rank(vocab_size)))
    return torch.cat(gathered, dim=1) if gathered else None


def rank_device(settings: RankSettings) -> torch.device:
    """Return the device of a rank; on CUDA the ranks of a node take one each."""
    if settings.device == "cpu":
        return torch.device("cpu")
    place = settings.rank if settings.device_index is None else settings.device_index
    return torch.device("cuda", place % torch.cuda.device_count())


def cache_shape(architecture: DecoderArchitecture, settings: RankSettings) -> CacheShape:
    """Return the cache of one rank."""
    return CacheShape(
        num_layer=len(settings.layout.layers(architecture.num_layer)),
        lanes=settings.lanes,
        kv_head_num=architecture.kv_head_num // settings.tp_size,
        max_len=settings.max_len,
        size_per_head=architecture.size_per_head,
    )


def split_segments(segments: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Cut segments into at most `parts` runs of about as many tokens, in order.

    A sequence may be cut: its later tokens then come in a later run and see the earlier ones.
    """
    total = sum(segment.count for segment in segments)
    if parts == 1:
        return [list(segments)]
    size = -(-total // parts)
    runs: list[list[Segment]] = [[]]
    room = size
    for segment in segments:
        start, left = segment.start, segment.count
        while left:
            if not room:
                runs.append([])
                room = size
            count = min(left, room)
            runs[-1].append(Segment(segment.lane, start, count))
            start, left, room = start + count, left - count, room - count
    return runs
