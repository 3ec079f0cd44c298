"""Muon: momentum whose update of a weight matrix is made orthogonal."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

STEPS = 5
# Of the odd polynomial a x + b x^3 + c x^5, which brings singular values from (0, 1] near 1 in five steps
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
ROOT_MEAN_SQUARE = 0.2  # of an update of AdamW, by Liu et al.


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024, Muon: for a matrix W [m, n] with gradient G,

        M <- b M + (1 - b) G,    W <- W - r (0.2 sqrt(max(m, n)) O(b M + (1 - b) G) + d W),

    where O replaces all singular values by about 1, with five steps of Newton and Schulz: X <- a X + (b A + c A^2) X,
    A = X X^T. The factor 0.2 sqrt(max(m, n)) gives an update the size of one of AdamW (Liu et al. 2025, arXiv
    2502.16982), so that learning rate r and weight decay d are those one would give to AdamW.

    Groups with `orthogonal` False are updated by AdamW. Matrices of one shape go through O together.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = True,
    ):
        defaults = {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum}
        super().__init__(groups, defaults | {"betas": betas, "eps": eps, "fused": fused})
        for group in self.param_groups:
            flat = [tuple(one.shape) for one in group["params"] if one.ndim != 2 and group["orthogonal"]]
            if flat:
                raise ValueError(f"an orthogonal update is one of a matrix, got a parameter of shape {flat[0]}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            (self._step_matrices if group["orthogonal"] else self._step_others)(group, parameters)

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        same: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            same.setdefault(parameter.shape, []).append(parameter)
        for shape, matrices in same.items():
            gradients: list[Any] = [matrix.grad for matrix in matrices]
            kept = [self._state(matrix, "momentum")["momentum"] for matrix in matrices]
            # PyTorch has no public names for one kernel over many tensors
            torch._foreach_lerp_(kept, gradients, 1 - group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
            ahead = torch._foreach_lerp(gradients, kept, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
            updates = orthogonalize(torch.stack(ahead))
            size = group["lr"] * ROOT_MEAN_SQUARE * max(shape) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(matrices, list(updates.unbind()), alpha=-size)  # pyright: ignore[reportPrivateImportUsage]

    def _step_others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "step" not in state:
                on = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=on)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # pyright: ignore[reportArgumentType]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state(self, parameter: Tensor, *entries: str) -> dict[str, Tensor]:
        state = self.state[parameter]
        for entry in entries:
            if entry not in state:
                state[entry] = torch.zeros_like(parameter)
        return state


def orthogonalize(matrices: Tensor) -> Tensor:
    """[N, m, n] -> [N, m, n] with singular values between about 0.7 and 1.2. On a GPU in bfloat16, whose errors are
    small beside that."""
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    # the largest singular value is at most the norm
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)
