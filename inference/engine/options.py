"""Budgets and bounds of an engine."""

from dataclasses import dataclass
from typing import Literal

from inference.ranks.settings import RANK_TIMEOUT_S


@dataclass(frozen=True)
class EngineOptions:
    """Budgets and bounds of an engine.

    `export_scripts.triton.parameters` says what the parameters of the same names mean and checks
    them. None stands for what is said there for a missing one.

    Attributes:
        max_lanes: A beam search takes one sequence per beam.
        kv_cache_bytes: None for a share of what is free.
        sharing_engines: Engines that divide what is free on the same devices, this one included.
        kv_block_tokens: On CPU attention reads blocks of whole sequences fastest.
        share_prefixes: Equal beginnings of prompts are shared where blocks hold a few tokens.
        session_idle_s: How long an interactive session may pause before its memory is freed.
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
    end_ids: tuple[int, ...] | None = None
