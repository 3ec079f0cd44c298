"""Mechanisms and position schemes as numbers to draw: measured on the layers that run, never told in advance."""

import copy
import math
import time
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.core.rows import Mask, Rows
from regard.layers.attention.projected import Projected
from regard.layers.position.base import Position
from regard.page.maps import Given
from regard.page.wire import Reply
from regard.spec import parse

REASONS = ("hidden", "local", "global", "stride", "fixed", "random", "content", "all")
LENGTHS = (64, 128, 256, 512, 1024)
PATIENCE = 0.5  # seconds for one length, after which no longer one is counted
DRAWS = 3  # of tokens and of seeds, to tell what a pattern depends on
MORE_DRAWS = 12  # of tokens, where they matter, to tell what is always visible from what happens to be
HEAD_WIDTH = 16  # of the heads whose pattern is measured
FAINT = 1e-6  # of the largest singular value: below it a direction counts as none
COMPARED = 96  # tokens of a text on which mechanisms are compared


def pattern(spec: str, role: str, length: int, heads: int, seed: int) -> Reply:
    """Why each pair is visible, [H, T, S] of REASONS; the weights over random tokens, and how many patterns they are
    made of (their rank).

    What depends on the tokens is found by other tokens through the same layer, what depends on a draw by other draws.
    """
    width = HEAD_WIDTH * heads

    def weights_of(draw: int, tokens: int) -> Tensor:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(draw)
            layer = regard.attention(spec, width=width, heads=heads, role=role).double().eval()
            torch.manual_seed(1_000_000 + tokens)
            x = torch.randn(1, length, width, dtype=torch.float64)
            memory = torch.randn(1, length, width, dtype=torch.float64) if role == "cross" else None
            return layer.weights(x, memory=memory)[0].detach()

    facts = regard.facts(spec)
    weights = weights_of(seed, 0)
    possible = _possible(weights[0], role)
    other_tokens = [weights_of(seed, tokens) for tokens in range(1, DRAWS)]
    other_draws = [weights_of(seed + draw, 0) for draw in range(1, DRAWS)]
    steady = all(torch.equal(weights, other) for other in other_tokens)
    if facts.family == "mixers":
        # of a mixer a zero is a number like any other: no pair is hidden by it
        why = torch.where(possible, REASONS.index("all"), 0).expand(weights.shape)
    else:
        here = weights != 0
        by_tokens = any(not torch.equal(here, other != 0) for other in other_tokens)
        others = [*other_tokens, *other_draws]
        if by_tokens:
            others += [weights_of(seed, tokens) for tokens in range(DRAWS, MORE_DRAWS)]
        always = torch.stack([here, *(other != 0 for other in others)]).all(0)
        by_draw = any(not torch.equal(here, other != 0) for other in other_draws)
        varies = REASONS.index("content" if by_tokens else "random")
        why = torch.stack([_geometry(part, possible) for part in always])
        why = torch.where(here & ~always, varies, why)
        if by_tokens or by_draw:
            # visible in every draw, and yet at no place of its own: it only happened to be
            why = torch.where(here & (why == REASONS.index("fixed")), varies, why)
    spectrum, most = _spectrum(weights, role)
    meta = {
        "reasons": REASONS,
        "columns": facts.columns,
        "signed": facts.signed,
        "formula": facts.formula,
        "roles": facts.roles,
        "steady": steady,
        "blank": not bool(weights.any()),
        "rank": (spectrum > FAINT).sum(1).tolist(),
        "most": most,
        "head_width": HEAD_WIDTH,
        "halves": role == "causal",
    }
    arrays = {"why": why.to(torch.uint8), "weights": weights.float(), "spectrum": spectrum.float()}
    return Reply(meta, {name: part.numpy() for name, part in arrays.items()})


def _possible(weights: Tensor, role: str) -> Tensor:
    """The pairs that a role allows."""
    T, S = weights.shape
    every = torch.ones(T, S, dtype=torch.bool)
    return every.tril() if role == "causal" and T == S else every


