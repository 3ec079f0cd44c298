"""Where the largest numbers of a row stand: Triton against PyTorch."""

import pytest
import torch
from torch.testing import assert_close

from regard.kernels import choose
from regard.kernels.largest import largest

SIZES = [(1, 1), (7, 3), (64, 64), (65, 1), (1000, 129), (4097, 33), (8192, 128), (8200, 60)]


def both(x: torch.Tensor, count: int, each: torch.Tensor | None = None) -> list[torch.Tensor]:
    answers = []
    for choice in ("torch", "triton"):
        with choose.use(choice), choose.record() as ran:
            answers.append(largest(x, count, each))
        assert ran == [("largest", choice)]
    return answers


def numbers(S: int, device: str) -> torch.Tensor:
    """All different, of both signs and of all sizes."""
    x = torch.randn(2, 1, 2, S, generator=torch.Generator().manual_seed(S)) * 10.0 ** torch.arange(-2, 0)[:, None]
    x[..., :: max(1, S // 3)] *= 1e30
    return x.to(device)


def check(device: str, S: int, count: int) -> None:
    x = numbers(S, device)
    expected, actual = both(x, count)
    assert_close(actual, expected)
    each = torch.tensor([count, count // 2], device=device)
    expected, actual = both(x, count, each)
    assert_close(actual, expected)


@pytest.mark.parametrize(("S", "count"), SIZES)
def test_places_of_the_largest(S: int, count: int) -> None:
    check("cpu", S, count)


def test_equal_numbers_are_taken_in_order() -> None:
    x = torch.tensor([0.0, 1.0, -0.0, 1.0, -torch.inf, 0.0, -1.0]).view(1, 1, 1, -1)
    with choose.use("triton"):
        assert [largest(x, n).flatten().tolist() for n in (1, 3, 4, 7)] == [[1], [0, 1, 3], [0, 1, 2, 3], [*range(7)]]


def test_rows_that_do_not_fit_are_left_to_pytorch() -> None:
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    with choose.use("triton"), pytest.raises(ValueError, match=r"numbers are torch\.float64, not float32"):
        largest(x, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("S", "count"), [*SIZES, (16384, 128), (65536, 512)])
def test_places_of_the_largest_on_a_gpu(S: int, count: int) -> None:
    check("cuda", S, count)
