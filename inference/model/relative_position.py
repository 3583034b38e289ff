"""T5's position bias: a learned value per head and bucket of the distance between two tokens.

Raffel et al., Exploring the Limits of Transfer Learning, section 2.1: near distances have a bucket
each, farther ones share buckets of logarithmic width, and all beyond `max_distance` the last.
"""

# Shapes: H heads, S tokens

import math

import torch


def distance_bias(table: torch.Tensor, *, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Return the bias by distance for a table (H, buckets).

    For a causal stack (H, max_distance + 1): entry d is for a key d tokens back. For a
    bidirectional one (H, 2 * max_distance + 1): entry d is for a key at offset d - max_distance.
    Farther keys take the outermost entry.
    """
    buckets = table.shape[1]
    back = torch.arange(max_distance + 1, device=table.device)
    if not bidirectional:
        return table[:, _buckets(back, buckets, max_distance)]
    half = buckets // 2
    near = _buckets(back, half, max_distance)  # (max_distance + 1,)
    ahead = near[1:] + half
    return table[:, torch.cat((near.flip(0), ahead))]


def _buckets(distance: torch.Tensor, count: int, max_distance: int) -> torch.Tensor:
    """Return the bucket of each distance >= 0 among `count`."""
    exact = count // 2
    # Computed in fp32 as in the original, for the same bucket borders.
    ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (count - exact)).long()
    return torch.where(distance < exact, distance, far.clamp_max(count - 1))


def square_bias(by_offset: torch.Tensor, width: int) -> torch.Tensor:
    """Return the bias (1, H, S, S) of S = `width` tokens from a bidirectional bias by offset."""
    reach = by_offset.shape[1] // 2
    places = torch.arange(width, device=by_offset.device)
    offset = places - places.unsqueeze(1)  # (S, S): key minus query
    return by_offset[:, offset.clamp(-reach, reach) + reach].unsqueeze(0)
