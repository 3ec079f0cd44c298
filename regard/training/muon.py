"""Muon: momentum whose update of a weight matrix is made orthogonal."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from regard.core.capture import without_collection

STEPS = 5
WARMUP = 2  # steps before a CUDA graph is captured: states are made, libraries have their workspaces
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

    Groups with `orthogonal` False are updated by AdamW. Matrices of one shape go through O together. `captured`: on a
    GPU, the update of the matrices is replayed as a CUDA graph from the third step on, because launching its kernels
    takes longer than running them; gradients must then keep their addresses.
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
        captured: bool = False,
    ):
        defaults = {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum}
        super().__init__(groups, defaults | {"betas": betas, "eps": eps, "fused": fused})
        for group in self.param_groups:
            flat = [tuple(one.shape) for one in group["params"] if one.ndim != 2 and group["orthogonal"]]
            if flat:
                raise ValueError(f"an orthogonal update is one of a matrix, got a parameter of shape {flat[0]}")

        self.captured = captured
        self.steps = 0
        self.rates: list[Tensor] = []  # of each group of matrices, where a graph reads it
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = [group for group in self.param_groups if group["orthogonal"]]
        self.rates = self.rates or [torch.zeros((), device=group["params"][0].device) for group in groups]
        for rate, group in zip(self.rates, groups, strict=True):
            rate.fill_(group["lr"])
        self.steps += 1
        if self.captured and self.graph is None and self.steps > WARMUP:
            self.graph = torch.cuda.CUDAGraph()
            # nothing runs while it is captured
            with without_collection(), torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self._step_matrices(groups)
        if self.graph is None:
            self._step_matrices(groups)
        else:
            self.graph.replay()
        for group in self.param_groups:
            if not group["orthogonal"]:
                self._step_others(group, [parameter for parameter in group["params"] if parameter.grad is not None])

    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        for rate, group in zip(self.rates, groups, strict=True):
            same: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    same.setdefault(parameter.shape, []).append(parameter)
            for matrices in same.values():
                self._step_alike(group, rate, matrices)

    def _step_alike(self, group: dict[str, Any], rate: Tensor, matrices: list[Tensor]) -> None:
        """The update of matrices of one shape."""
        gradients: list[Any] = [matrix.grad for matrix in matrices]
        kept = [self._state(matrix, "momentum")["momentum"] for matrix in matrices]
        # PyTorch has no public names for one kernel over many tensors
        torch._foreach_lerp_(kept, gradients, 1 - group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        ahead = torch._foreach_lerp(gradients, kept, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        size = ROOT_MEAN_SQUARE * max(matrices[0].shape) ** 0.5
        updates = orthogonalize(torch.stack(ahead)).mul_(-size * rate)
        torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(matrices, list(updates.unbind()))  # pyright: ignore[reportPrivateImportUsage]

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
