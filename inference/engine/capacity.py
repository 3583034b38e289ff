"""Capacity of an engine: device, slots and their length, from the model and the budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.families.layout.config import FTConfig
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.generation_file import all_end_tokens
from export_scripts.numeric.dtypes import item_size
from export_scripts.triton.parameters import DEFAULT_MAX_SEQ_LEN
from inference.decoding.rows import GenerationRequest, ModelLimits, SequenceRequest
from inference.engine.blocks import max_blocks
from inference.engine.options import EngineOptions
from inference.model.token_feed import marks_bytes
from inference.ranks.base import MAX_PROMPT_TOKENS, cache_shape
from inference.ranks.device import compute_dtype
from inference.ranks.settings import RankSettings
from inference.system.control_groups import available_memory

_CPU_SHARE = 0.25  # of the available memory, for keys and values
_CUDA_SHARE = 0.8  # of the memory that the weights leave
_MAX_SLOTS = {"cpu": 64, "cuda": 512}
_GPU_BLOCK_TOKENS = 128  # FlashAttention 4 reads blocks of 64 up to 10 % slower


@dataclass(frozen=True)
class Capacity:
    """Slots, sequence length and cache size of an engine.

    Sequences share `blocks` blocks of `block_tokens` tokens. Without paging a block holds a whole
    sequence, and the output of an encoder has a block of its own.
    """

    device: str  # cpu or cuda
    slots: int  # most sequences that run at once
    max_len: int  # most tokens of a sequence; with an encoder, of input and output each
    cache_bytes: int  # on each rank
    blocks: int
    block_tokens: int
    model_len: int | None  # the model's own maximum length

    @property
    def is_paged(self) -> bool:
        """Whether a sequence has several blocks, which it takes as it grows."""
        return self.block_tokens < self.max_len

    @property
    def tokens(self) -> int:
        """Tokens that the cache can hold, over all sequences."""
        return self.blocks * self.block_tokens

    def describe(self) -> str:
        """Return a description of the budget."""
        return (
            f"{self.tokens} tokens of up to {self.slots} sequences, at most {self.max_len} of "
            f"each, on {self.device}, {self.cache_bytes / 2**20:.0f} MiB of keys and values per "
            "rank"
        )

    def problems_of(self, request: GenerationRequest) -> list[str]:
        """Return the reasons why a request can never run."""
        problems = self._too_long(request)
        if request.beam_width > 1:
            largest = max(request.rows, key=lambda row: max_blocks(request, row, self.block_tokens))
            problems += self.concurrency_problems(request, [largest])
        return problems

    def concurrency_problems(
        self, request: GenerationRequest, rows: Sequence[SequenceRequest]
    ) -> list[str]:
        """Return the reasons why rows of a request cannot run to completion at the same time."""
        about = f"beam_width={request.beam_width}: rows need"
        problems, sequences = [], len(rows) * request.beam_width
        if sequences > self.slots:
            problems.append(
                f"{about} {sequences} sequences, the cache holds {self.slots}; raise max_lanes or "
                "kv_cache_bytes"
            )
        blocks = sum(max_blocks(request, row, self.block_tokens) for row in rows)
        need = blocks * self.block_tokens
        if need > self.tokens:
            problems.append(
                f"{about} {need} cached tokens, the cache holds {self.tokens}; lower "
                "beam_width or lengths, or raise kv_cache_bytes"
            )
        return problems

    def _too_long(self, request: GenerationRequest) -> list[str]:
        problems = []
        limit = f"exceeds the {self.max_len} tokens that a sequence holds; raise max_seq_len"
        if self.max_len == self.model_len:
            limit = f"exceeds max_pos_seq_len ({self.max_len}), the longest sequence of the model"
        for b, row in enumerate(request.rows):
            if request.encoder_decoder:
                sizes = {"input_ids": len(row.input_ids), "max_output_len": row.output_len}
                problems += [
                    f"{name}[{b}]={size} {limit}"
                    for name, size in sizes.items()
                    if size > self.max_len
                ]
            elif request.slot_tokens(row) > self.max_len:
                problems.append(
                    f"input_ids[{b}]: prompt ({row.context_len}) + request_output_len "
                    f"({row.output_len}) {limit}"
                )
        return problems


# Architectures that generate text.
GeneratorArchitecture = DecoderArchitecture | EncoderDecoderArchitecture


def model_limits(
    config: FTConfig,
    architecture: GeneratorArchitecture,
    folder: Path,
    end_ids: Sequence[int] | None,
) -> ModelLimits:
    """Return the limits of requests to the model in a folder.

    Answers end at `end_ids`; None takes the end tokens that the folder names. Raises ValueError if
    these are not token ids.
    """
    tokens: Any = config  # a generating model's config has start and end ids
    ends = end_ids or all_end_tokens(folder, tokens.end_id)
    # With other kinds of positions, max_pos_seq_len is only the trained length.
    has_table = architecture.position in ("learned", "absolute")
    return ModelLimits(
        vocab_size=architecture.vocab_size,
        start_id=tokens.start_id,
        end_id=tokens.end_id,
        other_end_ids=tuple(token for token in ends if token != tokens.end_id),
        max_pos_seq_len=architecture.max_pos_seq_len if has_table else None,
        encoder_decoder=isinstance(architecture, EncoderDecoderArchitecture),
        ia3_num_tasks=getattr(architecture, "ia3_num_tasks", 0),
        hidden_units=architecture.hidden,
        prompt_learning_type=config.prompt_learning_type or 0,
        prompt_learning_start_id=config.prompt_learning_start_id,
        prompt_lengths={i: task.prompt_length for i, task in enumerate(config.tasks)},
    )


def plan_capacity(
    architecture: GeneratorArchitecture, placement: RankSettings, options: EngineOptions
) -> Capacity:
    """Return the capacity of ranks that have passed `check_ranks`.

    Raises:
        ValueError: The memory cannot hold one sequence of the longest length.
    """
    longest = architecture.max_pos_seq_len or options.max_seq_len or DEFAULT_MAX_SEQ_LEN
    max_len = min(options.max_seq_len or DEFAULT_MAX_SEQ_LEN, longest)
    max_slots = options.max_lanes or _MAX_SLOTS[placement.device]
    block_tokens = options.kv_block_tokens
    if block_tokens is None:
        block_tokens = _GPU_BLOCK_TOKENS if placement.device == "cuda" else 0
    block_tokens = min(block_tokens or max_len, max_len)
    one_slot = cache_shape(
        architecture, replace(placement, slots=1, max_len=max_len, block_tokens=block_tokens)
    )
    dtype = compute_dtype(placement.data_type, torch.device(placement.device))
    block_bytes = block_tokens * one_slot.token_bytes(dtype.itemsize)
    sequence_blocks = one_slot.parts * one_slot.slot_blocks
    min_bytes = (sequence_blocks + 1) * block_bytes  # one more block takes padding tokens
    free_share = int(available_bytes() * _CPU_SHARE) // options.sharing_engines
    budget = options.kv_cache_bytes or free_share // placement.world_size
    if placement.device == "cuda":
        budget = _cuda_budget(architecture, placement, options, max_slots, min_bytes)
    if budget < min_bytes:
        raise ValueError(
            f"kv_cache_bytes={budget} cannot hold one sequence of {max_len} tokens, which takes "
            f"{min_bytes} bytes on each rank; raise kv_cache_bytes or lower max_seq_len"
        )
    blocks = min(max_slots * sequence_blocks, budget // block_bytes - 1)
    slots = min(max_slots, blocks // one_slot.parts)
    if block_tokens == max_len:
        blocks = slots * one_slot.parts
    return Capacity(
        placement.device,
        slots,
        max_len,
        cache_bytes=(blocks + 1) * block_bytes,
        blocks=blocks,
        block_tokens=block_tokens,
        model_len=architecture.max_pos_seq_len,
    )


def available_bytes() -> int:
    """Return the memory in bytes that this process may still take."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8").split("MemAvailable:")[1]
    machine_bytes = int(text.split()[0]) * 1024
    limit_bytes = available_memory()
    return machine_bytes if limit_bytes is None else min(machine_bytes, limit_bytes)


