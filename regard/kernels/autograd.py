"""Custom backward passes."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """PyTorch declares backward(ctx, *grad_outputs) and does not type `apply`. Ours name the gradients that
        they take, as its documentation does, so a checker must not compare the signatures."""

        backward: Any
        apply: Any

else:
    Function = torch.autograd.Function


def refuse_second_derivative() -> None:
    """Called by a custom backward pass, whose own derivative would be silently wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "this attention has no second derivative: call backward without create_graph, or use softmax or additive"
        )
