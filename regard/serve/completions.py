"""Completions as OpenAI's API has them: the request becomes generations, and these become its answer."""

import json
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from regard.data.tokenizer import Streamed
from regard.decoding import DecodingConfig
from regard.http.refused import Refused
from regard.serve.choosing import token_text
from regard.serve.limits import Limits
from regard.serve.requests import Generation, Row, Scored, Update
from regard.tasks.language.language_model import LanguageModel

DEFAULT_TOKENS = 16
LEAST_TOP_P = 1e-9  # takes the best token only


class Completion:
    """A request to /v1/completions. Its choices are the samples of the first prompt, then those of the second."""

    def __init__(self, values: dict[str, Any], name: str, language: LanguageModel, limits: Limits):
        # null is what is not given
        values = {field: value for field, value in values.items() if value is not None}
        self.name, self.language = name, language
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.streams, self.echoes = values.get("stream", False), values.get("echo", False)
        self.samples = values.get("n", 1)
        self.top = values.get("logprobs")
        if values.get("best_of", self.samples) != self.samples:
            raise Refused(400, f"best_of must equal n here, which is {self.samples}", param="best_of")
        if "stream_options" in values and not self.streams:
            raise Refused(400, "stream_options needs stream: true", param="stream_options")
        self.tells_usage = bool(values.get("stream_options", {}).get("include_usage"))
        tokens = values.get("max_tokens", DEFAULT_TOKENS)
        if not tokens and not self.echoes:
            raise Refused(400, "max_tokens may be 0 only with echo: true", param="max_tokens")
        stop = values.get("stop", [])
        config = self._config(values, tokens)
        self.prompts = list(self._prompts(values["prompt"]))
        self.echoed: dict[int, tuple[str, list[Scored]]] = {}  # by the numbers of prompts that are read
        self.generations = [
            Generation(
                ids,
                config,
                language.tokenizer,
                tokens=tokens,
                stop=[stop] if isinstance(stop, str) else stop,
                top=self.top,
                scores_prompt=self.echoes and self.top is not None,
                streams=self.streams,
                seconds=limits.deadline,
            )
            for ids, _ in self.prompts
        ]

    def _config(self, values: dict[str, Any], tokens: int) -> DecodingConfig:
        temperature, seed = values.get("temperature", 1.0), values.get("seed", secrets.randbits(62))
        maximum = tokens or None
        if temperature == 0:
            if self.samples > 1:
                raise Refused(400, "n above 1 needs a temperature above 0: the samples would be equal", param="n")
            return DecodingConfig(beam=1, maximum=maximum)
        top_p = max(values.get("top_p", 1.0), LEAST_TOP_P)
        return DecodingConfig(
            sample=True,
            temperature=float(temperature),
            top_p=top_p if top_p < 1 else None,
            top_k=values.get("top_k"),
            min_p=values.get("min_p"),
            nbest=self.samples,
            seed=seed % 2**63,
            maximum=maximum,
        )

    def _prompts(self, prompt: Any) -> Iterator[tuple[list[int], str]]:
        """The ids and the text of each prompt."""
        tokenizer = self.language.tokenizer
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        for number, one in enumerate(prompt):
            if isinstance(one, str):
                yield self.language.encode(one), one
                continue
            wrong = next((id for id in one if id >= tokenizer.size), None)
            if wrong is not None:
                why = f"token id {wrong} of prompt {number} is not in the vocabulary of {tokenizer.size} tokens"
                raise Refused(400, why, param="prompt")
            yield one, tokenizer.decode(one)

    def place(self, generation: Generation) -> int:
        return self.generations.index(generation)

    # answers

    def answer(self) -> dict[str, Any]:
        choices = []
        for number, one in enumerate(self.generations):
            before, told = self._echo(number)
            if not one.samples:
                choices.append(self._choice(len(choices), before, told, "length"))
            for row in one.samples:
                text, scores = before + row.listener.text, told + shifted(row, len(before))
                choices.append(self._choice(len(choices), text, scores, row.ended))
        return self._head() | {"choices": choices, "usage": self.usage()}

    def chunks(self, generation: Generation, item: Update) -> Iterator[bytes]:
        """What an update adds to the stream; the prompt comes before the first, where it is echoed."""
        number = self.place(generation)
        row = generation.samples[item.sample]
        before, told = self._echo(number)
        first = number * self.samples + item.sample
        if self.echoes and row.sent == 0:
            yield self.event({"choices": [self._choice(first, before, told, None)]})
        row.sent += 1
        scores = [token._replace(offset=token.offset + len(before)) for token in item.tokens]
        yield self.event({"choices": [self._choice(first, item.text, scores, item.ended)]})

    def last_chunks(self) -> Iterator[bytes]:
        for number, one in enumerate(self.generations):
            if not one.samples:
                yield self.event({"choices": [self._choice(number * self.samples, *self._echo(number), "length")]})
        if self.tells_usage:
            yield self.event({"choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    def event(self, values: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(self._head() | values, ensure_ascii=False).encode() + b"\n\n"

    def usage(self) -> dict[str, int]:
        read, made = (
            sum(values) for values in zip(*((len(g.ids), g.generated) for g in self.generations), strict=True)
        )
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.name}

    def _echo(self, number: int) -> tuple[str, list[Scored]]:
        """The text of a prompt that is read and its tokens, where they are echoed."""
        if number not in self.echoed:
            self.echoed[number] = self._place_prompt(number) if self.echoes else ("", [])
        return self.echoed[number]

    def _place_prompt(self, number: int) -> tuple[str, list[Scored]]:
        text, one = self.prompts[number][1], self.generations[number]
        if self.top is None:
            return text, []
        scores = one.prompt_scores
        tokenizer, ids = self.language.tokenizer, one.ids
        if self.language.start is None:
            scores = [Scored(ids[0], token_text(tokenizer, ids[0], []), None, [], 0), *scores]
        # the text of a token may be its name, so that only the stream knows how many characters stand before it
        placed, stream, at = [], Streamed(tokenizer), 0
        for token in scores:
            placed.append(token._replace(offset=min(at, len(text))))
            at += len(stream.add(token.id))
        return text, placed

    def _choice(self, index: int, text: str, scores: Sequence[Scored], ended: str | None) -> dict[str, Any]:
        logprobs = None
        if self.top is not None:
            logprobs = {
                "tokens": [token.text for token in scores],
                "token_logprobs": [token.logprob for token in scores],
                "top_logprobs": [dict(token.top) if token.logprob is not None else None for token in scores],
                "text_offset": [token.offset for token in scores],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ended}


def shifted(row: Row, by: int) -> list[Scored]:
    return [token._replace(offset=token.offset + by) for token in row.scores]
