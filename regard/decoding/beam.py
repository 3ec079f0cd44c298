"""Beam search under the penalties of GNMT, on length and coverage (Wu et al. 2016, arXiv 1609.08144, section 7)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.decoding.base import (
    Coverage,
    DecodingConfig,
    Hypothesis,
    Pool,
    candidates,
    narrow,
    refuse,
    take,
    worth_narrowing,
)

Report = Callable[[int, list[Hypothesis]], None]


def beam(
    model: Any,
    logits: Tensor,
    state: Any,
    limits: list[int],
    config: DecodingConfig,
    eos: int,
    forbidden: tuple[int, ...],
    coverage: Coverage | None = None,
    needed: list[int] | None = None,
    report: Report | None = None,
) -> Pool:
    """From the logits [B, V] of the first token and the state before it to the N best hypotheses of each sentence.

    A step ranks all continuations of a sentence. Those that end among the first K are finished; the K best others
    continue. A sentence is done at its limit, when no living one can beat the worst of the `needed` best (by default
    N), or (`stops_early`) when K are finished, which makes K = 1 greedy. The most a living one can reach is its log
    probability, which only falls, under the penalty of the longest output. There are fewer than K beams until there is
    a choice for K. `coverage` is that of the step which gave the logits: what a hypothesis leaves unread is charged
    when it ends. `report` is called with the number of a sentence and its hypotheses as soon as it leaves the search.
    """
    B, K, N, L, device = len(limits), config.beam, config.nbest, max(limits) + 1, logits.device
    blocked = torch.tensor([*forbidden, eos], device=device)
    limit, who, last = torch.tensor(limits, device=device), torch.arange(B, device=device), set(limits)
    live = logits.new_zeros((B, 1), dtype=torch.promote_types(logits.dtype, torch.float32))  # log probabilities
    pool = Pool.empty(live, B, N, L)
    result = pool.rows(who)
    ids = torch.zeros((B, 1, L), dtype=torch.long, device=device)
    finished, done, places = torch.zeros_like(limit), limit < 0, torch.arange(N, device=device)
    worst = torch.tensor([[N - 1]] * B if needed is None else [[count - 1] for count in needed], device=device)
    for step in range(L):
        width = live.shape[1]
        # of one beam, at most K that continue and one that ends can matter
        values, tokens = candidates(logits, K + 1, blocked if step < config.minimum else blocked[:-1])
        ranked = (live.view(-1, 1) + values).view(len(who), -1)
        ranked, at = ranked.topk(min(2 * K, ranked.shape[1]))
        parent, token = at // values.shape[1], tokens.view(len(who), -1).gather(1, at)
        ends = token == eos

        first, end = ranked[:, :K], ends[:, :K]
        score = first / config.scale(step + 1) + _charge(coverage, parent[:, :K], config)
        score = torch.where(end, score, -torch.inf)
        found = Pool(score, first, torch.full_like(at[:, :K], step), end, take(ids, parent[:, :K]))
        pool = pool.join(found)
        # what is done stays as it is while it waits to leave
        pool = pool.take(torch.where(done[:, None], places, pool.score.topk(N).indices))
        finished = finished + (score > -torch.inf).sum(1)
        if step in last:
            charge = _charge(coverage, torch.arange(width, device=device).expand(len(who), -1), config)
            pool = _fill(pool, live, ids, step, (limit == step)[:, None], charge, config)

        live, order = ranked.masked_fill(ends, -torch.inf).topk(min(K, ranked.shape[1]))
        parent, token = parent.gather(1, order), token.gather(1, order)
        ids = take(ids, parent)
        ids[:, :, step] = token
        done = done | (limit <= step) | (pool.score.gather(1, worst)[:, 0] >= live[:, 0] / config.scale(limit + 1))
        if config.stops_early:
            done = done | (finished >= K)

        beams = torch.arange(live.shape[1], device=device)
        still, moved, bad = torch.stack([(~done).sum(), (parent != beams).sum(), values.isnan().any(1).sum()]).tolist()
        refuse(bad, step)
        if worth_narrowing(still, len(who)):
            result.put(who, pool)
            if report is not None:
                ended = done.nonzero()[:, 0]
                for number, found in zip(who[ended].tolist(), pool.rows(ended).lists(), strict=True):
                    report(number, found if needed is None else found[: needed[number]])
            if not still:
                break
            kept = (~done).nonzero()[:, 0]
            parent, token, live, ids, pool = parent[kept], token[kept], live[kept], ids[kept], pool.rows(kept)
            limit, who, finished, done, worst = limit[kept], who[kept], finished[kept], done[kept], worst[kept]
            rows = (kept[:, None] * width + parent).flatten()
            state, coverage = narrow(state, rows, kept), coverage and coverage.rows(rows, kept)
        elif moved or live.shape[1] != width:
            rows = (torch.arange(len(who), device=device)[:, None] * width + parent).flatten()
            state, coverage = state.reorder(rows), coverage and coverage.rows(rows)
        if coverage is None:
            logits, state = model.extend(token.view(-1, 1), state)
        else:
            logits, state, weights = model.extend_with_attention(token.view(-1, 1), state)
            coverage = coverage._replace(attended=coverage.attended + weights)
        logits = logits[:, -1]
    return result


def _charge(coverage: Coverage | None, parent: Tensor, config: DecodingConfig) -> Tensor | float:
    """What the penalty on coverage adds to the scores of beams [B, K]; it is never positive."""
    return 0.0 if coverage is None else config.coverage * coverage.penalty(parent)


def _fill(
    pool: Pool,
    live: Tensor,
    ids: Tensor,
    length: int,
    full: Tensor,
    charge: Tensor | float,
    config: DecodingConfig,
) -> Pool:
    """Sentences at their limit [B, 1] fill the places no finished hypothesis took with the best that never ended."""
    score = torch.where(full, live / config.scale(length) + charge, -torch.inf)
    cut = Pool(score, live, torch.full_like(score, length, dtype=torch.long), score > torch.inf, ids)
    # a charge may have changed their order
    joined = pool.join(cut.take(score.sort(dim=1, descending=True, stable=True).indices))
    taken = (joined.score > -torch.inf).int()
    return joined.take(taken.sort(dim=1, descending=True, stable=True).indices[:, : pool.score.shape[1]])
