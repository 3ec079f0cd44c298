"""The kernels of random_features_triton.py: features of rows, their largest logits, and the gradients of rows.

A program takes several blocks of rows of a head, one after the other, so that the directions W are loaded once.
"""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.scan_triton_tiles import PTX, exp


@jit
def load_directions(W, d, r, D: tl.constexpr, R: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr):
    """W transposed [BD, BR], rounded where rows are bfloat16, and what rounding left of it."""
    inside = (r < R)[None, :] & (d < D)[:, None]
    weight = tl.load(W + r[None, :] * D + d[:, None], mask=inside, other=0.0)
    rest = weight
    if NARROW:
        high = weight.to(tl.bfloat16)
        if SPLIT:
            rest = (weight.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        weight = high
    else:
        weight = weight.to(tl.float32)
    return weight, rest


@jit
def products(row, weight, rest, NARROW: tl.constexpr, SPLIT: tl.constexpr):
    """w_r . x of each row, in float32."""
    if NARROW:
        product = tl.dot(row, weight)
        if SPLIT:
            product = tl.dot(row, rest, product)
    else:
        product = tl.dot(row.to(tl.float32), weight, input_precision="ieee")
    return product


@jit(do_not_specialize=["T"])
def exp_features(
    x, W, top, out, x_b, x_h, x_t, T, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    OWN: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """exp(w_r . x' - |x'|^2 / 2 - top) with x' = scale x; or, where there is no `out`, the largest logits."""
    h, b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    d, r, begin = tl.arange(0, BD), tl.arange(0, BR), (tl.program_id(0) // H) * (C * BLOCKS)
    weight, rest = load_directions(W, d, r, D, R, NARROW, SPLIT)
    x += b * x_b + h * x_h
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        i = begin + n * C + tl.arange(0, C)
        inside = (i < T)[:, None] & (d < D)[None, :]
        row = tl.load(x + i.to(tl.int64)[:, None] * x_t + d[None, :], mask=inside, other=0.0)
        length = row.to(tl.float32) * scale
        half = tl.sum(length * length, 1) * 0.5
        logits = products(row, weight, rest, NARROW, SPLIT) * scale - half[:, None]
        at = (b * H + h) * T + i
        if OWN:
            most = tl.max(tl.where((r < R)[None, :], logits, float("-inf")), 1)
            if out is None:
                tl.store(top + at, most, mask=i < T)
        else:
            most = tl.load(top + at, mask=i < T, other=0.0)
        if out is not None:
            # padded rows may lie above the largest real one, and are left out by whoever sums
            feature = exp(tl.minimum(logits - most[:, None], 0.0))
            to = out + ((b * T + i) * H + h)[:, None] * R + r[None, :]
            tl.store(to, feature.to(out.dtype.element_ty), mask=(i < T)[:, None] & (r < R)[None, :])


@jit(do_not_specialize=["T"])
def exp_gradient(
    x, W, feature, grad, dx, x_b, x_h, x_t, g_b, g_h, g_t, T, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    NARROW: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dx = scale (s W - scale x sum_r s_r) with s = feature * grad, the gradients of the logits; s is taken in parts
    of BR."""
    h, b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    d, begin = tl.arange(0, BD), (tl.program_id(0) // H) * (C * BLOCKS)
    x, grad = x + b * x_b + h * x_h, grad + b * g_b + h * g_h
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        i = begin + n * C + tl.arange(0, C)
        live, acc, total = i < T, tl.zeros([C, BD], tl.float32), tl.zeros([C], tl.float32)
        for part in tl.static_range((R + BR - 1) // BR):
            r = part * BR + tl.arange(0, BR)
            mask = live[:, None] & (r < R)[None, :]
            seen = tl.load(feature + ((b * T + i) * H + h)[:, None] * R + r[None, :], mask=mask, other=0.0)
            back = tl.load(grad + i.to(tl.int64)[:, None] * g_t + r[None, :], mask=mask, other=0.0)
            slope = seen.to(tl.float32) * back.to(tl.float32)
            total += tl.sum(slope, 1)
            weight = tl.load(W + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
            if NARROW:
                acc = tl.dot(slope.to(tl.bfloat16), weight.to(tl.bfloat16), acc)
            else:
                acc = tl.dot(slope, weight.to(tl.float32), acc, input_precision="ieee")
        inside = live[:, None] & (d < D)[None, :]
        row = tl.load(x + i.to(tl.int64)[:, None] * x_t + d[None, :], mask=inside, other=0.0)
        acc = (acc - row.to(tl.float32) * (total * scale)[:, None]) * scale
        tl.store(dx + ((b * T + i) * H + h)[:, None] * D + d[None, :], acc.to(dx.dtype.element_ty), mask=inside)


@jit
def _sine_cosine(x, WIDE: tl.constexpr):
    """Of narrow features by one instruction each, off by 2^-21 between -pi and pi; that is where angles go first."""
    if PTX and not WIDE:
        turns = tl.floor(x * 0.15915494309189535 + 0.5)
        # 2 pi as a sum of three numbers of few digits: products with the number of turns are exact
        x = x - turns * 6.28125 - turns * 0.0019350051879882812 - turns * 3.0199159819857e-07
        sine = tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        cosine = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        sine, cosine = tl.sin(x), tl.cos(x)
    return sine, cosine


@jit
def _load_unit(x, i, x_t, d, inside):
    """Rows, the same of length one in float32, and one over their length."""
    row = tl.load(x + i.to(tl.int64)[:, None] * x_t + d[None, :], mask=inside, other=0.0)
    wide = row.to(tl.float32)
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)
    return row, wide * inverse[:, None], inverse


@jit(do_not_specialize=["T"])
def trigonometric_features(
    x, W, gate, out, x_b, x_h, x_t, gate_b, gate_h, gate_t, T, share,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    NARROW: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """share [sin(a), cos(a)] with a_r = w_r . x / |x|, times sigmoid(-gate) where there is one."""
    h, b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    d, r, begin = tl.arange(0, BD), tl.arange(0, BR), (tl.program_id(0) // H) * (C * BLOCKS)
    weight, rest = load_directions(W + h * (R * D), d, r, D, R, NARROW, SPLIT)
    x += b * x_b + h * x_h
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        i = begin + n * C + tl.arange(0, C)
        live = i < T
        row, _, inverse = _load_unit(x, i, x_t, d, live[:, None] & (d < D)[None, :])
        sine, cosine = _sine_cosine(
            products(row, weight, rest, NARROW, SPLIT) * inverse[:, None], out.dtype.element_ty == tl.float32
        )
        factor = tl.zeros([C], tl.float32) + share
        if gate is not None:
            open = tl.load(gate + b * gate_b + h * gate_h + i.to(tl.int64) * gate_t, mask=live, other=0.0)
            factor = factor * tl.sigmoid(-open.to(tl.float32))
        to = out + ((b * T + i) * H + h)[:, None] * (2 * R) + r[None, :]
        mask = live[:, None] & (r < R)[None, :]
        tl.store(to, (sine * factor[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(to + R, (cosine * factor[:, None]).to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["T", "batch"])
def trigonometric_gradient(
    x, W, gate, feature, grad, dx, dW, d_gate,
    x_b, x_h, x_t, gate_b, gate_h, gate_t, g_b, g_h, g_t, T, batch,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    NARROW: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """With s_r = grad_sin cos - grad_cos sin, the gradient of the angles, and y = s W: dx = (y - x' (x' . y)) / |x|
    for x' = x / |x|, and dW = s^T x', of each program by itself; that of the gate is -sigmoid(gate) grad . feature."""
    h, b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    d, r, begin = tl.arange(0, BD), tl.arange(0, BR), (tl.program_id(0) // H) * (C * BLOCKS)
    of_W = (r < R)[:, None] & (d < D)[None, :]
    weight = tl.load(W + h * (R * D) + r[:, None] * D + d[None, :], mask=of_W, other=0.0)
    weight = weight.to(tl.bfloat16) if NARROW else weight.to(tl.float32)
    x, grad = x + b * x_b + h * x_h, grad + b * g_b + h * g_h
    sums = tl.zeros([BR, BD], tl.float32)
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        i = begin + n * C + tl.arange(0, C)
        live = i < T
        inside, mask = live[:, None] & (d < D)[None, :], live[:, None] & (r < R)[None, :]
        from_feature = feature + ((b * T + i) * H + h)[:, None] * (2 * R) + r[None, :]
        from_grad = grad + i.to(tl.int64)[:, None] * g_t + r[None, :]
        sine = tl.load(from_feature, mask=mask, other=0.0).to(tl.float32)
        cosine = tl.load(from_feature + R, mask=mask, other=0.0).to(tl.float32)
        of_sine = tl.load(from_grad, mask=mask, other=0.0).to(tl.float32)
        of_cosine = tl.load(from_grad + R, mask=mask, other=0.0).to(tl.float32)
        slope = of_sine * cosine - of_cosine * sine
        if gate is not None:
            open = tl.load(gate + b * gate_b + h * gate_h + i.to(tl.int64) * gate_t, mask=live, other=0.0)
            through = tl.sum(of_sine * sine + of_cosine * cosine, 1)
            tl.store(d_gate + (b * H + h) * T + i, -tl.sigmoid(open.to(tl.float32)) * through, mask=live)
        _, unit, inverse = _load_unit(x, i, x_t, d, inside)
        if NARROW:
            slope = slope.to(tl.bfloat16)
            back = tl.dot(slope, weight)
            sums = tl.dot(tl.trans(slope), unit.to(tl.bfloat16), sums)
        else:
            back = tl.dot(slope, weight, input_precision="ieee")
            sums = tl.dot(tl.trans(slope), unit, sums, input_precision="ieee")
        back = (back - unit * tl.sum(unit * back, 1)[:, None]) * inverse[:, None]
        tl.store(dx + ((b * T + i) * H + h)[:, None] * D + d[None, :], back.to(dx.dtype.element_ty), mask=inside)
    to = dW + ((tl.program_id(0) // H * batch + b) * H + h) * (R * D) + r[:, None] * D + d[None, :]
    tl.store(to, sums, mask=of_W)
