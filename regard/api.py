"""The public entry points: spec strings in, layers and tensors out."""

import functools
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.core.brief import in_brief_thread
from regard.core.rows import Mask, Memory, Rows, pack, pack_pairs, unpack
from regard.core.shape import Bias, Role, Shape
from regard.kernels.compiling import run_eagerly
from regard.keywords import check_keywords
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.cached import Cached
from regard.layers.attention.checks import allowed_pairs
from regard.layers.attention.heads import MixedHeads
from regard.layers.attention.projected import Projected
from regard.layers.attention.tailed import Tailed
from regard.layers.feedforward.base import FeedForward, FeedForwardFacts, Sizes
from regard.layers.position.base import Position, PositionFacts
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, REGISTRIES, Registry, Spec, parse

SMALL = 1024  # sizes in a spec up to which `facts` builds a layer that has numbers


@check_keywords(causal='role="causal"', is_causal='role="causal"', cross='role="cross"')
def attention(
    spec: str | Spec,
    *,
    width: int,
    heads: int,
    role: Role = "self",
    kv_heads: int | None = None,
    head_width: int | None = None,
    memory_width: int | None = None,
    out_width: int | None = None,
    bias: Bias = False,
    position: str | None = None,
    dropout: float = 0.0,
) -> Attention:
    """A layer [B, T, width] -> [B, T, out_width].

    Args:
        spec: the mechanism with its options, such as "softmax" or "local(window=256)"; `regard list` has them all.
        width: model width (d_model), the last axis of the input.
        heads: number of attention heads.
        role: "self" (every token may read every token), "causal" (those before it and itself; the role that decodes) or
            "cross" (the tokens of a memory).
        kv_heads: number of key/value heads, for grouped queries; default: as many as heads.
        head_width: width of a head; default: width / heads.
        memory_width: width of the memory, for role "cross"; default: width.
        out_width: width of the output; default: width.
        bias: whether the projections have biases; "inputs": all but the output projection, "output": that one alone.
        position: a position scheme inside the layer, such as "rotary" or "alibi"; `regard list --kind position`.
        dropout: attention dropout, the share of the weights set to zero in training, for the mechanisms that weigh
            pairs of tokens one by one; the others refuse it.

    Raises:
        ValueError: an unknown name or option, sizes that do not fit, a role or an option the mechanism cannot take.
        TypeError: an unknown keyword.

    >>> layer = regard.attention("local(window=256)", width=512, heads=8, role="causal", position="rotary")
    >>> y = layer(x, keep=keep)
    """
    shape = Shape.of(
        width=width,
        heads=heads,
        role=role,
        kv_heads=kv_heads,
        head_width=head_width,
        memory_width=memory_width,
        out_width=out_width,
        bias=bias,
        position=position,
        dropout=dropout,
    )
    return ATTENTION.build(spec, shape)


@check_keywords()
def position(spec: str | Spec, *, width: int, heads: int = 1, role: Role = "self") -> Position:
    """A position scheme on its own: for the kind "input", `scheme.add(x, rows)` puts positions into [B, T, width], rows
    saying where the tokens stand (`Rows.full(x)`: a whole sequence each).

    >>> scheme = regard.position("sinusoidal", width=512)
    """
    return POSITIONS.build(spec, Shape.of(width=width, heads=heads, role=role))


@check_keywords()
def feedforward(spec: str | Spec, *, width: int, inner: int, role: Literal["self", "causal"] = "self") -> FeedForward:
    """A feed-forward layer [B, T, width] -> [B, T, width], `inner` wide inside.

    >>> layer = regard.feedforward("dense(activation='silu', gated=True)", width=512, inner=1408)
    >>> y = layer(x, keep=keep)
    """
    return FEEDFORWARD.build(spec, Sizes(width, inner, role))


