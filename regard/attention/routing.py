"""Tokens near the same centroid attend to each other."""

import dataclasses
import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.base import Cached, Facts, Mask, Order, Rows, Shape, masked_softmax
from regard.reference import Row, blend


class Routing(Cached):
    """Roy et al. 2020: q and k are normalised to length sqrt(D) (a layer norm without parameters), and each of k
    centroids mu_c, our `clusters`, picks the w tokens of a row with the largest mu_c . k (and, where queries have a
    projection of their own, mu_c . q). A picked query attends to the keys its centroid picked; the outputs of a query
    picked several times are averaged, and a query picked by none gives zeros:

        o_i = mean over c that picked i of sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, j picked by c (causal: j <= i)

    The authors' code leaves out the division by sqrt(D): `scaled=False`. In training, each centroid follows the tokens
    nearest to it by moving sums, sum <- decay sum + (1 - decay) sum of them, and likewise their count; one that is
    nearest to none stays. The second loss, `commitment` times the mean square of x - mu, draws tokens to their
    centroid; a large one draws them into one point, where all weights are alike.

    A centroid picks among all tokens of a row, so a later token may drive an earlier one out: outputs change as a row
    grows, though no token reads what comes after it. Decoding lets the centroids pick again among the tokens so far, as
    the authors do: a new token's output is that of the last token of a whole row.
    Time N k + k w^2, which is N^1.5 for k = w = sqrt(N); memory N k.
    """

    facts = Facts(
        name="routing",
        paper="Roy et al. 2020, Efficient Content-Based Sparse Attention with Routing Transformers",
        link="arXiv 2003.05997",
        family="clusters",
        formula="o_i = mean_c sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, i and j among the w tokens nearest to mu_c",
        time=Order("N^2 / clusters", 2),
        memory=Order("N clusters", 1),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "a centroid picks among all queries of a row, and a decoder brings one at a time"),),
        prefix=False,
        split=False,
        exact=False,
        signed=True,
        loss=True,
    )
    examples = (
        "routing(clusters=3)",
        "routing(clusters=4, window=6, scaled=False)",
        "routing(clusters=3, window=7, shared=False)",
        "routing(clusters=2, shared=False)",
    )
    # each centroid picks all tokens
    reduces_to = (
        ("routing(clusters=3, window=64)", "routing(clusters=1)"),
        ("routing(clusters=3, window=33, shared=False)", "routing(clusters=1, shared=False)"),
    )

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[int, "centroids of each head (k in the paper)"] = 16,
        window: Annotated[int | None, "tokens each centroid picks (w); None: N / clusters, rounded up"] = None,
        shared: Annotated[bool, "queries and keys are one projection; False is for role 'self' only"] = True,
        scaled: Annotated[bool, "logits are divided by sqrt(D); False: not, as in the authors' code"] = True,
        decay: Annotated[float, "how much of the old centroid a training step keeps"] = 0.999,
        commitment: Annotated[float, "weight of the second loss (beta)"] = 1e-4,
    ):
        if window is not None:
            self.facts = dataclasses.replace(self.facts, time=Order("N clusters + clusters window^2", 1))
        if shared:
            self.inputs = {"k": "key", "v": "value"}
        else:
            why = "a centroid must pick the same tokens as queries and as keys: build it with shared=True"
            refusals = (*self.facts.refusals, ("causal", why))
            self.facts = dataclasses.replace(self.facts, roles=("self",), refusals=refusals, state=None)
        super().__init__(shape)
        for name, size in (("clusters", clusters), ("window", window)):
            if size is not None and size < 1:
                raise ValueError(f"option {name!r} of 'routing' must be at least 1, got {size}")
        if not 0 <= decay <= 1:
            raise ValueError(f"option 'decay' of 'routing' must be from 0 to 1, got {decay}")
        self.clusters, self.window, self.decay, self.commitment = clusters, window, decay, commitment
        self.temper = self.scale if scaled else 1.0
        self.register_buffer("sums", norm(torch.randn(shape.heads, clusters, shape.head_width)))
        self.register_buffer("counts", torch.ones(shape.heads, clusters))

    @property
    def centroids(self) -> Tensor:
        """[H, clusters, D]"""
        return self.sums / self.counts[..., None]

    def attend(self, mask: Mask, k: Tensor, v: Tensor, q: Tensor | None = None) -> Tensor:
        k = norm(k)
        at = self._pick(mask, k)  # [B, H, C, w]
        keys, values = take(k, at), take(v, at)
        if mask.T == 1 and mask.S > 1:
            return self._step(mask, k, at, keys, values)
        rows, queries = at, keys
        if q is not None:
            q = norm(q)
            rows = self._pick(mask, q)
            queries = take(q, rows)
        picked = [x.flatten(1, 2) for x in (queries, keys, values)]  # [B, H C, w, D]
        # sorted by position, with what stands for no token at the end: no causal query sees it
        seen = None if mask.causal else (at < mask.S).flatten(1, 2)[:, :, None]
        o = F.scaled_dot_product_attention(*picked, attn_mask=seen, is_causal=mask.causal, scale=self.temper)
        rows, o = rows.flatten(2), o.unflatten(1, (-1, self.clusters)).flatten(2, 3)
        # behind the last token a place for what stands for none
        total = o.new_zeros(*o.shape[:2], mask.S + 1, o.shape[3]).scatter_add(2, rows[..., None].expand_as(o), o)
        times = o.new_zeros(total.shape[:3]).scatter_add(2, rows, torch.ones_like(o[..., 0]))
        o = (total / times.clamp(min=1)[..., None])[:, :, : mask.S]
        if mask.T == mask.S:
            return o
        here = (mask.q0[:, None] + torch.arange(mask.T, device=k.device))[:, None].expand(-1, o.shape[1], -1)
        return take(o, here)

    def _pick(self, mask: Mask, x: Tensor) -> Tensor:
        """The tokens each centroid picks, sorted, and S in the place of those it lacks: [B, H, C, w]"""
        S, end = mask.S, mask.end[:, None, None, None]
        x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        near = torch.einsum("bhsd,hcd->bhcs", x, self.centroids.to(x.dtype))
        near = torch.where(torch.arange(S, device=x.device) < end, near, -torch.inf)
        if self.window is None:
            # by the real tokens of the row: padding makes no difference
            w, size = -(-S // self.clusters), -(-end // self.clusters)
        else:
            w, size = min(self.window, S), end
        ranked = near.topk(w, -1).indices
        return torch.where(torch.arange(w, device=x.device) < size, ranked, S).sort(-1).values

    def _step(self, mask: Mask, k: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One new token a row: it reads what the centroids that pick it picked."""
        here = mask.q0[:, None, None, None]
        q = take(k, here[..., 0].expand(-1, k.shape[1], -1))[:, :, :, None]  # [B, H, 1, 1, D]
        logits = (q * self.temper @ keys.transpose(-1, -2))[:, :, :, 0]  # [B, H, C, w]
        member = (at == here).any(-1, keepdim=True)
        weights = masked_softmax(logits, member & (at <= here)).to(values.dtype)
        total = torch.einsum("bhcw,bhcwd->bhd", weights, values)[:, :, None]
        return total / member.sum(2, keepdim=True).clamp(min=1)

    def learn(self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
        keys = self.repeated({"k": source["k"]})
        x = norm(torch.cat([*query.values(), *keys.values()], 2))  # [B, H, n, D]
        centroids = self.centroids.to(x.dtype)
        nearest = torch.einsum("bhsd,hcd->bhsc", x.detach(), centroids).argmax(-1)
        hot = F.one_hot(nearest, self.clusters).to(x.dtype)
        real = rows.real()
        if real is not None:
            real = real.repeat(1, x.shape[2] // rows.T)[:, None, :, None]
            x, hot = torch.where(real, x, 0), torch.where(real, hot, 0)
        # padded tokens are zeros on both sides
        square = (x - torch.einsum("bhsc,hcd->bhsd", hot, centroids)).square()
        loss = self.commitment * square.sum() / (hot.sum() * x.shape[3]).clamp(min=1)
        with torch.no_grad():
            count = hot.sum((0, 2))  # [H, C]
            total = torch.einsum("bhsc,bhsd->hcd", hot, x)
            share = torch.where(count > 0, 1 - self.decay, 0.0).to(self.sums.dtype)
            self.sums.lerp_(total.to(self.sums.dtype), share[..., None])
            self.counts.lerp_(count.to(self.counts.dtype), share)
        return loss

    def reference_loss(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        squares = []
        for head in range(self.shape.heads):
            row = self.plain_row(head, x)
            for token in [*(plain_norm(row.q) if "q" in row.values else []), *plain_norm(row.k)]:
                nearest = max(self.centroids[head], key=lambda mu, token=token: float(mu @ token.detach()))
                squares.append(((token - nearest) ** 2).mean())
        return self.commitment * sum(squares) / len(squares)

    def plain(self, row: Row) -> Tensor:
        keys = plain_norm(row.k)
        queries = plain_norm(row.q) if "q" in row.values else keys
        w = min(math.ceil(row.T / self.clusters) if self.window is None else self.window, row.T)
        outs = [[] for _ in range(row.T)]
        for mu in self.centroids[row.head]:
            near = [[-float(mu @ x.detach()) for x in side] for side in (queries, keys)]
            picked = [sorted(range(row.T), key=order.__getitem__)[:w] for order in near]
            for i in picked[0]:
                seen = [j for j in picked[1] if j in row.past(i)]
                logits = torch.stack([self.temper * (queries[i] @ keys[j]) for j in seen])
                outs[i].append(blend(logits, [row.v[j] for j in seen]))
        return torch.stack([sum(out) / len(out) if out else torch.zeros_like(row.v[0]) for out in outs])


def norm(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the last axis."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def plain_norm(vectors: Tensor) -> list[Tensor]:
    """`norm` for the reference."""
    centred = [x - x.mean() for x in vectors]
    return [x / torch.sqrt((x * x).mean() + 1e-6) for x in centred]


def take(x: Tensor, at: Tensor) -> Tensor:
    """x [B, H, N, D] at the tokens [B, H, ...]: [B, H, ..., D]; past the last one, that one."""
    B, H, N, D = x.shape
    first = torch.arange(B * H, device=x.device).view(B, H, *[1] * (at.dim() - 2)) * N
    return x.reshape(-1, D).index_select(0, (first + at.clamp(max=N - 1)).flatten()).view(*at.shape, D)
