"""What a cache does with tokens of another precision than its own, as under autocast."""

import pytest
import torch

from regard.core.rows import Rows
from regard.layers.attention.cached import append_to_cache, write_slots


@pytest.mark.parametrize("grad", [False, True])
def test_rows_of_different_length_are_written_in_the_precision_of_the_cache(grad):
    old, new = torch.full((2, 1, 4, 3), 7.0), torch.ones(2, 1, 2, 3, dtype=torch.bfloat16)
    start, count = torch.tensor([1, 3]), torch.tensor([2, 1])
    rows = Rows(start, count, 2, None)
    with torch.set_grad_enabled(grad):
        grown = append_to_cache(old.clone(), new, rows, 3)
        placed = write_slots(old.clone(), new, rows.positions(), 5)
    assert grown.dtype == placed.dtype == torch.float32
    for row, slots in enumerate([(1, 2), (3, 4)]):
        for made in (grown, placed):
            assert (made[row, 0, list(slots)] == 1).all()
            assert (made[row, 0, 0] == 7).all()
