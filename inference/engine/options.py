"""Budgets and bounds of an engine."""

from dataclasses import dataclass
from typing import Literal

from inference.ranks.settings import RANK_TIMEOUT_S


@dataclass(frozen=True)
class EngineOptions:
    """Budgets and bounds of an engine.

    `export_scripts.triton.parameters` documents and checks the parameters of the same names, and
    gives the default that None stands for.

    Attributes:
        max_lanes: Most running sequences; a beam search counts one per beam.
        kv_cache_bytes: Per rank; None takes a share of the free memory.
        sharing_engines: Engines that share the free memory of the same devices, including this one.
        kv_block_tokens: 0 gives each sequence one block, which attention on a CPU reads fastest.
        share_prefixes: Whether prompts share the blocks of common prefixes, in a paged cache.
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
