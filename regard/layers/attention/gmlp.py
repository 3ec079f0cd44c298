"""Spatial gating: tokens multiplied by a learned mixture of tokens."""

from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.reference import plain_layer_norm
from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached, CacheState, append_to_cache
from regard.layers.attention.mixing import Mixing
from regard.spec import ATTENTION


class Gated(Mixing):
    """Liu et al. 2021: with [Z_1, Z_2] = GELU(X U), each half e / 2 wide (e / d is `expansion`, d our E),

        Y = (Z_1 * (W LN(Z_2) + b)) V,

    W [n, n] and b [n] by position, n is `longest`; W starts at zero (in the paper near it) and b at one, so a layer
    starts as a feed-forward one. attention=64 is the paper's aMLP: a single head 64 wide over X, projected to e / 2,
    joins W LN(Z_2). A shorter input uses the first rows and columns of W and b, a padded token counts as zeros in
    LN(Z_2), and a causal layer has zeros above the diagonal of W. The map is W, and with attention the sum of W and its
    map, the same in every head. Time N^2, memory N^2 (W and its gradient), state N.
    """

    facts = Facts(
        name="gmlp",
        paper="Liu et al. 2021, Pay Attention to MLPs",
        link="arXiv 2105.08050",
        family="mixers",
        formula="Y = (Z_1 * (W LN(Z_2) + b)) V, [Z_1, Z_2] = GELU(X U), W [N, N]; causal: W lower triangular",
        time=Order("N^2", 2),
        memory=Order("N^2", 2),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "W has a row for each place of a query, and a query of another sequence has none"),),
        signed=True,
        independent_heads=False,
    )
    examples = ("gmlp(longest=256, expansion=4)", "gmlp(longest=256, expansion=2, attention=3)")

    def __init__(
        self,
        shape: Shape,
        *,
        longest: Annotated[int, "maximum input length in tokens (n in the paper)"] = 1024,
        expansion: Annotated[int, "width of Z in widths of the model (e / d in the paper), even"] = 6,
        attention: Annotated[int, "width of the tiny attention beside the gate, in the paper 64; 0: none"] = 0,
    ):
        super().__init__(shape)
        if longest < 1:
            raise ValueError(f"option 'longest' of 'gmlp' must be at least 1, got {longest}")
        if expansion < 2 or expansion % 2:
            raise ValueError(f"option 'expansion' of 'gmlp' must be even and at least 2, got {expansion}")
        self.longest = longest
        share = self.share(expansion // 2 * shape.width)
        self.size = share.stop - share.start
        self.bypass = nn.Linear(shape.width, self.size, bias=shape.input_bias)
        self.gate = nn.Linear(shape.width, self.size, bias=shape.input_bias)
        self.output = nn.Linear(self.size, shape.out_width, bias=shape.output_bias)
        for linear in (self.bypass, self.gate, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.norm = nn.LayerNorm(self.size)
        self.mix = nn.Parameter(torch.zeros(longest, longest))
        self.offset = nn.Parameter(torch.ones(longest))
        self.attention: Cached | None = None
        if attention:
            tiny = replace(shape, heads=1, kv_heads=1, head_width=attention, out_width=self.size, position=None)
            self.attention = ATTENTION.build("softmax", replace(tiny, first_head=0, all_heads=1))

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        table, offset = self._table(rows, state)
        x = self.placed(x, rows)
        bypass, gate = F.gelu(self.bypass(x)), self.norm(F.gelu(self.gate(x)))
        after = None
        if state is not None:
            kept = append_to_cache(state.parts[0], gate[:, None].to(state.parts[0].dtype), rows, state.progress.longest)
            gate = kept[:, 0, : table.shape[-1]]
            after = CacheState((kept,), state.progress.advance(rows))
        elif self.shape.role == "self" and rows.uniform_start is None:
            real = rows.real()
            gate = gate if real is None else torch.where(real[..., None], gate, 0)
        mixed = table @ gate + offset[..., None]
        if self.attention is not None:
            out = self.attention.forward_packed(x, rows, state=self._tiny(state))
            mixed = mixed + out.y
            after = after and after._replace(parts=after.parts + out.state.parts)
        return Out(self.output(bypass * mixed), after)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        parts = (torch.zeros(batch, 1, capacity or 0, self.size, dtype=dtype, device=device),)
        if self.attention is not None:
            parts += self.attention.empty_state(batch, capacity, dtype, device).parts
        return Initial(CacheState(parts, Progress.initial(batch, device, self.facts.name)))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        table = self._table(rows, state)[0]
        maps = table.expand(len(x), 1, *table.shape) if table.dim() == 2 else table[:, None]
        if self.attention is not None:
            maps = maps + self.attention.map(self.placed(x, rows), rows, state=self._tiny(state))
        return maps.expand(-1, self.shape.heads, -1, -1)

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        o = self._table(rows, None)[0] @ values
        if self.attention is not None:
            # it has one head: the heads of the values are channels to it
            folded = values.transpose(1, 2).flatten(2)[:, None]
            tiny = self.attention.apply_map(folded, self.placed(x, rows), rows)[:, 0]
            o = o + tiny.unflatten(2, (values.shape[1], -1)).transpose(1, 2)
        return o.expand(-1, self.shape.heads, -1, -1)

    def _table(self, rows: Rows, state: CacheState | None) -> tuple[Tensor, Tensor]:
        """The rows of W and b for the new tokens, [T, S] and [T], or [B, T, S] and [B, T] where they start apart."""
        S = rows.T + (0 if state is None else state.progress.longest)
        self.check_length(S, self.longest)
        steps = torch.arange(S, device=self.mix.device)
        # before the first token every row starts at 0, ragged or not
        at = 0 if state is None or state.progress.longest == 0 else rows.uniform_start
        if at is None:
            places = rows.positions()
            table, offset = self.mix[:, :S][places], self.offset[places]
        else:
            places = steps[at:]
            table, offset = self.mix[at:S, :S], self.offset[at:S]
        if self.shape.role == "causal":
            table = torch.where(steps <= places[..., None], table, 0)
        return table, offset

    def _tiny(self, state: CacheState | None) -> CacheState | None:
        """The part of a state that is the tiny attention's."""
        return None if state is None else state._replace(parts=state.parts[1:])

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)

        def project(linear: nn.Linear, row: Tensor) -> Tensor:
            made = linear.weight @ row
            return made if linear.bias is None else made + linear.bias

        def gelu(z: Tensor) -> Tensor:
            return z * (1 + torch.erf(z / 2**0.5)) / 2

        bypass, gates = [gelu(project(self.bypass, row)) for row in x], []
        for row in x:
            gates.append(plain_layer_norm(gelu(project(self.gate, row)), self.norm))
        joined = None if self.attention is None else self.attention.reference(x)
        rows = []
        for i in range(len(x)):
            seen = range(i + 1) if self.shape.role == "causal" else range(len(x))
            mixed = sum(self.mix[i, j] * gates[j] for j in seen) + self.offset[i]
            mixed = mixed if joined is None else mixed + joined[i]
            rows.append(project(self.output, bypass[i] * mixed))
        return torch.stack(rows)
