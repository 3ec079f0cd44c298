"""A memory of very many values, found by keys that are pairs of a few."""

from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import wide_dtype
from regard.core.parallel import batch_sum
from regard.core.reference import add_up, plain_layer_norm
from regard.core.rows import Rows
from regard.core.shape import Order
from regard.core.state import Out
from regard.kernels.router import wide_linear
from regard.layers.feedforward.base import FeedForward, FeedForwardFacts, Sizes, plain_linear
from regard.layers.feedforward.experts import count_real, mean, plain_softmax


class Normed(nn.Module):
    """Batch norm over the real tokens [N, C], which padding does not touch; running means outside training."""

    mean: Tensor  # [C]
    variance: Tensor  # [C]

    def __init__(self, width: int, momentum: float = 0.1, epsilon: float = 1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        if not self.training:
            # in the width of x, which may be more than that of a module in half precision
            scale = torch.rsqrt(self.variance.to(x.dtype) + self.epsilon)
            return (x - self.mean) * scale * self.weight + self.bias
        middle = mean(x, real)
        variance = mean((x - middle).square(), real)
        with torch.no_grad():
            count = batch_sum(count_real(x, real)).to(x.dtype)
            # an unbiased one is kept, as PyTorch's batch norm does; of no token at all, nothing
            unbiased = variance * count / (count - 1).clamp(min=1)
            step = self.momentum * (count > 0)
            self.mean.lerp_(middle.to(self.mean.dtype), step.to(self.mean.dtype))
            self.variance.lerp_(unbiased.to(self.variance.dtype), step.to(self.variance.dtype))
        return (x - middle) * torch.rsqrt(variance + self.epsilon) * self.weight + self.bias


class ProductKey(FeedForward):
    """Lample et al. 2019: y = sum_heads sum_(i in top k) softmax(s)_i V_i, with a score for each of keys^2 values,

        s_(i, j) = q_1 . K1_i + q_2 . K2_j,    (q_1, q_2) = BN(Wq x + b).

    The best k of the sums are among the best k of each half, so that they are found exactly with 2 keys products
    instead of keys^2. Values are shared by the heads, and with `shared_values` by all such layers of a model. With
    `query_layers` the queries come of a network, h <- ReLU(BN(W h + b)) for each of these widths. Batch norm spreads
    the queries over the keys: while training, an answer depends on all real tokens of the batch, afterwards on the
    token alone; norm="layer", of each half of a query (and of each h), never couples tokens. `inner` plays no part. The
    authors' code normalises only if asked to and trains the values with an Adam of their own, of learning rate 1e-3.
    Time N H (keys D + k^2 + k E), memory N H (keys + k^2)."""

    facts = FeedForwardFacts(
        name="productkey",
        paper="Lample et al. 2019, Large Memory Layers with Product Keys",
        link="arXiv 1907.05242",
        family="memory",
        formula="y = sum_heads sum_(i in top k) softmax(s)_i V_i,  s_(i, j) = q_1 . K1_i + q_2 . K2_j",
        time=Order("N", 1),
        memory=Order("N", 1),
        training="batch",
    )
    examples = (
        "productkey(keys=5, heads=2, choices=3, key_width=6)",
        "productkey(keys=5, heads=2, choices=3, key_width=6, query_layers=(7, 5))",
        "productkey(keys=6, heads=1, choices=6, key_width=4, norm='layer', query_layers=(9,), shared_values=True)",
    )
    choosing = ("hidden", "hidden_norms", "query", "norm", "table")

    def __init__(
        self,
        sizes: Sizes,
        *,
        keys: Annotated[int, "number of keys of each half; there are keys^2 values"] = 128,
        heads: Annotated[int, "number of queries per token"] = 4,
        choices: Annotated[int, "number of values that each head reads"] = 32,
        key_width: Annotated[int, "width of a query, both halves together"] = 128,
        norm: Annotated[Literal["batch", "layer"], "norm of the queries"] = "batch",
        query_layers: Annotated[tuple[int, ...], "hidden sizes of the query network; (): one layer"] = (),
        shared_values: Annotated[bool, "share the values among all such layers of a model"] = False,
    ):
        super().__init__(sizes)
        if min(keys, heads, key_width) < 1 or not 1 <= choices <= keys:
            raise ValueError(
                f"feedforward 'productkey' needs keys, heads and choices of at least 1, and at most as many choices as "
                f"keys; got keys {keys}, heads {heads}, choices {choices}"
            )
        if key_width % 2:
            raise ValueError(f"key_width of 'productkey' is two halves, so even; got {key_width}")
        if any(width < 1 for width in query_layers):
            raise ValueError(f"query_layers of 'productkey' must be at least 1 wide each, got {query_layers}")
        self.keys, self.heads, self.choices, self.shared_values = keys, heads, choices, shared_values
        half = key_width // 2
        widths = [sizes.width, *query_layers]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.hidden_norms = nn.ModuleList((Normed if norm == "batch" else nn.LayerNorm)(wide) for wide in query_layers)
        self.query = nn.Linear(widths[-1], heads * key_width)
        for linear in (*(linear for linear, _ in self._query_network()), self.query):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.norm = Normed(heads * key_width) if norm == "batch" else nn.LayerNorm(half)
        self.table = nn.Parameter(torch.empty(heads, 2, keys, half).uniform_(-(half**-0.5), half**-0.5))
        self.values = nn.Parameter(torch.empty(keys**2, sizes.width).normal_(std=sizes.width**-0.5))
        self.facts = replace(self.facts, training="batch" if norm == "batch" else "token")

    def _query_network(self) -> list[tuple[nn.Linear, Normed | nn.LayerNorm]]:
        """The layers before the queries; a ModuleList does not say what it holds."""
        linears = cast(list[nn.Linear], list(self.hidden))
        return list(zip(linears, cast(list[Normed | nn.LayerNorm], list(self.hidden_norms)), strict=True))

    def link_layers(self, first: FeedForward | None) -> None:
        if not isinstance(first, ProductKey) or not self.shared_values:
            return
        if not first.shared_values or first.values.shape != self.values.shape:
            raise ValueError(
                f"feedforward 'productkey' with shared_values needs as many keys in every layer, and the same option: "
                f"got {self.keys} keys, and {first.keys} with shared_values={first.shared_values}"
            )
        self.values = first.values

    def forward_packed(self, x: Tensor, rows: Rows) -> Out:
        tokens, real = x.flatten(0, 1), rows.real()
        real = None if real is None else real.flatten()
        index, weight = self.find(tokens, real)
        y = F.embedding_bag(index, self.values, mode="sum", per_sample_weights=weight.to(self.values.dtype))
        out = Out(y.to(x.dtype).view(x.shape))
        if not self.training:
            return out
        index = index if real is None else torch.where(real[:, None], index, self.keys**2)
        used = batch_sum(torch.zeros(self.keys**2 + 1, device=x.device).index_fill_(0, index.flatten(), 1.0)[:-1])
        return out._replace(statistics={"used": (used > 0).float().mean()})

    def find(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which values the tokens [N, E] read and how much of each, [N, heads * choices]."""
        wide = wide_dtype(x.dtype)
        for linear, norm in self._query_network():
            h = wide_linear(x, linear.weight)
            h = h + linear.bias.to(h.dtype)
            with torch.autocast(x.device.type, enabled=False):
                if isinstance(norm, Normed):
                    h = norm(h, real)
                else:
                    h = F.layer_norm(h, h.shape[1:], norm.weight.to(wide), norm.bias.to(wide), norm.eps)
            x = torch.relu(h)
        q = wide_linear(x, self.query.weight)
        q = q + self.query.bias.to(q.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(self.norm, Normed):
                q = self.norm(q, real).unflatten(1, (self.heads, 2, -1))
            else:
                q = q.unflatten(1, (self.heads, 2, -1))
                weight, bias = self.norm.weight.to(wide), self.norm.bias.to(wide)
                q = F.layer_norm(q, q.shape[3:], weight, bias, self.norm.eps)
            scores = torch.einsum("nhad,hakd->nhak", q, self.table.to(wide))
            top, at = scores.topk(self.choices, -1)  # [N, H, 2, k]
            sums = (top[:, :, 0, :, None] + top[:, :, 1, None, :]).flatten(2)  # [N, H, k k]
            pairs = (at[:, :, 0, :, None] * self.keys + at[:, :, 1, None, :]).flatten(2)
            best, which = sums.topk(self.choices, -1)
            return pairs.gather(2, which).flatten(1), torch.softmax(best, -1).flatten(1)

    def active(self) -> int:
        return super().active() - self.values.numel() + self.heads * self.choices * self.sizes.width

    def reference(self, x: Tensor) -> Out:
        h = list(x)
        for linear, norm in self._query_network():
            made = [plain_linear(linear.weight, token) + linear.bias for token in h]
            made = (
                self._plain_batch(made, norm) if isinstance(norm, Normed) else [plain_layer_norm(v, norm) for v in made]
            )
            h = [vector.clamp(min=0) for vector in made]
        queries = [plain_linear(self.query.weight, token) + self.query.bias for token in h]
        norm = self.norm
        if isinstance(norm, Normed):
            queries = self._plain_batch(queries, norm)
        else:
            halves = [query.chunk(2 * self.heads) for query in queries]
            queries = [torch.cat([plain_layer_norm(half, norm) for half in parts]) for parts in halves]
        y = []
        for query in queries:
            total = torch.zeros_like(self.values[0])
            for part, (first, second) in zip(query.chunk(self.heads), self.table, strict=True):
                one, two = part.chunk(2)
                scores = torch.stack([one @ a + two @ b for a in first for b in second])
                best = sorted(range(self.keys**2), key=lambda i, scores=scores: -scores[i].item())[: self.choices]
                shares = plain_softmax(scores[best])
                total = total + add_up(share * self.values[i] for share, i in zip(shares, best, strict=True))
            y.append(total)
        return Out(torch.stack(y))

    def _plain_batch(self, vectors: list[Tensor], norm: Normed) -> list[Tensor]:
        middle, variance = norm.mean, norm.variance
        if self.training:
            middle = add_up(vectors) / len(vectors)
            variance = add_up((vector - middle) ** 2 for vector in vectors) / len(vectors)
        scaled = [(vector - middle) / torch.sqrt(variance + norm.epsilon) for vector in vectors]
        return [vector * norm.weight + norm.bias for vector in scaled]
