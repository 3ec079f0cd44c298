"""Linear attention token by token in float64, and inputs for it: what tests of the kernels compare with."""

from typing import Any

import torch
from torch import Tensor


def features(x: Tensor, map: str) -> Tensor:
    if map == "elu":
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))
    return {"none": x, "relu": torch.relu(x), "exp": x.exp()}[map]


def divided(numerator: Tensor, denominator: Tensor, normalise: bool, floor: float) -> Tensor:
    if not normalise:
        return numerator
    if floor:
        return numerator / denominator.clamp(min=floor)[..., None]
    some = denominator.abs() > 1e-30
    return torch.where(some[..., None], numerator / torch.where(some, denominator, 1)[..., None], 0)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    S: Tensor | None = None,
    z: Tensor | None = None,
    decay: Tensor | None = None,
    first: Tensor | None = None,
    lengths: Tensor | None = None,
    map: str = "none",
    normalise: bool = True,
    floor: float = 0.0,
    each: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the denominators, S and z after the last token; each: of each feature its own denominator."""
    times = q.shape[1] // k.shape[1]
    q, k, v = features(q, map), *(x.repeat_interleave(times, 1) for x in (features(k, map), v))
    B, H, T, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[3]) if S is None else S
    z = q.new_zeros(B, H, K) if z is None else z
    outs, dens = [], []
    for t in range(T):
        real = (torch.full((B,), T) if lengths is None else lengths) > t
        begins = torch.zeros(B, dtype=torch.bool) if first is None else first[:, t] == t
        a = torch.ones(B, H, 1).to(q) if decay is None else decay[:, :, t].exp()
        a = a[..., None] if a.dim() == 2 else a
        a = torch.where(begins[:, None, None], 0, a)
        kt, a = torch.where(real[:, None, None], k[:, :, t], 0), torch.where(real[:, None, None], a, 1)
        S = a[..., None] * S + kt[..., None] * v[:, :, t, None]
        z = a * z + kt
        numerator = torch.einsum("bhk,bhkv->bhv", q[:, :, t] / z.masked_fill(z == 0, 1) if each else q[:, :, t], S)
        denominator = (q[:, :, t] * z).sum(-1)
        outs.append(torch.where(real[:, None, None], divided(numerator, denominator, normalise and not each, floor), 0))
        dens.append(torch.where(real[:, None], denominator, 0))
    return torch.stack(outs, 2), torch.stack(dens, 2), S, z


def inputs(
    *,
    B: int = 2,
    H: int = 2,
    G: int = 2,
    T: int,
    K: int = 16,
    V: int = 16,
    seed: int = 0,
    decay: str | None = None,
    state: bool = False,
    reset: bool = False,
    ragged: bool = False,
    positive: bool = False,
) -> dict[str, Any]:
    """In float64, by name; what is None is left out."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    q, k, v = normal(B, H, T, K), normal(B, G, T, K), normal(B, G, T, V)
    given = {"q": q.abs() + 0.1 if positive else q, "k": k.abs() + 0.1 if positive else k, "v": v}
    if decay:
        size = (B, H, T) if decay == "scalar" else (B, H, T, K)
        # mostly mild, now and then a sharp one
        given["decay"] = -normal(*size).abs() * torch.where(normal(*size) > 1.5, 20, 0.1)
    if state:
        given["S"], given["z"] = normal(B, H, K, V), normal(B, H, K).abs()
    if reset:
        starts = torch.rand(B, T, generator=draw) < 3 / T
        starts[0, 0] = True
        given["first"] = torch.where(starts, torch.arange(T), -1).cummax(1).values.int()
    if ragged:
        given["lengths"] = torch.tensor([T, max(1, T // 2), T - 1, 0][:B]).int()
    return given
