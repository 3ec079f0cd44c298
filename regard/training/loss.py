"""What training minimises: cross entropy with label smoothing, summed over the real target tokens.

The output layer and the loss are one function here. The logits of a translator are its largest tensor by far, so they
are written once, read while a few rows of them are still in the cache, and turned into their own gradient in place of
further tables of the same size. Only real tokens are projected.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.base import pack

CHUNK = {"cpu": 2**20, "cuda": 2**26}  # numbers of logits worked on at a time


class Loss(NamedTuple):
    """Sums over the real target tokens: divide by `tokens`. `plain` carries no gradient."""

    total: Tensor  # smoothed: what is trained
    plain: Tensor  # -log p(token): what perplexity is made of
    tokens: Tensor  # how many
    second: Tensor | None = None  # the second losses of the layers, already a mean


def loss(model: nn.Module, batch: Any, smoothing: float = 0.0) -> Loss:
    """The loss of a sequence-to-sequence model on a batch (source, source_keep, target_in, target_out, target_keep).

    A model with `hidden` and a linear `output` takes the fast way; of any other the logits are asked.
    """
    _check(smoothing)
    keeps = {"keep": batch.source_keep, "target_keep": batch.target_keep}
    target, keep = batch.target_out, batch.target_keep
    if not hasattr(model, "hidden"):
        logits, second = model(batch.source, batch.target_in, **keeps)
        real = target.flatten() if keep is None else target[keep]
        total, plain = smoothed(logits.flatten(0, 1) if keep is None else logits[keep], real, smoothing)
        return Loss(total, plain, _count(target, keep), second)
    x, second = model.hidden(batch.source, batch.target_in, **keeps)
    if keep is None:
        x, target = x.flatten(0, 1), target.flatten()
    else:
        packed, rows = pack(target[..., None], keep)
        real = rows.real()
        x, target = x[real], packed[..., 0][real]
    total, plain = projected(x, model.output.weight, target, smoothing, model.output.bias)
    return Loss(total, plain, _count(batch.target_out, keep), second)


def smoothed(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits [N, V], target [N] -> the sum of (1 - smoothing) * -log p(target) + smoothing * mean of -log p, and the
    sum of -log p(target), both in float32 (or better)."""
    _check(smoothing)
    wide = _wide(logits)
    total = F.cross_entropy(wide, target, reduction="sum", label_smoothing=smoothing)
    with torch.no_grad():
        plain = total.detach() if smoothing == 0 else F.cross_entropy(wide.detach(), target, reduction="sum")
    return total, plain


def projected(
    x: Tensor, weight: Tensor, target: Tensor, smoothing: float = 0.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`smoothed` of the logits x [N, E] @ weight [V, E]^T + bias."""
    _check(smoothing)
    return smoothed(F.linear(x, weight, bias), target, smoothing)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _count(target: Tensor, keep: Tensor | None) -> Tensor:
    return torch.tensor(target.numel(), device=target.device) if keep is None else keep.sum()


def _check(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(f"label smoothing must be at least 0 and below 1, got {smoothing}")