@check_keywords(role="causal=True or cross=True")
def attend(
    spec: str | Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    causal: bool = False,
    cross: bool | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Any mechanism without parameters of its own, as a function of q [B, H, T, D], k and v [B, G, S, D].

    `keep` [B, S] is True for real tokens. With T == S the queries are the keys' own tokens (role "self", or "causal");
    with fewer queries and `causal` they are the last of them, as in decoding with a cache; otherwise, or where `cross`
    says so, the role is that of cross-attention. `mask` [T, S] or [B, T, S] is True where a query may read a key, for
    the mechanisms that take one. Random features are drawn once and are the same in every call.

    >>> y = regard.attend("local(window=256)", q, k, v, causal=True)
    """
    _check_heads(q, k, v, keep, causal, cross)
    _, H, T, D = q.shape
    S = k.shape[2]
    cross = T != S and not causal if cross is None else cross
    role = "cross" if cross else "causal" if causal else "self"
    layer = _bare(str(parse(spec)), H, k.shape[1], D, role, q.dtype, q.device)
    allowed = allowed_pairs(layer, mask, len(q), T, S)
    if causal and T < S:
        if isinstance(layer, Cached | Tailed) and not getattr(layer, "front", 0):
            return _last(layer, q, k, v, keep, allowed)
        # what does not read keys one by one reads the queries of all tokens, of which only the last are returned
        return attend(spec, F.pad(q, (0, 0, S - T, 0)), k, v, keep, causal=True)[:, :, S - T :]
    if keep is None:
        rows = Rows.full(q.transpose(1, 2))._replace(allowed=allowed)
        memory = Memory(k.transpose(1, 2), None, allowed=allowed)
        return layer.attend_projected(rows, {"q": q}, {"k": k, "v": v}, None, memory)[0]
    (k, rows), (v, _) = _pack_heads(k, keep), _pack_heads(v, keep)
    if role == "cross":
        query_rows = Rows.full(q.transpose(1, 2))
        memory = Memory(k.transpose(1, 2), rows.count, allowed=pack_pairs(allowed, None, keep))
        return layer.attend_projected(query_rows, {"q": q}, {"k": k, "v": v}, None, memory)[0]
    rows = rows._replace(allowed=pack_pairs(allowed, keep))
    q, _ = _pack_heads(q, keep)
    o = layer.attend_projected(rows, {"q": q}, {"k": k, "v": v}, None, None)[0]
    return unpack(o, keep[:, None], dim=2)


def _pack_heads(x: Tensor, keep: Tensor) -> tuple[Tensor, Rows]:
    """`pack` of [B, H, n, D]."""
    packed, rows = pack(x.transpose(1, 2).flatten(2), keep)
    return packed.unflatten(2, x.shape[1::2]).transpose(1, 2), rows


def _last(
    layer: Cached | Tailed, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, allowed: Tensor | None
) -> Tensor:
    """Causal attention of the last T tokens of each row over all S, or as many as the mechanism reaches back."""
    B, _, T, _ = q.shape
    S, device = k.shape[2], q.device
    real = torch.ones(B, S, dtype=torch.bool, device=device) if keep is None else keep
    end, fresh = real.sum(1), real[:, S - T :].sum(1)
    first = end - fresh  # [B] position of the first query
    if keep is not None:
        allowed = pack_pairs(allowed, keep[:, S - T :], keep)
        q, k, v = _pack_heads(q, keep[:, S - T :])[0], _pack_heads(k, keep)[0], _pack_heads(v, keep)[0]
    shift = S - T if keep is None else None
    mask = Mask(first, torch.zeros_like(first), end, T, S, True, keep is None, shift, allowed)
    if isinstance(layer, Tailed):
        # as many keys as a tail would hold, at the same distance from the queries in every row
        shift = min(S - T, layer.reach)
        at = first[:, None] - shift + torch.arange(shift + T, device=device)  # [B, shift + T] positions
        index = at.clamp(0, S - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        k, v = k.gather(2, index), v.gather(2, index)
        mask = mask._replace(k0=at[:, 0], S=shift + T, shift=shift)
    o = layer.attend(mask, q=q, **layer.repeat_heads({"k": k, "v": v}))
    return o if keep is None else unpack(o, keep[:, None, S - T :], dim=2)


def names(kind: str = "attention") -> list[str]:
    """The registered names of a kind: "attention", "feedforward" or "position"."""
    return _registry(kind).names()


@overload
def facts(spec: str | Spec, kind: Literal["attention"] = "attention") -> Facts: ...
@overload
def facts(spec: str | Spec, kind: Literal["feedforward"]) -> FeedForwardFacts: ...
@overload
def facts(spec: str | Spec, kind: Literal["position"]) -> PositionFacts: ...
@overload
def facts(spec: str | Spec, kind: str) -> Facts | FeedForwardFacts | PositionFacts: ...
def facts(spec: str | Spec, kind: str = "attention") -> Facts | FeedForwardFacts | PositionFacts:
    """What a mechanism declares of itself, with the options of the spec."""
    registry = _registry(kind)
    spec = parse(spec)
    feeds = registry is FEEDFORWARD
    # PyTorch imports its compiler for most of what it does on the meta device, which is for sizes that need it
    device = torch.device("cpu" if _is_small(spec) and not feeds else "meta")
    refusals: list[ValueError] = []
    for role in registry.find(spec.name).facts.roles:
        try:
            # a width that options which must divide it mostly do
            shape = Sizes(8, 161280, role) if feeds else Shape.of(width=8 * spec.heads, heads=spec.heads, role=role)
            with torch.random.fork_rng(devices=[]), device, _Undrawn():
                return registry.build(spec, shape).facts
        except ValueError as error:
            refusals.append(error)
    raise refusals[-1]


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled with random numbers: on the meta device they have none, and
    PyTorch would import its compiler to find that out."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def _is_small(spec: Spec) -> bool:
    """Whether no option asks for a size that would take memory."""
    values = [value for _, value in spec.options]
    numbers = [number for value in values for number in (value if isinstance(value, tuple | list) else (value,))]
    small = all(not isinstance(number, int | float) or number <= SMALL for number in numbers)
    return small and all(_is_small(part) for part in spec.parts)


def _registry(kind: str) -> Registry:
    if kind not in REGISTRIES:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(REGISTRIES)}")
    return REGISTRIES[kind]


@run_eagerly  # a compiler cannot record how a layer is built
@functools.lru_cache(maxsize=64)
def _bare(
    spec: str, H: int, G: int, D: int, role: Role, dtype: torch.dtype, device: torch.device
) -> Projected | MixedHeads:
    """A layer of which only `attend_projected` is used. Its random draws come from a seed of their own."""
    # kept for later calls, and so built in a thread of its own: what the first one runs in (inference mode, a default
    # device, a transform of torch.func, fake tensors, torch.export) holds in this thread only
    layer = in_brief_thread(lambda: _built_bare(spec, H, G, D, role, dtype, device))
    for part in _leaves(layer):
        extra = [name for name, _ in part.named_parameters() if not name.startswith(("project.", "output."))]
        if not isinstance(part, Projected) or extra or set(part.inputs) != {"q", "k", "v"}:
            raise ValueError(
                f"attention {part.facts.name!r} has parameters of its own or other inputs than q, k and v, so it is no "
                f"plain function of them: build it with regard.attention({part.facts.name!r}, width=..., heads=...)"
            )
    return layer


def _built_bare(
    spec: str, H: int, G: int, D: int, role: Role, dtype: torch.dtype, device: torch.device
) -> Projected | MixedHeads:
    # one number for each head, for its projections are never used, and what ties the width to the heads has parameters
    # of its own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = Shape.of(width=H, heads=H, kv_heads=G, head_width=D, role=role)
        return ATTENTION.build(spec, shape).to(device, dtype)


def _leaves(layer: Attention) -> list[Attention]:
    """The mechanisms of a layer of mixed heads, nested ones too."""
    return [leaf for part in layer.layers() for leaf in _leaves(part)] if isinstance(layer, MixedHeads) else [layer]


def _check_heads(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, cross: bool | None) -> None:
    for name, part in (("q", q), ("k", k), ("v", v)):
        if not isinstance(part, Tensor) or part.dim() != 4:
            got = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"{name} must be [batch, heads, tokens, head width], got {got}")
        if not part.is_floating_point() or part.dtype != q.dtype:
            raise ValueError(f"q, k and v must share one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        if 0 in part.shape:
            raise ValueError(f"{name} is empty: got {list(part.shape)}")
    if k.shape != v.shape or len(q) != len(k) or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q [B, H, T, D] with k and v [B, G, S, D], G dividing H, expected; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if cross is not None and ((causal and cross) or not (causal or cross or q.shape[2] == k.shape[2])):
        raise ValueError(f"cross={cross} contradicts causal={causal} with {q.shape[2]} queries, {k.shape[2]} keys")
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(f"causal takes at most as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
    if keep is not None:
        boolean = isinstance(keep, Tensor) and keep.dtype == torch.bool
        if not boolean or keep.shape != (len(k), k.shape[2]):
            got = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise ValueError(f"keep must be boolean {[len(k), k.shape[2]]}, True = real token, got {got}")
