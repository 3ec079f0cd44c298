"""A beam search as a tree, recorded from outside by a wrapper around the model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.decoding import DecodingConfig, Hypothesis, decode


class Beam(NamedTuple):
    """One living hypothesis after a step."""

    parent: int  # its beam at the step before
    token: int
    logprob: float
    path: tuple[int, ...]


class WatchedState:
    """The state of the model, and the row of the step before that each of its rows came from."""

    def __init__(self, state: Any, rows: list[int]):
        self.state, self.rows = state, rows

    def reorder(self, rows: Tensor) -> "WatchedState":
        return WatchedState(self.state.reorder(rows), [self.rows[row] for row in rows.tolist()])

    select = reorder  # one sentence: its rows are its beams


class Watched:
    """Wraps a model in a search over one sentence. `on_step` is called with the beams of each step."""

    training = False

    def __init__(self, model: Any, on_step: Callable[[list[Beam]], None]):
        self.model, self.on_step = model, on_step
        self.encode = model.encode
        self.beams: list[Beam] = []
        self.logprobs: Tensor | None = None

    def start(self, batch: int, *, memory: Any = None, capacity: int | None = None) -> WatchedState:
        return WatchedState(self.model.start(batch, memory=memory, capacity=capacity), [0])

    def extend(self, tokens: Tensor, state: WatchedState) -> tuple[Tensor, WatchedState]:
        logits, after = self.model.extend(tokens, state.state)
        if self.logprobs is None:
            self.beams = [Beam(0, int(tokens[0, 0]), 0.0, ())]
        else:
            self.beams = [
                Beam(
                    parent,
                    token,
                    self.beams[parent].logprob + float(self.logprobs[parent, token]),
                    (*self.beams[parent].path, token),
                )
                for parent, token in zip(state.rows, tokens[:, 0].tolist(), strict=True)
            ]
            self.on_step(self.beams)
        self.logprobs = logits[:, -1].float().log_softmax(-1)
        return logits, WatchedState(after, list(range(len(tokens))))


def watch(translator: Any, ids: list[int], beam: int, on_step: Callable[[list[Beam]], None]) -> list[Hypothesis]:
    """The hypotheses of a sentence, best first; `on_step` may raise to end the search."""
    target = translator.target
    special = {"bos": target.bos, "eos": target.eos, "forbidden": (target.pad, target.bos)}
    source = torch.tensor([[*ids, translator.source.eos]], device=translator.device)
    config = DecodingConfig(beam=beam, nbest=beam)
    return decode(Watched(translator.copying(source), on_step), source, config=config, **special)[0]
