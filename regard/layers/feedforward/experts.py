"""What the layers of experts share: many feed-forward networks, of which each token goes to a few.

A layer writes `route`, which says where tokens go; dealing them out, the products and the way back are here. All
experts run at once, as grouped products over tokens sorted by expert (kernels/grouped.py): the cost is that of the
tokens that are sent, whatever the number of experts.

**Capacity.** While it trains, a layer may give each expert no more than ceil(capacity N / experts) of the N real tokens
of a call, first come, first served: the first choices of all tokens in order, then the second ones. A token that comes
too late is dropped, and gets zeros from that expert. In evaluation and in decoding no token is dropped. With `group` =
S the real tokens of a call are dealt out S at a time, the last ones perhaps fewer, as devices do that each have some of
them: each expert takes ceil(capacity n / experts) of the n tokens of a group, and the balance loss is that of the
groups, by their tokens.

**Losses** come weighted by options of the layer; `statistics` has them as they are, with the share of the tokens that
each expert was chosen for ("load") and of those dropped ("dropped").
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, NamedTuple, final

import torch
from torch import Tensor, nn

from regard.core.parallel import batch_offset, batch_sum, is_spread
from regard.core.reference import add_up
from regard.core.rows import Rows
from regard.core.state import Out
from regard.kernels import moves, router
from regard.kernels.grouped import Deal, deal
from regard.kernels.router import product_dtype
from regard.layers.feedforward.base import Activation, FeedForward, Sizes, activate, plain_activation, plain_linear

# options that layers share
Experts = Annotated[int, "number of experts"]
Inner = Annotated[int | None, "feed-forward width of an expert; None: that of the model"]
Capacity = Annotated[
    float | None, "tokens that an expert takes in training, as a multiple of its even share; None: no limit"
]
Balance = Annotated[float, "weight of the load-balancing loss"]
ExpertActivation = Annotated[Activation, "activation inside the experts"]
Gated = Annotated[bool, "gated experts, as in dense"]
Group = Annotated[int | None, "number of tokens routed together in training; None: the whole batch"]


class Route(NamedTuple):
    """Where the N tokens of a call go, first choices first."""

    expert: Tensor  # [N, k]
    gate: Tensor  # [N, k] what the answer of the expert is multiplied by
    sent: Tensor | None = None  # [N, k] False: not sent there after all
    losses: tuple[tuple[str, float, Tensor], ...] = ()  # name, weight, value


class Networks(nn.Module):
    """The experts: W2 a(W1 x), or gated W2 (a(Wg x) * W1 x), without biases; `scaled`: with a factor for each unit."""

    # set from outside where each process has some of the experts: a function that is called in place of `compute`
    exchange: "Callable[[Networks, Tensor, Deal], Tensor] | None" = None

    def __init__(self, sizes: Sizes, experts: int, activation: Activation, gated: bool, scaled: bool = False):
        super().__init__()
        E, F_ = sizes.width, sizes.inner
        self.activation: Activation = activation
        self.inner = nn.Parameter(torch.empty(experts, E, F_))
        self.gate = nn.Parameter(torch.empty(experts, E, F_)) if gated else None
        self.outer = nn.Parameter(torch.empty(experts, F_, E))
        self.scale = nn.Parameter(torch.ones(experts, F_)) if scaled else None
        bound = math.sqrt(6 / (E + F_))
        for weight in (self.inner, self.gate, self.outer):
            if weight is not None:
                nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, dealt: Deal) -> Tensor:
        """Slots in, slots out."""
        if self.exchange is not None:
            return self.exchange(self, x, dealt)
        return self.compute(x, dealt, dict(self.named_parameters()))

    def compute(self, x: Tensor, dealt: Deal, weights: Mapping[str, Tensor]) -> Tensor:
        """The formula, with the weights of the experts that the slots were dealt to."""

        def product(x: Tensor, name: str) -> Tensor:
            return dealt.product(x, narrow(weights[name]))

        def narrow(weight: Tensor) -> Tensor:
            return weight if weight.dtype == x.dtype else moves.Narrow.apply(weight, x.dtype)

        h = product(x, "inner")
        h = activate(self.activation, product(x, "gate")) * h if "gate" in weights else activate(self.activation, h)
        h = h * dealt.each(narrow(weights["scale"])) if "scale" in weights else h
        return product(h, "outer")

    def plain(self, expert: int, x: Tensor) -> Tensor:
        """One expert on one token, in loops."""
        h = plain_linear(self.inner[expert].T, x)
        if self.gate is None:
            h = plain_activation(self.activation, h)
        else:
            h = plain_activation(self.activation, plain_linear(self.gate[expert].T, x)) * h
        return plain_linear(self.outer[expert].T, h if self.scale is None else h * self.scale[expert])

    def each(self) -> int:
        """The number of parameters of one expert."""
        return sum(parameter.numel() for parameter in self.parameters()) // len(self.inner)


class Routed(FeedForward):
    """Each token goes to the k = `choices` experts that a router names for it."""

    data_dependent_shapes = True  # how many tokens an expert gets depends on the batch, which some compilers fail at

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: int,
        choices: int,
        inner: int | None = None,
        capacity: float | None = None,
        activation: Activation = "relu",
        gated: bool = False,
        scaled: bool = False,
        group: int | None = None,
    ):
        super().__init__(sizes if inner is None else replace(sizes, inner=inner))
        if group is not None and group < 1:
            raise ValueError(f"group of {self.facts.name!r} must be at least 1 token, or None for all; got {group}")
        if choices < 1:
            raise ValueError(f"feedforward {self.facts.name!r} must send a token to at least one expert, got {choices}")
        if experts < choices:
            raise ValueError(
                f"feedforward {self.facts.name!r} sends a token to {choices} experts: give at least as many experts, "
                f"got {experts}"
            )
        if capacity is not None and not capacity > 0:
            raise ValueError(f"capacity of {self.facts.name!r} must be above 0, or None for no limit; got {capacity}")
        self.experts, self.choices, self.capacity, self.group = experts, choices, capacity, group
        self.jitter = 0.0  # noise on what the router reads, in training
        # small, so that at first all experts are about as likely
        self.router = nn.Parameter(torch.empty(experts, sizes.width).normal_(std=0.02))
        self.networks = Networks(self.sizes, experts, activation, gated, scaled)

    @abstractmethod
    def route(self, logits: Tensor, real: Tensor | None) -> Route:
        """The experts of tokens, from the router's logits [N, experts], and the losses in training. `real` [N] says
        which tokens are real (None: all)."""

    @abstractmethod
    def plain_route(self, x: Tensor) -> tuple[list[list[tuple[int, Tensor]]], Tensor]:
        """For each real token its experts with their gates, and the weighted loss: the formula in loops."""

    @final
    def forward_packed(self, x: Tensor, rows: Rows) -> Out:
        tokens, real = x.flatten(0, 1), rows.real()
        if len(tokens) == 0:
            return Out(x)
        real = None if real is None else real.flatten()
        logits, tokens = self.logits(tokens)
        route = self.route(logits, real)
        sent = route.sent if real is None else real[:, None] if route.sent is None else route.sent & real[:, None]
        wished = route.expert if sent is None else torch.where(sent, route.expert, self.experts)
        limit, most = self._limits(tokens, real)
        group = wished
        if limit is not None and self.capacity is not None and (self.group is not None or is_spread()):
            group, most = self._drop_in_groups(wished, real, self.capacity / self.experts)
            limit = None
        kind, dtype = x.device.type, product_dtype(x)
        # all first choices, then all second ones
        dealt = deal(group.T, self.experts, dtype, (self.sizes.width, self.sizes.inner), most, limit)
        with torch.autocast(kind, enabled=False):
            y = self.networks(dealt.spread(tokens, dtype), dealt)
            y = dealt.collect(y, route.gate.T.flatten().index_select(0, dealt.pair)).view(x.shape)
        if not self.training:
            return Out(y)
        losses = [weight * value for _, weight, value in route.losses]
        loss = functools.reduce(torch.add, losses) if losses else None
        statistics = {name: value.detach() for name, _, value in route.losses}
        return Out(y, auxiliary_loss=loss, statistics=statistics | load(wished.flatten(), self.experts, dealt.taken))

    def _limits(self, tokens: Tensor, real: Tensor | None) -> tuple[Tensor | None, int | None]:
        """How many tokens an expert takes, and how many that can be, as far as the host knows."""
        if not self.training or self.capacity is None:
            return None, None
        share = self.capacity / self.experts
        most = min(len(tokens), room(len(tokens) * share))
        if real is None:
            # filled on the device, not copied to it: a CUDA graph may not copy from the host
            return torch.full((), most, device=tokens.device), most
        return torch.ceil(real.sum().double() * share - 1e-9).long(), most

    def _drop_in_groups(self, expert: Tensor, real: Tensor | None, share: float) -> tuple[Tensor, int]:
        """Experts [N, k] without those that have no room for a token in its group of `group` tokens, or in the whole
        batch, which other processes may share; an expert takes `share` of a group. And the most tokens of this call
        that an expert takes of all groups."""
        N, choices = expert.shape
        index, sizes = local_groups(N, self.group, real, expert.device)
        places = len(sizes) * self.experts
        key = torch.where(expert < self.experts, index[:, None] * self.experts + expert, places)
        # all first choices, then all second ones
        key = key.T  # [k, N]
        count = torch.zeros(choices, places + 1, dtype=torch.long, device=key.device)
        count = count.scatter_add_(1, key, torch.ones_like(key))
        before, total = batch_offset(count)
        # what comes before the first of a choice: earlier choices of all tokens, the same one of tokens elsewhere
        begin = total.cumsum(0) - total + before
        order = torch.argsort(key, dim=1, stable=True)
        steps = torch.arange(N, device=key.device).expand_as(key)
        own = steps - (count.cumsum(1) - count).gather(1, key.gather(1, order))
        rank = torch.empty_like(key).scatter_(1, order, own) + begin.gather(1, key)
        limit = torch.ceil(sizes.double() * share - 1e-9).long()[index]
        has_room = limit[:, None] > rank.T
        most = min(N, len(sizes) * room(min(self.group or N, N) * share)) if not is_spread() else N
        return torch.where(has_room, expert, self.experts), most

    @final
    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The router's logits in float32 (or better) whatever the dtype of the tokens; and the tokens as the experts
        read them."""
        return router.logits(x, self.routers(), self.jitter if self.training else 0.0)

    def routers(self) -> Tensor:
        """The weights whose products with a token `route` reads, one or more for each expert."""
        return self.router

    def active(self) -> int:
        return super().active() - (self.experts - self.choices) * self.networks.each()

    @final
    def reference(self, x: Tensor) -> Out:
        choices, loss = self.plain_route(x)
        share = self.capacity / self.experts if self.training and self.capacity is not None else None
        y, size = [torch.zeros_like(token) for token in x], self.group or len(x)
        for first in range(0, len(x), size):
            members = range(first, min(first + size, len(x)))
            limit = len(x) if share is None else room(len(members) * share)
            taken = [0] * self.experts
            for turn in range(self.choices):
                for n in members:
                    if turn < len(choices[n]):
                        expert, gate = choices[n][turn]
                        if taken[expert] < limit:
                            taken[expert] += 1
                            y[n] = y[n] + gate * self.networks.plain(expert, x[n])
        return Out(torch.stack(y), auxiliary_loss=loss if self.training else None)


