"""The choice of tokens by torch in place of the GPU's kernels: on CPUs, and to compare them.

Importing this lets `TokenFeed` choose on CPUs, too.
"""

import sys

import torch

from inference.model.token_feed import TokenFeed

_LOWEST = torch.finfo(torch.float32).min
_KERNELS = TokenFeed._kernels.fget  # type: ignore[attr-defined]
TokenFeed._kernels = property(  # type: ignore[method-assign,assignment]
    lambda feed: sys.modules[__name__] if feed._newest.device.type == "cpu" else _KERNELS(feed)
)


def chosen_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    forbidden: torch.Tensor,
    newest: torch.Tensor,
    draws: torch.Tensor | None = None,
    penalties: torch.Tensor | None = None,
    *,
    first: int,
    keep: bool,
    seen: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Return what `gpu.choice.chosen_tokens` does; rows with a forbidden id are overwritten."""
    at = slots.long()
    if draws is None:
        rows = torch.arange(len(logits), device=logits.device)
        wanted = forbidden.long() - first
        ids = wanted.clamp(0, logits.shape[1] - 1)
        # Another rank's, or none: a model's end id may lie outside its vocabulary.
        logits[rows, ids] = torch.where(ids == wanted, _LOWEST, logits[rows, ids])
        values, best = logits.max(-1)
        chosen = torch.stack((values.view(torch.int32), (best + first).int()), dim=1)
    elif penalties is None:
        chosen = draw_by_sorting(logits, forbidden, draws)
    else:
        chosen = draw_by_sorting(logits, forbidden, draws, penalties, seen[at], bias[at])
        cells = at, chosen[:, 1].long()
        seen[cells] = 1
        bias[cells] -= penalties[:, 2]
    if keep:
        newest[at] = chosen[:, 1].long()
    return chosen


def draw_by_sorting(
    logits: torch.Tensor,
    forbidden: torch.Tensor,
    draws: torch.Tensor,
    penalties: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the drawn tokens of whole rows of logits (n, V), see `TokenFeed.choose`.

    Rows with penalties need the ids they have `seen` and their `bias`, both (n, V).
    """
    factor, top_k, top_p, rest, whole_boundary, uniform = draws.double().t()[:, :, None]  # (n, 1)
    places = torch.arange(logits.shape[1], device=logits.device)
    if penalties is None:
        x = logits * factor.float()
    else:
        assert seen is not None
        assert bias is not None
        repetition, presence, _ = penalties.t()[:, :, None]  # (n, 1)
        marked = repetition > 0
        x = torch.where(marked, logits + bias, logits) * factor.float()
        less = torch.where(x < 0, x * repetition, x / repetition) - presence
        x = torch.where(marked & (seen > 0), less, x)
    x = torch.where(places == forbidden[:, None], _LOWEST, x)
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    best = values[:, :1].contiguous()
    masses = (values - best).double().exp()
    sums = torch.where((top_k > 0) & (places >= top_k), 0.0, masses).cumsum(-1)

    def crossing(mass: torch.Tensor) -> torch.Tensor:
        """Return the place of the token with which the masses' sum reaches `mass`."""
        place = torch.searchsorted(sums, torch.minimum(mass, sums[:, -1:]))
        return place.clamp(max=logits.shape[1] - 1)  # of a row that is not usable

    inside = top_p * (sums[:, -1:] + rest)
    inside = torch.where(whole_boundary > 0, sums.gather(1, crossing(inside)), inside)
    tokens = ids.gather(1, crossing(uniform * inside))
    return torch.cat((best.view(torch.int32), tokens.int()), dim=1)
