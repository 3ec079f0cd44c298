"""What `training.compile` compiles."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.training.loss import Loss
from regard.training.task import TrainingTask


def check_compiles(model: nn.Module) -> None:
    """Refuses models that the compiler is known to fail at."""
    has_data_dependent_shapes = any(getattr(part, "data_dependent_shapes", False) for part in model.modules())
    if torch.__version__ < "2.13" and has_data_dependent_shapes:
        raise ValueError(
            f"training.compile cannot be used for a model with experts: PyTorch {torch.__version__} fails at their "
            "data-dependent shapes, 2.13 does not. Leave it out; on a GPU, steps are replayed as CUDA graphs instead"
        )


def compile_loss(task: TrainingTask) -> Callable[[Any, float], Loss]:
    """The loss with what takes its time compiled: layers that say so one by one, because equal ones share one graph,
    and a model of many layers is compiled in the time of a few. A model without such layers is compiled as a whole."""
    layers = [part for part in task.model.modules() if getattr(part, "compiles_alone", False)]
    if not layers:
        return torch.compile(task.loss, dynamic=True)
    # all layers have the same code: graphs for the first and the others of each kind, of one shape and of any
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * len(layers))
    for layer in layers:
        layer.compile()
    return task.loss
