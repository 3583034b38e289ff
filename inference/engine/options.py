"""Budgets and bounds of an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from inference.ranks.settings import RANK_TIMEOUT_S


@dataclass(frozen=True)
class EngineOptions:
    """Budgets and bounds of an engine.

    Attributes:
        max_lanes: Most sequences that run at once; a beam search takes one per beam. None for 64
            on CPU and 512 on CUDA.
        max_seq_len: Most tokens of one sequence, prompt and answer; None for what the model was
            trained for, at most 4096.
        kv_cache_bytes: Memory for keys and values on each rank; None for a share of what is free.
        sharing_engines: Engines that divide what is free on the same devices, this one included.
        kv_block_tokens: Tokens of a block of the cache, 0 for blocks of whole sequences; None for
            these on CPU, where attention reads them fastest, and 64 on CUDA.
        share_prefixes: Whether equal beginnings of prompts are computed once, where the cache has
            blocks of a few tokens.
        max_queued_rows: Rows that may wait for slots before requests are refused.
        session_idle_s: How long an interactive session may pause before its memory is freed.
        max_stall_s: How much longer a step may take because of other requests' prompts.
        threads: CPU threads of each rank; None divides the cores among the ranks.
        shared_memory: Whether the CPU ranks of a node communicate through shared memory, else gloo.
        rank_timeout_s: How long a rank may take to answer before it counts as hung.
        start_timeout_s: How long the other ranks may take to load.
        output_log_probs_mode: See `BatchDecoder`.
        nucleus_include_boundary: See `BatchDecoder`.
    """

    max_lanes: int | None = None
    max_seq_len: int | None = None
    kv_cache_bytes: int | None = None
    sharing_engines: int = 1
    kv_block_tokens: int | None = None
    share_prefixes: bool = True
    max_queued_rows: int = 2048
    session_idle_s: float = 60.0
    max_stall_s: float = 0.25
    threads: int | None = None
    shared_memory: bool = True
    rank_timeout_s: float = RANK_TIMEOUT_S
    start_timeout_s: float = 1800.0
    output_log_probs_mode: Literal["renormalized", "full"] = "renormalized"
    nucleus_include_boundary: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}={value} must be greater than 0"
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), int | float)
            and not isinstance(value, bool)
            and (value < 0 if field.name == "kv_block_tokens" else value <= 0)
        ]
        if problems:
            raise ValueError("\n".join(problems))
