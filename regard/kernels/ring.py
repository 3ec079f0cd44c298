"""Softmax attention of one new token per row over a ring of keys and values: a step of decoding.

The ring has R slots, and position p lies in slot p % R: a KV cache where R is its capacity, a sliding window where R is
the number of keys that a query sees. Sizes never change and nothing is asked of the host, so that steps can be captured
as a CUDA graph. No gradients. O(R D) time for each head.

Letters: B batch, H heads, G key/value heads (H is a multiple of G), R slots, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.choose import use_triton

WIDEST = 256


def attend_next(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [B, H, 1, D], k and v [B, G, 1, D] of the token at position seen [B] -> [B, H, 1, D]. Writes k and v into the
    rings [B, G, R, D] in place; the query sees the last R tokens, itself among them. Slots that no token has filled
    must hold numbers."""
    q, k, v = (x.to(keys.dtype) for x in (q, k, v))
    refusal = f"heads are wider than {WIDEST}" if q.shape[-1] > WIDEST else None
    if use_triton("ring", q, keys, values, refusal=refusal):
        from regard.kernels import ring_triton

        return ring_triton.attend_next(q, k, v, keys, values, seen, scale)
    R = keys.shape[2]
    slot = (seen % R)[:, None, None, None].expand_as(k)
    keys.scatter_(2, slot, k)
    values.scatter_(2, slot, v)
    filled = (torch.arange(R, device=seen.device) <= seen[:, None])[:, None, None]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=filled, scale=scale, enable_gqa=grouped)
