"""The scans of scan.py in PyTorch's operators: tokens in chunks, forward and backward.

A span is a few chunks that are worked on at once. The backward pass keeps the inputs and the state before each span,
computes the rest again and scans in reverse.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.compiling import exporting, is_dynamic

CHUNK = 64  # near the minimum of the time for D = 64 and R = 64 to 256; a power of two
BLOCK = 4  # feature_scan forms the pairs in blocks of 4 one by one: smaller matrix products take longer than that
RESET = -104.0  # its exp is zero in float32, and sums of decays far below it would only lose digits


class _Span(NamedTuple):
    """n chunks of c tokens, X = B H n: what the forward and the backward pass both need. The value is (v, 1)."""

    q: Tensor  # [X, c, R]
    k: Tensor  # [X, c, R]
    v: Tensor  # [X, c, D + 1]
    weight: Tensor | None  # [X, c, c] of key j for query t; None is one
    arrive: Tensor | None  # [X, c, 1] of the state before the chunk for query t
    leave: Tensor | None  # [X, c, 1] of key j in what the chunk adds to the state
    kept: Tensor  # [X, c, R] k * leave
    shrink: Tensor | None  # [B H, n, 1, 1] of the state before the chunk in the state after it
    before: Tensor  # [X, R, D + 1] the state before the chunk
    state: Tensor  # [B, H, R, D + 1] the state after the span


def _span(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, at: slice, n: int) -> _Span:
    q, k, v = (_chunks(x, at, n, state.dtype) for x in (q, k, v))
    v = F.pad(v, (0, 1), value=1.0)
    weight = arrive = leave = shrink = None
    if decay is not None:
        A = _chunks(decay[..., None], at, n, state.dtype).cumsum(1)
        weight = (A - A.mT).exp_()  # not above one for j <= t; the rest, which may be inf, is replaced by `_lower`
        arrive, leave, shrink = A.exp(), (A[:, -1:] - A).exp(), A[:, -1:].exp().unflatten(0, (-1, n))
    kept = _scaled(k, leave)
    before, state = _carry(state, kept.mT @ v, shrink, n)
    return _Span(q, k, v, weight, arrive, leave, kept, shrink, before, state)


class Scan(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        D, states, ctx.spans = v.shape[-1], [], _spans(q)
        numerator, denominator = state.new_empty(v.shape), state.new_empty(v.shape[:3])
        for at, n in ctx.spans:
            s = _span(q, k, v, decay, state, at, n)
            score = _lower(s.q @ s.k.mT, s.weight)
            out = torch.baddbmm(_scaled(s.q, s.arrive) @ s.before, score, s.v)
            _put(numerator, at, out[..., :D])
            _put(denominator, at, out[..., D])
            states.append(state)
            state = s.state
        ctx.save_for_backward(q, k, v, decay, *states)
        return numerator, denominator, state

    @staticmethod
    def backward(
        ctx: Any, g_numerator: Tensor, g_denominator: Tensor, d_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        refuse_second_derivative()
        q, k, v, decay, *states = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        d_decay = None if decay is None else torch.empty_like(decay)
        with exact(q):
            for (at, n), state in reversed(list(zip(ctx.spans, states, strict=True))):
                s = _span(q, k, v, decay, state, at, n)
                g = torch.cat([_chunks(x, at, n, state.dtype) for x in (g_numerator, g_denominator[..., None])], -1)
                score, d_score = _lower(s.q @ s.k.mT, s.weight), _lower(g @ s.v.mT, s.weight)
                # what a chunk adds has the gradient of the state after it
                d_after, d_state = _carry(d_state, _scaled(s.q, s.arrive).mT @ g, s.shrink, n, reverse=True)
                d_kept = s.v @ d_after.mT
                d_q = torch.baddbmm(_scaled(g @ s.before.mT, s.arrive), d_score, s.k)
                d_k = torch.baddbmm(_scaled(d_kept, s.leave), d_score.mT, s.q)
                d_v = torch.baddbmm(s.kept @ d_after, score.mT, g)
                _put(dq, at, d_q)
                _put(dk, at, d_k)
                _put(dv, at, d_v[..., :-1])
                if d_decay is not None and s.shrink is not None:
                    # exp of the sum A_t of decays multiplies what query t reads and divides what key t gives;
                    # the last one of a chunk also multiplies all that leaves it, new or passing through
                    d_A = (s.q * d_q - s.k * d_k).sum(-1)
                    d_A[:, -1] += (s.kept * d_kept).sum((1, 2)) + (s.before * d_after).sum((1, 2)) * s.shrink.flatten()
                    _put(d_decay, at, d_A.flip(-1).cumsum(-1).flip(-1))
        return dq, dk, dv, d_decay, d_state


class _FeatureSpan(NamedTuple):
    """As `_Span`; weights have a feature axis and come from running maxima, which are constants."""

    v: Tensor  # [X, c, D + 1]
    near: Tensor  # [X, c / b, b, b, R] weight of key j for query t in the same block of b
    far: list[tuple[int, Tensor, Tensor]]  # b and the two factors for pairs of blocks: key [X, c / 2b, b, R], query
    arrive: Tensor  # [X, c, R]
    kept: Tensor  # [X, c, R]
    z: Tensor  # [X, c, R] the denominators
    u: Tensor  # [X, c, R] q / z
    score: Tensor  # [X, c, c]
    shrink: Tensor  # [B H, n, R, 1]
    before: Tensor  # [X, R, D + 1]
    state: Tensor  # [B, H, R, D + 1]
    top: Tensor  # [B, H, R] after the span


def _feature_span(q: Tensor, k: Tensor, v: Tensor, state: Tensor, top: Tensor, at: slice, n: int) -> _FeatureSpan:
    q, k, v = (_chunks(x, at, n, state.dtype) for x in (q, k, v))
    v = F.pad(v, (0, 1), value=1.0)
    c = q.shape[1]
    b = min(BLOCK, c)

    M = k.clone()  # the running maximum, first of the chunk alone
    for width in _widths(1, c):
        left, right = _halves(M, width)
        right.clamp_(min=left[:, :, -1:])
    tops = _running_max(torch.cat([top.flatten(0, 1)[:, None], M[:, -1].unflatten(0, (-1, n))], 1))
    first, last = (x.flatten(0, 1)[:, None] for x in (tops[:, :-1], tops[:, 1:]))  # before and after the chunk
    M = torch.maximum(M, first)
    arrive, kept, shrink = (first - M).exp(), (k - last).exp(), (first - last).exp().unflatten(0, (-1, n)).mT
    before, state = _carry(state, kept.mT @ v, shrink, n)

    near = k.unflatten(1, (-1, 1, b)) - M.unflatten(1, (-1, b, 1))
    future = torch.ones(b, b, dtype=torch.bool, device=q.device).triu_(1)[..., None]
    near = near.exp_().masked_fill_(future, 0)
    z, far = near.sum(3).flatten(1, 2), []
    for width in _widths(b, c):
        (k_left, _), (M_left, M_right), (z_left, z_right) = (_halves(x, width) for x in (k, M, z))
        end = M_left[:, :, -1:]
        from_key, to_query = (k_left - end).exp(), (end - M_right).exp()
        z_right += to_query * z_left[:, :, -1:]
        far.append((width, from_key, to_query))
    z += arrive * before[:, None, :, -1]
    z.masked_fill_(z == 0, 1)
    u = q / z

    nearest = (near * u.unflatten(1, (-1, b, 1))).sum(-1)
    corners = ((width, (_halves(u, width)[1] * to_query) @ from_key.mT) for width, from_key, to_query in far)
    if exporting():
        # a program that is exported writes to no diagonal
        score = _on_diagonal(nearest)
        for width, corner in corners:
            score = score + _on_diagonal(F.pad(corner, (0, width, width, 0)))
    else:
        score = q.new_zeros(q.shape[0], c, c)
        _diagonal(score, b).copy_(nearest)
        for width, corner in corners:
            _corner(score, width).copy_(corner)
    return _FeatureSpan(v, near, far, arrive, kept, z, u, score, shrink, before, state, tops[:, -1].view(top.shape))


class FeatureScan(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o, states, ctx.spans = state.new_empty(v.shape), [], _spans(q)
        for at, n in ctx.spans:
            s = _feature_span(q, k, v, state, top, at, n)
            _put(o, at, torch.baddbmm((s.u * s.arrive) @ s.before[..., :-1], s.score, s.v[..., :-1]))
            states += [state, top]
            state, top = s.state, s.top
        ctx.save_for_backward(q, k, v, *states)
        ctx.mark_non_differentiable(top)
        return o, state, top

    @staticmethod
    def backward(ctx: Any, g_o: Tensor, d_state: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        refuse_second_derivative()
        q, k, v, *states = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        with exact(q):
            for (at, n), state, top in reversed(list(zip(ctx.spans, states[::2], states[1::2], strict=True))):
                s = _feature_span(q, k, v, state, top, at, n)
                g = _chunks(g_o, at, n, state.dtype)
                b = s.near.shape[2]
                d_score = g @ s.v[..., :-1].mT
                d_near = _diagonal(d_score, b)[..., None]
                d_u = (g @ s.before[..., :-1].mT) * s.arrive
                d_u += (d_near * s.near).sum(3).flatten(1, 2)
                for width, from_key, to_query in s.far:
                    _halves(d_u, width)[1].add_((_corner(d_score, width) @ from_key) * to_query)
                d_q = d_u / s.z
                d_z = d_q * -s.u

                d_before = torch.cat([(s.u * s.arrive).mT @ g, (s.arrive * d_z).sum(1)[..., None]], -1)
                d_after, d_state = _carry(d_state, d_before, s.shrink, n, reverse=True)
                d_k = (s.v @ d_after.mT) * s.kept
                u, z = (x.unflatten(1, (-1, b, 1)) for x in (s.u, d_z))
                d_k += ((d_near * u + z) * s.near).sum(2).flatten(1, 2)
                for width, from_key, to_query in s.far:
                    u, z = (_halves(x, width)[1] * to_query for x in (s.u, d_z))
                    _halves(d_k, width)[0].add_((_corner(d_score, width).mT @ u + z.sum(2, keepdim=True)) * from_key)
                _put(dq, at, d_q)
                _put(dk, at, d_k)
                _put(dv, at, torch.baddbmm(s.kept @ d_after[..., :-1], s.score.mT, g))
        return dq, dk, dv, d_state, None


def _spans(x: Tensor) -> list[tuple[slice, int]]:
    """The tokens of x [B, H, T, .] as (slice, whole number of chunks); the rest, less than a chunk, comes last.

    A span is worked on at once. On the CPU it should stay in the cache; elsewhere, and where torch.compile unrolls the
    loop over the spans, a few long ones are better. A dynamic length is one span of whole chunks.
    """
    B, H, T, _ = x.shape
    if is_dynamic(T):
        return [(slice(None), T // CHUNK)]
    chunks = T // CHUNK
    cached = x.device.type == "cpu" and not torch.compiler.is_compiling()
    least, most, together = (1, 8, 64) if cached else (8, 64, 4096)
    most = max(least, min(most, together // (B * H)))
    spans = []
    for first in range(0, chunks, most):
        n = min(most, chunks - first)
        spans.append((slice(first * CHUNK, (first + n) * CHUNK), n))
    if T % CHUNK:
        spans.append((slice(chunks * CHUNK, T), 1))
    return spans


def _chunks(x: Tensor, at: slice, n: int, dtype: torch.dtype) -> Tensor:
    """[B, H, T, .] -> [B H n, c, .]"""
    return x[:, :, at].to(dtype).unflatten(2, (n, -1)).flatten(0, 2)


def _put(x: Tensor, at: slice, chunks: Tensor) -> None:
    """The inverse of `_chunks`."""
    x[:, :, at] = chunks.reshape(x[:, :, at].shape)


def _carry(
    state: Tensor, added: Tensor, shrink: Tensor | None, n: int, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """state <- shrink_i state + added_i over the n chunks: the state before each chunk [X, R, .] and the one after all.

    In reverse order it carries gradients: of the states before each chunk in, of the states after each chunk out.
    """
    shape, state, added = state.shape, state.flatten(0, 1), added.unflatten(0, (-1, n))
    if is_dynamic(n):
        before, state = _carried(state, added, shrink)
        return before.flatten(0, 1), state.view(shape)
    states: list[Tensor] = [state] * n
    for i in reversed(range(n)) if reverse else range(n):
        states[i] = state
        state = added[:, i] + state if shrink is None else torch.addcmul(added[:, i], shrink[:, i], state)
    return torch.stack(states, 1).flatten(0, 1), state.view(shape)


def _carried(state: Tensor, added: Tensor, shrink: Tensor | None) -> tuple[Tensor, Tensor]:
    """`_carry` without a loop, for a dynamic number of chunks: each state before as a sum over what the
    chunks before it added, [X, n, R, .]; with `shrink` [X, n, 1 or R, 1], O(n^2) products of the sums."""
    if shrink is None:
        after = added.cumsum(1) + state[:, None]
        return after - added, after[:, -1]
    # what is left of chunk m before chunk i is the product of what lies between; sums of many logarithms need float64
    logs = shrink.double().log().clamp(min=RESET)  # [X, n, 1 or R, 1]
    total = logs.cumsum(1)
    start = total - logs  # up to the chunk, without it
    i = torch.arange(logs.shape[1], device=logs.device)
    earlier = (i < i[:, None])[..., None, None]
    left = torch.where(earlier, (start[:, :, None] - total[:, None]).exp(), 0).to(added.dtype)  # [X, i, m, 1 or R, 1]
    before = torch.einsum("ximr,xmrd->xird", left[..., 0].expand(-1, -1, -1, added.shape[2]), added)
    before = before + start.exp().to(added.dtype) * state[:, None]
    return before, added[:, -1] + shrink[:, -1] * before[:, -1]


def _lower(score: Tensor, weight: Tensor | None) -> Tensor:
    return (score if weight is None else score.mul_(weight)).tril_()


def _scaled(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _widths(first: int, c: int) -> list[int]:
    """first, 2 first, 4 first, .. below c."""
    return [first << i for i in range((c // first).bit_length() - 1)]


def _halves(x: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """[X, c, R] -> the left and the right blocks of all pairs of neighbours of b tokens, views [X, c / 2b, b, R]."""
    left, right = x.unflatten(1, (-1, 2, b)).unbind(2)
    return left, right


def _running_max(x: Tensor) -> Tensor:
    """[X, n, D] -> the largest so far along n."""
    if not exporting():
        return x.cummax(1).values
    # other formats know no cummax: by all pairs, of which there are few, for n counts chunks
    past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    return torch.where(past[..., None], x[:, None], -torch.inf).amax(2)


def _on_diagonal(blocks: Tensor) -> Tensor:
    """[X, n, b, b] -> [X, n b, n b], with the blocks on the diagonal and zeros elsewhere."""
    same = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return torch.where(same[:, None, :, None], blocks[:, :, :, None], 0).flatten(3, 4).flatten(1, 2)


def _diagonal(x: Tensor, b: int) -> Tensor:
    """[X, c, c] -> its blocks of b x b on the diagonal, a view [X, c / b, b, b]."""
    return x.unflatten(2, (-1, b)).unflatten(1, (-1, b)).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _corner(x: Tensor, b: int) -> Tensor:
    """[X, c, c] -> right queries by left keys of all pairs of neighbours of b tokens, a view [X, c / 2b, b, b]."""
    return _diagonal(x, 2 * b)[:, :, b:, :b]


def exact(x: Tensor) -> AbstractContextManager:
    """Autocast would turn the products of float32 sums into products of bfloat16."""
    idle = x.is_meta or (exporting() and not torch.is_autocast_enabled(x.device.type))
    return nullcontext() if idle else torch.autocast(x.device.type, enabled=False)
