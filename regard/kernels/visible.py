"""Which keys a query sees, for kernels over whole sequences and caches."""

from typing import NamedTuple

from torch import Tensor


class Visible(NamedTuple):
    """Query t sees the keys j < limit[b], and where it is causal j <= first[b] + t."""

    first: Tensor  # [B]
    limit: Tensor  # [B]
    causal: bool
