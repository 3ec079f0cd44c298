"""Recurrent cells and convolutions as plain functions: against PyTorch's modules, loops, and rows alone."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from regard.core.tally import Tally
from regard.kernels.convolution import convolve, next_tail
from regard.kernels.recurrence import Cells, gates, loop


def built(cell: str) -> tuple[Cells, torch.Tensor, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    cells, x = Cells(cell, 5, 4).double(), torch.randn(3, 7, 5, dtype=torch.float64)
    return cells, x, tuple(torch.randn(3, 4, dtype=torch.float64) for _ in range(2 if cell == "lstm" else 1))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_cells_are_those_of_pytorch(cell):
    cells, x, state = built(cell)
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](5, 4, batch_first=True).double()
    theirs.load_state_dict({f"{name}_l0": weight for name, weight in cells.state_dict().items()})
    first = tuple(part[None] for part in state)
    expected, last = theirs(x, first if cell == "lstm" else first[0])
    y, after = cells(x, state)
    assert_close(y, expected)
    assert_close(torch.stack(after), torch.cat(last) if cell == "lstm" else last)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_rows_of_different_length_end_where_they_would_alone(cell):
    cells, x, state = built(cell)
    count = torch.tensor([7, 0, 3])
    y, after = cells(x, state, count)
    for made in (cells(x, state, count), loop(cell, x, cells.weights, state, count)):
        assert_close(torch.stack(made[1]), torch.stack(after))
        assert_close(made[0][0], y[0])
        assert_close(made[0][2, :3], y[2, :3])
    alone = cells(x[2:, :3], tuple(part[2:] for part in state))
    assert_close(y[2, :3], alone[0][0])
    for part, own, before in zip(after, alone[1], state, strict=True):
        assert_close(part[2], own[0])
        assert_close(part[1], before[1], rtol=0, atol=0)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_with_its_gates_a_cell_is_linear_in_its_candidates(cell):
    cells, x, state = built(cell)
    (y, last), h = cells(x, state), state[0]
    kept, taken = gates(cells, x, y, h)
    kept_sum = state[-1]
    for t in range(7):
        sums = cells.weight_ih @ x[:, t].T + cells.bias_ih[:, None]
        recalled = cells.weight_hh @ h.T + cells.bias_hh[:, None]
        if cell == "lstm":
            candidate = torch.tanh((sums + recalled)[8:12]).T
        else:
            candidate = torch.tanh(sums[8:] + torch.sigmoid((sums + recalled)[:4]) * recalled[8:]).T
        kept_sum, h = kept[:, t] * kept_sum + taken[:, t] * candidate, y[:, t]
    assert_close(kept_sum, last[-1])


def test_work_is_counted():
    """Table 1 of "Attention Is All You Need", two operations for a multiplication and an addition."""
    n, d = 24, 16
    x = torch.randn(1, n, d, requires_grad=True)
    for cell, gates_of in (("lstm", 4), ("gru", 3)):
        cells = Cells(cell, d, d)
        with Tally() as forward:
            y = cells(x)[0]
        with Tally() as backward:
            y.sum().backward()
        assert forward.flops == 4 * gates_of * n * d * d
        # of the first token no gradient goes on to a state before it
        assert 0 <= 2 * forward.flops - backward.flops <= 2 * gates_of * d * d
    with Tally() as tally:
        convolve(x, torch.randn(d, d, 3))
    assert tally.flops == 2 * 3 * n * d * d


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_convolution_in_pieces(kernel, dilation):
    torch.manual_seed(1)
    x, weight = torch.randn(3, 9, 4, dtype=torch.float64), torch.randn(5, 4, kernel, dtype=torch.float64)
    bias, reach = torch.randn(5, dtype=torch.float64), (kernel - 1) * dilation
    whole = convolve(x, weight, bias, dilation=dilation)
    for t in range(9):
        taps = [(i, t - (kernel - 1 - i) * dilation) for i in range(kernel)]
        expected = bias + sum(x[:, at] @ weight[:, :, i].T for i, at in taps if at >= 0)
        assert_close(whole[:, t], expected)
    tail, first = x.new_zeros(3, reach, 4), 0
    for n in (1, 3, 1, 4):
        piece = x[:, first : first + n]
        assert_close(convolve(piece, weight, bias, dilation=dilation, tail=tail), whole[:, first : first + n])
        tail, first = next_tail(tail, piece, None), first + n
    # a row keeps what its real tokens left
    before, count = torch.randn(3, reach, 4, dtype=torch.float64), torch.tensor([4, 0, 1])
    after = next_tail(before, x[:, :4], count)
    for row, n in enumerate(count.tolist()):
        assert_close(after[row], torch.cat([before[row], x[row, :n]])[n:], rtol=0, atol=0)
