"""Random directions of layers, and when they are drawn anew."""

import hashlib

import torch
from torch import Tensor, nn

from regard.layers.attention.base import Attention


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


def redraw(model: nn.Module, *, seed: int, step: int) -> None:
    """Draws anew what the layers of a model draw at this training step. Call it before each step of a training loop of
    your own; `regard train` does. What is drawn depends on the seed, the step and the place of the layer alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    for place, layer in enumerate(layers):
        if layer.redraw_every and step % layer.redraw_every == 0:
            layer.redraw(generator(seed, step, place))


def drawn(model: nn.Module) -> list[str]:
    """The names of the tensors in the state dict of a model that are drawn anew while it trains."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Attention))
    return [
        f"{name}.{buffer}" if name else buffer
        for name, layer in layers
        if layer.redraw_every
        for buffer, _ in layer.named_buffers(recurse=False)
    ]
