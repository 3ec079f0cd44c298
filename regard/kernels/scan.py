"""Linear attention: sums of key features times values, read by query features, in time linear in the length.

    S_t = g_t S_{t-1} + k_t v_t^T      z_t = g_t z_{t-1} + k_t      numerator_t = q_t S_t      denominator_t = q_t . z_t

q, k [B, H, T, R] are features already, v [B, H, T, D], and g_t = exp(decay_t) <= 1 is one number a head and token.
`scan` is this recurrence: g = 1 is plain linear attention, a gate is a decay, and so is a running maximum M of
log-features (`stabilise`): sums kept in units of exp(M) shrink by exp(M_{t-1} - M_t) when it grows. `feature_scan` has
a running maximum and a denominator for each feature. `absorb` and `read` are the two halves without an order.

The tokens are cut into chunks of C. Inside a chunk the scores q_t . k_j exp(decay_{j+1} + .. + decay_t) are a C x C
matrix; earlier chunks are met through S and z. No weight is above one, so none overflows. Nothing of a token reaches
an earlier one: scores of the future are replaced by zeros, never multiplied by them, and every maximum is over the
past, so the past is the same to the last bit whatever finite values follow.

Sums, states and results are float32 (float64 for double inputs), inside torch.autocast too: float16 sums overflow. The
backward pass keeps the inputs and one state per span of chunks, computes the rest again and scans in reverse; no tensor
has more than O(T (R + D)) or O(T C) elements. A second derivative is refused.
"""

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from regard.kernels.choose import use_triton
from regard.kernels.compiling import count_blocks, exporting, is_dynamic
from regard.kernels.parts import once

CHUNK = 64  # near the minimum of the time for D = 64 and R = 64 to 256; a power of two
BLOCK = 4  # feature_scan forms the pairs in blocks of 4 one by one: smaller matrix products take longer than that
RESET = -104.0  # its exp is zero in float32, and sums of decays far below it would only lose digits

FeatureMap = Literal["none", "elu", "relu", "exp"]  # "elu" is elu(x) + 1
State = tuple[Tensor, Tensor]  # S [B, H, R, D], z [B, H, R]
FeatureState = tuple[Tensor, Tensor, Tensor]  # S [B, H, R, D], z [B, H, R], top [B, H, R]


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = None,
    decay: Tensor | None = None,
    starts: Tensor | None = None,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor, State]:
    """Causal linear attention -> numerator [B, H, T, D], denominator [B, H, T] and the state after the last token.

    `decay` [B, H, T] <= 0 is log g; for a gate the caller scales k by 1 - g. `state` continues a sequence: any split of
    the tokens gives the same result, and gradients pass through it. `starts` [B, T]: the first tokens of packed
    documents, which forget all before. `real` [B, T]: the others, behind the real ones, leave the state alone.
    O(T (C (R + D) + R D)) time, O(T (R + D)) memory for C of the order of R; one token is O(R D).
    """
    if use_triton("scan", q, k, v, refusal=_refusal(q)):
        return _triton().scan(q, k, v, normalise=False, **_rest(state, decay, starts, real))
    return _scan(q, k, v, state, decay, starts, real)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    decay: Tensor | None,
    starts: Tensor | None,
    real: Tensor | None,
) -> tuple[Tensor, Tensor, State]:
    B, H, T, R = q.shape
    D, dtype = v.shape[-1], _wide(q, k, v)
    k = _select(k, real, 0)
    if starts is not None:
        decay = torch.where(starts[:, None], RESET, q.new_zeros(B, H, T) if decay is None else decay)
    if decay is not None:
        decay = _select(decay.to(dtype)[..., None], real, 0)[..., 0].clamp(min=RESET)
    S, z = (q.new_zeros(B, H, R, D, dtype=dtype), q.new_zeros(B, H, R, dtype=dtype)) if state is None else state
    with _exact(q):
        if T == 1:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            if decay is not None:
                g = decay.exp()
                S, z = S * g[..., None], z * g
            S, z = torch.addcmul(S, k.mT, v), z + k[:, :, 0]
            return *read(q, S, z), (S, z)
        if is_dynamic(T):
            room = count_blocks(T, CHUNK) * CHUNK - T
            q, k, v = (F.pad(x, (0, 0, 0, room)) for x in (q, k, v))
            decay = None if decay is None else F.pad(decay, (0, room))
        # z is the column of S that belongs to a value of one
        numerator, denominator, S = _Scan.apply(q, k, v, decay, torch.cat([S, z[..., None]], -1))
    # copies: a state must not hold on to the tensors of a long call
    return numerator[:, :, :T], denominator[:, :, :T], (S[..., :D].clone(), S[..., D].clone())