def _cuda_budget(
    architecture: GeneratorArchitecture,
    placement: RankSettings,
    options: EngineOptions,
    slots: int,
    min_bytes: int,
) -> int:
    """Return the bytes for keys and values on each GPU: as configured, or a share of what is free.

    Raises:
        ValueError: Weights, logits, and keys and values exceed the free memory.
    """
    ft_dir = Path(placement.ft_dir)
    _, config = read_config(ft_dir)
    stored = sum(path.stat().st_size for path in ft_dir.iterdir()) // placement.world_size
    item_bytes = 1 if placement.int8_mode or placement.fp8 else item_size(placement.data_type)
    weights = stored * item_bytes // item_size(config.weight_data_type)
    if getattr(config, "fp8_group_size", None) is not None:  # all but tables are in FP8
        weights = stored if placement.fp8 else stored * item_bytes
    logits = slots * 4 * architecture.vocab_size // placement.tp_size
    logits += marks_bytes(slots, architecture.vocab_size)
    free, _ = torch.cuda.mem_get_info()
    share = max(free // options.sharing_engines - weights - logits, 0)
    # The largest step needs about the memory of one MLP's inputs and outputs.
    inner = architecture.inter_size // placement.tp_size
    left = share - MAX_PROMPT_TOKENS * 2 * (4 * architecture.hidden + 3 * inner)
    budget = options.kv_cache_bytes or max(min(int(share * _CUDA_SHARE), left), min_bytes)
    if max(budget, min_bytes) > free - weights - logits:
        raise ValueError(
            f"each GPU must hold {_gib(weights)} of weights, {_gib(logits)} of logits and marks of "
            f"penalties (max_lanes x vocabulary) and {_gib(max(budget, min_bytes))} of keys and "
            f"values, and {_gib(free)} are free; lower max_seq_len, max_lanes or kv_cache_bytes, "
            "set int8_mode=1, raise tensor_para_size or pipeline_para_size, or stop other programs "
            "on the GPU"
        )
    return budget


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
