"""ring.py in Triton: the new key and value are written and all slots are read in one launch.

A program takes the heads of one key/value head and a share of the filled slots, with a running maximum and sum in base
2. Where batch and heads are few, the slots are split over the grid and a second kernel merges the shares. The number of
splits depends on sizes alone, and how far to read is in a tensor.
"""

import torch
import triton
from torch import Tensor

from regard.kernels.ring_triton_kernels import merge_kernel, read_kernel
from regard.kernels.runs import LOG2E

BLOCK = 64  # slots at a time
WARPS = 4
PROGRAMS = 264  # that a grid should have: two for each multiprocessor of an H200
WAVES = 8  # times as many, at most, where rings are long
MOST = 32  # splits


def attend_next(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    (B, H, _, D), (G, R) = q.shape, keys.shape[1:3]
    # heads side by side in memory, as the projection behind reads them
    o = q.new_empty(B, 1, H, D).transpose(1, 2)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    few, many = PROGRAMS // (B * G), WAVES * PROGRAMS // (B * G)
    # enough programs for every multiprocessor; of long rings several waves of them, so that the last one is short
    splits = max(1, min(triton.cdiv(R, 2 * BLOCK), few, MOST), min(triton.cdiv(R, 1024), many, MOST))
    sums = q.new_empty(splits, B, H, D + 2, dtype=torch.float32) if splits > 1 else None
    sizes = {"H": H, "D": D, "BLOCK_D": triton.next_power_of_2(max(D, 16)), "SPLITS": splits}
    group = H // G
    with torch.cuda.device_of(q):
        read_kernel[(B * G, splits)](
            q,
            k,
            v,
            keys,
            values,
            seen,
            o,
            sums,
            *(stride for x in (q, k, v, keys, values, o) for stride in x.stride()[:2]),
            keys.stride(2),
            values.stride(2),
            R,
            B * H * (D + 2),
            scale * LOG2E,
            **sizes,
            G=G,
            GROUP=group,
            ROWS=1 if group == 1 else max(16, triton.next_power_of_2(group)),
            BLOCK=BLOCK,
            num_warps=WARPS,
            num_stages=2,
        )
        if splits > 1:
            merged = {"SPLIT_BLOCK": triton.next_power_of_2(splits)}
            merge_kernel[(B * H,)](sums, o, *o.stride()[:2], B * H * (D + 2), **sizes, **merged, num_warps=1)
    return o
