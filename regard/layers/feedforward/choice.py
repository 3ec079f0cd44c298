"""Experts that choose their tokens."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Order
from regard.core.state import Out
from regard.kernels import router
from regard.kernels.grouped import chosen
from regard.kernels.router import product_dtype
from regard.layers.feedforward.base import FeedForward, FeedForwardFacts, Sizes, plain_linear
from regard.layers.feedforward.experts import (
    ExpertActivation,
    Experts,
    Gated,
    Inner,
    Networks,
    plain_softmax,
    room,
)


class Choice(FeedForward):
    """Zhou et al. 2022: each expert takes the c = ceil(capacity n / experts) tokens of a row of n that like it best,

        y_t = sum_(e that took t) p_te FFN_e(x_t),    p = softmax_e(W x).

    All experts get the same number of tokens by construction, so that no loss has to see to it; a token gets as many
    experts as want it, `capacity` on average, perhaps none. The paper lets the tokens of a whole batch compete; here
    those of a row do, so that a sentence is treated the same in any company. Which tokens are taken depends on later
    ones: not for a decoder. Time capacity N E F, memory capacity N F."""

    facts = FeedForwardFacts(
        name="choice",
        paper="Zhou et al. 2022, Mixture-of-Experts with Expert Choice Routing",
        link="arXiv 2202.09368",
        family="experts",
        formula="y_t = sum_(e: t in top c of p_e) p_te FFN_e(x_t),  p = softmax_e(W x)",
        time=Order("N", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            (
                "causal",
                "an expert chooses among all tokens, later ones too: name another in model.decoder_feedforward",
            ),
        ),
        training="row",
        evaluation="row",
    )
    examples = ("choice(experts=4, capacity=1.0)", "choice(experts=3, capacity=2.0, activation='gelu', gated=True)")

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Experts = 8,
        inner: Inner = None,
        capacity: Annotated[float, "average number of experts per token"] = 2.0,
        activation: ExpertActivation = "relu",
        gated: Gated = False,
    ):
        super().__init__(sizes if inner is None else replace(sizes, inner=inner))
        sizes = self.sizes
        if experts < 1 or not 0 < capacity <= experts:
            raise ValueError(
                f"feedforward 'choice' needs a capacity above 0, at most the number of experts; got {capacity} and "
                f"{experts} experts"
            )
        self.experts, self.capacity = experts, capacity
        self.router = nn.Parameter(torch.empty(experts, sizes.width).normal_(std=0.02))
        self.networks = Networks(sizes, experts, activation, gated)

    def forward_packed(self, x: Tensor, rows: Rows) -> Out:
        (B, T, _), real = x.shape, rows.real()
        if B * T == 0:
            return Out(x)
        kind, dtype = x.device.type, product_dtype(x)
        logits, tokens = router.logits(x.flatten(0, 1), self.router)
        shares = torch.softmax(logits, 1)  # [B T, experts]
        wishes = shares.detach().view(B, T, self.experts)
        wishes = wishes if real is None else torch.where(real[..., None], wishes, -1.0)
        at = wishes.mT.topk(room(self.capacity * T / self.experts), -1).indices.transpose(0, 1)  # [e, B, c]
        limit = torch.ceil(rows.count.double() * (self.capacity / self.experts) - 1e-9)
        steps = torch.arange(at.shape[2], device=x.device)
        took = (steps < limit[:, None]).expand(at.shape).flatten(1)  # [e, B c]
        token = (at + T * torch.arange(B, device=x.device)[:, None]).flatten(1)
        gate = shares.T.gather(1, token)
        with torch.autocast(kind, enabled=False):
            dealt = chosen(token, took, B * T)
            y = self.networks(dealt.spread(tokens, dtype), dealt)
            out = Out(dealt.collect(y, gate.flatten()).view(x.shape))
        if not self.training:
            return out
        chosen_tokens = x.new_zeros(B * T, dtype=torch.long).index_add_(0, token.flatten(), took.flatten().long()) > 0
        return out._replace(statistics={"dropped": 1 - chosen_tokens.sum() / rows.count.sum().clamp(min=1)})

    def active(self) -> int:
        return super().active() - round((self.experts - self.capacity) * self.networks.each())

    def reference(self, x: Tensor) -> Out:
        shares = [plain_softmax(plain_linear(self.router, token)) for token in x]
        y = [torch.zeros_like(token) for token in x]
        for expert in range(self.experts):
            best = sorted(range(len(x)), key=lambda n, expert=expert: -shares[n][expert].item())
            for n in best[: room(self.capacity * len(x) / self.experts)]:
                y[n] = y[n] + shares[n][expert] * self.networks.plain(expert, x[n])
        return Out(torch.stack(y))
