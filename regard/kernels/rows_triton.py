"""Rows of one head read and written by kernels that take tokens as they come."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def load_rows(x, rows, limit, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """The rows [n] below `limit`, of width D; zeros beyond."""
    column = tl.arange(0, BLOCK)
    at = x + rows.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=(rows < limit)[:, None] & (column < D)[None, :], other=0.0)


@jit
def store_rows(x, rows, limit, stride, value, D: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = x + rows.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(rows < limit)[:, None] & (column < D)[None, :])
