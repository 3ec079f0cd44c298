"""k-means of codes of -1 and 1: a centroid is the sign of what its members vote for, bit by bit.

The kernel in Triton assigns a block of codes and adds up their votes in one pass over memory, T (C + bits) of which
never leave the chip. Votes are whole numbers, so that sums in any order are exact.
"""

import torch
from torch import Tensor

from regard.kernels.choose import use_triton

MOST = 256  # clusters, and bits, that fit on the chip


def group_codes(codes: Tensor, centroids: Tensor, lengths: Tensor | None, iterations: int) -> Tensor:
    """The cluster [B, H, T] of each code [B, H, T, bits] of -1 and 1, after `iterations` assignments to the nearest
    centroid; those they begin with are [B, H, C, bits]. Of several, the first. With `lengths` [B], the codes of padding
    are zeros and have no vote, and a row has no more centroids than tokens. A centroid without members stays."""
    C, bits = centroids.shape[2:]
    refusal = None
    if max(C, bits) > MOST:
        refusal = f"there are {max(C, bits)} clusters or bits, and {MOST} fit"
    elif torch.compiler.is_compiling():
        refusal = "torch.compile records no kernel of ours here"
    if use_triton("votes", codes, refusal=refusal, second_axis=codes.shape[0] * codes.shape[1]):
        # imported late: not every PyTorch for a CPU comes with Triton
        from regard.kernels import picks_triton

        assign = picks_triton.assign
    else:
        assign = _assign
    for _ in range(iterations - 1):
        _, votes, members = assign(codes, centroids, lengths, False)
        centroids = torch.where(members[..., None] > 0, torch.where(votes > 0, 1, -1).to(codes.dtype), centroids)
    return assign(codes, centroids, lengths, True)[0]


def _assign(codes: Tensor, centroids: Tensor, lengths: Tensor | None, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    # tokens last: a GPU looks for the largest of neighbours many times slower
    near = centroids @ codes.mT  # [B, H, C, T]
    if lengths is not None:
        used = torch.arange(centroids.shape[2], device=codes.device) < lengths[:, None]
        near = torch.where(used[:, None, :, None], near, -torch.inf)
    group = near.argmax(2)
    if last:
        return group, centroids, centroids[..., 0]
    hot = torch.zeros_like(near).scatter_(2, group[:, :, None], 1)
    if lengths is not None:
        real = torch.arange(codes.shape[2], device=codes.device) < lengths[:, None]
        hot = torch.where(real[:, None, None], hot, 0)
    return group, hot @ codes, hot.amax(3)
