"""Where the largest numbers of a row stand, in order of place: what a centroid picks.

PyTorch sorts what it picks by size, then again by place. The kernel in Triton finds the smallest number that is picked,
one bit after another, and writes the places down as it meets them: one pass over memory. Of long rows only a few groups
of numbers, those with the largest maxima, are looked at so.
"""

import torch
from torch import Tensor

from regard.kernels.choose import use_triton

LONGEST = 65536  # of a row, which is held in registers


def largest(x: Tensor, count: int, each: Tensor | None = None) -> Tensor:
    """The places of the `count` largest of x [B, H, C, S], ascending: [B, H, C, count]. With `each` [B], that many of
    a row's, and S in the places behind."""
    S = x.shape[-1]
    refusal = None
    if S > LONGEST:
        refusal = f"rows of {S:,} are longer than {LONGEST:,}"
    elif x.dtype != torch.float32:
        refusal = f"numbers are {x.dtype}, not float32"
    elif torch.compiler.is_compiling():
        refusal = "torch.compile records no kernel of ours here"
    if use_triton("largest", x, refusal=refusal):
        # imported late: not every PyTorch for a CPU comes with Triton
        from regard.kernels import picks_triton

        return picks_triton.largest(x, count, each)
    at = x.topk(count, -1).indices
    if each is not None:
        at = torch.where(torch.arange(count, device=x.device) < each.view(-1, 1, 1, 1), at, S)
    return at.sort(-1).values
