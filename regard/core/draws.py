"""Random tensors of layers that training draws anew: when, from which seed, and under which names they are saved."""

import hashlib
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from regard.core.ahead import Ahead


class Redrawn(Protocol):
    """A layer with a random buffer. Every layer of attention says how often it is drawn anew; those that draw have the
    methods."""

    redraw_every: int  # training steps from one draw to the next; 0: one draw for good

    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """What the buffer gets, on the host. A thread may call it: it must not call a GPU."""
        ...

    def write_values(self, drawn: Tensor) -> None:
        """Fills the buffer with what was drawn."""


def redraw(model: nn.Module, *, seed: int, step: int) -> None:
    """Draws anew what the layers of a model draw at this training step. Call it before each step of a training loop of
    your own; `regard train` does. What is drawn depends on the seed, the step and the place of the layer alone."""
    RedrawnLayers(model, seed=seed).redraw(step)


class RedrawnLayers:
    """The layers of a model that draw anew while it trains. They are found once: a walk over all modules at each step
    would keep a GPU waiting. So would drawing: a thread draws for the next `ahead` steps, until `close`."""

    def __init__(self, model: nn.Module, *, seed: int, ahead: int = 0):
        self.layers = [(place, layer) for place, (_, layer) in enumerate(_layers(model)) if layer.redraw_every]
        self.seed = seed
        self.draws = Ahead(self._draw, ahead, one_core=True)

    def redraw(self, step: int, steps: int | None = None) -> None:
        """Draws anew what the layers draw at this training step, of `steps` in all if that is known. The buffers are
        written here, by the calling thread."""
        upcoming = range(step, step + 1 + self.draws.ahead)
        if not any(at % layer.redraw_every == 0 for _, layer in self.layers for at in upcoming):
            return
        for layer, drawn in self.draws.get(step, step + 1):
            layer.write_values(drawn)
        # not earlier: the thread would compete with the copies for the interpreter
        end = upcoming.stop if steps is None else min(upcoming.stop, steps)
        self.draws.begin(range(step + 1, end), end)

    def close(self) -> None:
        """Ends the thread."""
        self.draws.close()

    def _draw(self, step: int, steps: int) -> list[tuple[Redrawn, Tensor]]:
        """The layers that draw at this step, and what they draw, on the host."""
        return [
            (layer, layer.draw_values(_generator(self.seed, step, place)))
            for place, layer in self.layers
            if step % layer.redraw_every == 0
        ]


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
