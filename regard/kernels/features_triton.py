"""Random features in Triton: exp(w_r . x - |x|^2 / 2 - top) of rows x, without logits in memory.

x [B, H, T, D] is multiplied by `scale` first, W [R, D]. `top` [B, H, T] keeps exp from overflowing and is a constant in
the gradient: the largest logit of the row itself, or what the caller has made of `row_maxima`. Logits are float32:
bfloat16 rows meet W as two bfloat16 parts, other dtypes float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from regard.kernels.parts import once
from regard.kernels.scan_triton_cut import empty, power_of_two, rows, strides


def row_maxima(x: Tensor, W: Tensor, scale: float) -> Tensor:
    """The largest logit of each row, [B, H, T]."""
    B, H, T, _ = x.shape
    x, top = rows(x.detach()), empty(x, (B, H, T))
    _launch(x, W, scale, top, None, own=True)
    return top


def exp_features(x: Tensor, W: Tensor, scale: float, top: Tensor | None = None) -> Tensor:
    """[B, H, T, R] in the dtype of x; without `top` relative to the largest of each row."""
    return _Features.apply(x, W, scale, top)


class _Features(Function):
    @staticmethod
    def forward(ctx, x, W, scale, top):
        x, W = rows(x), W.contiguous()
        out = _forward(x, W, scale, top)
        ctx.save_for_backward(x, W, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        once()
        x, W, out = ctx.saved_tensors
        return _backward(x, W, ctx.scale, out, rows(grad)), None, None, None


def _forward(x: Tensor, W: Tensor, scale: float, top: Tensor | None) -> Tensor:
    B, H, T, _ = x.shape
    out = empty(x, (B, T, H, len(W)), x.dtype).transpose(1, 2)
    own = top is None
    _launch(x, W, scale, empty(x, (B, H, T)) if own else top.contiguous(), out, own=own)
    return out


def _launch(x: Tensor, W: Tensor, scale: float, top: Tensor, out: Tensor | None, *, own: bool) -> None:
    B, H, T, D = x.shape
    sizes = {"H": H, "D": D, "BD": power_of_two(D), "R": len(W), "BR": power_of_two(len(W))}
    with torch.cuda.device_of(x):
        _exp_features[(H * triton.cdiv(T, 32), B)](
            x, W, top, out, *strides(x), T, scale,
            **sizes, OWN=own, NARROW=x.dtype == torch.bfloat16, C=32, num_warps=4, num_stages=1,
        )  # fmt: skip


def _backward(x: Tensor, W: Tensor, scale: float, out: Tensor, grad: Tensor) -> Tensor:
    B, H, T, D = x.shape
    dx = empty(x, (B, T, H, D), x.dtype).transpose(1, 2)
    sizes = {"H": H, "D": D, "BD": power_of_two(D), "R": len(W), "BR": min(64, power_of_two(len(W)))}
    with torch.cuda.device_of(x):
        _of_rows[(H * triton.cdiv(T, 64), B)](
            x, W, out, grad, dx, *strides(x), *strides(grad), T, scale,
            **sizes, NARROW=x.dtype == torch.bfloat16, C=64, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dx


@triton.jit(do_not_specialize=["T"])
def _exp_features(
    x, W, top, out, x_b, x_h, x_t, T, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    OWN: tl.constexpr, NARROW: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The features of C rows, or, where there is no `out`, their largest logits."""
    h, b, i = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), (tl.program_id(0) // H) * C + tl.arange(0, C)
    d, r = tl.arange(0, BD), tl.arange(0, BR)
    inside = (i < T)[:, None] & (d < D)[None, :]
    row = tl.load(x + b * x_b + h * x_h + i.to(tl.int64)[:, None] * x_t + d[None, :], mask=inside, other=0.0)
    weight = tl.load(W + r[None, :] * D + d[:, None], mask=(r < R)[None, :] & (d < D)[:, None], other=0.0)
    weight = weight.to(tl.float32) * scale
    if NARROW:
        high = weight.to(tl.bfloat16)
        logits = tl.dot(row, high)
        logits = tl.dot(row, (weight - high.to(tl.float32)).to(tl.bfloat16), logits)
    else:
        logits = tl.dot(row.to(tl.float32), weight, input_precision="ieee")
    length = row.to(tl.float32) * scale
    logits -= (tl.sum(length * length, 1) * 0.5)[:, None]
    at = (b * H + h) * T + i
    if OWN:
        most = tl.max(tl.where((r < R)[None, :], logits, float("-inf")), 1)
        if out is None:
            tl.store(top + at, most, mask=i < T)
    else:
        most = tl.load(top + at, mask=i < T, other=0.0)
    if out is not None:
        # padded rows may lie above the largest real one, and are left out by whoever sums
        feature = tl.exp2(tl.minimum(logits - most[:, None], 0.0) * 1.4426950408889634)
        to = out + ((b * T + i) * H + h)[:, None] * R + r[None, :]
        tl.store(to, feature.to(out.dtype.element_ty), mask=(i < T)[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["T"])
def _of_rows(
    x, W, feature, grad, dx, x_b, x_h, x_t, g_b, g_h, g_t, T, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    NARROW: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx = scale (s W - scale x sum_r s_r) with s = feature * grad, the gradients of the logits."""
    h, b, i = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), (tl.program_id(0) // H) * C + tl.arange(0, C)
    d, live = tl.arange(0, BD), i < T
    acc, total = tl.zeros([C, BD], tl.float32), tl.zeros([C], tl.float32)
    for n in range((R + BR - 1) // BR):
        r = n * BR + tl.arange(0, BR)
        mask = live[:, None] & (r < R)[None, :]
        seen = tl.load(feature + ((b * T + i) * H + h)[:, None] * R + r[None, :], mask=mask, other=0.0).to(tl.float32)
        back = tl.load(grad + b * g_b + h * g_h + i.to(tl.int64)[:, None] * g_t + r[None, :], mask=mask, other=0.0)
        slope = seen * back.to(tl.float32)
        total += tl.sum(slope, 1)
        weight = tl.load(W + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
        if NARROW:
            acc = tl.dot(slope.to(tl.bfloat16), weight.to(tl.bfloat16), acc)
        else:
            acc = tl.dot(slope, weight.to(tl.float32), acc, input_precision="ieee")
    inside = live[:, None] & (d < D)[None, :]
    row = tl.load(x + b * x_b + h * x_h + i.to(tl.int64)[:, None] * x_t + d[None, :], mask=inside, other=0.0)
    acc = (acc - row.to(tl.float32) * (total * scale)[:, None]) * scale
    tl.store(dx + ((b * T + i) * H + h)[:, None] * D + d[None, :], acc.to(dx.dtype.element_ty), mask=inside)
