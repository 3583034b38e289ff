"""The newest token of each slot, chosen and kept where the model runs.

The next step reads it there, which lets the host plan that step before it knows the token.
"""

# Shapes: n tokens whose logits are given, V vocabulary, T ranks that share it

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from inference.model.kv_cache import Array

# In place of a token id: the newest one that the slot's last step chose.
NEWEST = -1
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Chosen:
    """Tokens being copied to the host, (n, 2) int32: the bits of each one's logit, and its id."""

    values: torch.Tensor
    arrived: torch.cuda.Event | None = None

    def array(self) -> Array:
        """Return them once they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.numpy()


class TokenFeed:
    """Chooses the best token and keeps it for the next step.

    Of ranks that share the vocabulary each finds the best of its own slice; then all of them take
    the best of those.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        *,
        vocab: range,
        gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Allocate `slots` entries, and one more for choices that no step reads.

        Args:
            slots: Of the cache.
            device: Of the logits.
            vocab: The ids whose logits this rank computes.
            gather: Returns every rank's tensor in rank order (T, ...); None for a single rank.
        """
        self._newest = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._vocab = vocab
        self._gather = gather
        self.unread = slots

    def ids(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return `ids` (N,) with the newest tokens of their `slots` (N,) for NEWEST."""
        return torch.where(ids == NEWEST, self._newest[slots].to(ids.dtype), ids)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, forbidden: torch.Tensor
    ) -> torch.Tensor:
        """Store the best token of each row of logits, and return them as in `Chosen`.

        Of equal logits the lowest id is chosen. A row with NaN has a best logit that is not finite.

        Args:
            logits: Of this rank's ids (n, V / T or more) fp32; a forbidden id's is overwritten.
            slots: Slot that reads it, (n,) integers; `unread` for none.
            forbidden: An id that is not chosen (n,) integers, outside the vocabulary for none.
        """
        if self._vocab:
            logits = logits[:, : len(self._vocab)]
        else:  # the vocabulary ends before this rank
            logits = logits[:, :1].fill_(_LOWEST)
        kernels = _kernels() if logits.is_cuda else None
        if kernels is not None:
            chosen: torch.Tensor = kernels.best_tokens(
                *(logits, slots, forbidden, self._newest),
                first=self._vocab.start,
                keep=self._gather is None,
            )
            return chosen if self._gather is None else self._agreed(chosen, slots)
        return self._agreed(self._best(logits, forbidden), slots)

    def _best(self, logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
        """Return the best of this rank's ids for each row."""
        rows = torch.arange(len(logits), device=logits.device)
        wanted = forbidden.long() - self._vocab.start
        ids = wanted.clamp(0, logits.shape[1] - 1)
        # Another rank's, or none: a model's end id may lie outside its vocabulary.
        logits[rows, ids] = torch.where(ids == wanted, _LOWEST, logits[rows, ids])
        values, best = logits.max(-1)
        return torch.stack((values.view(torch.int32), (best + self._vocab.start).int()), dim=1)

    def _agreed(self, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the best of what all ranks have chosen, and keep it for the next step."""
        if self._gather is not None:
            every = self._gather(chosen)  # (T, n, 2)
            rank = every[:, :, 0].contiguous().view(torch.float32).max(0).indices
            chosen = every[rank, torch.arange(len(chosen), device=chosen.device)]
        self._newest[slots.long()] = chosen[:, 1].long()
        return chosen


def _kernels() -> ModuleType | None:
    """Return the choice of a GPU, None where torch came without Triton."""
    try:
        from inference.model.gpu import choice
    except ImportError:
        return None
    return choice


def chosen_to_host(chosen: torch.Tensor) -> Chosen:
    """Start the copy of the chosen tokens (n, 2) to the host."""
    if chosen.device.type == "cpu":
        return Chosen(chosen)
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return Chosen(host, arrived)