def attend_past(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    map: FeatureMap = "none",
    state: State | None = None,
    decay: Tensor | None = None,
    starts: Tensor | None = None,
    real: Tensor | None = None,
    floor: float = 0.0,
    final: bool = True,
) -> tuple[Tensor, State | None]:
    """`scan` of the features map(q) and map(k), divided: o [B, H, T, D] in the dtype of v, and the state if `final`.

    Denominators are raised to `floor` where it is above zero; without one, o is zero where a denominator is. In Triton
    it is one kernel, and features need no memory.
    """
    if use_triton("scan", q, k, v, refusal=_refusal(q)):
        rest = _rest(state, decay, starts, real)
        o, _, state = _triton().scan(q, k, v, map=map, floor=floor, final=final, **rest)
        return o, state if final else None
    numerator, denominator, state = _scan(features(q, map), features(k, map), v, state, decay, starts, real)
    return ratio(numerator, denominator, floor).to(v.dtype), state if final else None


def attend_sums(
    q: Tensor, S: Tensor, z: Tensor, *, dtype: torch.dtype, map: FeatureMap = "none", floor: float = 0.0
) -> Tensor:
    """q = map(q) reads what `absorb` has summed: q S / (q . z) [B, H, T, D] in `dtype`, divided as in `attend_past`."""
    if use_triton("scan", q, S, z, refusal=_refusal(q)):
        return _sums().read(q, S, z, dtype=dtype, map=map, floor=floor)[0]
    return ratio(*_read(features(q, map), S, z), floor).to(dtype)


def features(x: Tensor, map: FeatureMap) -> Tensor:
    """The feature map of each number, in float32 or better."""
    x = x.to(_wide(x))
    if map == "elu":
        return F.elu(x) + 1
    if map == "relu":
        return torch.relu(x)
    return x.exp() if map == "exp" else x


