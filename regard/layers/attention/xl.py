"""Segments that read the one before them: recurrence instead of a longer context."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Progress
from regard.layers.attention.base import Facts
from regard.layers.attention.segmented import Segmented, stretch


class XLState(NamedTuple):
    """The last tokens of each row, newest at the right: as the layer read them where gradients flow, so that what is
    cut from its history is still projected by weights that learn; as keys and values otherwise."""

    tail: tuple[Tensor, ...]  # x [B, 1, W, E], or k and v [B, G, W, D]
    progress: Progress


class XL(Segmented):
    """Dai et al. 2019: a row is cut into segments of n tokens. The queries of a segment, q from h, read keys and values
    from h~ = [m; h], where m holds the inputs of the layer at the M tokens before the segment: query i of the segment
    that begins at a sees the keys a - M <= j <= i, by the logits of position scheme "xl",

        ((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(D),

    unless the layer is built with another scheme, or with relative=False. Segments are counted from the first token of
    a row, so that the cut of `extend` does not matter; segment=1 gives every query the M tokens before it, as the
    authors' `same_length`. The paper's stop of gradients between segments is `regard.detach(state)`: calls of `extend`
    with a segment each, and a detach between them, are the training of the paper. The authors share u and v among all
    layers by default; here each layer has its own. Time N (n + M), memory N.
    """

    facts = Facts(
        name="xl",
        paper="Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context",
        link="arXiv 1901.02860",
        family="recurrence",
        formula="o_i = sum_j softmax_j(((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(D)) v_j over a - M <= j <= i",
        time=Order("N (segment + memory)", 1),
        memory=Order("N", 1),
        state=Order("segment + memory", 0),
        roles=("causal",),
        refusals=(
            ("self", "a segment reads those before it, so it has a direction"),
            ("cross", "what a segment reads beside itself are tokens of its own row"),
        ),
        positions=("rotation", "bias", "content"),
    )
    examples = (
        "xl(segment=4, memory=6)",
        "xl(segment=5, memory=3, clamp=4)",
        "xl(segment=1, memory=5, relative=False)",
        "xl(segment=8, memory=0, relative=False)",
    )
    reduces_to = (
        ("xl(segment=33, memory=0, relative=False)", "softmax"),
        ("xl(segment=8, memory=33, relative=False)", "softmax"),
        ("xl(segment=1, memory=5, relative=False)", "local(window=5)"),
    )

    def __init__(
        self,
        shape: Shape,
        *,
        segment: Annotated[int, "segment length in tokens (n)"] = 512,
        memory: Annotated[int, "memory length in tokens (M)"] = 512,
        relative: Annotated[bool, "the paper's relative positions, unless the layer has another scheme"] = True,
        clamp: Annotated[int | None, "largest relative distance, to which others are clamped; None: no limit"] = None,
    ):
        super().__init__(shape, segment=segment, memory=memory, relative=relative, clamp=clamp)

    def project_sources(self, x: Tensor) -> dict[str, Tensor]:
        return super().project_sources(x) | {"x": x[:, None]}

    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: XLState | None
    ) -> tuple[Tensor, XLState | None]:
        q, k, v = query["q"], source["k"], source["v"]
        M, n, T, W = self.memory, self.segment, rows.T, self.reach
        if state is None:
            return self.whole(rows, q, k, v), None
        old_k, old_v = self._tail(state)
        k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)  # slot s is at start - W + s
        end = rows.start + rows.count
        inside = rows.start % n
        if state.progress.longest == 0:
            # every row starts at 0, ragged or not
            o = self.whole(rows, q, source["k"], source["v"])
        elif (at := self.step_position(rows)) is not None:
            visible = min(at, at % n + M) + 1
            o = self.last(q, k[:, :, -visible:], v[:, :, -visible:])
        elif T == 1:
            # positions from the first that the query sees, so that what lies before it is not real
            first = (rows.start - inside - M).clamp(min=0)
            q0 = rows.start - first
            mask = Mask(q0, q0 - W, end - first, 1, W + 1, causal=True, full=False, shift=W)
            o = self.attend(mask, q, k, v)
        else:
            # whole segments, from the beginning of the one that the first new token stands in
            length = -(-(n - 1 + T) // n) * n
            queries = stretch(q, -inside, length)
            keys, values = (stretch(x, n - 1 - inside, M + length) for x in (k, v))
            o = stretch(self.segments(rows.start - inside, end, queries, keys, values, n, M), inside, T)
        kept = (k, v)
        if torch.is_grad_enabled() and len(state.tail) == 1:
            kept = (torch.cat([state.tail[0], source["x"]], 2),)
        new = rows.count if rows.uniform_start is None else T
        tail = tuple(stretch(part, new, W) for part in kept)
        return o, XLState(tail, state.progress.advance(rows))

    def _tail(self, state: XLState) -> tuple[Tensor, Tensor]:
        """The keys and values that a state stands for."""
        if len(state.tail) == 2:
            k, v = state.tail
            return k, v
        x = state.tail[0][:, 0]
        k, v, rotation = self.project_heads("k", x), self.project_heads("v", x), self.scheme("rotation")
        if rotation is not None:
            at = state.progress.length[:, None] + torch.arange(-self.reach, 0, device=x.device)
            k = rotation.rotate(k, at.clamp(min=0))
        return k, v

    def empty_state(self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device) -> XLState:
        x = torch.zeros(batch, 1, self.reach, self.shape.width, dtype=dtype, device=device)
        return XLState((x,), Progress.initial(batch, device))

    def probe_self_state(self, state: XLState, names: list[str], first: int) -> XLState:
        at = state.progress.length[:, None] + torch.arange(-self.reach, 0, device=state.progress.length.device)
        return state._replace(tail=self._with_units(names, self._tail(state), at, first))

    def plain(self, row: Row) -> Tensor:
        outs = []
        for i in range(row.T):
            begin = i // self.segment * self.segment
            outs.append(row.attend(i, range(max(0, begin - self.memory), i + 1), self.scale))
        return torch.stack(outs)
