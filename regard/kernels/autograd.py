"""Backward passes written by hand."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """PyTorch declares backward(ctx, *grad_outputs) and tells nothing of `apply`. Ours name the gradients that
        they take, as its documentation does, so a checker must not compare the signatures."""

        backward: Any
        apply: Any

else:
    Function = torch.autograd.Function


def refuse_second_derivative() -> None:
    """Called by a backward pass written by hand: its own derivative would be wrong, silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "this attention has no second derivative: leave create_graph out, or use softmax or additive"
        )
