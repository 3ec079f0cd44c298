"""Vectors of a head taken and added up by index, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # that a program moves


def take(x: Tensor, at: Tensor) -> Tensor:
    """x [B, H, N, D] at [B, H, n]: [B, H, n, D]"""
    (B, H, _, D), n = x.shape, at.shape[2]
    x = x if x.stride(3) == 1 else x.contiguous()
    y = torch.empty(B, H, n, D, dtype=x.dtype, device=x.device)
    if y.numel():
        width, rows = _tile(D)
        grid = (triton.cdiv(n, rows), B * H)
        _take[grid](x, at.contiguous(), y, H, n, D, *x.stride()[:3], WIDTH=width, ROWS=rows)
    return y


def add(y: Tensor, at: Tensor, N: int) -> Tensor:
    """The sums of y [B, H, n, D] by at [B, H, n]: [B, H, N, D]"""
    B, H, n, D = y.shape
    y = y if y.stride(3) == 1 else y.contiguous()
    total = torch.zeros(B, H, N, D, device=y.device)
    if y.numel():
        width, rows = _tile(D)
        grid = (triton.cdiv(n, rows), B * H)
        _add[grid](y, at.contiguous(), total, H, N, n, D, *y.stride()[:3], WIDTH=width, ROWS=rows)
    return total.to(y.dtype)


def _tile(D: int) -> tuple[int, int]:
    width = triton.next_power_of_2(D)
    return width, max(1, NUMBERS // width)


@triton.jit
def _take(x, at, y, H, n, D, stride_b, stride_h, stride_n, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (column < D)[None, :]
    token = tl.load(at + head * n + row, mask=row < n, other=0)
    first = x + (head // H) * stride_b + (head % H) * stride_h
    part = tl.load(first + token[:, None] * stride_n + column[None, :], mask=inside, other=0.0)
    tl.store(y + (head * n + row)[:, None] * D + column[None, :], part, mask=inside)


@triton.jit
def _add(y, at, total, H, N, n, D, stride_b, stride_h, stride_n, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (column < D)[None, :]
    token = tl.load(at + head * n + row, mask=row < n, other=0)
    first = y + (head // H) * stride_b + (head % H) * stride_h
    part = tl.load(first + row[:, None] * stride_n + column[None, :], mask=inside, other=0.0)
    place = total + (head * N + token)[:, None] * D + column[None, :]
    tl.atomic_add(place, part.to(tl.float32), mask=inside, sem="relaxed")