def stabilise(
    logits: Tensor, *, top: Tensor | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-features [B, H, T, R] whose exp may overflow -> k, decay for `scan` and the running maximum `top` [B, H]:

        k_t = exp(logits_t - M_t)    decay_t = M_{t-1} - M_t    M_t = max of the logits of all tokens <= t    top = M_T

    The numerator and the denominator come out in units of exp(M_t). `top` is part of the state, -inf before the first
    token. The maximum counts as a constant in the gradient: it cancels in the ratio. A feature that stays more than 87
    below M is lost in float32; a query that reads only such features has denominator zero.
    """
    logits = _select(logits.to(_wide(logits)), real, -torch.inf)
    with torch.no_grad():
        M, decay, last = _running(logits.amax(-1), top)
    return (logits - M[..., None]).exp(), decay, last


def exp_features(x: Tensor, W: Tensor, *, scale: float) -> Tensor:
    """exp(w_r . x' - |x'|^2 / 2) with x' = scale x, relative to the largest of each row: [B, H, T, R]."""
    if _fuses_features(x, W):
        return _features().exp_features(x, W, scale)
    logits = exp_logits(x, W, scale=scale)
    return (logits - logits.detach().amax(-1, keepdim=True)).exp()


def stabilised_features(
    x: Tensor, W: Tensor, *, scale: float, top: Tensor | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`stabilise` of the logits of `exp_features`: k, decay and top. In Triton no logits lie in memory."""
    if not _fuses_features(x, W):
        return stabilise(exp_logits(x, W, scale=scale), top=top, real=real)
    with torch.no_grad():
        highest = _select(_features().row_maxima(x, W, scale)[..., None], real, -torch.inf)[..., 0]
        M, decay, last = _running(highest, top)
    return _features().exp_features(x, W, scale, M), decay, last


def exp_logits(x: Tensor, W: Tensor, *, scale: float) -> Tensor:
    """w_r . x' - |x'|^2 / 2, [B, H, T, R], in float32 or better."""
    x = x.to(_wide(x)) * scale
    return x @ W.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


def _running(highest: Tensor, top: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum M of [B, H, T] from `top` on, what it decays by from token to token, and the last of it."""
    first = torch.full_like(highest[..., 0], -torch.inf) if top is None else top
    M = torch.cat([_finite(first)[..., None], highest], -1).cummax(-1).values
    return M[..., 1:], M[..., :-1] - M[..., 1:], M[..., -1].clone()


def _fuses_features(x: Tensor, W: Tensor) -> bool:
    # rows of a step are few, and a compiler fuses what it sees
    if x.shape[2] == 1 or torch.compiler.is_compiling():
        return False
    refusal = None if max(W.shape) <= 256 else f"it takes at most 256 features of a head, got {len(W)}"
    return use_triton("features", x, refusal=refusal)


def _features() -> ModuleType:
    from regard.kernels import features_triton

    return features_triton


def absorb(k: Tensor, v: Tensor, *, map: FeatureMap = "none", real: Tensor | None = None) -> State:
    """S = sum_j k_j v_j^T and z = sum_j k_j over the real keys, k = map(k). O(S R D)."""
    if use_triton("scan", k, v, refusal=_refusal(k)):
        return _sums().absorb(k, v, map=map, lengths=_lengths(real))
    dtype = _wide(k, v)
    k = _select(features(k, map), real, 0).to(dtype)
    with _exact(k):
        return k.mT @ v.to(dtype), k.sum(-2)


def read(q: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """numerator [B, H, T, D] = q S, denominator [B, H, T] = q . z. O(T R D)."""
    if use_triton("scan", q, S, z, refusal=_refusal(q)):
        return _sums().read(q, S, z, dtype=S.dtype, normalise=False)
    return _read(q, S, z)


def _read(q: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    q = q.to(S.dtype)
    with _exact(q):
        # a matrix product with one column is the slower way
        return q @ S, (q * z[:, :, None]).sum(-1)


def ratio(numerator: Tensor, denominator: Tensor, floor: float = 0.0) -> Tensor:
    """numerator / denominator, raised to `floor` where there is one; without, zeros and no gradient where the
    denominator is zero or too small to divide by."""
    if floor > 0:
        return numerator / denominator.clamp(min=floor)[..., None]
    some = (denominator.abs() > 1e-30)[..., None]
    return torch.where(some, numerator / torch.where(some, denominator[..., None], 1), 0)


def feature_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: FeatureState | None = None,
    real: Tensor | None = None,
) -> tuple[Tensor, FeatureState]:
    """Causal attention with a softmax over the past for each feature c -> [B, H, T, D] and the state:

        o_t = sum_c q_tc sum_{j <= t} exp(k_jc) v_j / sum_{j <= t} exp(k_jc)

    State: the two sums in units of exp(top) and the running maximum `top`, -inf before the first token, a constant in
    the gradient since it cancels. A query with no real key gives zeros. O(T (C (R + D) + R D)) time, memory as `scan`.

    The weight exp(k_jc - M_tc) <= 1 must be split into a factor of j and one of t to enter a matrix product. For j in
    the left half of a chunk and t in the right half, the maximum E_c at the end of the left half does it: in
    exp(k_jc - E_c) exp(E_c - M_tc) neither factor is above one. Inside the halves it is the same again.
    """
    B, H, T, R = q.shape
    D, dtype = v.shape[-1], _wide(q, k, v)
    # a step of decoding is a few small operators, fewer than the kernels for running maxima are
    if T > 1 and use_triton("scan", q, k, v, refusal=_refusal(q)):
        return _triton().softmax_scan(q, k, v, state=state, lengths=_lengths(real))
    k = _select(k.to(dtype), real, -torch.inf)
    if state is None:
        state = k.new_zeros(B, H, R, D), k.new_zeros(B, H, R), k.new_full((B, H, R), -torch.inf)
    S, z, top = state
    top = _finite(top)
    if T == 1:
        last = torch.maximum(top, k.detach()[:, :, 0])
        shrink, k = (top - last).exp(), (k - last[:, :, None]).exp()
        S, z = torch.addcmul(S * shrink[..., None], k.mT, v.to(dtype)), z * shrink + k[:, :, 0]
        with _exact(q):
            return (q / z.masked_fill(z == 0, 1)[:, :, None]) @ S, (S, z, last)
    pad = count_blocks(T, CHUNK) * CHUNK - T if is_dynamic(T) else -T % min(CHUNK, 1 << (T - 1).bit_length())
    if is_dynamic(T) or pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad), value=fill) for x, fill in ((q, 0.0), (k, -torch.inf), (v, 0.0)))
    with _exact(q):
        o, S, top = _FeatureScan.apply(q, k, v, torch.cat([S, z[..., None]], -1), top)
    return o[:, :, :T], (S[..., :D].clone(), S[..., D].clone(), top.clone())


