"""A sliding window, and a few tokens that see and are seen by all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.band import band_parts
from regard.kernels.compiling import at_most, exporting
from regard.kernels.parts import Part, Runs, union
from regard.kernels.runs import Bias, Bound, Far, Pass
from regard.layers.attention.base import Facts
from regard.layers.attention.projected import InputKind
from regard.layers.attention.tailed import Tailed


class Longformer(Tailed):
    """Beltagy et al. 2020: a window of w tokens to each side (the paper counts both sides, 2 w), and global tokens.

    The first g tokens of a row are global and have projections of their own (Q_g, K_g, V_g; ours `global_q`, ...),
    which start as copies of Q_s, K_s, V_s. Any other query i sees, in one softmax and each key once, the global tokens
    and the j with |i - j| <= w d and d | i - j, by Q_s, K_s, V_s; a global query sees all keys by Q_g, K_g, V_g. With
    dilation d the window reaches d times as far; the paper's different d on different heads is written
    `heads(longformer(dilation=1), longformer(dilation=2))`. Causal: the same without the keys after the query.
    Time N (w + g), memory N.
    """

    facts = Facts(
        name="longformer",
        paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
        link="arXiv 2004.05150",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, j < g or |i - j| <= w; i < g: all j, by q', k', v'",
        time=Order("N (w + g)", 1),
        memory=Order("N", 1),
        state=Order("w + g", 0),
        roles=("self", "causal"),
        refusals=(("cross", "the window is around a query's own place, and a memory is another sequence"),),
        positions=("rotation", "bias"),
    )
    examples = (
        "longformer(window=3, globals=2)",
        "longformer(window=4, globals=0)",
        "longformer(window=2, globals=5, dilation=3)",
    )
    reduces_to = (
        ("longformer(window=33, globals=0)", "softmax"),
        ("longformer(window=4, globals=0)", "local(window=4)"),
    )
    grouped = True

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, "window size: tokens seen on each side, besides the query's own"] = 256,
        globals: Annotated[int, "number of global tokens, at the start of a row"] = 1,
        dilation: Annotated[int, "dilation: distance between the tokens of the window"] = 1,
    ):
        for name, size, least in (("window", window, 1), ("globals", globals, 0), ("dilation", dilation, 1)):
            if size < least:
                raise ValueError(f"option {name!r} of 'longformer' must be at least {least}, got {size}")
        if globals:
            of_globals: dict[str, InputKind] = {"global_q": "query", "global_k": "key", "global_v": "value"}
            self.inputs = self.inputs | of_globals
        super().__init__(shape)
        self.window, self.dilation = window, dilation
        self.reach, self.front = window * dilation, globals
        self._copy_to_globals()

    def _copy_to_globals(self) -> set[str]:
        """Gives global tokens the projections of all others. Returns the names of their parameters."""
        names = set()
        for name in ("q", "k", "v") if self.front else ():
            state = self.project[name].state_dict()
            self.project[f"global_{name}"].load_state_dict(state)
            names |= {f"project.global_{name}.{part}" for part in state}
        return names

    def take_projections(self, given: Mapping[str, Tensor]) -> set[str]:
        return super().take_projections(given) | self._copy_to_globals()

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, **of_globals: Tensor) -> Tensor:
        """`of_globals`: the inputs of global tokens by name, where there are some."""
        bias = None if self.position is None else self.position.run_bias(mask.S, mask.S)
        refusal = None
        if bias is not None and self.dilation > 1 and not exporting():
            refusal = "a bias of positions counts the tokens between, and with a dilation it counts those of one class"
        in_runs = mask.T > 1 and runs.takes(q, k, v, bias, refusal)
        if not self.front:
            if in_runs:
                return self._near_in_runs(mask, q, k, v, None, None, None, bias)
            return self._near(mask, q, k, v, k[:, :, :0], v[:, :, :0])
        return self._with_globals(mask, q, k, v, bias, in_runs, **of_globals)

    def _with_globals(
        self,
        mask: Mask,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Bias | None,
        in_runs: bool,
        *,
        global_q: Tensor,
        global_k: Tensor,
        global_v: Tensor,
        front_k: Tensor,
        front_v: Tensor,
        front_global_k: Tensor,
        front_global_v: Tensor,
    ) -> Tensor:
        """The global queries over all keys by their own projections, the others over the window and the global keys;
        `in_runs`: by kernels that compare positions."""
        # a call starts at position 0 or later: only its first queries can be global
        first = at_most(self.front, mask.T)
        wide = mask._replace(T=first)
        if mask.causal:
            # what a global query may see is global itself, and real because it lies before the query
            global_k, global_v = front_global_k, front_global_v
            wide = wide._replace(k0=torch.zeros_like(mask.k0), S=global_k.shape[2], full=True)
            wide = wide if mask.aligned else wide._replace(shift=None)
        if in_runs and not mask.causal:
            options = {"scale": self.scale, "where": mask.where(), "bias": bias}
            o = runs.attend(global_q[:, :, :first], global_k, global_v, [Pass()], **options)
        else:
            o = self.product(wide, global_q[:, :, :first], global_k, global_v, self.scale)
        if mask.aligned and first == mask.T:
            return o
        if in_runs and mask.aligned:
            return self._near_in_runs(mask, q, k, v, None, None, o, bias)
        if in_runs:
            near = self._near_in_runs(mask, q, k, v, front_k, front_v, None, bias)
        else:
            near = self._near(mask, q, k, v, front_k, front_v)
        if not mask.aligned:
            late = mask.q0[:, None] + torch.arange(first, device=q.device) >= self.front
            o = torch.where(late[:, None, :, None], near[:, :, :first], o)
            near = near[:, :, first:]
        return torch.cat([o, near], 2)

    def _near_in_runs(
        self,
        mask: Mask,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        front_k: Tensor | None,
        front_v: Tensor | None,
        head: Tensor | None,
        bias: Bias | None,
    ) -> Tensor:
        """All queries over the global keys and the window, but for the first, whose output is `head`."""
        far = Far(at_most(self.front, mask.S) if front_k is None else front_k.shape[2]) if self.front else None
        after = 0 if mask.causal else self.window
        near = Pass(Bound(plus=-self.window), Bound(plus=after + 1), far, fold=self.dilation)
        options = {"scale": self.scale, "where": mask.where(first=self.front), "bias": bias}
        return runs.attend(q, k, v, [near], far_k=front_k, far_v=front_v, head=head, **options)

    def _near(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, front_k: Tensor, front_v: Tensor) -> Tensor:
        """The queries that are not global, over the global keys and the window; aligned rows drop the global ones."""
        d, window = self.dilation, min(self.window, mask.S)
        after = 0 if mask.causal else window
        drop = self.front if mask.aligned else 0
        # a token meets its own residue class modulo d only: fold the classes into the batch
        offset = mask.known_shift
        left, right = -offset % d, (drop - mask.T) % d
        if d == 1 and mask.aligned:
            keys, values, folded = k, v, q[:, :, drop:]
        else:
            k, v = (F.pad(part[:, :, drop:], (0, 0, left, right)) for part in (k, v))
            keys, values = (
                torch.cat([front.repeat_interleave(d, 0), _fold(part, d)], 2)
                for front, part in ((front_k, k), (front_v, v))
            )
            folded = _fold(F.pad(q[:, :, drop:], (0, 0, 0, right)), d)
        T, g = folded.shape[2], front_k.shape[2]
        bias, beside, scheme = None, None, self.scheme("bias")
        if scheme is not None:
            gaps = torch.arange(-window, after + 1, device=q.device) * d
            bias = scheme.bias(scheme.places(gaps[None]))[:, 0]
            at = mask.q0[:, None] + torch.arange(drop, mask.T + right, device=q.device)  # [B, T]
            at = _fold(at[: 1 if mask.aligned else None, None, :, None], d)[:, 0]  # [B d, T / d, 1]
            beside = scheme.bias(scheme.places(torch.arange(g, device=q.device) - at))[:, None]
            if mask.aligned and d > 1:
                beside = beside.repeat(len(q), 1, 1, 1, 1)
        parts = [Part(Runs(0, T), Runs(0, g), mask=beside)] if g else []
        shift = (offset + left) // d
        parts += band_parts(T, before=window, after=after, shift=shift, front=g, bias=bias, device=q.device)
        real = self._real(mask, drop, left, right, g)
        o = union(folded, keys, values, parts, scale=self.scale, real=real)
        if d > 1:
            o = o.unflatten(0, (-1, d)).movedim(1, 3).flatten(2, 3)[:, :, : mask.T - drop]
        return o

    def _real(self, mask: Mask, drop: int, left: int, right: int, g: int) -> Tensor | None:
        """[B d, g + S / d]: the keys of the window that are real and not met as global ones already."""
        # no causal query of a whole sequence sees what stands behind it
        if mask.aligned and (mask.causal or (mask.full and not right)):
            return None
        if not mask.aligned and mask.full and not g and not left:
            return None
        d, device = self.dilation, mask.k0.device
        at = mask.k0[:, None] + torch.arange(drop - left, mask.S + right, device=device)
        at = _fold(torch.where(at < g, -1, at)[:, None, :, None], d)[:, 0, :, 0]
        at = torch.cat([torch.arange(g, device=device).expand(at.shape[0], -1), at], 1)
        return (at >= 0) & (at < mask.end.repeat_interleave(d)[:, None])

    def plain(self, row: Row) -> Tensor:
        g, outs = self.front, []
        for i in range(row.T):
            if i < g:
                wide = replace(row, values={name: row.values[f"global_{name}"] for name in ("q", "k", "v")})
                outs.append(wide.attend(i, row.past(i), self.scale))
                continue
            near = [j for j in row.past(i) if abs(i - j) <= self.reach and (i - j) % self.dilation == 0]
            outs.append(row.attend(i, sorted({*near, *range(g)}), self.scale))
        return torch.stack(outs)


def _fold(x: Tensor, d: int) -> Tensor:
    """[B, H, n d, D] -> [B d, H, n, D]: the tokens of each residue class modulo d by themselves."""
    return x if d == 1 else x.unflatten(2, (-1, d)).movedim(3, 1).flatten(0, 1)
