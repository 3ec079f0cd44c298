"""The exponential moving average of the weights, which is evaluated and used in their place.

Weights of late steps jump around a minimum, and their mean lies nearer to it (Polyak and Juditsky 1992; for networks
Tarvainen and Valpola 2017, arXiv 1703.01780). After each step,

    average <- d average + (1 - d) weights,    d = min(decay, (1 + step) / (10 + step)),

so that the first average is not one of random weights. Floating-point buffers, such as the running statistics of batch
normalization, are averaged as well; whole numbers and random draws are those of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.core.draws import list_redrawn
from regard.training import checkpoint
from regard.training.distributed.tensors import local, placed_like


def decay_at(decay: float, step: int) -> float:
    """The decay at a step, counted from 1."""
    return min(decay, (1 + step) / (10 + step))


class Ema:
    """The average of the weights of a model, on its device. Nothing here waits for a GPU."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        state = model.state_dict()
        self.ties = checkpoint.find_ties(dict(zip(state, local(state.values()), strict=True)))
        drawn = set(list_redrawn(model))
        self.names = [
            name
            for name, tensor in state.items()
            if tensor.is_floating_point() and name not in self.ties and name not in drawn
        ]
        # tensors of the state share memory with the model
        self.weights = [state[name] for name in self.names]
        self.average = [tensor.detach().clone() for tensor in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After a step, counted from 1."""
        # PyTorch has no public name for one kernel over many tensors
        torch._foreach_lerp_(local(self.average), local(self.weights), 1 - decay_at(self.decay, step))  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights meanwhile, where its own ones are before and after: CUDA graphs and the
        optimizer know their addresses."""
        own = [tensor.clone() for tensor in self.weights]
        self._set(self.weights, self.average)
        try:
            yield
        finally:
            self._set(self.weights, own)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged tensors under the names that they have in the model; tied ones under each of them."""
        average = dict(zip(self.names, self.average, strict=True))
        return average | {name: average[first] for name, first in self.ties.items() if first in average}

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Takes the average from a checkpoint, and gives the model the weights that it is an average of."""
        weights = found.tensors.get("weights", {})
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        if form != {name: (tensor.shape, tensor.dtype) for name, tensor in self.state_dict().items()}:
            raise checkpoint.CheckpointError(
                f"{found.path}: weights.safetensors does not have the weights of a run with training.ema: "
                "training cannot be resumed"
            )
        for own, tensors in ((self.average, found.tensors["model"]), (self.weights, weights)):
            self._set(own, [placed_like(tensors[name], part) for name, part in zip(self.names, own, strict=True)])

    @staticmethod
    @torch.no_grad()
    def _set(tensors: list[Tensor], values: list[Tensor]) -> None:
        torch._foreach_copy_(local(tensors), local(values))  # pyright: ignore[reportPrivateImportUsage]
