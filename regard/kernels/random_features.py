"""Random features of rows x [B, H, T, D]: exponentials whose products are, on average, the softmax kernel, and sines
and cosines whose products are the Gaussian kernel. In Triton no logits and no angles lie in memory, and features have
the dtype of x; otherwise they are float32 or better."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.choose import use_triton
from regard.kernels.scan import running_maximum, stabilise

# Tokens of a row, and numbers of a token, that a program of `attend_pairs` holds. On an H200 (Triton 3.6) gradients of
# 64 tokens of 61 numbers in bfloat16 were wrong, where products are those of warp groups; tiles of 32 use others.
TILE = 32


def exp_features(x: Tensor, W: Tensor, *, scale: float) -> Tensor:
    """exp(w_r . x' - |x'|^2 / 2) with x' = scale x, relative to the largest of each row: [B, H, T, R]."""
    if _is_fused(x, len(W)):
        return _triton().exp_features(x, W, scale)
    logits = exp_logits(x, W, scale=scale)
    return (logits - logits.detach().amax(-1, keepdim=True)).exp()


def exp_features_of_all(x: Tensor, W: Tensor, *, scale: float, real: Tensor | None = None) -> Tensor:
    """`exp_features` relative to the largest of all real rows [B, T] of a head; of the others none is above one."""
    if _is_fused(x, len(W)):
        with torch.no_grad():
            largest = _masked(_triton().row_maxima(x, W, scale), real).amax(-1, keepdim=True)
        return _triton().exp_features(x, W, scale, largest.expand(x.shape[:3]))
    logits = exp_logits(x, W, scale=scale)
    largest = _masked(logits.detach().amax(-1), real).amax(-1)[..., None, None]
    return (logits - largest).clamp(max=0).exp()


def stabilised_features(
    x: Tensor, W: Tensor, *, scale: float, top: Tensor | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`stabilise` of the logits of `exp_features`: k, decay and top."""
    if not _is_fused(x, len(W)):
        return stabilise(exp_logits(x, W, scale=scale), top=top, real=real)
    with torch.no_grad():
        M, decay, last = running_maximum(_masked(_triton().row_maxima(x, W, scale), real), top)
    return _triton().exp_features(x, W, scale, M), decay, last


def exp_logits(x: Tensor, W: Tensor, *, scale: float) -> Tensor:
    """w_r . x' - |x'|^2 / 2, [B, H, T, R], in float32 or better."""
    x = _wide(x) * scale
    return x @ W.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


def attends_pairs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend_pairs` takes these: rows of one tile, in Triton."""
    if torch.compiler.is_compiling() or max(q.shape[2], k.shape[2], q.shape[3], v.shape[3]) > TILE or q.shape[2] == 1:
        return False
    return bool(q.numel() and k.numel()) and use_triton("pairs", q, k, v)


def attend_pairs(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, *, scale: float, real: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention with the weights `exp_features` of queries times those of real keys [B, S], [B, H, T, E]: for short
    rows all pairs at once, without features or sums of them in memory."""
    from regard.kernels import pairs_triton

    return pairs_triton.attend(q, k, v, W, scale, real, causal)


def trigonometric_features(x: Tensor, W: Tensor, *, gate: Tensor | None = None) -> Tensor:
    """R^(-1/2) [sin(w_r . x / |x|), cos(w_r . x / |x|)], [B, H, T, 2 R], with W [H, R, D] of each head; times
    1 - sigmoid(gate) where there is a gate [B, H, T]."""
    if _is_fused(x, 2 * W.shape[1]):
        return _triton().trigonometric_features(x, W, gate)
    x = F.normalize(_wide(x), dim=-1)
    angles = x @ W.to(x.dtype).mT
    features = torch.cat([angles.sin(), angles.cos()], -1) * W.shape[1] ** -0.5
    return features if gate is None else features * torch.sigmoid(-gate.to(x.dtype))[..., None]


def _masked(logits: Tensor, real: Tensor | None) -> Tensor:
    """[B, H, T], below all others where a row is padding."""
    least = torch.finfo(logits.dtype).min
    return logits if real is None else torch.where(real[:, None], logits, least)


def _is_fused(x: Tensor, features: int) -> bool:
    # rows of a step are few, and a compiler fuses what it sees
    if x.shape[2] == 1 or torch.compiler.is_compiling():
        return False
    most = max(features, x.shape[3])
    refusal = None if most <= 256 else f"it takes at most 256 features, got {most}"
    return use_triton("features", x, refusal=refusal, second_axis=x.shape[0])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _triton() -> ModuleType:
    # imported late: not every PyTorch for a CPU comes with Triton
    from regard.kernels import random_features_triton

    return random_features_triton