def room(tokens: float) -> int:
    """Rounded up; not by what a product of fractions is off."""
    return max(0, math.ceil(tokens - 1e-9))


def load(group: Tensor, experts: int, taken: Tensor) -> dict[str, Tensor]:
    """The share of the pairs that chose each expert, and of those that found no place there."""
    # float32 by name: the default dtype is the user's to choose
    ones = torch.ones_like(group, dtype=torch.float32)
    count = batch_sum(ones.new_zeros(experts + 1).scatter_add_(0, group, ones))
    total = count[:experts].sum().clamp(min=1)
    return {"load": count[:experts] / total, "dropped": 1 - batch_sum(taken.sum()) / total}


def best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, and where they are."""
    # a GPU is faster at asking for the largest again and again
    return one_by_one(x, k) if x.is_cuda and k <= 4 else x.topk(k, 1)


def one_by_one(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    left = x.detach()
    places = [left.argmax(1, keepdim=True)]
    for _ in range(1, k):
        left = left.scatter(1, places[-1], -math.inf)
        places.append(left.argmax(1, keepdim=True))
    at = torch.cat(places, 1)
    return x.gather(1, at), at


def mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Over the real tokens of the batch, [N, ...] here; zeros where there is none."""
    if real is None and not is_spread():
        return x.mean(0)
    total = x.sum(0) if real is None else torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, 0).sum(0)
    return batch_sum(total) / batch_sum(count_real(x, real)).clamp(min=1)


