"""Sums over a batch that is spread over processes: those of one process with the whole batch."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from processes import in_processes
from torch import Tensor
from torch.testing import assert_close

from regard.core.parallel import Spread, batch_offset, batch_rows, batch_sum, spread_batch

SIZE = 3
ROWS = torch.arange(10.0).view(5, 2)
SHARES = (
    slice(0, 2),
    slice(2, 3),
    slice(2, 5),
)  # the second has no row of its own: it computes one that does not count


def compute(x: Tensor) -> dict[str, Tensor]:
    """The loss of some rows, and what a layer learns of the whole batch."""
    before, total = batch_offset(torch.tensor(len(x)))
    every, over = batch_rows(x), batch_rows(x[:, 0] > 3)
    loss = batch_sum(x.square().sum()) * batch_sum(x.sum()) + (every.cumsum(0) ** 2).sum()
    return {"before": before, "total": total, "every": every, "over": over, "loss": loss}


def begin(rank: int, work: Callable[[Spread], None]) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=SIZE)
    try:
        work(Spread(None, rank, SIZE, has_rows=rank != 1))
    finally:
        dist.destroy_process_group()


def test_sums_and_gradients_are_those_of_the_whole_batch():
    alone = ROWS.clone().requires_grad_()
    expected = compute(alone)
    expected["loss"].backward()

    def work(spread: Spread) -> None:
        own = SHARES[spread.rank]
        x = ROWS[own].clone().requires_grad_()
        with spread_batch(spread):
            got = compute(x)
            got["loss"].backward()
        for name in ("total", "every", "over", "loss"):
            assert_close(got[name], expected[name])
        assert int(got["before"]) == (0, 2, 2)[spread.rank]
        # the loss that is minimised is the mean over processes: each computes the whole loss here
        assert alone.grad is not None
        wanted = SIZE * alone.grad[own] if spread.has_rows else torch.zeros_like(x)
        assert_close(x.grad, wanted)

    assert in_processes(SIZE, lambda rank: begin(rank, work)) == [0] * SIZE
