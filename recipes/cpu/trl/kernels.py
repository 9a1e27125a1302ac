"""The one attention kernel that TRL's asynchronous GRPO asks of the package `kernels`, in plain PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def get_kernel(name: str, **_: Any) -> type[FlashAttention]:
    """Return the only one that there is."""
    if name != "kernels-community/flash-attn3":
        raise ImportError(f"{name} is for GPUs, and recipes/cpu/trl has no other in its place")
    return FlashAttention


class FlashAttention:
    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        *_: Any,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Return the attention of each segment to its keys, of which its own are the last: (tokens, heads, size)."""
        assert causal and window_size == (-1, -1)
        found = []
        for (q0, q1), (k0, k1) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
            q, k, v = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(diagonal=(k1 - k0) - (q1 - q0))
            attend = torch.nn.functional.scaled_dot_product_attention
            found.append(attend(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
        return torch.cat(found)
