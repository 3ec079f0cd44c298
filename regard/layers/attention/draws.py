"""Random directions of layers, and when they are drawn anew."""

import hashlib

import torch
from torch import Tensor


def normal_rows(*size: int, draw: torch.Generator | None = None, orthogonal: bool = False) -> Tensor:
    """Normal vectors [..., R, D]. Orthogonal: the directions are orthogonal within each D consecutive rows, which
    lowers the variance of random features; the lengths stay those of normal vectors."""
    *batch, R, D = size
    rows = torch.randn(*size, generator=draw)
    if not orthogonal:
        return rows
    blocks = torch.linalg.qr(torch.randn(*batch, -(-R // D), D, D, generator=draw))[0].mT  # D orthonormal rows each
    return blocks.flatten(-3, -2)[..., :R, :] * rows.norm(dim=-1, keepdim=True)


def generator(*numbers: int) -> torch.Generator:
    """One that depends on these numbers and nothing else."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def check_redraw(name: str, redraw: int) -> int:
    if redraw < 0:
        raise ValueError(f"option 'redraw' of {name!r} must be 0 (one draw for good) or more steps, got {redraw}")
    return redraw
