"""AdamW for gradients that stay where they are."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Listed(NamedTuple):
    """The tensors of a group of parameters that have gradients."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class AdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW, which computes the same numbers, with less work of the host.

    PyTorch lists parameters, gradients and states anew at each step, and a GPU waits for that: 0.2 ms for 221
    parameters on one core. Here they are listed once. Gradients must keep their addresses, as those of CUDA graphs do.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any):
        super().__init__(groups, **options, fused=True)
        self.listed: list[Listed] = []  # group by group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._is_listed():
            # it makes the states, too
            super().step()
            self.listed = [self._list_group(group) for group in self.param_groups]
            return
        for group, listed in zip(self.param_groups, self.listed, strict=True):
            # PyTorch has no public names for one kernel over many tensors
            torch._foreach_add_(listed.steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                listed.parameters,
                listed.gradients,
                listed.means,
                listed.squares,
                [],
                listed.steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _is_listed(self) -> bool:
        """Whether states were made, and none was loaded since."""
        return bool(self.listed) and all(
            listed.parameters[0].grad is listed.gradients[0]
            and self.state[listed.parameters[0]].get("step") is listed.steps[0]
            for listed in self.listed
        )

    def _list_group(self, group: dict[str, Any]) -> Listed:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        moments = ([state[entry] for state in states] for entry in ("exp_avg", "exp_avg_sq", "step"))
        return Listed(parameters, [parameter.grad for parameter in parameters], *moments)
