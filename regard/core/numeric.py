"""Numerics that several mechanisms need."""

import torch
from torch import Tensor


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax in float32 (or better) over the visible keys; a row that sees none is all zeros, gradients finite."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if visible is None:
        return torch.softmax(wide, -1)
    wide = torch.where(visible, wide, torch.finfo(wide.dtype).min)
    return torch.where(visible, torch.softmax(wide, -1), 0)
