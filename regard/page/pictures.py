"""Mechanisms and position schemes as numbers to draw, all measured on the layers themselves."""

import copy
import math
import time
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.core.rows import Mask, Rows
from regard.core.shape import Role
from regard.core.tally import Tally
from regard.kernels.packed import Packed
from regard.layers.attention.base import Attention
from regard.layers.attention.projected import Projected
from regard.layers.position.base import Position
from regard.page.maps import LayerCall, parts_of
from regard.page.wire import Reply, to_numpy
from regard.spec import parse

REASONS = ("hidden", "local", "global", "stride", "fixed", "random", "content", "all")
LENGTHS = (64, 128, 256, 512, 1024)
PATIENCE = 0.5  # seconds: after a length that takes longer, no longer one is counted
DRAWS = 3  # draws of tokens and of seeds, to tell what a pattern depends on
MORE_DRAWS = 12  # draws of tokens, if they matter, to tell what is always visible from what happens to be
HEAD_WIDTH = 16  # of the layers that are measured
FAINT = 1e-6  # share of the largest singular value below which a direction does not count
COMPARED = 96  # tokens of a text on which two mechanisms are compared


def pattern(spec: str, role: Role, length: int, heads: int, seed: int) -> Reply:
    """Why each pair is visible, [H, T, S] of REASONS; the weights over random tokens; the rank of each head's map."""
    facts = regard.facts(spec)
    weights = _random_weights(spec, role, length, heads, seed, 0)
    possible = _possible(weights[0], role)
    other_tokens = [_random_weights(spec, role, length, heads, seed, tokens) for tokens in range(1, DRAWS)]
    if facts.family == "mixers":
        # a zero of a mixer is a number like any other: it hides no pair
        why = torch.where(possible, REASONS.index("all"), 0).expand(weights.shape)
    else:
        other_draws = [_random_weights(spec, role, length, heads, seed + draw, 0) for draw in range(1, DRAWS)]
        visible, by_tokens = weights != 0, any(not torch.equal(weights != 0, other != 0) for other in other_tokens)
        others = [*other_tokens, *other_draws]
        if by_tokens:
            others += [_random_weights(spec, role, length, heads, seed, tokens) for tokens in range(DRAWS, MORE_DRAWS)]
        by_draw = any(not torch.equal(visible, other != 0) for other in other_draws)
        why = _reasons(visible, [other != 0 for other in others], possible, by_tokens, by_draw)
    spectrum, most = _spectrum(weights, role)
    meta = {
        "reasons": REASONS,
        "columns": facts.columns,
        "signed": facts.signed,
        "formula": facts.formula,
        "roles": facts.roles,
        "steady": all(torch.equal(weights, other) for other in other_tokens),
        "blank": not bool(weights.any()),
        "rank": (spectrum > FAINT).sum(1).tolist(),
        "most": most,
        "head_width": HEAD_WIDTH,
        "halves": role == "causal",
    }
    arrays = {"why": why.to(torch.uint8), "weights": weights.float(), "spectrum": spectrum.float()}
    return Reply(meta, {name: part.numpy() for name, part in arrays.items()})


def _random_weights(spec: str, role: Role, length: int, heads: int, draw: int, tokens: int) -> Tensor:
    """The map [H, T, S] of a new layer over random tokens, each from a seed of its own."""
    width = HEAD_WIDTH * heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(draw)
        layer = regard.attention(spec, width=width, heads=heads, role=role).double().eval()
        torch.manual_seed(1_000_000 + tokens)
        x = torch.randn(1, length, width, dtype=torch.float64)
        memory = torch.randn(1, length, width, dtype=torch.float64) if role == "cross" else None
        return layer.weights(x, memory=memory)[0].detach()


def _reasons(visible: Tensor, others: list[Tensor], possible: Tensor, by_tokens: bool, by_draw: bool) -> Tensor:
    """Why pairs [H, T, S] are visible. `others` are the visible pairs of other tokens through the same layer, and of
    other draws of the layer: what differs between them depends on the tokens, or on the draw."""
    always = torch.stack([visible, *others]).all(0)
    varies = REASONS.index("content" if by_tokens else "random")
    why = torch.stack([_geometry(part, possible) for part in always])
    why = torch.where(visible & ~always, varies, why)
    if by_tokens or by_draw:
        # visible in every draw, but in no regular place: that only happened
        why = torch.where(visible & (why == REASONS.index("fixed")), varies, why)
    return why


def _possible(weights: Tensor, role: Role) -> Tensor:
    """The pairs that a role allows."""
    T, S = weights.shape
    every = torch.ones(T, S, dtype=torch.bool)
    return every.tril() if role == "causal" and T == S else every


