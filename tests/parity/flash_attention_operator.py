"""FlashAttention 4's forward pass as the engine calls it, in torch, for machines without it."""

import torch


def forward(
    q: torch.Tensor,  # (N, H, D)
    k: torch.Tensor,  # (blocks, S, K, D)
    v: torch.Tensor,
    *,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_q: torch.Tensor,
    seqused_k: torch.Tensor,
    max_seqlen_q: int,
    page_table: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int | None,
) -> None:
    assert causal
    assert max_seqlen_q == seqused_q.max()
    assert all(part.dtype == torch.int32 for part in (cu_seqlens_q, seqused_q, seqused_k))
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[2]
    for nth, (start, count, cached) in enumerate(
        zip(cu_seqlens_q.tolist(), seqused_q.tolist(), seqused_k.tolist(), strict=False)
    ):
        query = q[start : start + count].float().transpose(0, 1)
        keys, values = (
            part[page_table[nth]].flatten(0, 1)[:cached].float().repeat_interleave(group, 1)
            for part in (k, v)
        )
        scores = query @ keys.permute(1, 2, 0) * scale
        back = torch.arange(cached - count, cached).unsqueeze(1) - torch.arange(cached)
        hidden = back < 0
        if window_size_left is not None:
            hidden |= back > window_size_left
        weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        out[start : start + count] = (weights @ values.transpose(0, 1)).transpose(0, 1).to(q.dtype)
