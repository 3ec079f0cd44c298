"""Self-attention through a few learned points, for sets."""

from dataclasses import replace
from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.core.reference import plain_layer_norm
from regard.core.rows import Memory, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.cached import Cached
from regard.layers.attention.checks import input_position
from regard.layers.attention.projected import CrossState
from regard.spec import ATTENTION


class SetState(NamedTuple):
    """The points after they have read the memory."""

    points: CrossState
    count: Tensor  # [B] real tokens of the memory  # pyright: ignore[reportIncompatibleMethodOverride]
    S: int


class Induced(Attention):
    """Lee et al. 2019: y = Multihead(X, H, H) with H = MAB(I, X), where I [m, E] are learned inducing points and

        MAB(I, X) = LN(A + rFF(A)),    A = LN(I + Multihead(I, X, X)),    rFF(A) = ReLU(A W + b).

    The rest of the paper's ISAB(X) = MAB(X, H), the residuals, norms and rFF around y, is what a post-norm Transformer
    layer puts there. With block=False the points keep H = Multihead(I, X, X) alone. The authors'
    code adds the projected I, divides by the root of the whole width, has no output projection, and norms only where
    asked. A padded token is read by no point.
    The order of the tokens does not matter unless a position scheme puts it in. What reaches a query is told by two
    maps, [T, m] and [m, S] of each head; the map of the layer is their product. Time N m, memory N.
    """

    facts = Facts(
        name="set",
        paper="Lee et al. 2019, Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks",
        link="arXiv 1810.00825",
        family="memory",
        formula="Y = Multihead(X, H, H), H = LN(A + ReLU(A W + b)), A = LN(I + Multihead(I, X, X)), I [m, E] learned",
        time=Order("N m", 1),
        memory=Order("N", 1),
        roles=("self", "cross"),
        refusals=(("causal", "each point reads the whole set, so it would tell a query of its future"),),
        exact=False,
        independent_heads=False,
        linear=False,
    )
    examples = ("set(points=5)", "set(points=3, block=False)")

    def __init__(
        self,
        shape: Shape,
        *,
        points: Annotated[int, "number of inducing points (m in the paper)"] = 32,
        block: Annotated[bool, "True: the points pass through residual, norms and rFF; False: attention alone"] = True,
    ):
        super().__init__(shape)
        if points < 1:
            raise ValueError(f"option 'points' of 'set' must be at least 1, got {points}")
        why = "its queries and the tokens meet through points that have no place"
        self.position = input_position("set", shape, why)
        self.block = block
        self.points = nn.Parameter(nn.init.xavier_uniform_(torch.empty(points, shape.width)))
        wide = replace(shape, role="cross", position=None)
        self.gather: Cached = ATTENTION.build("softmax", replace(wide, out_width=shape.width))
        self.spread: Cached = ATTENTION.build("softmax", replace(wide, memory_width=shape.width))
        if block:
            self.feed = nn.Linear(shape.width, shape.width)
            self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
            nn.init.xavier_uniform_(self.feed.weight)
            nn.init.zeros_(self.feed.bias)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        if state is None:
            x, memory = self._source(x, rows, memory)
            state = self._state(memory)
        y = self.spread.forward_packed(x, state=state.points).y
        if self.shape.role != "cross":
            return Out(y)
        return Out(torch.where(state.count[:, None, None] > 0, y, 0), state)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        assert memory is not None, "only role 'cross' has a state, of a memory"
        return Initial(self._state(memory))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        x, memory = self._source(x, rows, memory)
        gathered = self.gather.apply_map(values, self._points(len(memory.x)), memory=memory)  # [B, H, m, n]
        return self.spread.apply_map(gathered, x, memory=Memory(self._read(memory), None))

    def _source(self, x: Tensor, rows: Rows | None, memory: Memory | None) -> tuple[Tensor, Memory]:
        """The queries, and what the points read."""
        if self.shape.role == "cross":
            assert memory is not None, "role 'cross' reads a memory or a state"
            return x, memory
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        return x, Memory(x, None if rows.uniform_start is not None else rows.count)

    def _state(self, memory: Memory) -> SetState:
        rows, points = memory.rows(), Memory(self._read(memory), None)
        made = self.spread.initial_state(points.x.shape[0], memory=points, dtype=points.x.dtype, device=points.x.device)
        return SetState(made.state, rows.count, rows.T)

    def _points(self, batch: int) -> Tensor:
        return self.points.expand(batch, -1, -1)

    def _read(self, memory: Memory) -> Tensor:
        """H [B, m, E]"""
        points = self._points(memory.x.shape[0])
        read = self.gather.forward_packed(points, memory=memory).y
        if not self.block:
            return read
        inner, outer = self.norms
        read = inner(points + read)
        return outer(read + torch.relu(self.feed(read)))

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        points = self.gather.reference(self.points, x if memory is None else memory)
        if self.block:
            inner, outer = cast(list[nn.LayerNorm], list(self.norms))  # a ModuleList does not say what it holds
            rows = []
            for start, read in zip(self.points, points, strict=True):
                row = plain_layer_norm(start + read, inner)
                fed = self.feed.weight @ row + self.feed.bias
                rows.append(plain_layer_norm(row + torch.where(fed > 0, fed, 0), outer))
            points = torch.stack(rows)
        return self.spread.reference(x, points)
