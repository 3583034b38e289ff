"""The newest token of each slot, chosen and stored on the device that runs the model.

The next step reads it there, so that the host can plan that step before it knows the token.
`inference.decoding.draws` defines how logits are processed before the choice.
"""

# Shapes: n tokens whose logits are given, V vocabulary, T ranks that share it

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inference.model.kv_cache import Array, on_device

# Stands for the token that the slot's last step chose.
NEWEST = -1
_LOWEST = torch.finfo(torch.float32).min


class TokenFeed:
    """Chooses tokens and stores them for the next step.

    Ranks that share the vocabulary find the best token of their slices, and then the best of all.
    To draw tokens, every rank gathers all slices and repeats the same computation, which requires
    that the ranks of a stage are GPUs of one kind.
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
        """Allocate `slots` entries, and one (`unread`) for choices that no step reads.

        This rank computes the logits of the ids `vocab`; `vocab_size` None means that these are all
        ids. `gather` returns every rank's tensor in rank order (T, ...); None for a single rank.
        """
        self._newest = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._vocab = vocab
        self._vocab_size = len(vocab) if vocab_size is None else vocab_size
        # On every rank for the whole vocabulary, (slots + 1, V); `marks_bytes` is their size.
        self._seen = torch.zeros(slots + 1, self._vocab_size, dtype=torch.uint8, device=device)
        self._bias = torch.zeros(slots + 1, self._vocab_size, device=device)
        self._gather = gather
        self.unread = slots

    def ids(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Return `ids` (N,), with NEWEST replaced by the newest tokens of `slots` (N,)."""
        return torch.where(ids == NEWEST, self._newest[slots].to(ids.dtype), ids)

    def mark(self, slot: int, seen: Array, ids: Array, bias: Array) -> None:
        """Set the marks of a sequence that begins in a slot, replacing earlier ones.

        Penalties apply to the ids `seen` (m,) int64, and later to chosen ones. `ids` (k,) int64
        have a `bias` (k,) fp32; the biases of repeated ids add up, and -inf bans an id.
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
        """Choose and store the best or a drawn token of each row of logits; return (n, 2) int32.

        The columns are the fp32 bits of the row's best logit, and the chosen id. Among equal logits
        the lower id is chosen. The best logit of a row with NaN is not finite.

        Args:
            logits: This rank's slice (n, V / T or more) fp32. Rows with a forbidden id or a draw
                other than arg-max may be overwritten.
            slots: Slot that reads the token, (n,) integers; `unread` for none.
            forbidden: Id that must not be chosen, (n,) integers; outside the vocabulary for none.
            draws: (n, 6) fp32, see `StepPlan`; None for arg-max.
            penalties: (n, 3) fp32, see `StepPlan`; None for none; requires `draws`.
        """
        keep = draws is not None or self._gather is None
        first = self._vocab.start
        if draws is not None:
            logits, first = self._gathered(logits), 0
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
        return chosen if keep else self._best_of_ranks(chosen, slots)

    @property
    def _kernels(self) -> Any:
        """The GPU kernels; on a CPU the host chooses tokens."""
        from inference.model.gpu import choice

        return choice

    def _gathered(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary (n, V)."""
        if self._gather is not None:
            parts = self._gather(logits)  # (T, n, V / T or more)
            slices = parts[:, :, : -(-self._vocab_size // len(parts))]
            logits = slices.transpose(0, 1).flatten(1)
        return logits[:, : self._vocab_size]

    def _best_of_ranks(self, chosen: Tensor, slots: Tensor) -> Tensor:
        """Return the best of all ranks' choices, and store it for the next step."""
        assert self._gather is not None
        choices = self._gather(chosen)  # (T, n, 2)
        rank = choices[:, :, 0].contiguous().view(torch.float32).max(0).indices
        chosen = choices[rank, torch.arange(len(chosen), device=chosen.device)]
        self._newest[slots.long()] = chosen[:, 1].long()
        return chosen


def marks_bytes(slots: int, vocab_size: int) -> int:
    """Return the memory of the marks: a flag and an fp32 bias for each slot and id.

    One more slot is for choices that no step reads.
    """
    return (slots + 1) * vocab_size * 5
