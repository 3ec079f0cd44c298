"""Tokens sorted by cluster attend in chunks."""

from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import take_tokens, wide_dtype
from regard.core.parallel import batch_rows
from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Out
from regard.kernels.compiling import at_most, count_blocks, is_dynamic
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.checks import input_position
from regard.spec import ATTENTION


class Clusterformer(Attention):
    """Wang et al. 2020, the Cluster-Former layer: the cluster of a token x_i, as the layer reads it, is that of the
    centroid it points to, c_i = argmax_k x_i . C_k. The tokens of a row are sorted by (c_i, i) and cut into chunks of
    m, and the tokens of a chunk attend to each other, by a softmax attention with H heads. The paper alternates such
    layers with ones that attend in windows: `attention=["local(window=128)", "clusterformer"]`.

    The p centroids are learned without gradients. In training, a memory bank takes in the tokens that the layer reads,
    and drops the oldest; after every `every` calls, k-means over the bank makes new centroids (`refresh()`). Vectors
    count by direction, as centroids of unit length are compared by products: k-means is the spherical one, begun with
    tokens spread evenly over the bank. (No code of the authors was found.) Until the first time, the centroids are
    random directions.

    Time N (m + p), and the sorting; memory N p.
    """

    facts = Facts(
        name="clusterformer",
        paper="Wang et al. 2020, Cluster-Former: Clustering-based Sparse Transformer for Question Answering",
        link="arXiv 2009.06097",
        family="clusters",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, j in the chunk of i in rows sorted by argmax_k x.C_k",
        time=Order("N (chunk + clusters)", 1),
        memory=Order("N clusters", 1),
        roles=("self",),
        refusals=(
            ("causal", "later tokens move earlier ones to other chunks, and chunks hold tokens of any place"),
            ("cross", "queries and keys are sorted as one, and a memory is another sequence"),
        ),
        exact=False,
    )
    examples = ("clusterformer(clusters=4, chunk=5)", "clusterformer(clusters=3, chunk=8)")
    # one chunk holds all: then the clusters do not matter
    reduces_to = (("clusterformer(clusters=5, chunk=64)", "clusterformer(clusters=1, chunk=33)"),)
    centroids: Tensor  # [p, E]
    bank: Tensor  # [bank + 1, E]
    kept: Tensor  # [] tokens that the bank has taken in so far
    calls: Tensor  # []

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[int, "number of centroids (p in the paper)"] = 64,
        chunk: Annotated[int, "chunk size: tokens of the sorted row that attend to each other"] = 256,
        bank: Annotated[int, "number of recent tokens that k-means clusters, at least clusters"] = 4096,
        every: Annotated[int, "calls in training between two runs of k-means"] = 100,
        iterations: Annotated[int, "number of k-means iterations"] = 10,
    ):
        super().__init__(shape)
        sizes = (("clusters", clusters), ("chunk", chunk), ("every", every), ("iterations", iterations))
        for name, size in sizes:
            if size < 1:
                raise ValueError(f"option {name!r} of 'clusterformer' must be at least 1, got {size}")
        if bank < clusters:
            raise ValueError(f"option 'bank' of 'clusterformer' must be at least clusters={clusters}, got {bank}")
        self.position = input_position("clusterformer", shape, "the tokens of a chunk come from anywhere in the row")
        self.clusters, self.chunk, self.every, self.iterations = clusters, chunk, every, iterations
        self.inner: Attention = ATTENTION.build("softmax", replace(shape, position=None))
        self.register_buffer("centroids", F.normalize(torch.randn(clusters, shape.width), dim=-1))
        # saved with the weights, so that a resumed run continues exactly; the last slot takes what is not kept
        self.register_buffer("bank", torch.zeros(bank + 1, shape.width))
        self.register_buffer("kept", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        order, chunks, counts = self._chunks(x, rows)
        y = self.inner.forward_packed(chunks, counts).y.unflatten(0, (x.shape[0], -1)).flatten(1, 2)
        if self.training:
            self._remember(x.detach(), rows)
        return Out(take_tokens(y, _places(order)[:, : rows.T]))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        order, chunks, counts = self._chunks(x, rows)
        maps = self.inner.map(chunks, counts).unflatten(0, (len(x), -1))  # [B, n, H, m, m]
        values = F.pad(values, (0, 0, 0, order.shape[1] - rows.T)).transpose(1, 2)
        values = (
            take_tokens(values, order).unflatten(1, maps.shape[1::2][:2]).transpose(2, 3)
        )  # [B, n, 1 or H, m, width]
        o = (maps @ values).transpose(2, 3).flatten(1, 2)
        return take_tokens(o, _places(order)[:, : rows.T]).transpose(1, 2)

    def refresh(self) -> None:
        """New centroids: k-means over the bank."""
        with torch.no_grad():
            filled = min(int(self.kept), len(self.bank) - 1)
            if filled < self.clusters:
                return
            points = F.normalize(self.bank[:filled].float(), dim=-1)
            centroids = points[torch.arange(self.clusters, device=points.device) * filled // self.clusters]
            for _ in range(self.iterations):
                nearest = (points @ centroids.T).argmax(1)
                sums = torch.zeros_like(centroids).index_add(0, nearest, points)
                # one that is nearest to none stays
                centroids = torch.where(sums.any(1, keepdim=True), F.normalize(sums, dim=-1), centroids)
            self.centroids.copy_(centroids)

    def _chunks(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
        """The order of the tokens, padding last [B, n m], the chunks [B n, m, E], and what is real in them."""
        m = at_most(self.chunk, rows.T)
        n = count_blocks(rows.T, m)
        wide = wide_dtype(x.dtype)
        near = torch.einsum("bte,ke->btk", x.detach().to(wide), self.centroids.to(wide))
        real = rows.real()
        cluster = near.argmax(-1) if real is None else torch.where(real, near.argmax(-1), self.clusters)
        cluster = F.pad(cluster, (0, n * m - rows.T), value=self.clusters)
        order = cluster.argsort(dim=1, stable=True)
        chunks = take_tokens(F.pad(x, (0, 0, 0, n * m - rows.T)), order).unflatten(1, (n, m)).flatten(0, 1)
        if real is None and not is_dynamic(rows.T) and n * m == rows.T:
            return order, chunks, Rows.full(chunks)
        count = (rows.count[:, None] - m * torch.arange(n, device=x.device)).clamp(0, m).flatten()
        return order, chunks, Rows(torch.zeros_like(count), count, m, None)

    def _remember(self, x: Tensor, rows: Rows) -> None:
        """Puts the real tokens of a call into the bank; now and then, `refresh`."""
        x, room = x.flatten(0, 1).to(self.bank.dtype), len(self.bank) - 1
        real = rows.real()
        real = torch.ones(len(x), dtype=torch.bool, device=x.device) if real is None else real.flatten()
        x, real = batch_rows(x), batch_rows(real)
        rank = real.cumsum(0)
        # the last ones, where there are more than the bank has room for
        keep = real & (rank > rank[-1] - room)
        self.bank[torch.where(keep, (self.kept + rank - 1) % room, room)] = x
        self.kept += rank[-1]
        self.calls += 1
        if int(self.calls) % self.every == 0:
            self.refresh()

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        clusters = []
        for token in x.detach():
            near = [float(token @ centroid) for centroid in self.centroids]
            clusters.append(near.index(max(near)))
        order = sorted(range(len(x)), key=lambda i: (clusters[i], i))
        outs: dict[int, Tensor] = {}
        for first in range(0, len(x), self.chunk):
            chunk = order[first : first + self.chunk]
            outs |= dict(zip(chunk, self.inner.reference(x[chunk]), strict=True))
        return torch.stack([outs[i] for i in range(len(x))])


def _places(order: Tensor) -> Tensor:
    """The place of each token in the order."""
    steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, steps)
