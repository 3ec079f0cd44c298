"""How many cores share the operators of a model."""

import torch
from torch import nn

# Parameters of a model that decodes on one core. On two cores, with 12 or 16 clients, models of 6 and 7 million answer
# 1.4 times as many requests per second on one, and one of 16 million 1.3 times as many on both.
SMALL = 10_000_000


def decoding_threads(model: nn.Module) -> int:
    """The threads that decode with a model on a CPU: as many as the process has, but one for a small model. In a step
    an operator of a small model takes less time than dividing it, and the threads that answer requests need a core too.
    """
    return 1 if sum(part.numel() for part in model.parameters()) < SMALL else torch.get_num_threads()