def _spectrum(weights: Tensor, role: str) -> tuple[Tensor, int]:
    """The singular values of each head's map as shares of the largest, and how many there could be. A causal map is a
    triangle, which always has full rank: there, of what the second half of the text reads of the first."""
    T, S = weights.shape[1:]
    part = weights[:, -(-T // 2) :, : S // 2] if role == "causal" else weights
    values = torch.linalg.svdvals(part)
    return values / values[:, :1].clamp(min=torch.finfo(values.dtype).tiny), values.shape[1]


def _geometry(seen: Tensor, possible: Tensor) -> Tensor:
    """Why fixed pairs [T, S] are visible: all there are; a row or a column of its own; next to the query; at a step."""
    T, S = seen.shape
    if bool((seen == possible).all()):
        return torch.where(seen, REASONS.index("all"), 0)
    # a line that is visible wherever it can be, and has more than a few places to be so
    counts = possible.sum(1), possible.sum(0)
    full_row = ((seen | ~possible).all(1) & (counts[0] > T // 4))[:, None]
    full_column = ((seen | ~possible).all(0) & (counts[1] > S // 4))[None]
    spread = (full_row | full_column) & seen
    near = torch.zeros_like(seen)
    at = torch.arange(T)
    for direction in (-1, 1) if T == S else ():
        # how far each query sees without a gap; a run that ends at the border could go on
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
    # all of them whole steps of one length away, and so for more than a few queries
    gaps = (torch.arange(S) - at[:, None])[rest].tolist()
    step = math.gcd(*gaps) if int(rest.any(1).sum()) > T // 4 else 1
    why = torch.where(seen, REASONS.index("stride" if step > 1 else "fixed"), 0)
    why = torch.where(spread, REASONS.index("global"), why)
    return torch.where(near & seen, REASONS.index("local"), why)


class Deadline(TorchDispatchMode):
    """Ends what takes too long between two operators, whatever mechanism it is."""

    def __init__(self, seconds: float = 8.0):
        super().__init__()
        self.end = time.monotonic() + seconds

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if time.monotonic() > self.end:
            raise ValueError("this takes too long to be shown: choose smaller options or fewer tokens")
        return function(*args, **(kwargs or {}))


class Written(TorchDispatchMode):
    """Counts the numbers that operators write which are no views."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not any(result.alias_info is not None for result in function._schema.returns):
            for part in out if isinstance(out, list | tuple) else [out]:
                self.numbers += part.numel() if isinstance(part, Tensor) else 0
        return out


def _flash_flops(q, k, v, *_, out_shape=None, **__):
    B, H, T, D = q
    return 2 * B * H * T * k[2] * (D + v[3])


# the counter of torch does not know the CPU's kernel
FLASH = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops}


def cost(spec: str, role: str) -> Reply:
    """Multiplications and numbers written by one layer (width 64, 4 heads) at rising lengths, as many as take no longer
    than PATIENCE; of softmax at each of them at least."""
    counts: dict[str, list[int]] = {"softmax": [], "mechanism": []}
    for at, length in enumerate(LENGTHS):
        began = time.monotonic()
        try:
            counts["softmax"].append(_counted("softmax", role, length))
        except ValueError:
            # longer than we wait
            break
        if len(counts["mechanism"]) == at:
            # longer than its tables: shorter ones tell enough
            with suppress(ValueError):
                counts["mechanism"].append(_counted(spec, role, length))
        # twice the length may take four times as long
        if time.monotonic() - began > PATIENCE:
            break
    if not counts["mechanism"]:
        raise ValueError(f"{spec} takes no {LENGTHS[0]} tokens, or too long for them, so that its work was not counted")
    facts = regard.facts(spec)
    meta = {"lengths": LENGTHS, "counts": counts, "time": facts.time._asdict(), "memory": facts.memory._asdict()}
    return Reply(meta)


def _counted(spec: str, role: str, length: int) -> int:
    heads = -(-4 // parse(spec).heads) * parse(spec).heads
    # with gradients, which the counter of torch expects of whoever switches them on inside
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        layer = regard.attention(spec, width=16 * heads, heads=heads, role=role).eval()
        x = torch.randn(1, length, 16 * heads)
        memory = x if role == "cross" else None
        with FlopCounterMode(display=False, custom_mapping=FLASH) as flops, Written() as written:
            layer(x, memory=memory)
    return flops.get_total_flops() + written.numbers


def compare(spec: str, given: Given, tokens: list[str]) -> Reply:
    """The weights of a mechanism beside softmax's on the same vectors, by the projections a trained layer has."""
    trained = given.layer
    shape, x = trained.shape, given.x[:, :COMPARED].cpu().float()
    weights, learned, roles = [], [], []
    for one in (spec, "softmax"):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            sizes = {"width": shape.width, "heads": shape.heads, "head_width": shape.head_width}
            role = shape.role if shape.role in regard.facts(one).roles else regard.facts(one).roles[0]
            if role == "cross":
                raise ValueError("this mechanism only reads another sequence: see it in a translator's cross attention")
            layer = regard.attention(one, **sizes, kv_heads=shape.kv_heads, role=role).eval()
            learned.append(sum(_copy(part, trained) for part in getattr(layer, "parts", [layer])))
            weights.append(layer.weights(x)[0].detach())
            roles.append(role)
    meta = {"tokens": tokens[:COMPARED], "cut": len(tokens) > COMPARED, "spec": spec, "learned": learned[0] > 0}
    meta |= {"role": roles[0], "softmax_role": roles[1], "signed": regard.facts(spec).signed}
    names = ("mechanism", "softmax")
    return Reply(meta, {name: part.float().numpy() for name, part in zip(names, weights, strict=True)})


def _copy(layer: torch.nn.Module, trained: torch.nn.Module) -> int:
    """Queries, keys and values as they were learned, where the mechanism has the like of them: how many."""
    if not isinstance(layer, Projected) or not isinstance(trained, Projected):
        return 0
    copied = 0
    first, D = layer.shape.first_head, layer.shape.head_width
    for name, linear in layer.project.items():
        if name in trained.project and trained.inputs[name] == layer.inputs[name]:
            weight = trained.project[name].weight[first * D : first * D + len(linear.weight)]
            if weight.shape == linear.weight.shape:
                linear.weight.copy_(weight)
                copied += 1
    return copied


def trained_position(model: nn.Module, spec: str, role: str) -> Position | None:
    """The scheme of that name as the first layer of a model that has it in that role has learned it; None: none has."""
    name = parse(spec).name
    for module in model.modules():
        if not isinstance(module, Position) or module.facts.name != name or not _trains(module):
            continue
        if module.facts.kind == "input" or module.shape.role == role:
            return module
    return None


def _trains(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def position(spec: str, role: str, length: int, width: int, heads: int, trained: Position | None = None) -> Reply:
    """What a scheme does with places: a table of its own where it has one, and what it adds between two places. Of a
    trained one the width and the heads are its own."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if trained is None:
            scheme = regard.position(spec, width=width, heads=heads, role=role).double().eval()
        else:
            scheme = copy.deepcopy(trained).cpu().double().eval()
            width, heads = scheme.shape.width, scheme.shape.heads
            length = min(length, getattr(scheme, "longest", length)) if scheme.facts.kind == "input" else length
        kind, D = scheme.facts.kind, width // heads if trained is None else scheme.shape.head_width
        arrays: dict[str, Tensor] = {}
        x = torch.zeros(1, length, width, dtype=torch.float64)
        rows = Rows.full(x)
        if kind == "input":
            table = scheme.add(x, rows)[0]
            arrays = {"table": table, "pairs": (table @ table.T)[None]}
        elif kind == "rotation":
            same = torch.full((1, heads, length, D), D**-0.5, dtype=torch.float64)
            turned = scheme.rotate(same, rows.positions())[0]
            arrays = {"table": turned[0], "pairs": turned @ turned.mT}
        else:
            zero = torch.zeros(1, dtype=torch.long)
            mask = Mask(zero, zero, zero + length, length, length, role == "causal", True, 0)
            if kind == "bias":
                pairs = scheme.biases(mask)
            else:
                q = torch.randn(1, heads, 1, D, dtype=torch.float64).expand(-1, -1, length, -1)
                pairs = scheme.scores(q, torch.zeros(1, heads, length, D, dtype=torch.float64), mask, D**-0.5)[0]
            arrays = {"pairs": pairs}
    facts = scheme.facts
    meta = {"kind": kind, "formula": facts.formula, "paper": facts.paper, "role": role, "heads": len(arrays["pairs"])}
    # an input is added before the layers, whatever they hide
    meta |= {"width": width, "length": length, "hidden": role == "causal" and kind != "input"}
    meta |= {"trained": trained is not None, "trains": _trains(scheme)}
    return Reply(meta, {name: part.float().numpy() for name, part in arrays.items()})
