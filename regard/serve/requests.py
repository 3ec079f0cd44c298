"""A request to continue a prompt, the rows of its samples, and what is told of them while they grow."""

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.decoding.searching import uniform_draws
from regard.http.refused import Refused
from regard.tasks.language.language_model import Listener

Ended = Literal["stop", "length"]  # by the end token or a stop string, at the largest number of tokens


class Scored(NamedTuple):
    """A token with its log probability and those of the best others."""

    id: int
    text: str
    logprob: float | None  # of the first token of a prompt there is none
    top: list[tuple[str, float]]
    offset: int  # characters of the text before it


class Update(NamedTuple):
    """What a sample has grown by."""

    sample: int
    text: str
    tokens: list[Scored]
    ended: Ended | None


class Finished(NamedTuple):
    """All samples of a request are complete."""


class Failed(NamedTuple):
    """A request that ends without an answer."""

    why: Refused


class Generation:
    """A request: a prompt, how to continue it, and its samples."""

    def __init__(
        self,
        ids: Sequence[int],
        config: DecodingConfig,
        tokenizer: Tokenizer,
        *,
        tokens: int,
        stop: Sequence[str] = (),
        top: int | None = None,
        scores_prompt: bool = False,
        streams: bool = False,
        seconds: float = float("inf"),
    ):
        """It is continued by at most `tokens` tokens. `top` is the number of other tokens to name beside each; None:
        no log probabilities."""
        self.ids, self.config, self.tokenizer, self.tokens, self.top = list(ids), config, tokenizer, tokens, top
        self.scores_prompt, self.streams = scores_prompt, streams
        self.created = time.monotonic()
        self.deadline = self.created + seconds
        self.first_token: float | None = None  # when it was chosen
        self.cancelled = False  # anybody may set it: nobody waits for the answer any more
        self.prompt_scores: list[Scored] = []
        self.owner: Any = None  # of whoever waits for it
        samples = config.nbest if tokens else 0
        draws: list[list[float]] = [[]] * samples
        if config.sample and samples:
            draws = uniform_draws([self.ids], [tokens], config)[0].tolist()
        self.samples = [Row(self, number, stop, draws[number]) for number in range(samples)]

    @property
    def longest(self) -> int:
        """Tokens that a row of it has read at most: the last one is chosen and not read."""
        return len(self.ids) + max(0, self.tokens - 1)

    @property
    def generated(self) -> int:
        return sum(len(row.listener.ids) for row in self.samples)


class Row:
    """One sample of a request: a row of a batch while it grows."""

    def __init__(self, generation: Generation, sample: int, stop: Sequence[str], draws: list[float]):
        self.generation, self.sample, self.draws = generation, sample, draws
        self.listener = Listener(generation.tokenizer, generation.ids, stop)
        self.token = 0  # the last one, to be read next
        self.steps = 0  # tokens chosen, the end token among them
        self.length = 0  # characters of the text, also of what is held back
        self.ended: Ended | None = None
        self.scores: list[Scored] = []
        self.told = 0  # scores that an update had
        self.sent = 0  # updates that were written to the client

    @property
    def read(self) -> int:
        """Tokens that the state of the row has read."""
        return len(self.generation.ids) + max(0, self.steps - 1)

    def add(self, token: int, scored: Scored | None) -> Update | None:
        """Takes the next token; the end token has none of the others' text. None: there is nothing to tell yet; of an
        answer that is no stream there is at its end only."""
        self.token, self.steps = token, self.steps + 1
        text = ""
        if token == self.generation.tokenizer.eos:
            self.ended, text = "stop", self.listener.rest()
        else:
            text, stops = self.listener.add(token)
            if scored is not None:
                self.scores.append(scored._replace(text=self.listener.piece, offset=self.length))
            self.length += len(self.listener.piece)
            if stops:
                self.ended = "stop"
            elif self.steps == self.generation.tokens:
                self.ended, text = "length", text + self.listener.rest()
        return self._update(text) if self.ended or (text and self.generation.streams) else None

    def _update(self, text: str) -> Update:
        """The text, and the tokens that it has shown the beginning of."""
        shown = len(self.listener.text) if self.scores else 0
        if self.listener.stopped:
            self.scores = [token for token in self.scores if token.offset < shown]
        elif self.ended and self.scores:
            # half a character that is never completed
            self.scores[-1] = self.scores[-1]._replace(text=self.listener.text[self.scores[-1].offset :])
        upto = self.told
        while upto < len(self.scores) and (self.ended or self.scores[upto].offset < shown):
            upto += 1
        tokens, self.told = self.scores[self.told : upto], upto
        return Update(self.sample, text, tokens, self.ended)
