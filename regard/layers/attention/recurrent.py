"""A recurrent layer in the place of attention: LSTM or GRU."""

from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import wide_dtype
from regard.core.reference import add_up
from regard.core.rows import Rows, reverse_rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.kernels.compiling import is_dynamic
from regard.kernels.recurrence import Cells, State, gates
from regard.layers.attention.base import Facts
from regard.layers.attention.mixing import Mixing


class RecurrentState(NamedTuple):
    """h, and for an LSTM c, behind the last token of each row."""

    hidden: State  # [B, hidden]
    progress: Progress


class Recurrent(Mixing):
    """Hochreiter & Schmidhuber 1997 (with the forget gate of Gers et al. 2000) and Cho et al. 2014, one layer of
    PyTorch's cells, with an output projection. The LSTM is

        c_t = f_t * c_{t-1} + i_t * g_t,    h_t = o_t * tanh(c_t),

    with i, f, o = sigmoid and g = tanh of W x_t + U h_{t-1} + b. The GRU is

        h_t = z_t * h_{t-1} + (1 - z_t) * n_t,    n_t = tanh(W x_t + b + r_t * (U h_{t-1} + b')),

    with z, r = sigmoid of W x_t + U h_{t-1} + b. The state is as wide as all heads together. Role "self" reads both
    ways, each with half of it. Given the gates, a cell is a weighted sum of its candidates: c_t is the sum over j of
    (f_t * ... * f_{j+1} * i_j) * g_j (Levy et al. 2018, arXiv 1805.03716). Those weights are the map, the mean over the
    channels of a head; in role "self" the first heads read from the left and the last from the right. Time N, in N
    steps that wait for each other; memory N, state 1.
    """

    facts = Facts(
        name="recurrent",
        paper="Hochreiter & Schmidhuber 1997, Long Short-Term Memory; Cho et al. 2014, Learning Phrase Representations "
        "using RNN Encoder-Decoder",
        link="arXiv 1406.1078",
        family="recurrence",
        formula="h_t = z_t * h_{t-1} + (1 - z_t) * n_t (gru); c_t = f_t * c_{t-1} + i_t * g_t, h_t = o_t * tanh(c_t) "
        "(lstm); y_t = W_o h_t",
        time=Order("N", 1),
        memory=Order("N", 1),
        state=Order("1", 0),
        roles=("self", "causal"),
        refusals=(("cross", "it reads one sequence in its order, and a second one has no place in it"),),
        independent_heads=False,
        linear=False,
        signed=True,
        dynamic_length=False,
    )
    examples = ("recurrent(cell='lstm')", "recurrent")

    def __init__(
        self,
        shape: Shape,
        *,
        cell: Annotated[Literal["gru", "lstm"], "kind of the cells"] = "gru",
    ):
        super().__init__(shape)
        if cell not in ("gru", "lstm"):
            raise ValueError(f"option 'cell' of 'recurrent' must be 'gru' or 'lstm', got {cell!r}")
        ways = 2 if shape.role == "self" else 1
        hidden = -(-shape.heads * shape.head_width // ways)
        self.directions = nn.ModuleList(Cells(cell, shape.width, hidden) for _ in range(ways))
        self.output = nn.Linear(ways * hidden, shape.out_width, bias=shape.output_bias)
        nn.init.xavier_uniform_(self.output.weight)
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        x = self.placed(x, rows)
        if state is None:
            ways = [y for _, _, y in self._ways(x, rows)]
            ways[1:] = [reverse_rows(y, rows) for y in ways[1:]]
            return Out(self.output(torch.cat(ways, -1)))
        (cells,) = self._cells()
        y, hidden = cells(x, state.hidden, None if rows.real() is None else rows.count)
        return Out(self.output(y), RecurrentState(hidden, state.progress.advance(rows)))

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        (cells,) = self._cells()
        hidden = cells.zero(batch, wide_dtype(dtype) if device.type == "cpu" else dtype, device)
        return Initial(RecurrentState(hidden, Progress.initial(batch, device, self.facts.name)))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        channels = torch.arange(self.output.in_features, device=x.device)
        members = F.one_hot(channels * self.shape.heads // len(channels), self.shape.heads).to(values.dtype)
        members = members / members.sum(0).clamp(min=1)  # [channels, H]: the mean over those of each head
        parts = []
        for way, (cells, read, y) in enumerate(self._ways(self.placed(x, rows), rows)):
            kept, taken = gates(cells, read, y, y.new_zeros(len(y), cells.hidden))
            of_heads = members[way * cells.hidden : (way + 1) * cells.hidden]
            parts.append(_weighted_sums(kept, taken, values, of_heads, rows if way else None))
        return add_up(parts)

    def _cells(self) -> list[Cells]:
        return [cells for cells in self.directions if isinstance(cells, Cells)]

    def _ways(self, x: Tensor, rows: Rows) -> list[tuple[Cells, Tensor, Tensor]]:
        """Each direction: its cells, the tokens and h at each of them [B, T, h], in the order in which it reads."""
        if is_dynamic(rows.T):
            raise ValueError(
                "attention 'recurrent' cannot be exported with a dynamic length: it reads the tokens one by one; "
                "export it with a fixed length, or use another mechanism"
            )
        found = []
        for way, cells in enumerate(self._cells()):
            read = reverse_rows(x, rows) if way else x
            found.append((cells, read, cells(read)[0]))
        return found

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        T, ways = len(x), []
        for way, cells in enumerate(self._cells()):
            n, h = cells.hidden, torch.zeros(cells.hidden, dtype=x.dtype)
            c, outs = torch.zeros_like(h), [h] * T
            for t in reversed(range(T)) if way else range(T):
                given = cells.weight_ih @ x[t] + cells.bias_ih
                recalled = cells.weight_hh @ h + cells.bias_hh
                if cells.cell == "lstm":
                    i, f, g, o = (given[k * n : (k + 1) * n] + recalled[k * n : (k + 1) * n] for k in range(4))
                    c = c / (1 + torch.exp(-f)) + torch.tanh(g) / (1 + torch.exp(-i))
                    h = torch.tanh(c) / (1 + torch.exp(-o))
                else:
                    r, z = (1 / (1 + torch.exp(-(given + recalled)[k * n : (k + 1) * n])) for k in range(2))
                    h = z * h + (1 - z) * torch.tanh(given[2 * n :] + r * recalled[2 * n :])
                outs[t] = h
            ways.append(torch.stack(outs))
        rows = [self.output.weight @ torch.cat([way[t] for way in ways]) for t in range(T)]
        y = torch.stack(rows)
        return y if self.output.bias is None else y + self.output.bias


def _weighted_sums(kept: Tensor, taken: Tensor, values: Tensor, of_heads: Tensor, reverse: Rows | None) -> Tensor:
    """s_t = kept_t s_{t-1} + taken_t v_t for every channel [B, T, c] and column of the values [B, 1 or H, T, n]: the
    mean over the channels of each head, which `of_heads` [c, H] gives, [B, H, T, n]. Gates stand in the order of
    reading; with `reverse` that of the values is the opposite."""
    values = values.transpose(1, 2).expand(-1, -1, of_heads.shape[1], -1)  # [B, T, H, n]
    values = values if reverse is None else reverse_rows(values, reverse)
    owners = of_heads.argmax(1)
    sums, outs = values.new_zeros(len(kept), kept.shape[2], values.shape[3]), []
    for t in range(kept.shape[1]):
        sums = kept[:, t, :, None] * sums + taken[:, t, :, None] * values[:, t, owners]
        outs.append(of_heads.T @ sums)
    found = torch.stack(outs, 1)
    found = found if reverse is None else reverse_rows(found, reverse)
    return found.transpose(1, 2)
