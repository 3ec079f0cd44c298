"""How many cores share the operators of a model."""

import torch
from torch import nn

# Parameters of a model that decodes on one of two cores, and leaves the other to the threads that answer requests. With
# 12 or 16 clients on two cores, models of 6 and 7 million parameters answer 1.4 to 1.5 times as many requests per
# second so, and one of 16 million 0.8 times as many. With more cores nothing was measured.
SMALL = 10_000_000


def decoding_threads(model: nn.Module) -> int:
    """The threads that decode with a model on a CPU: as many as the process has, but of two one for a small model."""
    available = torch.get_num_threads()
    is_small = sum(part.numel() for part in model.parameters()) < SMALL
    return 1 if available == 2 and is_small else available