def count_real(x: Tensor, real: Tensor | None) -> Tensor:
    """The number of real tokens of [N, ...], without waiting for the device."""
    return torch.full((), len(x), device=x.device) if real is None else real.sum()


def local_groups(N: int, size: int | None, real: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The group of each of N tokens, the real ones of the batch counted `size` at a time (None: all are one group), and
    how many real ones each group has."""
    steps = torch.arange(N, device=device) if real is None else (real.cumsum(0) - 1).clamp(min=0)
    before, total = batch_offset(torch.full((), N, device=device) if real is None else real.sum())
    if size is None:
        return torch.zeros_like(steps), total[None]
    # the number of groups must be known to the host, which then waits for the other processes
    begin = torch.arange(0, max(1, int(total)) if is_spread() else N, size, device=device)
    # a process whose tokens do not count is behind the last group
    return ((steps + before) // size).clamp(max=len(begin) - 1), (total - begin).clamp(0, size)


def balance(shares: Tensor, first: Tensor, real: Tensor | None, size: int | None = None) -> Tensor:
    """experts * sum_e f_e P_e of the router's shares [N, experts], with f_e the part of the tokens that choose e first
    (which has no gradient) and P_e its mean share: 1 where all experts are alike. Of groups of `size` tokens, the mean,
    each by its tokens."""
    experts = shares.shape[1]
    if size is not None:
        index, sizes = local_groups(len(shares), size, real, shares.device)
        weight = torch.ones_like(shares) if real is None else real.to(shares.dtype)[:, None].expand_as(shares)
        key = index * experts + first
        counts = batch_sum(shares.new_zeros(len(sizes) * experts).scatter_add(0, key, weight[:, 0].detach()))
        seen = shares if real is None else torch.where(real[:, None], shares, 0)
        sums = batch_sum(shares.new_zeros(len(sizes), experts).index_add(0, index, seen))
        each = (counts.view(-1, experts) * sums).sum(1) / sizes.clamp(min=1)
        return experts * each.sum() / batch_sum(weight[:, 0].sum()).clamp(min=1)
    weight = torch.ones_like(shares[:, 0]) if real is None else real.to(shares.dtype)
    counts = batch_sum(shares.new_zeros(experts).scatter_add(0, first, weight.detach()))
    return experts * (counts / batch_sum(weight.sum()).clamp(min=1) * mean(shares, real)).sum()


def plain_softmax(logits: Tensor) -> Tensor:
    powers = torch.exp(logits - logits.max())
    return powers / powers.sum()


def plain_balance(shares: list[Tensor], firsts: list[int], size: int | None = None) -> Tensor:
    """`balance` in loops."""
    if size is not None:
        cuts = [slice(first, first + size) for first in range(0, len(shares), size)]
        return add_up(len(shares[cut]) / len(shares) * plain_balance(shares[cut], firsts[cut]) for cut in cuts)
    experts, terms = len(shares[0]), []
    for expert in range(experts):
        chosen = sum(first == expert for first in firsts) / len(firsts)
        terms.append(chosen * add_up(share[expert] for share in shares) / len(shares))
    return experts * add_up(terms)