def _triton() -> ModuleType:
    # imported late: not every PyTorch for a CPU comes with Triton
    from regard.kernels import scan_triton

    return scan_triton


def _sums() -> ModuleType:
    from regard.kernels import sums_triton

    return sums_triton


def _refusal(x: Tensor) -> str | None:
    return f"it takes at most 256 features of a head, got {x.shape[-1]}" if x.shape[-1] > 256 else None


def _lengths(real: Tensor | None) -> Tensor | None:
    """Real tokens stand on the left."""
    return None if real is None else real.sum(1, dtype=torch.int32)


def _rest(state: State | None, decay: Tensor | None, starts: Tensor | None, real: Tensor | None) -> dict[str, Any]:
    """What the kernel in Triton is given beside q, k and v."""
    first = None
    if starts is not None:
        at = torch.arange(starts.shape[1], device=starts.device, dtype=torch.int32)
        first = torch.where(starts, at, -1).cummax(1).values
    decay = None if decay is None else decay.float().clamp(min=RESET)
    return {"state": state, "decay": decay, "first": first, "lengths": _lengths(real)}


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


class _Scan(Function):
    @staticmethod
    def forward(ctx, q, k, v, decay, state):
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
    def backward(ctx, g_numerator, g_denominator, d_state):
        once()
        q, k, v, decay, *states = ctx.saved_tensors
        dq, dk, dv, d_decay = (None if x is None else torch.empty_like(x) for x in (q, k, v, decay))
        with _exact(q):
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
                if decay is not None:
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
    tops = torch.cat([top.flatten(0, 1)[:, None], M[:, -1].unflatten(0, (-1, n))], 1).cummax(1).values
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

    score = q.new_zeros(q.shape[0], c, c)
    _diagonal(score, b).copy_((near * u.unflatten(1, (-1, b, 1))).sum(-1))
    for width, from_key, to_query in far:
        _corner(score, width).copy_((_halves(u, width)[1] * to_query) @ from_key.mT)
    return _FeatureSpan(v, near, far, arrive, kept, z, u, score, shrink, before, state, tops[:, -1].view(top.shape))


class _FeatureScan(Function):
    @staticmethod
    def forward(ctx, q, k, v, state, top):
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
    def backward(ctx, g_o, d_state, _):
        once()
        q, k, v, *states = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        with _exact(q):
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


def _halves(x: Tensor, b: int) -> tuple[Tensor, ...]:
    """[X, c, R] -> the left and the right blocks of all pairs of neighbours of b tokens, views [X, c / 2b, b, R]."""
    return x.unflatten(1, (-1, 2, b)).unbind(2)


def _diagonal(x: Tensor, b: int) -> Tensor:
    """[X, c, c] -> its blocks of b x b on the diagonal, a view [X, c / b, b, b]."""
    return x.unflatten(2, (-1, b)).unflatten(1, (-1, b)).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _corner(x: Tensor, b: int) -> Tensor:
    """[X, c, c] -> right queries by left keys of all pairs of neighbours of b tokens, a view [X, c / 2b, b, b]."""
    return _diagonal(x, 2 * b)[:, :, b:, :b]


def _select(x: Tensor, real: Tensor | None, other: float) -> Tensor:
    """x [B, H, T, .] at the real tokens [B, T], `other` elsewhere."""
    return x if real is None else torch.where(real[:, None, :, None], x, other)


def _finite(top: Tensor) -> Tensor:
    """An empty maximum as a number, so that the difference of two is one."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _exact(x: Tensor) -> AbstractContextManager:
    """Autocast would turn the products of float32 sums into products of bfloat16."""
    idle = x.is_meta or (exporting() and not torch.is_autocast_enabled(x.device.type))
    return nullcontext() if idle else torch.autocast(x.device.type, enabled=False)
