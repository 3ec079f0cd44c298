"""Which backends of PyTorch's attention a call may take, where PyTorch's own order of them is not the best one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FEW = 64  # queries
WITHOUT_PLANS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def for_few_queries(q: Tensor, k: Tensor, queries: int, *, masked: bool) -> AbstractContextManager[Any]:
    """For a call of scaled_dot_product_attention in inference. On a GPU PyTorch takes cuDNN's kernel first, which makes
    a plan for every new shape: more than a millisecond of the host for each layer on average, when prompts of many
    lengths are read piece by piece. A few queries are quicker in the memory-efficient kernel, which needs no plan. It
    has no grouped heads, and without a mask shapes are few."""
    takes = (
        masked
        and q.is_cuda
        and queries <= FEW
        and q.shape[1] == k.shape[1]
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
    return sdpa_kernel(WITHOUT_PLANS) if takes else nullcontext()
