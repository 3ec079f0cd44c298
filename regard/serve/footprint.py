"""How much memory the decoding states of a model take, measured on the model itself."""

from typing import Any, NamedTuple

import torch

from regard.core.state import state_bytes

LONGEST = 256  # tokens that are read to measure: beyond, the bytes are extrapolated


class Footprint(NamedTuple):
    """Bytes of the state of one row as a line through what was measured at two lengths. Whatever a mechanism keeps is
    in it: a cache grows with the length, a window or running sums do not."""

    short: int  # tokens
    bytes_short: int
    bytes_per_token: float

    @classmethod
    @torch.inference_mode()
    def measure(cls, model: Any, context: int, token: int, device: torch.device) -> "Footprint":
        """Reads `token` as often as a context has tokens, and half as often."""
        long = max(2, min(context, LONGEST))
        sizes = []
        for length in (long // 2, long):
            ids = torch.full((1, length), token, device=device)
            sizes.append(state_bytes(model.extend(ids, model.start(1, capacity=length))[1]))
        slope = max(0.0, (sizes[1] - sizes[0]) / (long - long // 2))
        return cls(long // 2, sizes[0], slope)

    def bytes(self, length: int) -> int:
        """Of a row that reads `length` tokens; an upper bound for one that is shorter than a window."""
        return max(0, round(self.bytes_short + self.bytes_per_token * (length - self.short)))
