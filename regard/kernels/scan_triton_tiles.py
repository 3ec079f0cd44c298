"""What the kernels of scan_triton.py share on the device: features, factors of products, decays, documents, states.

DECAY is 0 for none, 1 for one of a head and token, 2 for one of each feature too. In 3 and 4 keys are logits, and sums
are kept in units of the running maximum of each feature: 3 takes it token by token, 4 chunk by chunk and as a power of
two, which is exact where no maximum grows by more than 2^120 inside a chunk; heads where one does are left to 3.
"""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportGeneralTypeIssues=false

import os

import torch
import triton.language as tl

from regard.kernels.jit_triton import jit

PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)
TOKENS = tl.constexpr(16)  # whose maximum is kept, and of a chunk of DECAY 3
LIFT = tl.constexpr(60)  # the largest weight of DECAY 4 is 2^60: what came before it may be as small as 2^-60
LOG2E = tl.constexpr(1.4426950408889634)
FLOOR = tl.constexpr(-1e30)  # of logits


@jit
def exp(x):
    # one instruction where tl.exp is five: that one takes care of numbers below the smallest
    return tl.exp2(x * LOG2E)


@jit
def exp_once(x):
    """For tiles that several products take: the compiler would compute `_exp` anew for each, and this it cannot."""
    if PTX:
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        x = exp(x)
    return x


