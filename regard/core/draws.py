"""Random tensors of layers that training draws anew: when, from which seed, and under which names they are saved."""

import hashlib
from typing import Protocol, cast

import torch
from torch import nn


class Redrawn(Protocol):
    """A layer with random buffers. Every layer of attention says how often they are drawn; those that draw have
    `redraw`."""

    redraw_every: int  # training steps from one draw to the next; 0: one draw for good

    def redraw(self, draw: torch.Generator | None = None) -> None:
        """Fills the buffers of the layer with new draws."""


def redraw(model: nn.Module, *, seed: int, step: int) -> None:
    """Draws anew what the layers of a model draw at this training step. Call it before each step of a training loop of
    your own; `regard train` does. What is drawn depends on the seed, the step and the place of the layer alone."""
    RedrawnLayers(model).redraw(seed=seed, step=step)


class RedrawnLayers:
    """The layers of a model that draw anew while it trains. They are found once: a walk over all modules at each step
    would keep a GPU waiting."""

    def __init__(self, model: nn.Module):
        self.layers = [(place, layer) for place, (_, layer) in enumerate(_layers(model)) if layer.redraw_every]

    def redraw(self, *, seed: int, step: int) -> None:
        """Draws anew what the layers draw at this training step."""
        for place, layer in self.layers:
            if step % layer.redraw_every == 0:
                layer.redraw(_generator(seed, step, place))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds what a model on a device draws from. `torch.manual_seed` also seeds devices that are not there: it keeps
    the seed for each, and the stack of the call, at every step."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def list_redrawn(model: nn.Module) -> list[str]:
    """The names of the tensors in the state dict of a model that are drawn anew while it trains."""
    return [
        f"{name}.{buffer}" if name else buffer
        for name, layer in _layers(model)
        if layer.redraw_every
        for buffer, _ in cast(nn.Module, layer).named_buffers(recurse=False)
    ]


def _layers(model: nn.Module) -> list[tuple[str, Redrawn]]:
    """By name. Layers that never draw count too: a draw follows from the place of a layer among all of them."""
    return [(name, cast(Redrawn, layer)) for name, layer in model.named_modules() if hasattr(layer, "redraw_every")]


def _generator(*numbers: int) -> torch.Generator:
    """One that depends on these numbers and nothing else."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
