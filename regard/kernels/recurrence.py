"""Recurrent cells over whole sequences: PyTorch's fused kernels, and a loop where programs are recorded.

`Cells` holds the weights in PyTorch's order (input, forget, candidate, output for an LSTM; reset, update, candidate for
a GRU). It is no `nn.LSTM`, which PyTorch's compiler refuses to read.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cell = Literal["lstm", "gru"]
State = tuple[Tensor, ...]  # h, and for an LSTM c: [B, hidden]
GATES = {"lstm": 4, "gru": 3}


class Cells(nn.Module):
    """The weights of one layer in one direction, drawn as PyTorch draws them, uniformly within 1 / sqrt(hidden)."""

    def __init__(self, cell: Cell, width: int, hidden: int):
        super().__init__()
        self.cell: Cell = cell
        self.width, self.hidden = width, hidden
        rows, bound = GATES[cell] * hidden, 1 / math.sqrt(hidden)
        self.weight_ih = nn.Parameter(torch.empty(rows, width).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(rows, hidden).uniform_(-bound, bound))
        self.bias_ih = nn.Parameter(torch.empty(rows).uniform_(-bound, bound))
        self.bias_hh = nn.Parameter(torch.empty(rows).uniform_(-bound, bound))

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh

    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """The state before the first token."""
        count = 2 if self.cell == "lstm" else 1
        return tuple(torch.zeros(batch, self.hidden, dtype=dtype, device=device) for _ in range(count))

    def given(self, x: Tensor) -> Tensor:
        """What each token alone gives to the gates, [B, T, width] -> [B, T, gates * hidden]."""
        return F.linear(x, self.weight_ih, self.bias_ih)

    def forward(self, x: Tensor, state: State | None = None, count: Tensor | None = None) -> tuple[Tensor, State]:
        """[B, T, width] -> h at every token [B, T, hidden], and the state behind the first `count` [B] tokens of each
        row (None: behind all). Outputs behind them are numbers without meaning."""
        state = self.zero(x.shape[0], x.dtype, x.device) if state is None else state
        if torch.compiler.is_compiling():
            return loop(self.cell, x, self.weights, state, count)
        # in the precision of the weights, which cuDNN reads where they are; a CPU's half would round h at every token
        wide = self.weight_ih.dtype
        wide = torch.promote_types(wide, torch.float32) if x.device.type == "cpu" else wide
        weights = [weight.to(wide) for weight in self.weights]
        with torch.autocast(x.device.type, enabled=False):
            y, last = fused(self.cell, x.to(wide), weights, tuple(part.to(wide) for part in state), count)
        return y.to(x.dtype), tuple(part.to(old.dtype) for part, old in zip(last, state, strict=True))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._flatten()
        return self

    def _flatten(self) -> None:
        """On a GPU the weights are moved into one piece of memory, as cuDNN reads them; `nn.LSTM` does the same."""
        weights = list(self.weights)
        first = weights[0]
        if not all(weight.is_cuda and weight.dtype == first.dtype for weight in weights):
            return
        if not torch.backends.cudnn.is_acceptable(first.data) or len({weight.data_ptr() for weight in weights}) < 4:
            return
        from torch.backends.cudnn import rnn

        with torch.cuda.device_of(first), torch.no_grad():
            if torch._use_cudnn_rnn_flatten_weight():  # pyright: ignore[reportPrivateImportUsage]
                mode = rnn.get_cudnn_mode(self.cell.upper())
                torch._cudnn_rnn_flatten_weight(  # pyright: ignore[reportPrivateImportUsage]
                    weights, len(weights), self.width, mode, self.hidden, 0, 1, True, False
                )


def fused(cell: Cell, x: Tensor, weights: list[Tensor], state: State, count: Tensor | None) -> tuple[Tensor, State]:
    """PyTorch's kernels over all tokens."""
    # of PyTorch's two functions, one takes a tuple and the other a tensor
    run: Any = torch.lstm if cell == "lstm" else torch.gru
    first = tuple(part[None].contiguous() for part in state)
    options = (weights, True, 1, 0.0, torch.is_grad_enabled(), False)  # biases, layers, dropout, trains, directions
    if count is None:
        y, *last = run(x, first if cell == "lstm" else first[0], *options, True)
        return y, tuple(part[0] for part in last)
    # lengths must be on the host and above 0: a row without tokens reads one of padding, and is put right below
    packed = nn.utils.rnn.pack_padded_sequence(x, count.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    assert order is not None, "lengths were not sorted"
    assert back is not None, "lengths were not sorted"
    first = tuple(part[:, order] for part in first)
    y, *last = run(packed.data, packed.batch_sizes, first if cell == "lstm" else first[0], *options)
    y, _ = nn.utils.rnn.pad_packed_sequence(packed._replace(data=y), batch_first=True, total_length=x.shape[1])
    some = (count > 0)[:, None]
    return y, tuple(torch.where(some, part[0][back], old) for part, old in zip(last, state, strict=True))


def loop(
    cell: Cell, x: Tensor, weights: tuple[Tensor, ...], state: State, count: Tensor | None
) -> tuple[Tensor, State]:
    """One token after the other, in operators that compilers know."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    given, outs = F.linear(x, weight_ih, bias_ih), []
    for t in range(x.shape[1]):
        after = step(cell, given[:, t], F.linear(state[0].to(x.dtype), weight_hh, bias_hh), state)
        outs.append(after[0].to(x.dtype))
        if count is not None:
            after = tuple(torch.where((t < count)[:, None], new, old) for new, old in zip(after, state, strict=True))
        state = tuple(new.to(old.dtype) for new, old in zip(after, state, strict=True))
    return torch.stack(outs, 1), state


def step(cell: Cell, given: Tensor, recalled: Tensor, state: State) -> State:
    """The next state, from what the token [B, gates] and the old h give to the gates."""
    if cell == "lstm":
        i, f, g, o = (given + recalled).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    (r, z, n), (r_, z_, n_) = given.chunk(3, -1), recalled.chunk(3, -1)
    kept = (z + z_).sigmoid()
    return (kept * state[0] + (1 - kept) * (n + (r + r_).sigmoid() * n_).tanh(),)


def gates(cells: Cells, x: Tensor, y: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept of the old state and what is taken of the new one at each token, both [B, T, hidden], where the
    cells gave y for x, and h was `before` [B, hidden] at first: with them a cell is linear in its candidates."""
    h = torch.cat([before[:, None].to(y.dtype), y[:, :-1]], 1)
    sums = F.linear(x, cells.weight_ih, cells.bias_ih) + F.linear(h, cells.weight_hh, cells.bias_hh)
    if cells.cell == "lstm":
        i, f, _, _ = sums.chunk(4, -1)
        return f.sigmoid(), i.sigmoid()
    kept = sums.chunk(3, -1)[1].sigmoid()
    return kept, 1 - kept
