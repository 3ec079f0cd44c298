"""The sparsely-gated mixture of experts: the k best of a noisy router."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.parallel import batch_sum
from regard.core.reference import add_up
from regard.core.shape import Order
from regard.kernels import moves
from regard.layers.feedforward.base import FeedForwardFacts, Sizes, plain_linear
from regard.layers.feedforward.experts import Experts, Inner, Route, Routed, best, plain_softmax

FLOOR = 1e-2  # of the noise, so that no expert is out of reach


class MoE(Routed):
    """Shazeer et al. 2017: y = sum_(e in top k of h) softmax_(top k)(h)_e FFN_e(x) with h = Wg x, and while training
    h = Wg x + n * (softplus(Wn x) + 0.01), n ~ N(0, 1).

    Two losses keep the experts alike, importance * CV^2(sum_x gates) and load * CV^2(sum_x P(e is chosen)), where CV is
    standard deviation by mean and P the probability that another draw of its own noise would choose e. There is no
    capacity: no token is dropped. Both matrices of the router start at zero. Time k N E F, memory k N F."""

    facts = FeedForwardFacts(
        name="moe",
        paper="Shazeer et al. 2017, Outrageously Large Neural Networks",
        link="arXiv 1701.06538",
        family="experts",
        formula="y = sum_(e in top k of h) softmax(h)_e FFN_e(x),  h = Wg x + n softplus(Wn x)",
        time=Order("N", 1),
        memory=Order("N", 1),
        random=True,
        auxiliary_loss=True,
    )
    examples = ("moe(experts=5, choices=2, noise=False)", "moe(experts=4, choices=3)", "moe(experts=3, choices=3)")

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Experts = 8,
        inner: Inner = None,
        choices: Annotated[int, "number of experts per token"] = 4,
        importance: Annotated[float, "weight of the loss on the sums of the gates"] = 0.1,
        load: Annotated[float, "weight of the load loss; unused without noise or where every expert is chosen"] = 0.1,
        noise: Annotated[bool, "noise on the router's logits, in training"] = True,
    ):
        super().__init__(sizes, experts=experts, inner=inner, choices=choices)
        self.importance, self.load = importance, load if noise and choices < experts else 0.0
        nn.init.zeros_(self.router)
        self.spread = nn.Parameter(torch.zeros_like(self.router)) if noise else None
        self.facts = replace(self.facts, random=noise, auxiliary_loss=self.importance > 0 or self.load > 0)

    def routers(self) -> Tensor:
        return torch.cat([self.router, self.spread]) if self.training and self.spread is not None else self.router

    def route(self, logits: Tensor, real: Tensor | None) -> Route:
        k, losses, chosen = self.choices, [], None
        if not self.training or self.spread is None:
            top, expert = best(logits, k)
        elif self.load:
            noise = torch.randn_like(logits[:, : self.experts])
            # with more choices the kernels take a compiler minutes
            work = _NoisyTop.apply if k <= 4 and moves.kernels(logits) else noisy_top
            top, expert, chosen = work(logits, noise, real, k + 1)
        else:
            clean, spread = logits.chunk(2, 1)
            top, expert = best(clean + torch.randn_like(clean) * (nn.functional.softplus(spread) + FLOOR), k)
        expert, gate = expert[:, :k], torch.softmax(top[:, :k], 1)
        if self.training:
            counted = gate if real is None else torch.where(real[:, None], gate, 0)
            gates = gate.new_zeros(self.experts).index_add(0, expert.flatten(), counted.flatten())
            losses.append(("importance", self.importance, variation(batch_sum(gates))))
        if chosen is not None:
            losses.append(("balance", self.load, variation(batch_sum(chosen))))
        return Route(expert, gate, losses=tuple(losses))

    def plain_route(self, x: Tensor) -> tuple[list[list[tuple[int, Tensor]]], Tensor]:
        choices, importance = [], [x.new_zeros(()) for _ in range(self.experts)]
        for token in x:
            h = plain_linear(self.router, token)
            best = sorted(range(self.experts), key=lambda expert, h=h: -h[expert].item())[: self.choices]
            gates = plain_softmax(h[best])
            choices.append(list(zip(best, gates, strict=True)))
            for expert, gate in choices[-1]:
                importance[expert] = importance[expert] + gate
        mean = add_up(importance) / self.experts
        variance = add_up((total - mean) ** 2 for total in importance) / self.experts
        return choices, self.importance * variance / mean**2


def variation(sums: Tensor) -> Tensor:
    """CV^2: the variance by the square of the mean."""
    return sums.var(correction=0) / sums.mean().square().clamp(min=1e-10)


def noisy_top(logits: Tensor, noise: Tensor, real: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [N, 2 experts], clean ones and those of the width of the noise, the k best with noise, [N, k]; where
    they are; and the sum over the real tokens of how likely each expert is among the best k - 1, [experts]."""
    clean, spread = logits.chunk(2, 1)
    width = nn.functional.softplus(spread) + FLOOR
    noisy = torch.addcmul(clean, noise, width)
    top, expert = best(noisy, k)
    # what an expert must exceed: the (k - 1)-th largest of the others
    bar = torch.where(noisy > top[:, k - 1 :], top[:, k - 1 :], top[:, k - 2 : k - 1])
    chosen = torch.special.ndtr((clean - bar) / width)
    return top, expert, (chosen if real is None else torch.where(real[:, None], chosen, 0)).sum(0)


class _NoisyTop(torch.autograd.Function):
    """The same by two kernels, in place of some forty passes over memory."""

    @staticmethod
    def forward(ctx, logits, noise, real, k):
        logits, noise, kernel = logits.contiguous(), noise.contiguous(), moves.kernels(logits)
        assert kernel is not None, "chosen only where there are kernels"
        top, expert, chosen = kernel.noisy_top(logits, noise, real, k, FLOOR)
        ctx.kernel = kernel
        ctx.save_for_backward(logits, noise, real, top, expert)
        ctx.mark_non_differentiable(expert)
        return top, expert, chosen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        of_top, _, of_chosen = grads
        logits, noise, real, top, expert = ctx.saved_tensors
        of_logits = ctx.kernel.of_noisy_logits(logits, noise, real, top, expert, of_top, of_chosen, FLOOR)
        return of_logits, None, None, None
