"""k-means of codes: Triton against PyTorch. All numbers are whole, so that both give the same clusters."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from regard.kernels import choose
from regard.kernels.votes import group_codes


def check(device: str, dtype: torch.dtype, *, T: int, C: int, bits: int, ragged: bool) -> None:
    gen = torch.Generator().manual_seed(T)
    codes = torch.where(torch.rand(2, 3, T, bits, generator=gen) > 0.5, 1.0, -1.0).to(device, dtype)
    lengths = None
    if ragged:
        lengths = torch.tensor([T, max(1, C // 2)], device=device)
        codes = torch.where((torch.arange(T, device=device) < lengths[:, None])[:, None, :, None], codes, 0)
    found: list[Tensor] = []
    for choice in ("torch", "triton"):
        with choose.use(choice), choose.record() as ran:
            found.append(group_codes(codes, codes[:, :, :C], lengths, 4))
        assert ran == [("votes", choice)]
    assert_close(found[1], found[0])
    assert len(found[0].unique()) > min(C, T) // 4, "codes must fall into several clusters"


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("T", "C", "bits"), [(1, 1, 8), (65, 7, 5), (150, 20, 32)])
def test_clusters_of_codes(T: int, C: int, bits: int, ragged: bool) -> None:
    check("cpu", torch.float32, T=T, C=C, bits=bits, ragged=ragged)


def test_a_centroid_without_members_stays_and_ties_go_to_the_first() -> None:
    codes = torch.tensor([[1.0, 1], [1, 1], [-1, -1], [1, -1]]).view(1, 1, 4, 2)
    first = torch.tensor([[1.0, 1], [1, 1], [-1, -1]]).view(1, 1, 3, 2)
    for choice in ("torch", "triton"):
        with choose.use(choice):
            # the second centroid equals the first and gets none; [1, -1] is as far from both others
            assert group_codes(codes, first, None, 3).flatten().tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_padding_has_no_vote_and_is_no_centroid(choice: choose.Choice) -> None:
    away = torch.tensor([[-1.0, -1], [-1, -1], [0, 0]]).view(1, 1, 3, 2)
    lengths = torch.tensor([2])
    with choose.use(choice):
        # nobody real is near the first centroid, so it stays, though padding is assigned to it
        first = torch.tensor([[1.0, 1], [-1, -1]]).view(1, 1, 2, 2)
        assert group_codes(away, first, lengths, 3).flatten().tolist()[:2] == [1, 1]
        # the third centroid is padding, and nearer than both others
        assert group_codes(-away, away, lengths, 1).flatten().tolist()[:2] == [0, 0]


def test_too_many_clusters_are_left_to_pytorch() -> None:
    codes = torch.ones(1, 1, 300, 4)
    with choose.use("triton"), pytest.raises(ValueError, match="there are 300 clusters or bits, and 256 fit"):
        group_codes(codes, codes, None, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("T", "C", "bits"), [(1, 1, 8), (65, 7, 5), (4097, 64, 32), (1000, 256, 64)])
def test_clusters_of_codes_on_a_gpu(T: int, C: int, bits: int, dtype: torch.dtype) -> None:
    for ragged in (False, True):
        check("cuda", dtype, T=T, C=C, bits=bits, ragged=ragged)
