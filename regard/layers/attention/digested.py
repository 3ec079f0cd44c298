"""Mechanisms that turn all keys and values into something of fixed size, which queries then read."""

from abc import abstractmethod
from typing import Any, final

from torch import Tensor

from regard.core.rows import Memory, Rows
from regard.layers.attention.projected import CrossState, Projected


class Digested(Projected):
    """A mechanism that turns all keys and values into tensors of fixed size and reads its queries against those."""

    @abstractmethod
    def digest(self, real: Tensor | None, *args: Any, **sources: Any) -> tuple[Tensor, ...]:
        """The fixed tensors. `real` is [B, S], or None where all tokens are; the arguments after it are the mechanism's
        keys, values and gates by name, k and v by default."""

    @abstractmethod
    def consult(self, digest: Any, *args: Any, **queries: Any) -> Tensor:
        """[B, H, T, D] from what `digest` returned and the queries by name, q by default; a digest of no real token
        gives zeros."""

    def attend_fused(self, real: Tensor | None, *args: Any, **inputs: Any) -> Tensor | None:
        """Role "self": what `consult` makes of `digest`, by one kernel for both. Default: there is none."""

    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: Any
    ) -> tuple[Tensor, Any]:
        real, source = rows.real(), self.repeat_heads(source)
        o = self.attend_fused(real, **query, **source)
        return self.consult(self.digest(real, **source), **query) if o is None else o, None

    @final
    def project_memory(self, source: dict[str, Tensor], memory: Memory) -> CrossState:
        rows = memory.rows()
        digest = self.digest(rows.real(), **self.repeat_heads(source))
        return CrossState(digest, rows.count, memory.count is None, rows.T, mechanism=self.facts.name)

    @final
    def attend_memory(self, query: dict[str, Tensor], state: CrossState) -> Tensor:
        return self.consult(state.parts, **query)
