"""The newest token of each slot, chosen and kept where the model runs.

The next step reads it there, which lets the host plan that step before it knows the token. How
logits are changed first is the contract of `inference.decoding.draws`.
"""

# Shapes: n tokens whose logits are given, V vocabulary, T ranks that share it

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inference.model.kv_cache import Array, on_device

# In place of a token id: the newest one that the slot's last step chose.
NEWEST = -1
_LOWEST = torch.finfo(torch.float32).min


class TokenFeed:
    """Chooses the tokens and keeps them for the next step.

    Ranks that share the vocabulary each find the best token of their own slice, and all take the
    best of those. To draw tokens every rank gathers all slices and computes what the others do: the
    ranks of a stage are GPUs of one kind.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        *,
        vocab: range,
        vocab_size: int | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Allocate `slots` entries, and one more for choices that no step reads.

        This rank computes the logits of `vocab`, all `vocab_size` ids if that is None. `gather`
        returns every rank's tensor in rank order (T, ...); None for a single rank.
        """
        self._newest = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._vocab = vocab
        self._vocab_size = len(vocab) if vocab_size is None else vocab_size
        # The whole vocabulary on every rank, (slots + 1, V), see `marks_bytes`.
        self._seen = torch.zeros(slots + 1, self._vocab_size, dtype=torch.uint8, device=device)
        self._bias = torch.zeros(slots + 1, self._vocab_size, device=device)
        self._gather = gather
        self.unread = slots

    def ids(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Return `ids` (N,) with the newest tokens of their `slots` (N,) for NEWEST."""
        return torch.where(ids == NEWEST, self._newest[slots].to(ids.dtype), ids)

    def mark(self, slot: int, seen: Array, ids: Array, bias: Array) -> None:
        """Set the marks of a sequence that begins in a slot, and drop earlier ones.

        Penalties act on the ids `seen` (m,) int64, which chosen ones join. The ids (k,) int64 have
        a `bias` (k,) fp32: those of one id add up, and minus infinity bans it.
        """
        device = self._bias.device
        self._seen[slot].zero_().index_fill_(0, on_device(seen, device), 1)
        self._bias[slot].zero_().index_add_(0, on_device(ids, device), on_device(bias, device))

    def choose(
        self,
        logits: Tensor,
        slots: Tensor,
        forbidden: Tensor,
        draws: Tensor | None = None,
        penalties: Tensor | None = None,
    ) -> Tensor:
        """Store the best or a drawn token of each row of logits; return them.

        These are (n, 2) int32: the bits of the row's best logit, and the id. Of equal logits the
        lower id comes first. A row with NaN has a best logit that is not finite.

        Args:
            logits: Of this rank's ids (n, V / T or more) fp32. A row with a forbidden id or a draw
                other than the best token may be overwritten.
            slots: Slot that reads it, (n,) integers; `unread` for none.
            forbidden: An id that is not chosen (n,) integers, outside the vocabulary for none.
            draws: (n, 6) fp32, see `StepPlan`; None for the best tokens.
            penalties: (n, 3) fp32, see `StepPlan`; None without, and without draws.
        """
        keep = draws is not None or self._gather is None
        first = self._vocab.start
        if draws is not None:
            logits, first = self._whole(logits), 0
        elif self._vocab:
            logits = logits[:, : len(self._vocab)]
        else:  # the vocabulary ends before this rank
            logits = logits[:, :1].fill_(_LOWEST)
        chosen: Tensor = self._kernels.chosen_tokens(
            *(logits, slots, forbidden, self._newest, draws, penalties),
            first=first,
            keep=keep,
            seen=self._seen,
            bias=self._bias,
        )
        return chosen if keep else self._agreed(chosen, slots)

    @property
    def _kernels(self) -> Any:
        """The kernels of a GPU; where a CPU computes, the host chooses."""
        from inference.model.gpu import choice

        return choice

    def _whole(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary (n, V)."""
        if self._gather is not None:
            every = self._gather(logits)  # (T, n, V / T or more)
            slices = every[:, :, : -(-self._vocab_size // len(every))]
            logits = slices.transpose(0, 1).flatten(1)
        return logits[:, : self._vocab_size]

    def _agreed(self, chosen: Tensor, slots: Tensor) -> Tensor:
        """Return the best of what all ranks have chosen, and keep it for the next step."""
        assert self._gather is not None
        every = self._gather(chosen)  # (T, n, 2)
        rank = every[:, :, 0].contiguous().view(torch.float32).max(0).indices
        chosen = every[rank, torch.arange(len(chosen), device=chosen.device)]
        self._newest[slots.long()] = chosen[:, 1].long()
        return chosen


def marks_bytes(slots: int, vocab_size: int) -> int:
    """Return the memory of the marks: a flag and an fp32 number for each slot and id.

    One slot more serves choices that no step reads.
    """
    return (slots + 1) * vocab_size * 5


def on_host(chosen: Tensor) -> Tensor:
    """Return the chosen tokens (n, 2) on the host, to which a GPU begins to copy them."""
    if chosen.device.type == "cpu":
        return chosen
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    return host.copy_(chosen, non_blocking=True)