@jit
def mapped(x, inside, MAP: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Features in float32, zeros where there is no token or no feature."""
    x = x.to(tl.float32)
    if MAP == 1:
        low = tl.minimum(x, 0.0)
        x = tl.maximum(x, 0.0) + (exp_once(low) if ONCE else exp(low))
    elif MAP == 2:
        x = tl.maximum(x, 0.0)
    elif MAP == 3:
        x = exp_once(x) if ONCE else exp(x)
    if (MAP == 1 or MAP == 3) and not EVEN:
        x = tl.where(inside, x, 0.0)
    return x


@jit
def sloped(grad, feature, MAP: tl.constexpr):
    """The gradient of what a feature was made of."""
    if MAP == 1:
        grad = grad * tl.minimum(feature, 1.0)
    elif MAP == 2:
        grad = tl.where(feature > 0, grad, 0.0)
    elif MAP == 3:
        grad = grad * feature
    return grad


@jit
def factor(x, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """As a factor of a product: bfloat16, or float32 rounded to tf32, whose last digits a GPU would cut off."""
    if NARROW:
        x = x.to(tl.bfloat16)
    else:
        x = x.to(tl.float32)
        if PRECISION == "tf32":
            bits = x.to(tl.uint32, bitcast=True)
            x = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return x


@jit
def inverse_of(den, floor, NORM: tl.constexpr):
    if NORM == 1:
        some = tl.abs(den) > 1e-30
        den = tl.where(some, 1.0 / tl.where(some, den, 1.0), 0.0)
    elif NORM == 2:
        den = 1.0 / tl.maximum(den, floor)
    else:
        den = tl.full(den.shape, 1.0, tl.float32)
    return den


@jit
def load_tile(x, i, stride, columns, inside, EVEN: tl.constexpr):
    at = x + i[:, None] * stride + columns[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@jit
def store_tile(x, i, stride, columns, value, inside, EVEN: tl.constexpr):
    at = x + i[:, None] * stride + columns[None, :]
    if EVEN:
        tl.store(at, value.to(x.dtype.element_ty))
    else:
        tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@jit
def decays(decay, i, stride, live, columns, K: tl.constexpr, DECAY: tl.constexpr):
    """A, the sum of the decays of a chunk up to each token, [C, 1] or [C, BK], and of all of them, [1] or [BK]."""
    if DECAY == 2:
        each = load_tile(decay, i, stride, columns, live[:, None] & (columns < K)[None, :], False).to(tl.float32)
        A = tl.cumsum(each, 0)
    else:
        each = tl.load(decay + i * stride, mask=live, other=0.0).to(tl.float64)
        A = tl.cumsum(each, 0).to(tl.float32)[:, None]
    # the last of the sums: a sum in another order would differ from it
    return A, tl.min(A, 0)


@jit
def documents(first, start, i, live, causal):
    """Which pairs of a chunk are of one document, which queries of the one before the chunk, which keys of the one
    after it, and whether that is the same one."""
    begun = tl.load(first + start + i, mask=live, other=-1)
    last = tl.max(begun, 0)
    return causal & ((start + i)[None, :] >= begun[:, None]), begun < start, start + i >= last, last < start


@jit
def add_product(x, y, total, TWICE: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """total + x y for a factor x; twice: with what rounding leaves of y."""
    rounded = factor(y, NARROW, PRECISION)
    total = tl.dot(x, rounded, total, input_precision=PRECISION)
    if TWICE and (NARROW or PRECISION == "tf32"):
        rest = factor(y - rounded.to(tl.float32), NARROW, PRECISION)
        total = tl.dot(x, rest, total, input_precision=PRECISION)
    return total


@jit
def load_state(
    S, z, number, part, columns, values,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STATE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """S transposed [BV, BK], and z as 16 rows that add up to it [16, BK], of a segment; or zeros. Once: only the first
    part of V has z."""
    if STATE:
        inside = (columns < K)[None, :] & (values < V)[:, None]
        state = tl.load(S + number * (K * V) + columns[None, :] * V + values[:, None], mask=inside, other=0.0)
        row = tl.load(z + number * K + columns, mask=columns < K, other=0.0)
        sums = tl.where(tl.arange(0, 16)[:, None] == (part * 16 if ONCE else 0), row[None, :], 0.0)
    else:
        state, sums = tl.zeros([BV, BK], tl.float32), tl.zeros([16, BK], tl.float32)
    return state, sums


@jit
def store_state(S, z, number, part, state, sums, columns, values, K: tl.constexpr, V: tl.constexpr):
    inside = (columns < K)[None, :] & (values < V)[:, None]
    tl.store(S + number * (K * V) + columns[None, :] * V + values[:, None], state, mask=inside)
    # the first part of V is enough for z
    if part == 0:
        tl.store(z + number * K + columns, tl.sum(sums, 0), mask=columns < K)


@jit
def split_row(e, r, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """e [C] as the first two of 16 rows: rounded, and what is left."""
    rounded = factor(e, NARROW, PRECISION).to(tl.float32)
    rest = tl.where(r == 1, (e - rounded)[None, :], 0.0)
    return factor(tl.where(r == 0, rounded[None, :], rest), NARROW, PRECISION)


@jit
def program(H: tl.constexpr, GROUP: tl.constexpr):
    """The head, segment and batch row that a program has, its head among all and its key/value head."""
    h, segment, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    return h, segment, b, b * H + h, h // GROUP


@jit
def is_left_to_other(safe, head, DECAY: tl.constexpr):
    """Whether a head is not for this DECAY: 4 takes those whose maxima grow slowly, 3 the others."""
    return (tl.load(safe + head) != 0) != (DECAY == 4)


@jit
def real_length(lengths, b, T, RAGGED: tl.constexpr):
    """How many tokens of a batch row are real."""
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    return length


@jit
def place(BK: tl.constexpr, BV: tl.constexpr, V: tl.constexpr):
    """Which parts of K and of V a program has, its features and its values."""
    parts: tl.constexpr = (V + BV - 1) // BV
    part_k, part_v = tl.program_id(2) // parts, tl.program_id(2) % parts
    return part_k, part_v, part_k * BK + tl.arange(0, BK), part_v * BV + tl.arange(0, BV)


@jit
def power(x):
    """2^x of whole numbers, exactly; zero below the smallest normal one."""
    return ((tl.minimum(tl.maximum(x, -127.0), 127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@jit
def unit(tops, position, last, columns, K: tl.constexpr, DECAY: tl.constexpr):
    """In what units sums at a position are kept, [BK]: the maximum before it, or its power of two. `last` is that
    of the last maximum."""
    at = tl.minimum((position + TOKENS - 1) // TOKENS, last)
    top = tl.load(tops + columns * (last + 1) + at, mask=columns < K, other=0.0)
    if DECAY == 4:
        top = tl.floor(top * LOG2E) - LIFT
    return top


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def weights_of_logits(x, inside, before, after, DECAY: tl.constexpr):
    """exp of logits [C, BK] in units of their maxima, and the sums A of what these decay, up to each token and of all;
    for DECAY 4 none of tokens, and of all as a factor."""
    x = tl.where(inside, tl.minimum(tl.maximum(x.to(tl.float32), FLOOR), -FLOOR), FLOOR)
    if DECAY == 4:
        # a power of two times a number between one and two: later keys do not change how earlier ones are rounded
        x = x * LOG2E
        whole = tl.floor(x)
        ks, A, total = tl.exp2(x - whole) * power(whole - after[None, :]), x, power(before - after)
    else:
        top = tl.maximum(tl.associative_scan(x, 0, _larger), before[None, :])
        ks, A, total = tl.where(inside, exp(x - top), 0.0), before[None, :] - top, before - after
    return ks, A, total


@jit
def load_keys(
    k, k_t, decay, d_t, tops, last, start, i, columns, live, is_k,
    K: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The features of a chunk of keys in float32, and the sums A of their decays, up to each token and of all."""
    x = load_tile(k + start.to(tl.int64) * k_t, i, k_t, columns, is_k, EVEN)
    if DECAY > 2:
        before, after = unit(tops, start, last, columns, K, DECAY), unit(tops, start + C, last, columns, K, DECAY)
        ks, A, total = weights_of_logits(x, is_k, before, after, DECAY)
    else:
        ks = mapped(x, is_k, MAP, EVEN, ONCE)
        A, total = ks, columns
        if DECAY > 0:
            A, total = decays(decay + start.to(tl.int64) * d_t, i, d_t, live, columns, K, DECAY)
    return ks, A, total


@jit
def faded(state, sums, xs, A, total, DECAY: tl.constexpr):
    """What a chunk leaves of the sums before it, and its keys as they are behind it."""
    if DECAY == 4:
        state, sums = state * total[None, :], sums * total[None, :]
    elif DECAY > 0:
        state, sums, xs = state * exp(total)[None, :], sums * exp(total)[None, :], xs * exp(total[None, :] - A)
    return state, sums, xs


@jit
def pair_weights(A, ks, visible):
    """The weight of the key j for query t with a decay of each feature, [t, j, BK]."""
    return exp(tl.where(visible[:, :, None], A[:, None, :] - A[None, :, :], float("-inf"))) * ks[None, :, :]


@jit
def sums_seen(z, A, ks, visible, before, ones, DECAY: tl.constexpr, RESET: tl.constexpr, NARROW, PRECISION):
    """z at each query of a chunk, [C, BK]."""
    seen = add_product(ones, z, tl.zeros(ks.shape, tl.float32), True, NARROW, PRECISION)
    if DECAY > 0 and DECAY < 4:
        seen = seen * exp(A)
    if RESET:
        seen = tl.where(before[:, None], seen, 0.0)
    if DECAY == 2 or DECAY == 3:
        seen = seen + tl.sum(pair_weights(A, ks, visible), 1)
    else:
        weight = tl.where(visible, 1.0, 0.0)
        if DECAY == 1:
            weight = weight * exp(tl.where(visible, A - tl.trans(A), 0.0))
        weight, ks = factor(weight, NARROW, PRECISION), factor(ks, NARROW, PRECISION)
        seen = tl.dot(weight, ks, seen, input_precision=PRECISION)
    return seen


@jit(do_not_specialize=["T", "count"])
def group_maxima(
    k, lengths, tops, k_b, k_h, k_t, T, count,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, RAGGED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The maxima of each feature over groups of 16 tokens, behind the first column of tops [B, H, K, count + 1]."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, TOKENS), tl.arange(0, BK)
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    for n in tl.static_range(GROUPS):
        group = (tl.program_id(0) // H) * GROUPS + n
        at = group.to(tl.int64) * TOKENS
        inside = (at + i < length)[:, None] & (columns < K)[None, :]
        x = load_tile(k + b * k_b + h * k_h + at * k_t, i, k_t, columns, inside, False).to(tl.float32)
        top = tl.max(tl.where(inside, tl.minimum(tl.maximum(x, FLOOR), -FLOOR), FLOOR), 0)
        to = tops + ((b * H + h) * K + columns) * (count + 1) + 1 + group
        tl.store(to, top, mask=(columns < K) & (columns * 0 + group < count))
