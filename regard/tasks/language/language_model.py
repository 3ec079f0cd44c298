"""A language model: loaded from a run, it is evaluated on text and continues a text."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from regard import models
from regard.core.model import LinearHead, Model
from regard.data.batches import padded, similar
from regard.data.documents import Blocks, Pieces, Text, stream
from regard.data.tokenizer import Streamed, Tokenizer
from regard.decoding import DecodingConfig, Sliding, generate
from regard.layers.attention.base import Attention
from regard.tasks.load import load
from regard.tasks.text import FILE, TOKENS_AT_ONCE
from regard.training.loss import IGNORED, next_token_loss


class Measures(NamedTuple):
    """How well a text was predicted. Bits are divided by all its characters or bytes, and `word_perplexity` by its
    words and line ends, whatever its tokens are: these can be compared between tokenizers."""

    loss: float  # nats per token
    perplexity: float  # per token
    bits_per_character: float
    bits_per_byte: float
    word_perplexity: float
    tokens: int
    characters: int
    bytes: int
    words: int  # between white space, and line ends
    unknown: int  # tokens


class Continuation(NamedTuple):
    """What a model generated after a prompt."""

    text: str
    ids: list[int]
    logprob: float
    ended: Literal["end", "stop", "length"]  # by the end token, at a stop string, at the largest number of tokens


class LanguageModel:
    """A model with its tokenizer.

    >>> language = LanguageModel.load("runs/shakespeare")
    >>> language("ROMEO:")
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, length: int, start: int | None, apart: bool = False):
        self.model, self.tokenizer = model, tokenizer
        self.length = length  # tokens per row that it was trained with
        self.start = start  # the token before a text; None: there is none
        self.apart = apart  # whether every row was from one document
        self.limit = models.max_positions(model)  # the number of positions; None: any

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "LanguageModel":
        """Loads a run folder; see `regard.tasks.load.load`."""
        model, parts, run = load(folder, "language", which=which, device=device)
        length, start = parts.facts.get("length"), parts.facts.get("start")
        if not isinstance(length, int) or not isinstance(start, int | None) or FILE not in parts.tokenizers:
            raise ValueError(f"{run.folder}/run.json is damaged: it must have length, start and {FILE}")
        return cls(model, parts.tokenizers[FILE], length, start, bool(parts.facts.get("apart")))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def decodes(self) -> bool:
        """Whether every layer can decode token by token."""
        return all(part.facts.state is not None for part in self.attentions())

    def __call__(self, prompt: str) -> str:
        """The most probable continuation, up to the length the model was trained for."""
        (found,) = self.generate(prompt, DecodingConfig(beam=1, maximum=self.length))
        return found.text

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt. An empty one is the start of a document, or of a line."""
        ids = ([] if self.start is None else [self.start]) + self.tokenizer.encode(prompt)
        return ids or self.tokenizer.encode("\n") or [self.tokenizer.eos]

    def generate(
        self,
        prompt: str,
        decoding: DecodingConfig,
        *,
        stop: Sequence[str] = (),
        slide: bool = False,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Continuation]:
        """Continues a prompt, `decoding.nbest` times, by at most `decoding.maximum` tokens. `on_text(sample, text)`
        gets each text piece by piece. A text ends before the first of the `stop` strings. With `slide`,
        a text that reaches the last position (or the length of training rows) continues from the last half of its
        context."""
        self.check_decodes()
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        ids = self.encode(prompt)
        model, most = self.model, decoding.maximum or decoding.limit(len(ids))
        if slide:
            model = Sliding(model, self.limit or self.length)
        elif self.limit is not None:
            if len(ids) >= self.limit:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens, and the model {self.limit} positions: shorten it, or use "
                    "--slide, which reads its last half"
                )
            most = min(most, self.limit - len(ids))
        listeners = [Listener(self.tokenizer, ids, stop) for _ in range(decoding.nbest)]

        def watch(row: int, sample: int, token: int) -> bool:
            text, stops = listeners[sample].add(token)
            if on_text is not None and text:
                on_text(sample, text)
            return stops

        config = DecodingConfig(**{**vars(decoding), "maximum": most, "maximum_ratio": 0, "maximum_extra": most})
        special = {self.tokenizer.pad, self.tokenizer.unk, self.tokenizer.bos}
        forbidden = tuple(special - {self.tokenizer.eos, None})
        prompts = torch.tensor([ids], device=self.device)
        (found,) = generate(model, prompts, config=config, eos=self.tokenizer.eos, forbidden=forbidden, watch=watch)
        for sample, listener in enumerate(listeners):
            rest = listener.rest()
            if on_text is not None and rest:
                on_text(sample, rest)
        # best first, while the listeners are in the order of the draws
        heard = {tuple(listener.ids): listener for listener in listeners}
        results = []
        for part in found:
            listener = heard[tuple(part.ids)]
            ended = "stop" if listener.stopped else "end" if part.finished else "length"
            results.append(Continuation(listener.text, part.ids, part.logprob, ended))
        return results

    def measure(
        self,
        documents: Sequence[str],
        *,
        length: int | None = None,
        stride: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Measures:
        """How well it predicts documents, in rows of `length` tokens, by default as in training. With a `stride`, rows
        overlap and only the last `stride` tokens of each count, so that each has a context of at least length - stride
        tokens."""
        length = self.length if length is None else length
        if length < 1 or (self.limit is not None and length > self.limit):
            most = "" if self.limit is None else f" and at most the {self.limit} positions of the model"
            raise ValueError(f"the length of a row must be at least 1{most}, got {length}")
        sizes: dict[str, Any] = {"length": length, "tokens": max(TOKENS_AT_ONCE, length), "shuffle": False}
        stride = self._stride(stride, length)
        if self.apart:
            if stride is not None:
                raise ValueError(
                    "a stride needs a model that reads all documents as one text, and this one was trained with "
                    "data.apart: leave the stride out"
                )
            ids = [self.tokenizer.encode_text(text) for text in documents]
            batches, unknown = (
                Pieces(ids, self.tokenizer.eos, **sizes),
                sum(int((part == self.tokenizer.unk).sum()) for part in ids),
            )
        else:
            ids = stream(documents, self.tokenizer)
            batches, unknown = Blocks(ids, stride=stride, **sizes), int((ids == self.tokenizer.unk).sum())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            for index in range(batches.count(0)):
                batch = batches.get(0, index).to(self.device)
                part = next_token_loss(self.model, batch, ignores=stride is not None, prefix=_first_counted(batch))
                total += part.plain.double()
                tokens += part.tokens
                check()
        nats, count = float(total), int(tokens)
        characters, size = sum(map(len, documents)), sum(len(text.encode()) for text in documents)
        words = sum(len(text.split()) + text.count("\n") for text in documents)
        return Measures(
            loss=nats / count,
            perplexity=_exp(nats / count),
            bits_per_character=nats / math.log(2) / characters,
            bits_per_byte=nats / math.log(2) / size,
            word_perplexity=_exp(nats / max(1, words)),
            tokens=count,
            characters=characters,
            bytes=size,
            words=words,
            unknown=unknown,
        )

    def _stride(self, stride: int | None, length: int) -> int | None:
        """The stride of an evaluation in rows of a length: a model with latents for the last tokens only can predict no
        others."""
        latents = getattr(self.model, "predicts_last", None)
        if latents is None or self.apart or length <= latents:
            return stride
        if stride is not None and stride > latents:
            raise ValueError(f"the stride must be at most the {latents} latents of the model, got {stride}")
        return latents if stride is None else stride

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, int]]:
        """log p(rest | context) of each (context, rest), and its number of tokens."""
        rows, known = [], []
        for context, rest in pairs:
            before = self.encode(context)
            whole = self.encode(context + rest) if context else before + self.tokenizer.encode(rest)
            # a token that begins in the context and ends in the rest belongs to the rest
            same = next(
                (n for n, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), len(before)
            )
            rows.append(whole)
            known.append(max(1, min(same, len(whole) - 1)))
            if self.limit is not None and len(whole) - 1 > self.limit:
                raise ValueError(f"a prompt has {len(whole)} tokens, more than the {self.limit} positions of the model")
        found: list[tuple[float, int]] = [(0.0, 0)] * len(rows)
        with torch.inference_mode():
            for group in similar([len(row) for row in rows], TOKENS_AT_ONCE):
                ids, keep = padded([rows[place] for place in group], self.device)
                first = torch.tensor([known[place] - 1 for place in group], device=self.device)
                x = self._hidden(ids[:, :-1], None if keep is None else keep[:, 1:], first)
                for line, place in enumerate(group):
                    at, end = known[place] - 1, len(rows[place]) - 1
                    logp = self._head.output(x[line, at:end]).float().log_softmax(1)
                    values = logp.gather(1, ids[line, at + 1 : end + 1, None])
                    found[place] = (float(values.double().sum()), end - at)
        return found

    @property
    def _head(self) -> LinearHead:
        """The model: every one that predicts the next token has a linear head."""
        return cast(LinearHead, self.model)

    def _hidden(self, ids: Tensor, keep: Tensor | None, first: Tensor) -> Tensor:
        """The input of the output layer, [B, T, E], for rows whose predictions count from their token `first` [B]."""
        latents = getattr(self.model, "predicts_last", None)
        if latents is None:
            return self._head.hidden(ids, keep=keep).x
        lengths = torch.full_like(first, ids.shape[1]) if keep is None else keep.sum(1)
        return self._head.hidden(ids, keep=keep, prefix=(lengths - latents).clamp(min=0).minimum(first)).x

    def check_decodes(self) -> None:
        if not self.decodes:
            names = {part.facts.name for part in self.attentions() if part.facts.state is None}
            raise ValueError(f"attention {', '.join(sorted(names))} does not decode token by token")

    def attentions(self) -> list[Attention]:
        return [part for part in self.model.modules() if isinstance(part, Attention)]


class Listener:
    """The text of one continuation while it is generated, held back while it may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self.stream, self.stop = Streamed(tokenizer, prompt), tuple(stop)
        self.ids: list[int] = []
        self.given: list[str] = []
        self.held = ""
        self.piece = ""  # what the last token has added
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self.given)

    def add(self, token: int) -> tuple[str, bool]:
        """The text that can be shown now, and whether it ends here."""
        self.ids.append(token)
        self.piece = self.stream.add(token)
        self.held += self.piece
        if not self.stop:
            return self._give(len(self.held)), False
        places = [at for word in self.stop if (at := self.held.find(word)) >= 0]
        if places:
            self.held, self.stopped = self.held[: min(places)], True
            return self._give(len(self.held)), True
        # the longest end of the text that is the beginning of a stop string
        most = max(
            (size for word in self.stop for size in range(1, len(word)) if self.held.endswith(word[:size])), default=0
        )
        return self._give(len(self.held) - most), False

    def rest(self) -> str:
        """The text that was held back, after the last token."""
        if not self.stopped:
            self.held += self.stream.pending()
        return self._give(len(self.held))

    def _give(self, size: int) -> str:
        text, self.held = self.held[:size], self.held[size:]
        self.given += [text] if text else []
        return text


def _first_counted(batch: Text) -> Tensor:
    """The number of tokens of each row before the first one whose target counts, [B]."""
    counted = batch.target != IGNORED
    return torch.where(counted.any(1), counted.int().argmax(1), batch.target.shape[1])


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
