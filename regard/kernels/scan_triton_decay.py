"""The gradient of decays in scan_triton.py: a sum over all later tokens, of parts that cancel."""

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # S [.., K, V] and z [.., K], or their gradients


def state_products(starts: Pair, of_starts: Pair, end: Pair, of_end: Pair | None, *, segments: int) -> Tensor:
    """S . dS + z . dz for the state behind each segment, [B, H, segments, K] in float64: what the gradients of A of all
    tokens behind it add up to. `starts` are the states before the segments, `of_starts` the gradients of those behind.
    """
    B, H, K = end[1].shape
    last = end[0].new_zeros(B, H, 1, K, dtype=torch.float64) if of_end is None else _product(end, of_end)[:, :, None]
    if segments == 1:
        return last
    behind = starts[0][:, :, 1:], starts[1][:, :, 1:]
    return torch.cat([_product(behind, (of_starts[0][:, :, :-1], of_starts[1][:, :, :-1])), last], 2)


def _product(state: Pair, grad: Pair) -> Tensor:
    (S, z), (dS, dz) = state, grad
    return (S.double() * dS).sum(-1) + z.double() * dz


def decay_gradient(
    of_sums: Tensor, products: Tensor, span: int, decay: Tensor, first: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """The gradients of A summed over the tokens from t on: over those of its segment, and the product of the state
    behind it for the rest. Summed to the end of the sequence, rounding errors of the last tokens would stand in the
    gradients of all before, which may be far smaller. None at padding and where a document begins."""
    T, segments, vector = decay.shape[2], products.shape[2], decay.dim() == 4
    padding = [0, 0, 0, segments * span - T] if vector else [0, segments * span - T]
    of_sums = F.pad(of_sums.double(), padding).unflatten(2, (segments, span))
    total = of_sums.flip(3).cumsum(3).flip(3) + (products if vector else products.sum(-1)).unsqueeze(3)
    total = total.flatten(2, 3)[:, :, :T]
    at = torch.arange(T, device=decay.device)[None]
    live = torch.ones_like(at, dtype=torch.bool)
    live = live if lengths is None else live & (at < lengths[:, None])
    live = live if first is None else live & (first != at)
    return torch.where(live[:, None, :, None] if vector else live[:, None], total, 0).to(decay.dtype)
