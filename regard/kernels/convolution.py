"""Convolution over tokens, whole or token by token: the last inputs are all that it keeps."""

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dilation: int = 1,
    tail: Tensor | None = None,
    centred: bool = False,
    groups: int = 1,
) -> Tensor:
    """[B, T, E] -> [B, T, out] with taps `dilation` tokens apart, weight [out, E / groups, k]. The last tap reads the
    token itself, or the middle one where `centred`. Before the first token stands `tail` [B, reach, E], or zeros."""
    reach = (weight.shape[2] - 1) * dilation
    if centred:
        x = F.pad(x, (0, 0, reach // 2, reach - reach // 2))
    elif tail is None:
        x = F.pad(x, (0, 0, reach, 0))
    else:
        x = torch.cat([tail.to(x.dtype), x], 1)
    return F.conv1d(x.transpose(1, 2), weight, bias, dilation=dilation, groups=groups).transpose(1, 2)


def next_tail(tail: Tensor, x: Tensor, count: Tensor | None) -> Tensor:
    """The last inputs of each row, as many as `tail` [B, W, E] has, after the first `count` [B] of x [B, T, E] (None:
    after all). A row without new tokens keeps what it had."""
    W = tail.shape[1]
    joined = torch.cat([tail, x.to(tail.dtype)], 1)
    if count is None:
        # a copy, lest a few tokens hold on to a whole prompt
        return joined[:, joined.shape[1] - W :].clone()
    at = count[:, None] + torch.arange(W, device=x.device)
    return joined.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
