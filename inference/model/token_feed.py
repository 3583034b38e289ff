"""The newest token of each slot, chosen and kept where the model runs.

The next step reads it there, which lets the host plan that step before it knows the token.
"""

# Shapes: B sequences of a step, n tokens whose logits are given, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

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
    """Chooses the best token and keeps it for the next step."""

    def __init__(self, slots: int, device: torch.device) -> None:
        """Allocate `slots` entries, and one more for choices that no step reads."""
        self._newest = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.unread = slots

    def ids(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return `ids` (N,) with the newest tokens of their `slots` (N,) for NEWEST."""
        return torch.where(ids == NEWEST, self._newest[slots].to(ids.dtype), ids)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, forbidden: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        """Store the best token of each row of logits, and return them as in `Chosen`.

        A row with NaN has a best logit that is not finite.

        Args:
            logits: (n, V or more) fp32; a forbidden id's is overwritten.
            slots: Slot that reads it, (n,) integers; `unread` for none.
            forbidden: An id that is not chosen (n,) integers, outside the vocabulary for none.
            vocab_size: V.
        """
        logits = logits[:, :vocab_size]
        rows = torch.arange(len(logits), device=logits.device)
        ids = forbidden.clamp(0, vocab_size - 1).long()
        real = ids == forbidden  # a model's end id may lie outside its vocabulary
        logits[rows, ids] = torch.where(real, _LOWEST, logits[rows, ids])
        values, best = logits.max(-1)
        self._newest[slots.long()] = best
        return torch.stack((values.view(torch.int32), best.int()), dim=1)


def chosen_to_host(chosen: torch.Tensor) -> Chosen:
    """Start the copy of the chosen tokens (n, 2) to the host."""
    if chosen.device.type == "cpu":
        return Chosen(chosen)
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return Chosen(host, arrived)
