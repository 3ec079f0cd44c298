"""Numerics that several mechanisms need."""

import torch
from torch import Tensor


class NonFinite(ValueError):
    """Outputs of a model that are NaN or infinite. `what` says which; whoever trains the model has other advice than
    whoever only uses it."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}")
        self.what = what


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax in float32 (or better) over the visible keys; a row that sees none is all zeros, gradients finite."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if visible is None:
        return torch.softmax(wide, -1)
    wide = torch.where(visible, wide, torch.finfo(wide.dtype).min)
    return torch.where(visible, torch.softmax(wide, -1), 0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for what is narrower: the type of sums, norms and angles."""
    return torch.promote_types(dtype, torch.float32)


def to_wide(x: Tensor) -> Tensor:
    """In float32, or as it is where that is wider."""
    return x.to(wide_dtype(x.dtype))


def take_tokens(x: Tensor, at: Tensor) -> Tensor:
    """x [B, N, ...] at the tokens [B, n]: [B, n, ...]"""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], at]