def _spectrum(weights: Tensor, role: Role) -> tuple[Tensor, int]:
    """The singular values of each head's map as shares of the largest, and their possible number. A causal map is a
    triangle, which always has full rank: there, those of what the second half of the text reads of the first."""
    T, S = weights.shape[1:]
    part = weights[:, -(-T // 2) :, : S // 2] if role == "causal" else weights
    values = torch.linalg.svdvals(part)
    return values / values[:, :1].clamp(min=torch.finfo(values.dtype).tiny), values.shape[1]


def _geometry(seen: Tensor, possible: Tensor) -> Tensor:
    """Why fixed pairs [T, S] are visible: as all pairs; as a whole row or column; next to the query; at a stride."""
    T, S = seen.shape
    if bool((seen == possible).all()):
        return torch.where(seen, REASONS.index("all"), 0)
    # a row or column that is visible wherever the role allows, in more than a few places
    counts = possible.sum(1), possible.sum(0)
    full_row = ((seen | ~possible).all(1) & (counts[0] > T // 4))[:, None]
    full_column = ((seen | ~possible).all(0) & (counts[1] > S // 4))[None]
    spread = (full_row | full_column) & seen
    near = torch.zeros_like(seen)
    at = torch.arange(T)
    for direction in (-1, 1) if T == S else ():
        # how far each query sees without a gap; a run that ends at the border could be longer
        runs, clipped, alive = torch.zeros(T, dtype=torch.long), torch.zeros(T, dtype=torch.bool), at >= 0
        for gap in range(T):
            to = at + direction * gap
            inside = (to >= 0) & (to < S) & possible[at, to.clamp(0, S - 1)]
            clipped |= alive & ~inside
            alive = alive & inside & seen[at, to.clamp(0, S - 1)]
            runs = torch.where(alive, gap, runs)
        free = runs[~clipped & ~full_row[:, 0]]
        reach = int(free.max()) if len(free) else T
        gaps = (torch.arange(S) - at[:, None]) * direction
        near |= (gaps >= 0) & (gaps <= torch.minimum(runs, torch.tensor(reach))[:, None])
    rest = seen & ~spread & ~near
    # the rest is all at multiples of one stride, for more than a few queries
    gaps = (torch.arange(S) - at[:, None])[rest].tolist()
    step = math.gcd(*gaps) if int(rest.any(1).sum()) > T // 4 else 1
    why = torch.where(seen, REASONS.index("stride" if step > 1 else "fixed"), 0)
    why = torch.where(spread, REASONS.index("global"), why)
    return torch.where(near & seen, REASONS.index("local"), why)


class Deadline(TorchDispatchMode):
    """Ends work that takes too long, between two operators, whatever is computed."""

    def __init__(self, seconds: float = 8.0):
        super().__init__()
        self.end = time.monotonic() + seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if time.monotonic() > self.end:
            raise ValueError("this takes too long to be shown: choose smaller options or fewer tokens")
        return func(*args, **(kwargs or {}))


def cost(spec: str, role: Role) -> Reply:
    """Floating point operations and numbers written by one layer (width 64, 4 heads) at rising lengths, until one takes
    longer than PATIENCE; those of softmax at each of these lengths."""
    counts: dict[str, list[int]] = {"softmax": [], "mechanism": []}
    for at, length in enumerate(LENGTHS):
        began = time.monotonic()
        try:
            counts["softmax"].append(_counted("softmax", role, length))
        except ValueError:
            # over the deadline
            break
        if len(counts["mechanism"]) == at:
            # longer than its tables: shorter lengths suffice
            with suppress(ValueError):
                counts["mechanism"].append(_counted(spec, role, length))
        # twice the length may take four times as long
        if time.monotonic() - began > PATIENCE:
            break
    if not counts["mechanism"]:
        raise ValueError(
            f"{spec} cannot read {LENGTHS[0]} tokens, or takes too long for them: its work was not counted"
        )
    facts = regard.facts(spec)
    meta = {"lengths": LENGTHS, "counts": counts, "time": facts.time._asdict(), "memory": facts.memory._asdict()}
    return Reply(meta)


def _counted(spec: str, role: Role, length: int) -> int:
    heads = -(-4 // parse(spec).heads) * parse(spec).heads
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        layer = regard.attention(spec, width=16 * heads, heads=heads, role=role).eval()
        x = torch.randn(1, length, 16 * heads)
        memory = x if role == "cross" else None
        with Tally() as tally:
            layer(x, memory=memory)
    return tally.flops + tally.written


def compare(spec: str, call: LayerCall, tokens: list[str]) -> Reply:
    """The weights of a mechanism beside those of softmax, on the same vectors and with learned projections."""
    x = call.x[:, :COMPARED].cpu().float()
    mechanism, softmax = (_with_projections(one, call.layer, x) for one in (spec, "softmax"))
    meta = {
        "tokens": tokens[:COMPARED],
        "cut": len(tokens) > COMPARED,
        "spec": spec,
        "learned": mechanism.copied > 0,
        "role": mechanism.role,
        "softmax_role": softmax.role,
        "signed": regard.facts(spec).signed,
    }
    return Reply(meta, {"mechanism": to_numpy(mechanism.weights), "softmax": to_numpy(softmax.weights)})


class Compared(NamedTuple):
    """The weights [H, T, S] of a layer in a role, and the number of projections that were copied into it."""

    weights: Tensor
    role: Role
    copied: int


def _with_projections(spec: str, trained: Attention, x: Tensor) -> Compared:
    """A new layer of a mechanism, with the projections of a trained layer, on its input."""
    shape, roles = trained.shape, regard.facts(spec).roles
    role = shape.role if shape.role in roles else roles[0]
    if role == "cross":
        raise ValueError("this mechanism only reads another sequence: see it in the cross-attention of a translator")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = regard.attention(
            spec,
            width=shape.width,
            heads=shape.heads,
            head_width=shape.head_width,
            kv_heads=shape.kv_heads,
            role=role,
        ).eval()
        copied = sum(_copy_projections(part, trained) for part in parts_of(layer))
        return Compared(layer.weights(x)[0].detach(), role, copied)


def _copy_projections(layer: Attention, trained: Attention) -> int:
    """Copies the projections that both layers have alike. Returns their number."""
    if not isinstance(layer, Projected) or not isinstance(trained, Projected):
        return 0
    copied = 0
    first, D = layer.shape.first_head, layer.shape.head_width
    for name, linear in layer.project.items():
        if name not in trained.project:
            continue
        source = trained.project[name]
        if not isinstance(linear, nn.Linear) or not isinstance(source, nn.Linear | Packed):
            continue
        weight = source.weight[first * D : first * D + len(linear.weight)]
        if trained.inputs[name] == layer.inputs[name] and weight.shape == linear.weight.shape:
            linear.weight.copy_(weight)
            copied += 1
    return copied


def trained_position(model: nn.Module, spec: str, role: Role) -> Position | None:
    """The scheme of that name and role as the first layer of a model that has it has learned it; None: no layer has."""
    name = parse(spec).name
    for module in model.modules():
        if not isinstance(module, Position) or module.facts.name != name or not _trains(module):
            continue
        if module.facts.kind == "input" or module.shape.role == role:
            return module
    return None


def _trains(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def position(spec: str, role: Role, length: int, width: int, heads: int, trained: Position | None = None) -> Reply:
    """What a scheme does with positions: its table if it has one, and what it adds between two positions. A trained
    scheme has its own width and heads."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if trained is None:
            scheme = regard.position(spec, width=width, heads=heads, role=role).double().eval()
            D = width // heads
        else:
            scheme = copy.deepcopy(trained).cpu().double().eval()
            width, heads, D = scheme.shape.width, scheme.shape.heads, scheme.shape.head_width
            length = min(length, getattr(scheme, "longest", length)) if scheme.facts.kind == "input" else length
        arrays = _position_arrays(scheme, role, length, width, heads, D)
    facts = scheme.facts
    meta = {
        "kind": facts.kind,
        "formula": facts.formula,
        "paper": facts.paper,
        "role": role,
        "heads": len(arrays["pairs"]),
        "width": width,
        "length": length,
        # an input is added before the layers, whatever they hide
        "hidden": role == "causal" and facts.kind != "input",
        "trained": trained is not None,
        "trains": _trains(scheme),
    }
    return Reply(meta, {name: to_numpy(part) for name, part in arrays.items()})


def _position_arrays(scheme: Position, role: Role, length: int, width: int, heads: int, D: int) -> dict[str, Tensor]:
    """ "pairs" [1 or H, T, T]: what the scheme adds between two positions; of some kinds "table" [T, E or D] too."""
    x = torch.zeros(1, length, width, dtype=torch.float64)
    rows, kind = Rows.full(x), scheme.facts.kind
    if kind == "input":
        table = scheme.add(x, rows)[0]
        return {"table": table, "pairs": (table @ table.T)[None]}
    if kind == "rotation":
        same = torch.full((1, heads, length, D), D**-0.5, dtype=torch.float64)
        rotated = scheme.rotate(same, rows.positions())[0]
        return {"table": rotated[0], "pairs": rotated @ rotated.mT}
    zero = torch.zeros(1, dtype=torch.long)
    mask = Mask(zero, zero, zero + length, length, length, role == "causal", True, 0)
    if kind == "bias":
        return {"pairs": scheme.biases(mask)}
    q = torch.randn(1, heads, 1, D, dtype=torch.float64).expand(-1, -1, length, -1)
    k = torch.zeros(1, heads, length, D, dtype=torch.float64)
    return {"pairs": scheme.scores(q, k, mask, D**-0.5)[0]}
