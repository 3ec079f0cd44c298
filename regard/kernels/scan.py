"""Linear attention: sums of key features times values, read by query features, in time linear in the length.

    S_t = g_t S_{t-1} + k_t v_t^T      z_t = g_t z_{t-1} + k_t      numerator_t = q_t S_t      denominator_t = q_t . z_t

q, k [B, H, T, R] are features already, v [B, H, T, D], and g_t = exp(decay_t) <= 1 is one number per head and token.
`scan` is this recurrence: g = 1 is plain linear attention, a gate is a decay, and so is a running maximum M of
log-features (`stabilise`): sums kept in units of exp(M) shrink by exp(M_{t-1} - M_t) when it grows. `feature_scan` has
a running maximum and a denominator for each feature. `absorb` and `read` are the two halves without an order.

The tokens are cut into chunks of C. Inside a chunk the scores q_t . k_j exp(decay_{j+1} + .. + decay_t) are a C x C
matrix; earlier chunks are met through S and z. No weight is above one, so none overflows. Nothing of a token reaches
an earlier one: scores of the future are replaced by zeros, never multiplied by them, and every maximum is over the
past, so the past is the same to the last bit whatever finite values follow.

Sums, states and results are float32 (float64 for double inputs), inside torch.autocast too: float16 sums overflow. The
backward pass keeps the inputs and one state per span of chunks, computes the rest again and scans in reverse; no tensor
has more than O(T (R + D)) or O(T C) elements. A second derivative is refused. The chunks are in scan_chunks.py, and in
scan_triton.py for a GPU.
"""

from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.choose import use_triton
from regard.kernels.compiling import count_blocks, is_dynamic
from regard.kernels.scan_chunks import CHUNK, RESET, FeatureScan, Scan, exact

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
    if use_triton("scan", q, k, v, refusal=_refusal(q), second_axis=q.shape[0]):
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
    with exact(q):
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
        numerator, denominator, S = Scan.apply(q, k, v, decay, torch.cat([S, z[..., None]], -1))
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
    if use_triton("scan", q, k, v, refusal=_refusal(q), second_axis=q.shape[0]):
        rest = _rest(state, decay, starts, real)
        o, _, state = _triton().scan(q, k, v, map=map, floor=floor, final=final, **rest)
        return o, state if final else None
    numerator, denominator, state = _scan(features(q, map), features(k, map), v, state, decay, starts, real)
    return ratio(numerator, denominator, floor).to(v.dtype), state if final else None


def attend_sums(
    q: Tensor, S: Tensor, z: Tensor, *, dtype: torch.dtype, map: FeatureMap = "none", floor: float = 0.0
) -> Tensor:
    """q = map(q) reads what `absorb` has summed: q S / (q . z) [B, H, T, D] in `dtype`, divided as in `attend_past`."""
    if use_triton("scan", q, S, z, refusal=_refusal(q), second_axis=q.shape[0]):
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
        M, decay, last = running_maximum(logits.amax(-1), top)
    return (logits - M[..., None]).exp(), decay, last


def running_maximum(highest: Tensor, top: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum M of [B, H, T] from `top` on, what it decays by from token to token, and the last of it."""
    first = torch.full_like(highest[..., 0], -torch.inf) if top is None else top
    M = torch.cat([_finite(first)[..., None], highest], -1).cummax(-1).values
    return M[..., 1:], M[..., :-1] - M[..., 1:], M[..., -1].clone()


def absorb(k: Tensor, v: Tensor, *, map: FeatureMap = "none", real: Tensor | None = None) -> State:
    """S = sum_j k_j v_j^T and z = sum_j k_j over the real keys, k = map(k). O(S R D)."""
    if use_triton("scan", k, v, refusal=_refusal(k), second_axis=k.shape[0]):
        return _sums().absorb(k, v, map=map, lengths=_lengths(real))
    dtype = _wide(k, v)
    k = _select(features(k, map), real, 0).to(dtype)
    with exact(k):
        return k.mT @ v.to(dtype), k.sum(-2)


def read(q: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """numerator [B, H, T, D] = q S, denominator [B, H, T] = q . z. O(T R D)."""
    if use_triton("scan", q, S, z, refusal=_refusal(q), second_axis=q.shape[0]):
        return _sums().read(q, S, z, dtype=S.dtype, normalise=False)
    return _read(q, S, z)


def _read(q: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    q = q.to(S.dtype)
    with exact(q):
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
    if T > 1 and use_triton("scan", q, k, v, refusal=_refusal(q), second_axis=q.shape[0]):
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
        with exact(q):
            return (q / z.masked_fill(z == 0, 1)[:, :, None]) @ S, (S, z, last)
    pad = count_blocks(T, CHUNK) * CHUNK - T if is_dynamic(T) else -T % min(CHUNK, 1 << (T - 1).bit_length())
    if is_dynamic(T) or pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad), value=fill) for x, fill in ((q, 0.0), (k, -torch.inf), (v, 0.0)))
    with exact(q):
        o, S, top = FeatureScan.apply(q, k, v, torch.cat([S, z[..., None]], -1), top)
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
    """The arguments of the kernel in Triton beside q, k and v."""
    first = None
    if starts is not None:
        at = torch.arange(starts.shape[1], device=starts.device, dtype=torch.int32)
        first = torch.where(starts, at, -1).cummax(1).values
    decay = None if decay is None else decay.float().clamp(min=RESET)
    return {"state": state, "decay": decay, "first": first, "lengths": _lengths(real)}


def _select(x: Tensor, real: Tensor | None, other: float) -> Tensor:
    """x [B, H, T, .] at the real tokens [B, T], `other` elsewhere."""
    return x if real is None else torch.where(real[:, None, :, None], x, other)


def _finite(top: Tensor) -> Tensor:
    """An empty maximum as a number, so that the difference of two is one."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
