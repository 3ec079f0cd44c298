"""cross_entropy.py in Triton."""

# Triton's compiler reads the kernel's body, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.cross_entropy import IGNORED
from regard.kernels.jit_triton import jit

WIDEST = 8192  # numbers of a row at a time


def rows(logits: Tensor, target: Tensor, label_smoothing: float, trains: bool) -> tuple[Tensor, Tensor | None]:
    """-log p(target) of each row [N], and with label smoothing the sum of all log p of the rows that count. `trains`:
    the logits are overwritten."""
    (N, V), block = logits.shape, min(triton.next_power_of_2(logits.shape[1]), WIDEST)
    assert logits.stride() == (V, 1), "logits are contiguous"
    missed = torch.empty(N, dtype=torch.float32, device=logits.device)
    spread = torch.empty_like(missed) if label_smoothing else None
    with torch.cuda.device_of(logits):
        rows_kernel[(N,)](
            logits,
            target.contiguous(),
            missed,
            spread,
            V,
            label_smoothing,
            IGNORED=IGNORED,
            TRAINS=trains,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
    return missed, None if spread is None else spread.sum()


@jit
def rows_kernel(
    logits, target, missed, spread, V, smoothing, IGNORED: tl.constexpr, TRAINS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    own = tl.load(target + row)
    real = own != IGNORED
    # finite: a difference of two such is a number
    top = tl.full([], -3.4028234663852886e38, tl.float32)
    mass = tl.zeros([], tl.float32)
    whole = tl.zeros([], tl.float32)
    at_own = tl.zeros([], tl.float32)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
        # summed, not loaded: another thread may have overwritten it by then
        at_own += tl.sum(tl.where(column == own, x, 0.0), 0)
        if spread is not None:
            whole += tl.sum(tl.where(column < V, x, 0.0), 0)
    lse = top + tl.log(mass)
    tl.store(missed + row, tl.where(real, lse - at_own, 0.0))
    if spread is not None:
        tl.store(spread + row, tl.where(real, whole - V * lse, 0.0))
    if TRAINS:
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
            slope = tl.exp(x - lse) - smoothing / V - tl.where(column == own, 1.0 - smoothing, 0.0)
            slope = tl.where(real, slope, 0.0)
            tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < V)
