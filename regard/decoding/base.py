"""What greedy, sampling and beam search share: the config, hypotheses, the best tokens, rows that leave a batch.

Letters: B sentences still open, K rows per sentence (beams or samples, adjacent rows of the model), V vocabulary,
N hypotheses kept per sentence, L columns for tokens.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.limits import check_sizes
from regard.core.numeric import NonFinite
from regard.core.options import config_dataclass


@config_dataclass
class DecodingConfig:
    """How to decode. Lengths count tokens without eos.

    A sentence may grow to maximum_ratio * source length + maximum_extra tokens, and to `maximum` if that is less: a
    bound of its own, whatever its batch.
    """

    beam: int = 5  # hypotheses followed at a time; 1 is greedy
    penalty: float = 1.0  # alpha of GNMT: score = log probability / ((5 + |Y|) / 6) ** alpha, |Y| counts eos
    coverage: float = 0.0  # beta of GNMT: score + beta * sum over source tokens of log min(attention on it, 1)
    nbest: int = 1  # hypotheses (or samples) returned per sentence, best first
    minimum: int = 1
    maximum: int | None = None
    maximum_ratio: float = 1.5
    maximum_extra: int = 10
    stops_early: bool = True  # done at `beam` finished hypotheses; False: only when no other can score better
    sample: bool = False  # draw tokens instead of searching; `beam` then has no effect
    temperature: float = 1.0
    top_k: int | None = None  # draw among the k most probable tokens
    top_p: float | None = None  # draw among the fewest tokens that together have this probability
    min_p: float | None = None  # draw among the tokens with at least this share of the best one's probability
    repetition: float = 1.0  # of tokens that were there before, positive logits are divided by this, others multiplied
    seed: int = 0
    graphs: bool = True  # on a GPU, greedy decoding and sampling capture a step as a CUDA graph

    def __post_init__(self) -> None:
        least = {"beam": 1, "nbest": 1, "minimum": 0, "maximum": 1, "maximum_extra": 0, "top_k": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None and name in ("maximum", "top_k"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
        check_sizes(self)
        for name, most in (("penalty", 100), ("coverage", 100), ("maximum_ratio", 10_000)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be a number from 0 to {most:,}, got {getattr(self, name)!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature!r}; sample=False takes the best token"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p!r}")
        if not 0 < self.repetition < math.inf:
            raise ValueError(f"repetition must be above 0, and 1 for no penalty, got {self.repetition!r}")
        if self.coverage and (self.sample or self.beam == 1):
            raise ValueError("coverage chooses among the hypotheses of a beam: make beam at least 2, without sample")
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum {self.maximum} is below minimum {self.minimum}")
        if not self.sample:
            if self.nbest > self.beam:
                raise ValueError(f"nbest {self.nbest} is more than beam {self.beam} can find: make beam at least nbest")
            if self.temperature != 1 or any(cut is not None for cut in (self.top_k, self.top_p, self.min_p)):
                raise ValueError("temperature, top_k, top_p and min_p are for sampling: set sample=True as well")
            if self.repetition != 1 and self.beam > 1:
                raise ValueError(f"repetition is for sampling and for beam=1, got beam={self.beam}")

    def limit(self, length: int) -> int:
        """The most tokens for a source of this length."""
        limit = max(int(self.maximum_ratio * length + self.maximum_extra), 1)
        limit = limit if self.maximum is None else min(limit, self.maximum)
        return max(limit, self.minimum)

    def scale(self, length: Any) -> Any:
        """What a log probability over this many tokens, eos among them, is divided by (number or tensor)."""
        return ((5 + length) / 6) ** self.penalty


class Coverage(NamedTuple):
    """What a decoder has attended to so far."""

    attended: Tensor  # [rows, S], summed over the steps
    real: Tensor  # [B, S]: which tokens of the source there are

    def penalty(self, parent: Tensor) -> Tensor:
        """Wu et al. 2016: sum over source tokens of log min(attention on it, 1), of beams [B, K]."""
        by_beam = self.attended.unflatten(0, (len(self.real), -1))
        logs = by_beam.clamp(torch.finfo(by_beam.dtype).tiny, 1).log()
        return torch.where(self.real[:, None], logs, 0).sum(2).gather(1, parent)

    def rows(self, rows: Tensor, sentences: Tensor | None = None) -> "Coverage":
        return Coverage(self.attended[rows], self.real if sentences is None else self.real[sentences])


class Hypothesis(NamedTuple):
    """An output without bos and eos. Not finished: it was cut at its maximum length, before eos."""

    ids: list[int]
    score: float  # log probability under the length penalty
    logprob: float  # as the model gives it, eos included
    finished: bool


class Pool(NamedTuple):
    """Hypotheses of each sentence, best first; a score of -inf is an empty place."""

    score: Tensor  # [B, N]
    logprob: Tensor  # [B, N]
    length: Tensor  # [B, N], without eos
    finished: Tensor  # [B, N]
    ids: Tensor  # [B, N, L]

    @classmethod
    def empty(cls, like: Tensor, sentences: int, places: int, columns: int) -> "Pool":
        score = like.new_full((sentences, places), -torch.inf)
        whole = torch.zeros((sentences, places, columns), dtype=torch.long, device=like.device)
        return cls(score, score.clone(), whole[..., 0].clone(), whole[..., 0] > 0, whole)

    def join(self, other: "Pool") -> "Pool":
        return Pool(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))

    def take(self, order: Tensor) -> "Pool":
        """Places [B, N] of each sentence."""
        score, logprob, length, finished = (x.gather(1, order) for x in self[:-1])
        return Pool(score, logprob, length, finished, take(self.ids, order))

    def rows(self, sentences: Tensor) -> "Pool":
        return Pool(*(part[sentences] for part in self))

    def put(self, sentences: Tensor, other: "Pool") -> None:
        for part, new in zip(self, other, strict=True):
            part[sentences] = new

    def lists(self) -> list[list[Hypothesis]]:
        return [
            [
                Hypothesis(ids[:length], score, logprob, finished)
                for score, logprob, length, finished, ids in zip(*row, strict=True)
                if score > -math.inf
            ]
            for row in zip(*(part.tolist() for part in self), strict=True)
        ]


def take(ids: Tensor, order: Tensor) -> Tensor:
    """[B, K, L] and the rows [B, N] to take of each sentence -> [B, N, L]"""
    return ids.gather(1, order[..., None].expand(-1, -1, ids.shape[2]))


def highest(logits: Tensor, count: int, chunk: int = 64) -> Tensor:
    """The ids [rows, count] of the highest logits. One pass of maxima over chunks, which is fast everywhere, leaves
    `count` chunks of each row to be searched: sorting out a whole vocabulary takes two to three times as long."""
    V = logits.shape[1]
    chunks = V // chunk
    if chunks < 4 * count:
        return logits.topk(min(count, V)).indices
    body = logits[:, : chunks * chunk].unflatten(1, (chunks, chunk))
    where = body.amax(2).topk(count).indices[..., None]  # [rows, count, 1]
    steps = torch.arange(chunk, device=logits.device)
    ids = (where * chunk + steps).flatten(1)
    rest = torch.arange(chunks * chunk, V, device=logits.device).expand(len(logits), -1)
    ids = torch.cat([ids, rest], 1)
    return ids.gather(1, logits.gather(1, ids).topk(count).indices)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Those of some ids [rows, n] under the whole softmax. On a CPU a few rows at a time, which stay in its cache:
    large temporaries are asked of the system anew each step, and that costs more than filling them."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    size = max(2**19 // logits.shape[1], 1) if logits.device.type == "cpu" else len(logits)
    parts = zip(logits.split(size), ids.split(size), strict=True)
    return torch.cat([part.log_softmax(-1, dtype=wide).gather(1, at) for part, at in parts])


def candidates(logits: Tensor, count: int, blocked: Tensor) -> tuple[Tensor, Tensor]:
    """The best `count` tokens of each row, blocked ones at -inf: log probabilities and ids."""
    ids = highest(logits, count + len(blocked))
    return log_probabilities(logits, ids).masked_fill((ids[..., None] == blocked).any(-1), -torch.inf), ids


def worth_narrowing(still: int, present: int) -> bool:
    """Whether enough sentences are done to pay for copying the others: one in eight."""
    return 8 * (present - still) >= present


def narrow(state: Any, rows: Tensor, sentences: Tensor) -> Any:
    """The state of some sentences: these rows of what the decoder has written, and these sentences of the memory."""
    if len(rows) == len(sentences):
        return state.select(rows)
    return _join(state, state.reorder(rows), state.select(sentences))


def _join(old: Any, own: Any, memory: Any) -> Any:
    # what reorder returns unchanged belongs to the memory
    if own is old:
        return memory
    if not isinstance(own, tuple):
        return own
    parts = [_join(*triple) for triple in zip(old, own, memory, strict=True)]
    return type(own)(*parts) if hasattr(own, "_fields") else tuple(parts)


def refuse(bad: int, step: int) -> None:
    """Ends a search in which some rows have no probabilities."""
    if bad:
        raise NonFinite(
            f"the model's logits for token {step + 1} are not numbers (NaN or infinite), in {bad} of the rows decoded",
            "its weights are broken or their precision is too low; take an earlier checkpoint, or float32",
        )
