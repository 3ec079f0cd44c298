"""Cross-attention whose queries, keys and values a model makes itself."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Initial, Out
from regard.layers.attention.base import Attention
from regard.layers.attention.projected import Projected
from regard.spec import ATTENTION, Spec


class PlainCross(Attention):
    """A mechanism of role "cross" without projections, for models in which keys and values differ: the tokens [B, T, E]
    are the queries, and the memory [B, S, 2 E] holds keys and values side by side (`join`). What the mechanism learns
    besides projections, such as the vector of additive attention, stays its own."""

    def __init__(self, spec: Spec | str, width: int, heads: int):
        inner = ATTENTION.build(spec, Shape.of(width=width, heads=heads, role="cross"))
        if not isinstance(inner, Projected) or set(inner.inputs) != {"q", "k", "v"}:
            raise ValueError(
                f"attention {inner.facts.name!r} is no function of queries, keys and values, which this model makes "
                "itself: use another one, such as dot, softmax or additive"
            )
        self.facts, self.examples = inner.facts, ()
        super().__init__(Shape.of(width=width, heads=heads, role="cross", memory_width=2 * width))
        inner.project = nn.ModuleDict()
        del inner.output
        inner.link_layers(None, False, False)
        self.inner: Projected = inner

    @staticmethod
    def join(keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [B, S, E] as one memory."""
        return torch.cat([keys, values], -1)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows, query = rows or Rows.full(x), {"q": self._heads(x)}
        o, after = self.inner.attend_projected(rows, query, self._source(memory), state, memory)
        return Out(o.transpose(1, 2).flatten(2), after)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        assert memory is not None, "role 'cross' reads a memory"
        source = {name: part.contiguous() for name, part in self._source(memory).items()}
        return Initial(self.inner.project_memory(source, memory))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        if state is None:
            return super().map(x, rows, memory=memory)
        names = self.inner.input_names("key", "value")
        keys, values = (state.parts[names.index(name)].transpose(1, 2).flatten(2) for name in "kv")
        return super().map(x, rows, memory=Memory(self.join(keys, values), None if state.full else state.count))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        return self.inner.read_values(rows, {"q": self._heads(x)}, self._source(memory), values, memory)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        raise NotImplementedError("the mechanism inside has the reference: this layer only leaves projections out")

    def _heads(self, x: Tensor) -> Tensor:
        """[B, n, E] -> [B, H, n, D]"""
        return x.unflatten(2, (self.shape.heads, -1)).transpose(1, 2)

    def _source(self, memory: Any) -> dict[str, Tensor]:
        if memory is None:
            return {}
        keys, values = memory.x.chunk(2, -1)
        return {"k": self._heads(keys), "v": self._heads(values)}
