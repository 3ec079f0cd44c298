"""One token a row and step: the best (greedy), or a drawn one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.decoding.base import DecodingConfig, Pool, candidates, crowded, log_probabilities, narrow, refuse

Watch = Callable[[int, int, int], bool]  # sentence, sample, token -> whether it ends here


def walk(
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
    """From the logits [B, V] of the first token and the state before it to K hypotheses a sentence: one, or with
    `draws` [B, K, L], a uniform number for each token, K samples. `used` [B, V] are the tokens that were there before,
    for the penalty on repetition; `watch` is told of each token and may end its hypothesis."""
    B, L, device = len(limits), max(limits) + 1, logits.device
    K = 1 if draws is None else draws.shape[1]
    if K > 1:
        logits = logits.repeat_interleave(K, 0)
        state = state.reorder(torch.arange(B, device=device).repeat_interleave(K))
    if config.repetition != 1:
        used = torch.zeros_like(logits, dtype=torch.bool) if used is None else used.repeat_interleave(K, 0)
    blocked = torch.tensor([*forbidden, eos], device=device)
    limit, who = torch.tensor(limits, device=device), torch.arange(B, device=device)
    wide = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    result = Pool.empty(wide, B, K, L)
    # `score` waits for the end; what is finished or cut is no longer going
    pool, going = result._replace(logprob=torch.zeros_like(result.logprob)).rows(who), who[:, None].expand(B, K) >= 0
    for step in range(L):
        now = blocked if step < config.minimum else blocked[:-1]
        weighed = logits if config.repetition == 1 else repeated_less(logits, used, config.repetition)
        if draws is None:
            value, token = best(weighed, now)
        else:
            value, token = draw(weighed, now, draws[:, :, step].flatten(), config)
        if config.repetition != 1:
            value = log_probabilities(logits, token[:, None])[:, 0]
            used.scatter_(1, token[:, None], True)
        value, token = value.view(-1, K), token.view(-1, K)
        ends, room = token == eos, (limit > step)[:, None]
        taken = going & (ends | room)
        pool.ids[:, :, step] = token
        pool = pool._replace(
            logprob=pool.logprob + torch.where(taken, value, 0),
            length=pool.length + (taken & ~ends),
            finished=pool.finished | (taken & ends),
        )
        going = going & ~ends & room
        if watch is not None:
            told, stops = (taken & ~ends).tolist(), torch.zeros_like(going, device="cpu")
            for place, (sentence, tokens) in enumerate(zip(who.tolist(), token.tolist(), strict=True)):
                for sample in range(K):
                    if told[place][sample]:
                        stops[place, sample] = bool(watch(sentence, sample, tokens[sample]))
            stops = stops.to(device)
            pool, going = pool._replace(finished=pool.finished | stops), going & ~stops
        undone = going.any(1)
        still, bad = torch.stack([undone.sum(), value.isnan().sum()]).tolist()
        refuse(bad, step)
        if crowded(still, len(who)):
            result.put(who, pool)
            if not still:
                break
            kept = undone.nonzero()[:, 0]
            pool, token, going, limit, who = pool.rows(kept), token[kept], going[kept], limit[kept], who[kept]
            rows = (kept[:, None] * K + torch.arange(K, device=device)).flatten()
            draws = None if draws is None else draws[kept]
            used = None if used is None else used[rows]
            state = narrow(state, rows, kept)
        logits, state = model.extend(token.view(-1, 1), state)
        logits = logits[:, -1]
    score = result.logprob / config.scale(result.length + result.finished)
    return result._replace(score=score).take(score.sort(dim=1, descending=True, stable=True).indices)


def best(logits: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
    """The log probability and the id of the best token of each row."""
    values, ids = candidates(logits, 1, blocked)
    value, at = values.max(1, keepdim=True)
    return value[:, 0], ids.gather(1, at)[:, 0]


def repeated_less(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
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
