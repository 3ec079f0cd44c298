"""A short global sequence beside a long one that is read locally, with learned relations between tokens."""

import copy
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import masked_softmax
from regard.core.reference import Row, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.compiling import at_most, count_blocks, exporting
from regard.kernels.runs import Bound, Far, Pass, Relations
from regard.layers.attention.attending import recomputed
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached
from regard.layers.attention.projected import InputKind
from regard.layers.position.base import skew

# Size of temporaries, in numbers. On a GPU they are cheap and the start of a kernel is not.
CHUNK = 1 << 21
DEVICE_CHUNK = 1 << 26


class ETC(Cached):
    """Ainslie et al. 2020: the first g tokens of a row are its global sequence (n_g in the paper), the others the long
    one. A long token sees the long ones at most r (`radius`) away and all global ones, a global token sees all, each in
    one softmax over (q . k + q . e_p + b_p) / sqrt(D), where p is the relation of the two tokens and e_p, b_p are
    learned for each head, other ones for the queries of either sequence.

    Within a sequence p is the distance, clipped at m (`distance`): 0 the token itself, 1 ... m to the right,
    m + 1 ... 2m to the left. Between the two p is 2m + 1, or 2m + 2 for a long token and the global one of its segment.
    Segments are equally long, or as long as `segment` gives them one by one.

    projections="shared": both sequences share those of q, k and v (the authors' share_qkv_projections, their default).
    "query": the queries of either sequence have projections of q, k and v of their own (share_kv_projections). "pair":
    keys and values have one for each of the four pairs of sequences, a query that of its sequence. Theirs has an output
    projection for each sequence by default: output="separate".

    Theirs is told relations and masks with every example, any label for any pair of tokens. A layer here is given
    tokens only: relations follow from places, and are the same in every row. Time N (r + g), memory N.
    """

    facts = Facts(
        name="etc",
        paper="Ainslie et al. 2020, ETC: Encoding Long and Structured Inputs in Transformers",
        link="arXiv 2004.08483",
        family="patterns",
        formula="o_i = sum_j softmax_j((q_i . (k_j + e_p) + b_p) / sqrt(D)) v_j, p = p(i, j), j global or |i - j| <= r",
        time=Order("N (r + g)", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            ("causal", "every token reads the global tokens, and these have read the whole row"),
            ("cross", "relations are told by the places of two tokens of one row, and a memory is another sequence"),
        ),
    )
    examples = (
        "etc(globals=3, radius=2, distance=2)",
        "etc(globals=4, radius=5, distance=7, segment=6)",
        "etc(globals=3, radius=3, distance=2, segment=(2, 9, 4), projections='query', output='separate')",
        "etc(globals=3, radius=2, distance=3, segment=5, projections='pair', output='separate')",
    )

    def __init__(
        self,
        shape: Shape,
        *,
        globals: Annotated[int, "number of tokens at the start of a row that form the global sequence"] = 256,
        radius: Annotated[int, "number of tokens that a long token sees on each side"] = 84,
        distance: Annotated[int, "largest distance that has a relation of its own"] = 12,
        segment: Annotated[
            int | tuple[int, ...] | None,
            "number of long tokens per global token, one for all or one each; None: no segments",
        ] = None,
        projections: Annotated[
            Literal["shared", "query", "pair"],
            "projections of q, k and v: one for both sequences, for the queries of each, or for each pair",
        ] = "shared",
        output: Annotated[Literal["shared", "separate"], "output projection: one, or one for each sequence"] = "shared",
    ):
        segment = tuple(segment) if isinstance(segment, list) else segment
        if projections != "shared":
            wide: dict[str, InputKind] = {"wide_k": "key", "wide_v": "value"}
            self.inputs = self.inputs | wide
        super().__init__(shape)
        lengths = segment if isinstance(segment, tuple) else (segment,)
        sizes = (("globals", globals), ("radius", radius), ("distance", distance))
        for name, size in (*sizes, *(("segment", length) for length in lengths)):
            if size is not None and size < 1:
                raise ValueError(f"option {name!r} of 'etc' must be at least 1, got {size}")
        if isinstance(segment, tuple) and len(segment) > globals:
            raise ValueError(
                f"option 'segment' of 'etc' gives {len(segment)} segments, and there are {globals} global tokens: give "
                f"at most one for each"
            )
        self.globals, self.radius, self.distance, self.segment = globals, radius, distance, segment
        for name in {"shared": (), "query": ("q",), "pair": self.inputs}[projections]:
            self.project[name] = Pair(self.linear_of(name), globals)
        if output == "separate":
            # called as a linear map; `reference` alone looks into it
            self.output = cast(nn.Linear, Pair(self.output, globals))
        relations, H, D = 2 * distance + 3, shape.heads, shape.head_width
        self.long_e, self.global_e = (nn.Parameter(0.02 * torch.randn(relations, H, D)) for _ in range(2))
        self.long_b, self.global_b = (nn.Parameter(torch.zeros(relations, H)) for _ in range(2))

    def attend(
        self,
        mask: Mask,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        wide_k: Tensor | None = None,
        wide_v: Tensor | None = None,
    ) -> Tensor:
        """`wide_k` and `wide_v` are what the global queries read, where it is not what the long ones do."""
        g = at_most(self.globals, mask.T)
        wide_k, wide_v = k if wide_k is None else wide_k, v if wide_v is None else wide_v
        refusal = "the lengths of segments are given one by one" if isinstance(self.segment, tuple) else None
        if exporting():
            refusal = "an exported program has no tables of relations"
        if mask.T > 1 and runs.takes(q, k, v, refusal=refusal):
            return self._in_runs(mask, q, k, v, wide_k, wide_v, g)
        q = q * self.scale
        o = recomputed(lambda q, k, v: self._wide(mask, q, k, v), q[:, :, :g], wide_k, wide_v)
        return o if g == mask.T else torch.cat([o, self._near(mask, q[:, :, g:], k, v)], 2)

    def _in_runs(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, wide_k: Tensor, wide_v: Tensor, g: int) -> Tensor:
        """By kernels that read what a relation adds from a table of the queries."""
        place = mask.where()
        # segments of given lengths do not come here
        segment = self.segment if isinstance(self.segment, int) else 0

        def related(q: Tensor, e: Tensor, b: Tensor, of_globals: bool) -> Relations:
            table = self._relate(q * self.scale, e, b, torch.arange(len(e), device=q.device))
            return Relations(table, self.distance, g, segment, of_globals)

        wide = related(q[:, :, :g], self.global_e, self.global_b, True)
        o = runs.attend(q[:, :, :g], wide_k, wide_v, [Pass()], scale=self.scale, where=place, relations=wide)
        if g == mask.T:
            return o
        near = Pass(Bound(plus=-self.radius), Bound(plus=self.radius + 1), Far(g))
        place, beside = place._replace(first=g), related(q, self.long_e, self.long_b, False)
        return runs.attend(q, k, v, [near], scale=self.scale, where=place, head=o, relations=beside)

    def _wide(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The global queries over all keys."""
        g = q.shape[2]
        inside = skew(self._relate(q, self.global_e, self.global_b, self._distances(1 - g, g)), g)
        across = self._relate(q, self.global_e, self.global_b, self._links())
        linked = self._linked(torch.arange(mask.T - g, device=q.device), g).mT
        logits = q @ k.mT + torch.cat([inside, torch.where(linked, across[..., 1:], across[..., :1])], 3)
        return masked_softmax(logits, None if mask.full else mask.real()[:, None, None]).to(v.dtype) @ v

    def _near(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The long queries, in blocks of c > radius that see the block before, their own and the one behind."""
        (B, H, T, _), g, c = q.shape, self.globals, self.radius + 1
        n = count_blocks(T, c)
        places = torch.arange(n * c, device=q.device).view(n, c)
        blocks = F.pad(q, (0, 0, 0, n * c - T)).unflatten(2, (n, c))  # [B, H, n, c, D]
        near_k, near_v = (F.pad(x[:, :, g:], (0, 0, c, n * c + c - T)).unfold(2, 3 * c, c).mT for x in (k, v))
        away = torch.arange(-c, 2 * c, device=q.device)  # of a key from the first query of its block
        inside = (away - places[0][:, None]).abs() <= self.radius  # [c, 3c]
        lengths = (mask.end - g)[:, None, None, None, None]
        global_k, global_v = k[:, :, :g], v[:, :, :g]

        def read(q: Tensor, near_k: Tensor, near_v: Tensor, places: Tensor) -> Tensor:
            at = (places[:, :1] + away)[:, None]  # [m, 1, 3c]
            seen = inside & (at >= 0) & (at < lengths)  # [B, 1, m, c, 3c]
            flat = q.flatten(2, 3)
            apart = self._relate(flat, self.long_e, self.long_b, self._distances(1 - 2 * c, 2 * c))
            near = q @ near_k.mT + skew(apart.unflatten(2, (-1, c)), 3 * c)
            across = self._relate(flat, self.long_e, self.long_b, self._links())
            linked = self._linked(places.flatten(), g)
            far = flat @ global_k.mT + torch.where(linked, across[..., 1:], across[..., :1])
            near = torch.where(seen, near, torch.finfo(near.dtype).min)
            weights = masked_softmax(torch.cat([near, far.unflatten(2, (-1, c))], 4), None).to(v.dtype)
            return (weights[..., : 3 * c] @ near_v).flatten(2, 3) + weights[..., 3 * c :].flatten(2, 3) @ global_v

        if exporting():
            return read(blocks, near_k, near_v, places)[:, :, :T]
        size = max(1, (CHUNK if q.device.type == "cpu" else DEVICE_CHUNK) // (B * H * c * (3 * c + g)))
        pieces = zip(*(x.split(size, -3) for x in (blocks, near_k, near_v)), places.split(size), strict=True)
        return torch.cat([recomputed(read, *piece) for piece in pieces], 2)[:, :, :T]

    def _relate(self, q: Tensor, e: Tensor, b: Tensor, relations: Tensor) -> Tensor:
        """q . e_p + b_p / sqrt(D) for scaled queries: [B, H, T, D] -> [B, H, T, C] for C relations."""
        return q @ e[relations].permute(1, 2, 0) + (self.scale * b[relations].T)[:, None]

    def _distances(self, first: int, last: int) -> Tensor:
        """The relations of a query and the keys `first` to `last` to its right."""
        away = torch.arange(first, last + 1, device=self.long_e.device).clamp(-self.distance, self.distance)
        return torch.where(away < 0, self.distance - away, away)

    def _links(self) -> Tensor:
        """The relations of a global token and a long one: of another segment, of its own."""
        return torch.arange(2 * self.distance + 1, 2 * self.distance + 3, device=self.long_e.device)

    def _linked(self, places: Tensor, g: int) -> Tensor:
        """[n, g]: which global token the long tokens at these places belong to."""
        owner = -torch.ones_like(places)
        if isinstance(self.segment, tuple):
            ends = torch.tensor(self.segment, device=places.device).cumsum(0)
            owner = torch.searchsorted(ends, places, right=True)
            owner = torch.where(owner < len(ends), owner, -1)
        elif self.segment is not None:
            owner = places // self.segment
        return owner[:, None] == torch.arange(g, device=places.device)

    def plain(self, row: Row) -> Tensor:
        g, m, outs = self.globals, self.distance, []
        for i in range(row.T):
            e, b = (self.global_e, self.global_b) if i < g else (self.long_e, self.long_b)
            logits, values = [], []
            for j in range(row.T):
                if (i < g) == (j < g):
                    far = min(abs(i - j), m)
                    p = far if j >= i else m + far
                else:
                    p = 2 * m + (2 if self._plain_owner(max(i, j) - g) == min(i, j) else 1)
                if i < g or j < g or abs(i - j) <= self.radius:
                    wide = "wide_" if i < g and "wide_k" in row.values else ""
                    k, v = (row.values[wide + name][j] for name in "kv")
                    score = row.q[i] @ k + row.q[i] @ e[p, row.head] + b[p, row.head]
                    logits.append(score * self.scale)
                    values.append(v)
            outs.append(blend(torch.stack(logits), values))
        return torch.stack(outs)

    def _plain_owner(self, place: int) -> int | None:
        """The global token that the long token at a place belongs to."""
        if not isinstance(self.segment, tuple):
            return None if self.segment is None else place // self.segment
        for owner, length in enumerate(self.segment):
            if place < length:
                return owner
            place -= length
        return None

    def plain_input(self, name: str, head: int, x: Tensor, source: Tensor) -> Tensor:
        D, G, H = self.shape.head_width, self.shape.kv_heads, self.shape.heads
        slot = head if self.inputs[name] == "query" else head * G // H
        tokens = [self._plain_linear(self.project[name], i, token) for i, token in enumerate(x)]
        return torch.stack([token[slot * D : slot * D + D] for token in tokens])

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        heads = torch.cat([self.plain(self.plain_row(head, x)) for head in range(self.shape.heads)], -1)
        return torch.stack([self._plain_linear(self.output, i, token) for i, token in enumerate(heads)])

    def _plain_linear(self, linear: nn.Module, i: int, token: Tensor) -> Tensor:
        """A token projected by its place."""
        if isinstance(linear, Pair):
            linear = linear.first if i < self.globals else linear.others
        assert isinstance(linear, nn.Linear)
        return linear.weight @ token if linear.bias is None else linear.weight @ token + linear.bias


class Pair(nn.Module):
    """A projection of the first g tokens of a row, and another one, of the same shape, of the others."""

    def __init__(self, linear: nn.Linear, g: int):
        super().__init__()
        self.first, self.others, self.g = linear, copy.deepcopy(linear), g
        nn.init.xavier_uniform_(self.others.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x[:, : self.g]), self.others(x[:, self.g :])], 1)
