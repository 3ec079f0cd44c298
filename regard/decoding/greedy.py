"""One token per row and step: the best (greedy), or a drawn one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.decoding.base import DecodingConfig, Pool, candidates, log_probabilities, narrow, refuse, worth_narrowing

Watch = Callable[[int, int, int], bool]  # sentence, sample, token -> whether it ends here


def search_greedily(
    model: Any,
    logits: Tensor,
    state: Any,
    limits: list[int],
    config: DecodingConfig,
    eos: int,
    forbidden: tuple[int, ...],
    draws: Tensor | None,
    used: Tensor | None = None,
    watch: Watch | None = None,
) -> Pool:
    """From the logits [B, V] of the first token and the state before it to K hypotheses per sentence: one, or with
    `draws` [B, K, L], a uniform number for each token, K samples. `used` [B, V] are the tokens that were there before,
    for the penalty on repetition; `watch` is called with each token and may end its hypothesis."""
    B, L, device = len(limits), max(limits) + 1, logits.device
    K = 1 if draws is None else draws.shape[1]
    if K > 1:
        logits = logits.repeat_interleave(K, 0)
        state = state.reorder(torch.arange(B, device=device).repeat_interleave(K))
    blocked = torch.tensor([*forbidden, eos], device=device)
    limit, who, steps = (torch.tensor(x, device=device) for x in (limits, range(B), range(L)))
    now = Written.nothing(logits, used, B, K, L, config)
    result = now.pool.rows(who)
    for step in range(L):
        barred = blocked if step < config.minimum else blocked[:-1]
        now, token, taken = now.advance(logits, steps[step : step + 1], limit, barred, eos, draws, config)
        if watch is not None:
            now = now.stopped(ask_watch(watch, taken & (token != eos), token, who))
        undone = now.going.any(1)
        still, bad = torch.stack([undone.sum(), now.bad]).tolist()
        refuse(bad, step)
        if worth_narrowing(still, len(who)):
            result.put(who, now.pool)
            if not still:
                break
            kept = undone.nonzero()[:, 0]
            rows = (kept[:, None] * K + torch.arange(K, device=device)).flatten()
            now, token, limit, who = now.rows(kept, rows), token[kept], limit[kept], who[kept]
            draws = None if draws is None else draws[kept]
            state = narrow(state, rows, kept)
        logits, state = model.extend(token.view(-1, 1), state)
        logits = logits[:, -1]
    return ranked(result, config)


class Written(NamedTuple):
    """What the steps so far have written. A score waits for the end; what is finished or cut is no longer going."""

    pool: Pool
    going: Tensor  # [B, K]
    used: Tensor | None  # [B K, V] tokens that were there before, for the penalty on repetition
    bad: Tensor  # () rows of all steps whose logits were no numbers

    @classmethod
    def nothing(cls, logits: Tensor, used: Tensor | None, B: int, K: int, L: int, config: DecodingConfig) -> "Written":
        wide = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        pool = Pool.empty(wide, B, K, L)
        if config.repetition == 1:
            used = None
        else:
            used = torch.zeros_like(logits, dtype=torch.bool) if used is None else used.repeat_interleave(K, 0)
        going = torch.ones(B, K, dtype=torch.bool, device=logits.device)
        bad = torch.zeros((), dtype=torch.long, device=logits.device)
        return cls(pool._replace(logprob=torch.zeros_like(pool.logprob)), going, used, bad)

    def advance(
        self,
        logits: Tensor,
        step: Tensor,
        limit: Tensor,
        barred: Tensor,
        eos: int,
        draws: Tensor | None,
        config: DecodingConfig,
    ) -> tuple["Written", Tensor, Tensor]:
        """Chooses token `step` [1] of each hypothesis from logits [B K, V], without synchronising with the host: what
        is written then, the tokens [B, K], and which of them count."""
        K = self.going.shape[1]
        weighed = logits if self.used is None else penalize_repetition(logits, self.used, config.repetition)
        if draws is None:
            value, token = best(weighed, barred)
        else:
            value, token = draw(weighed, barred, draws.index_select(2, step).flatten(), config)
        if self.used is not None:
            value = log_probabilities(logits, token[:, None])[:, 0]
            self.used.scatter_(1, token[:, None], True)
        value, token = value.view(-1, K), token.view(-1, K)
        ends, room = token == eos, (limit > step)[:, None]
        taken = self.going & (ends | room)
        self.pool.ids.index_copy_(2, step, token[..., None])
        pool = self.pool._replace(
            logprob=self.pool.logprob + torch.where(taken, value, 0),
            length=self.pool.length + (taken & ~ends),
            finished=self.pool.finished | (taken & ends),
        )
        bad = self.bad + value.isnan().sum()
        return Written(pool, self.going & ~ends & room, self.used, bad), token, taken

    def stopped(self, stops: Tensor) -> "Written":
        """Hypotheses that `watch` ended count as finished."""
        return self._replace(pool=self.pool._replace(finished=self.pool.finished | stops), going=self.going & ~stops)

    def rows(self, sentences: Tensor, rows: Tensor) -> "Written":
        used = None if self.used is None else self.used[rows]
        return Written(self.pool.rows(sentences), self.going[sentences], used, self.bad)


def ranked(pool: Pool, config: DecodingConfig) -> Pool:
    """The hypotheses of each sentence with their scores, best first."""
    score = pool.logprob / config.scale(pool.length + pool.finished)
    return pool._replace(score=score).take(score.sort(dim=1, descending=True, stable=True).indices)


def ask_watch(watch: Watch, reported: Tensor, token: Tensor, who: Tensor) -> Tensor:
    """Which hypotheses [B, K] `watch` ends, asked for each token that counts."""
    stops = torch.zeros_like(reported, device="cpu")
    for place, (sentence, tokens, counts) in enumerate(
        zip(who.tolist(), token.tolist(), reported.tolist(), strict=True)
    ):
        for sample, (one, counted) in enumerate(zip(tokens, counts, strict=True)):
            if counted:
                stops[place, sample] = bool(watch(sentence, sample, one))
    return stops.to(reported.device)


def best(logits: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
    """The log probability and the id of the best token of each row."""
    values, ids = candidates(logits, 1, blocked)
    value, at = values.max(1, keepdim=True)
    return value[:, 0], ids.gather(1, at)[:, 0]


def penalize_repetition(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Keskar et al. 2019 (arXiv 1909.05858, section 4.1), for logits of either sign."""
    return torch.where(used, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, blocked: Tensor, uniform: Tensor, config: DecodingConfig) -> tuple[Tensor, Tensor]:
    """A token of each row, drawn from what temperature, top_k, top_p and min_p leave, in this order; its log
    probability is that of the logits, without them."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x.index_fill(1, blocked, -torch.inf)
    # the best token is at 0 before the division, so that a temperature near 0 leaves it alone
    x = (x - x.amax(1, keepdim=True)) / max(config.temperature, 1e-20)
    ids = None
    if config.top_k is not None:
        x, ids = x.topk(min(config.top_k, x.shape[1]))
    elif config.top_p is not None:
        x, ids = x.sort(dim=1, descending=True, stable=True)
    mass = x.exp().double()
    if config.top_p is not None:
        before = mass.cumsum(1) - mass
        mass = torch.where(before < config.top_p * mass.sum(1, keepdim=True), mass, 0)
    if config.min_p is not None:
        # of the best token it is 1
        mass = torch.where(mass >= config.min_p, mass, 0)
    upto = mass.cumsum(1)
    # strictly below the whole mass, as a float32 below 1 times a float64 is, so that no token without mass is drawn
    at = torch.searchsorted(upto, uniform.double()[:, None] * upto[:, -1:], right=True).clamp(max=x.shape[1] - 1)
    token = at if ids is None else ids.gather(1, at)
    return log_probabilities(logits, token)[:, 0], token[:, 0]
