"""A feed-forward layer of which a controller allows one unit of each block."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Order
from regard.core.state import Out
from regard.kernels.router import wide_linear
from regard.layers.feedforward.base import FeedForward, FeedForwardFacts, Sizes, plain_linear
from regard.layers.feedforward.experts import plain_softmax


class Scaling(FeedForward):
    """Jaszczur et al. 2021 (Scaling Transformers): y = W2 ReLU(m * W1 x) + b2, where m has a single 1 in each block of
    units, at the largest of the controller's logits c = C2 C1 x + b, C1 of a small `rank`.

    While training, all units are computed. With probability `hard`, for the whole batch, m is that of c with Gumbel
    noise times `temperature`, its gradient that of softmax(c) over the block (straight through); otherwise m is
    softmax(c) itself. Outside training m is the largest, and a few tokens, as in decoding, read only the chosen rows of
    W1 and W2: a part 1 / block of them. The authors' option to multiply the units by softmax(c) is not here. Time N E
    F, for few tokens N E (F / block + rank); memory N F."""

    facts = FeedForwardFacts(
        name="scaling",
        paper="Jaszczur et al. 2021, Sparse is Enough in Scaling Transformers",
        link="arXiv 2111.12763",
        family="sparse",
        formula="y = W2 ReLU(m * W1 x) + b2,  m = one unit of each block, the largest of C2 C1 x + b",
        time=Order("N", 1),
        memory=Order("N", 1),
        random=True,
    )
    examples = (
        "scaling(block=4, rank=3, temperature=0.0, hard=1.0)",
        "scaling(block=8, rank=3, hard=0.0)",
        "scaling(block=16, rank=3)",
    )
    choosing = ("down", "up")

    def __init__(
        self,
        sizes: Sizes,
        *,
        inner: Annotated[int | None, "number of units; None: the feed-forward width of the model"] = None,
        block: Annotated[int, "block size: one unit of each block is used"] = 32,
        rank: Annotated[int, "rank of the controller"] = 64,
        temperature: Annotated[float, "temperature of the Gumbel noise in training"] = 0.1,
        hard: Annotated[
            float, "share of the batches trained with one unit per block, the others with soft choices"
        ] = 0.3,
    ):
        super().__init__(sizes if inner is None else replace(sizes, inner=inner))
        sizes = self.sizes
        if block < 1 or sizes.inner % block:
            raise ValueError(f"block of 'scaling' must divide the width inside, {sizes.inner}; got {block}")
        if rank < 1 or not 0 <= hard <= 1 or temperature < 0:
            raise ValueError(
                f"feedforward 'scaling' needs a rank of at least 1, hard from 0 to 1, a temperature of at least 0; "
                f"got {rank}, {hard} and {temperature}"
            )
        self.block, self.temperature, self.hard = block, temperature, hard
        self.down = nn.Linear(sizes.width, rank, bias=False)
        self.up = nn.Linear(rank, sizes.inner)
        self.inner = nn.Linear(sizes.width, sizes.inner, bias=False)
        # row by row, since rows are what few tokens read
        self.outer = nn.Parameter(torch.empty(sizes.inner, sizes.width))
        self.bias = nn.Parameter(torch.zeros(sizes.width))
        for weight in (self.down.weight, self.up.weight, self.inner.weight, self.outer):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.up.bias)
        self.facts = replace(self.facts, random=0 < hard < 1 or (hard > 0 and temperature > 0))

    def forward_packed(self, x: Tensor, rows: Rows) -> Out:
        tokens = x.flatten(0, 1)
        logits = wide_linear(wide_linear(tokens, self.down.weight), self.up.weight)
        logits = (logits + self.up.bias.to(logits.dtype)).unflatten(1, (-1, self.block))  # [N, F / block, block]
        if not self.training and 4 * len(tokens) <= self.block:
            return Out(self._few(tokens, logits.argmax(2)).view(x.shape))
        h = torch.relu(self.inner(tokens) * self._mask(logits).flatten(1).to(tokens.dtype))
        outer, bias = self.outer.to(h.dtype), self.bias.to(h.dtype)
        return Out(torch.addmm(bias, h, outer).to(x.dtype).view(x.shape))

    def _mask(self, logits: Tensor) -> Tensor:
        def largest(logits: Tensor) -> Tensor:
            return torch.zeros_like(logits).scatter(2, logits.argmax(2, keepdim=True), 1.0)

        if not self.training:
            return largest(logits)
        soft = torch.softmax(logits, 2)
        noisy = logits
        if self.temperature:
            drawn = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            noisy = logits - self.temperature * torch.log(-torch.log(drawn))
        through = largest(noisy) + soft - soft.detach()
        return torch.where(torch.rand((), device=logits.device) < self.hard, through, soft)

    def _few(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Tokens [N, E] with the unit of each block that is allowed, [N, F / block]."""
        unit = chosen + self.block * torch.arange(chosen.shape[1], device=x.device)
        h = torch.relu(torch.einsum("ne,nfe->nf", x, self.inner.weight.to(x.dtype)[unit]))
        return torch.einsum("nf,nfe->ne", h, self.outer.to(x.dtype)[unit]) + self.bias.to(x.dtype)

    def active(self) -> int:
        idle = self.inner.weight.numel() + self.outer.numel()
        return super().active() - idle + idle // self.block

    def reference(self, x: Tensor) -> Out:
        y = []
        for token in x:
            logits = plain_linear(self.up.weight, plain_linear(self.down.weight, token)) + self.up.bias
            h = plain_linear(self.inner.weight, token)
            total = self.bias
            for first in range(0, self.sizes.inner, self.block):
                block = logits[first : first + self.block]
                soft, best = plain_softmax(block), int(block.argmax())
                for unit in range(self.block):
                    allowed = float(unit == best)
                    if self.training:
                        through = allowed + soft[unit] - soft[unit].detach()
                        allowed = through if self.hard == 1 else soft[unit]
                    total = total + torch.relu(h[first + unit] * allowed) * self.outer[first + unit]
            y.append(total)
        return Out(torch.stack(y))
