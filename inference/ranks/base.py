"""Base class of ranks: layout, device, weights, and communication with the other ranks."""

# Shapes: n tokens whose logits are wanted, V vocabulary, N tokens of a step, E hidden

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.reader import FTReader
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.stage import StageModel
from inference.model.weights import RankWeights
from inference.parallel.epilogue import GemmOptions, ordered_sum
from inference.parallel.groups import RankGroups
from inference.ranks.device import compute_dtype, matrix_dtype, rank_device
from inference.ranks.keyed_store import KeyedStore
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings
from inference.system.process_memory import give_back_memory

MAX_PROMPT_TOKENS = 8192  # of a step on a GPU; fewer would leave it idle


@dataclass(frozen=True)
class StepResult:
    """The result of a step, on rank 0.

    An encoder-only rank returns `hidden`, the tokens of all rows concatenated, and if wanted
    `attentions` (rows, layers, heads, S, S), zero beyond each row's length. `chosen` holds the
    tokens of a plan with choices, on the host, in the format of `TokenFeed.choose`. `done` is the
    event after the last kernel and copy, None on CPU.
    """

    logits: Tensor  # (n, V or more) fp32
    pooled: Tensor | None = None  # (segments, E) fp32
    hidden: Tensor | None = None  # (N, E)
    attentions: Tensor | None = None
    chosen: Tensor | None = None  # (n, 2) int32
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the result is computed."""
        if self.done is not None:
            self.done.synchronize()


def cache_shape(
    architecture: DecoderArchitecture | EncoderDecoderArchitecture, settings: RankSettings
) -> CacheShape:
    """Return the shape of one rank's cache, which also holds an encoder's output."""
    if isinstance(architecture, DecoderArchitecture):
        layers, heads, parts = architecture.num_layer, architecture.kv_head_num, 1
    else:
        layers, heads, parts = architecture.decoder_num_layer, architecture.head_num, 2
    return CacheShape(
        num_layer=len(settings.layout.layers(layers)),
        slots=settings.slots,
        kv_head_num=heads // settings.tp_size,
        max_len=settings.max_len,
        size_per_head=architecture.size_per_head,
        block_tokens=settings.block_tokens,
        blocks=settings.blocks,
        parts=parts,
        fp8=settings.kv_cache_dtype == "fp8_e4m3",
    )


class RankBase(ABC):
    """One rank of a model; rank 0 sends the steps to the others."""

    architecture: Architecture
    model: StageModel
    cache: KVCache  # set by generating ranks
    # CUDA graphs of some subclasses, of the classes in `inference.model.gpu`, or None.
    _graphs: Any = None
    _prompt_graphs: Any = None
    _encoder_graphs: Any = None

    def __init__(self, settings: RankSettings) -> None:
        self.layout = settings.layout
        self.device = rank_device(settings)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # cuDNN plans its attention anew for every shape, and nearly every step has a new one:
            # 256 mixed requests took 223 s on an H200 with cuDNN, 17 s without.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._groups: RankGroups | None = None
        self._in_rank_order = settings.batch_invariant

    def open_weights(self, settings: RankSettings) -> RankWeights:
        """Return this rank's view of the folder, and set `architecture` from it.

        Raises:
            CheckpointMismatchError: The folder is not exactly what its config.ini describes.
        """
        reader = FTReader(Path(settings.ft_dir))
        self.architecture = reader.config.architecture()
        return RankWeights(
            reader,
            self.layout,
            dtype=compute_dtype(settings.data_type, self.device),
            device=self.device,
            matrix_dtype=matrix_dtype(settings.data_type, reader.weight_data_type, self.device),
            reduce=self._reduce if self.layout.tp_size > 1 else None,
            gemm=GemmOptions(
                int8=settings.int8_mode == 1,
                fp8=settings.fp8,
                batch_invariant=settings.batch_invariant,
            ),
        )

    @property
    def groups(self) -> RankGroups:
        """The connection to the other ranks."""
        assert self._groups is not None, "ranks are not connected"
        return self._groups

    def connect(self, store: Store, settings: RankSettings) -> RankGroups:
        """Connect to the other ranks, all of which must do so at the same time."""
        self._groups = RankGroups(
            self.layout,
            store,
            device=self.device,
            timeout_s=settings.rank_timeout_s,
            shared_memory=settings.shared_memory,
            address=store.address if isinstance(store, KeyedStore) else "127.0.0.1",
        )
        return self._groups

    def exchange(self, settings: RankSettings) -> None:
        """Replace the weights by others of the same shapes, and empty the cache.

        All ranks do so at the same time and then call `prepare`. Their connections stay. Raises
        the errors of a start, after which the rank is unusable.
        """
        groups = self._groups
        vars(self).clear()  # free weights, cache and graphs before the new ones are allocated
        give_back_memory()
        torch.cuda.empty_cache()
        type(self).__init__(self, settings)
        self._groups = groups

    def ping(self) -> None:
        """Wait until every rank has answered."""
        if self._groups is not None:
            self._groups.barrier()

    def close(self) -> None:
        """Close the connection to the other ranks, all of which must do the same."""
        # Graphs contain sums that use the connection.
        self._graphs = self._prompt_graphs = self._encoder_graphs = None
        if self._groups is not None:
            self._groups.close()

    def run(self, plan: StepPlan, embeddings: Tensor | None = None) -> StepResult | None:
        """Run one step; rank 0 returns the result.

        Rank 0 passes `embeddings` (plan.embedding_rows, E) fp32, which the others receive.
        """
        with torch.inference_mode():
            # First of all: moves and entries are sent only once, even if the step fails later.
            if plan.moves or plan.entries:
                self.cache.update(plan.moves, plan.entries)
            if plan.embedding_rows:
                if embeddings is None:
                    embeddings = torch.empty(plan.embedding_rows, self.architecture.hidden)
                if self._groups is not None:
                    embeddings = self._groups.broadcast(embeddings)
                embeddings = embeddings.to(self.device)
            return self._run(plan, embeddings)

    @abstractmethod
    def _run(self, plan: StepPlan, embeddings: Tensor | None) -> StepResult | None:
        """Run a step whose embeddings every rank has and whose cache moves are done."""

    def prepare(self) -> None:  # noqa: B027 - most ranks have nothing to prepare
        """Do the work that would slow down the first requests, at the same time on all ranks."""

    def _parameters(self) -> int:
        """Return this rank's number of matrix weights, which limits the steps that become graphs.

        For an encoder-decoder only the encoder counts. A pipeline has no such graphs.
        """
        model = self.architecture
        key_heads = model.kv_head_num if isinstance(model, DecoderArchitecture) else model.head_num
        attention = 2 * (model.head_num + key_heads) * model.size_per_head
        is_gated = not isinstance(model, EncoderArchitecture) and model.gated
        layer = model.hidden * (attention + (3 if is_gated else 2) * model.inter_size)
        return model.num_layer * layer // self.layout.tp_size

    def _reduce(
        self,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if self._in_rank_order:
            return ordered_sum(self.groups.gather_stage(x), bias=bias, residual=residual)
        return self.groups.all_reduce(x, bias=bias, residual=residual)

    def _send_to_first_rank(
        self, output: Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        """Return the last stage's output, of a known shape and type, on rank 0."""
        if self.layout.pp_size == 1:
            return output if self.layout.rank == 0 else None
        source = self.layout.last_stage_ranks[:1]
        part = output if self.layout.rank in source else None
        found = self.groups.gather(part, shape, ranks=source, dtype=dtype)
        return found[0] if found else None
