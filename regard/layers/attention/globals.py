"""A few tokens that see all and are seen by all."""

from typing import Annotated

import torch
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.band import band_parts
from regard.kernels.parts import Part, Runs, union
from regard.kernels.runs import Bias, Bound, Far, Pass, Where
from regard.layers.attention.base import Facts
from regard.layers.attention.tailed import Tailed


class Globals(Tailed):
    """Beltagy et al. 2020 and Zaheer et al. 2020, their global tokens on their own: query i sees key j if one of the
    two is among the first g tokens, or if i = j; of the past only where it is causal. Their set G is our first g tokens
    (`tokens`), so that it is there from the start and a causal output never moves.

    Where it is causal, a query sees the first g tokens before it and itself. Time N g, memory N, state g.
    """

    facts = Facts(
        name="globals",
        paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer (section 3.1)",
        link="arXiv 2004.05150",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over i < tokens or j < tokens or i = j",
        time=Order("N tokens", 1),
        memory=Order("N", 1),
        state=Order("tokens", 0),
        roles=("self", "causal"),
        refusals=(("cross", "tokens that both see and are seen belong to one sequence"),),
        positions=("rotation", "bias"),
    )
    examples = ("globals(tokens=3)", "globals(tokens=1)")
    reduces_to = (("globals(tokens=64)", "softmax"),)
    grouped = True
    reach = 0

    def __init__(self, shape: Shape, *, tokens: Annotated[int, "number of global tokens, at the start of a row"] = 16):
        super().__init__(shape)
        if tokens < 1:
            raise ValueError(f"option 'tokens' of 'globals' must be at least 1, got {tokens}")
        self.tokens = self.front = tokens

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, front_k: Tensor, front_v: Tensor) -> Tensor:
        F, T = front_k.shape[2], mask.T
        run_bias = None if self.position is None else self.position.run_bias(mask.S, mask.T)
        if T > 1 and runs.takes(q, k, v, run_bias):
            return self._in_runs(mask, q, k, v, front_k, front_v, run_bias)
        if mask.causal:
            k, v = torch.cat([front_k, k], 2), torch.cat([front_v, v], 2)
            return union(q, k, v, self._parts(mask, T, F), scale=self.scale)
        o = self.product(mask._replace(T=F), q[:, :, :F], k, v, self.scale)
        if F == T:
            return o
        late = mask._replace(q0=mask.q0 + F, T=T - F)
        real = None if mask.full else mask.real()
        return torch.cat([o, union(q[:, :, F:], k, v, self._parts(late, T - F, F), scale=self.scale, real=real)], 2)

    def _in_runs(
        self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, front_k: Tensor, front_v: Tensor, bias: Bias | None
    ) -> Tensor:
        F, alone = front_k.shape[2], Pass(Bound(), Bound(plus=1))
        if mask.causal:
            # the global keys before a query, and itself; a call with a state is aligned wherever it begins
            where = Where(q0=mask.q0, k0=mask.k0)
            part = alone._replace(far=Far(F, Bound()))
            return runs.attend(q, k, v, [part], scale=self.scale, where=where, bias=bias, far_k=front_k, far_v=front_v)
        part = Pass() if mask.T == F else alone._replace(far=Far(F))
        unbounded = 0 if mask.T == F else F
        return runs.attend(q, k, v, [part], unbounded=unbounded, scale=self.scale, where=mask.where(), bias=bias)

    def _parts(self, mask: Mask, T: int, F: int) -> list[Part]:
        """T queries over the F global keys that stand before each of them, and over itself, at key t + F."""
        scheme = self.scheme("bias")
        # from the F-th query on, all global keys lie in the past, wherever the queries begin
        early = min(T, F) if scheme is None else T
        gap = mask._replace(k0=torch.zeros_like(mask.k0), T=early, S=F, shift=None).gap()  # [B, T, F]
        visible, bias = (gap < 0)[:, None, None], None  # [B, 1, 1, T, F]
        if scheme is not None:
            beside = scheme.bias(scheme.places(gap))[:, None]  # [B, 1, H, T, F]
            visible = torch.where(visible, beside, -torch.inf)
            bias = scheme.bias(gap.new_zeros(1, 1))[:, 0]  # [H, 1]
        parts = [Part(Runs(0, early), Runs(0, F), mask=visible)]
        if early < T:
            parts.append(Part(Runs(early, T - early), Runs(0, F)))
        return parts + band_parts(T, before=0, after=0, shift=F, bias=bias, device=gap.device)

    def plain(self, row: Row) -> Tensor:
        seen = ([j for j in row.past(i) if min(i, j) < self.tokens or i == j] for i in range(row.T))
        return torch.stack([row.attend(i, keys, self.scale) for i, keys in enumerate(seen)])
