"""What is counted of a layer, which no clock can disturb: operations, elements written, bytes kept, tokens seen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.tally import Tally, tensors_of


class Observed(Tally):
    """Counts, and remembers which kernel of PyTorch's scaled_dot_product_attention ran."""

    def __init__(self):
        super().__init__()
        self.backends: set[str] = set()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if "scaled_dot_product" in name and not name.endswith("backward"):
            self.backends.add(name.strip("_").removeprefix("scaled_dot_product_").removesuffix("_for_cpu"))
        return super().__torch_dispatch__(function, kinds, args, kwargs)


def count_training(forward: Callable[[], tuple[Tensor, Tensor | None]], x: Tensor, at: int) -> dict[str, Any]:
    """Counts of one training step: `forward` gives the output [B, T, E] and the auxiliary loss. The gradient enters at
    one token, `at`: the tokens of x [B, T, E], or of values [B, H, T, D], that it reaches are those which it sees."""
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        # held, so that no other tensor takes its address
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with Observed() as tally:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            y, auxiliary_loss = forward()
        flops_forward = tally.flops
        grad = torch.zeros_like(y)
        grad[:, at] = torch.randn_like(grad[:, at])
        total = (y * grad).sum()
        (total if auxiliary_loss is None else total + 0 * auxiliary_loss).backward()
    if x.grad is None:
        raise RuntimeError("no gradient reached the input")
    reached = (x.grad[0] != 0).any(-1)  # [T] or [H, T]
    seen = int((reached if reached.dim() == 1 else reached.any(0)).sum())
    return {
        "flops": tally.flops,
        "flops_forward": flops_forward,
        "written": tally.written,
        "saved_bytes": sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
        "sees": seen,
        "backend": "+".join(sorted(tally.backends)),
    }


def state_bytes(state: Any) -> int:
    """The bytes of the tensors in a decoding state, each counted once."""
    held = {tensor.untyped_storage().data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors_of(state)}
    return sum(held.values())


def count_parameters(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(part.numel() for part in module.parameters())
