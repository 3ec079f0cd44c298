"""The kernels of features_triton.py: the features of rows or their largest logits, and the gradient of rows."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportCallIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit(do_not_specialize=["T"])
def exp_features_kernel(
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


@jit(do_not_specialize=["T"])
def rows_gradient_kernel(
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
