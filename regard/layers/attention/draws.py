"""Random directions of layers. When they are drawn anew is in regard/core/draws.py."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomBuffer(ABC):
    """A layer with one random buffer. Drawing and writing are apart, so that a thread can draw what the next step
    needs while the buffer still has what the present one needs."""

    random_buffer: str  # its name

    @abstractmethod
    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """What the buffer gets, on the host: it depends on the generator and on the options of the layer alone."""

    def write_values(self, drawn: Tensor) -> None:
        """Fills the buffer with what was drawn."""
        put_draw(getattr(self, self.random_buffer), drawn)

    def redraw(self, draw: torch.Generator | None = None) -> None:
        """Fills the buffer with a new draw."""
        self.write_values(self.draw_values(draw))


def normal_rows(*size: int, draw: torch.Generator | None = None, orthogonal: bool = False) -> Tensor:
    """Normal vectors [..., R, D]. Orthogonal: the directions are orthogonal within each D consecutive rows, which
    lowers the variance of random features; the lengths stay those of normal vectors."""
    *batch, R, D = size
    rows = torch.randn(*size, generator=draw)
    if not orthogonal:
        return rows
    blocks = torch.randn(*batch, -(-R // D), D, D, generator=draw)
    with _one_thread():
        blocks = torch.linalg.qr(blocks)[0].mT  # D orthonormal rows each
    # the decomposition has a rule for the sign of each row, which would favour some directions: another is drawn
    lengths = rows.norm(dim=-1, keepdim=True) * rows[..., :1].sign()
    return blocks.flatten(-3, -2)[..., :R, :] * lengths


def put_draw(buffer: Tensor, drawn: Tensor) -> None:
    """Writes what the host has drawn into a buffer. A GPU gets it when it is done with the step before, and the host
    does not wait for that."""
    buffer.copy_(drawn.pin_memory() if buffer.is_cuda else drawn, non_blocking=True)


def check_redraw(name: str, redraw: int) -> int:
    if redraw < 0:
        raise ValueError(f"option 'redraw' of {name!r} must be 0 (one draw for good) or more steps, got {redraw}")
    return redraw


@contextmanager
def _one_thread() -> Iterator[None]:
    """For matrices so small that threads wait for each other longer than they work, while a GPU waits for the host. The
    last bits of a decomposition depend on the number of threads too, and a draw must not. A thread that has one already
    sets nothing: for a moment all threads that begin elsewhere would get one as well."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
