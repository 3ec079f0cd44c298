"""Cross entropy of rows of logits, which become their own gradient in place.

PyTorch's operators read and write a few rows of logits several times while these are in the cache. The kernel in Triton
takes a row to a program: it is read for its logsumexp, read again for the gradient and overwritten, in one launch.
"""

import torch
from torch import Tensor

from regard.kernels.choose import DTYPES, use_triton

IGNORED = -100  # a target that is left out of the loss
CHUNK = {"cpu": 2**20, "cuda": 2**26}  # numbers of logits worked on at a time


def cross_entropy(
    logits: Tensor, target: Tensor, label_smoothing: float, *, ignores: bool, trains: bool
) -> tuple[Tensor, Tensor]:
    """Logits [N, V], target [N] -> two sums over N in float32 or better: of (1 - label_smoothing) * -log p(target) +
    label_smoothing * mean of -log p, and of -log p(target). `ignores`: some targets are IGNORED. `trains`: the gradient
    of the first sum takes the place of the logits."""
    if logits.dtype in DTYPES and logits.numel() and use_triton("cross_entropy", logits):
        # imported late: not every PyTorch for a CPU comes with Triton
        from regard.kernels import cross_entropy_triton

        missed, spread = cross_entropy_triton.rows(logits, target, label_smoothing, trains)
        plain = missed.sum()
        total = plain if spread is None else (1 - label_smoothing) * plain - label_smoothing / logits.shape[1] * spread
        return total, plain.clone() if spread is None else plain
    return _in_chunks(logits, target, label_smoothing, ignores, trains)


def _in_chunks(
    logits: Tensor, target: Tensor, label_smoothing: float, ignores: bool, trains: bool
) -> tuple[Tensor, Tensor]:
    V, wide = logits.shape[1], torch.promote_types(logits.dtype, torch.float32)
    total, plain = (torch.zeros((), dtype=wide, device=logits.device) for _ in range(2))
    size = max(CHUNK.get(logits.device.type, CHUNK["cuda"]) // V, 1)
    for rows, ids in zip(logits.split(size), target.split(size), strict=True):
        logp, real = torch.log_softmax(rows, 1, dtype=wide), (ids != IGNORED)[:, None]
        at = torch.where(real, ids[:, None], 0)
        missed = torch.where(real, -logp.gather(1, at), 0)
        # not in place: compiled by PyTorch 2.11, what was written in place and returned has no gradient
        # (pytorch/pytorch issue 180642)
        plain = plain + missed.sum()
        spread = torch.where(real, logp.sum(1, keepdim=True), 0).sum() if label_smoothing else 0.0
        total = total + ((1 - label_smoothing) * missed.sum() - label_smoothing / V * spread)
        if trains:
            slope = logp.exp_()
            slope = slope.sub_(label_smoothing / V) if label_smoothing else slope
            slope.scatter_add_(1, at, torch.full_like(missed, label_smoothing - 1))
            rows.copy_(slope.mul_(real) if ignores else slope)
    return total, plain
