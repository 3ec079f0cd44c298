"""Small language models behind a generator that is advanced by hand, without its thread."""

import functools

import torch

from regard import models
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.models.config import ModelConfig
from regard.serve.generating import Generator, GeneratorLimits
from regard.serve.requests import Failed, Finished, Generation
from regard.tasks.language.language_model import LanguageModel

SHARED = "the cat sat on the mat and the dog sat beside it, and then they both slept. "


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train([SHARED], 260, "bytes")


def small_language(config=None, **options) -> LanguageModel:
    """Random weights, a token per byte."""
    torch.manual_seed(0)
    sizes = {"vocabulary": tokenizer().size, "width": 16, "heads": 4, "layers": 2, "inner": 16}
    config = config or functools.partial(ModelConfig, kind="decoder")
    return LanguageModel(models.build(config(**sizes | options)).eval(), tokenizer(), 64, None)


def generation(language, prompt, number=0, tokens=8, n=1, **options) -> Generation:
    """Greedy, or drawn with settings that depend on the number."""
    config = DecodingConfig(beam=1, maximum=tokens or None)
    if number % 3 or n > 1:
        cut = {"top_p": 0.9} if number % 2 else {"temperature": 0.7}
        config = DecodingConfig(sample=True, nbest=n, seed=number, maximum=tokens, **cut)
    return Generation(language.encode(prompt), config, language.tokenizer, tokens=tokens, **options)


class ByHand(Generator):
    """A generator without a thread. What it delivers is in `items`."""

    def __init__(self, language, **limits):
        self.items = []
        super().__init__(language, GeneratorLimits(**{"context": 300} | limits), self.items.extend)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    def run(self, generations=(), every=1, most=500) -> None:
        """Submits a generation `every` so many rounds, and goes on until all are answered."""
        left = list(generations)
        for number in range(most):
            if left and number % every == 0:
                self.submit([left.pop(0)])
            self.advance()
            if self.is_idle and not left:
                return
        raise AssertionError(f"not done after {most} rounds")

    def finished(self) -> list[Generation]:
        return [one for one, item in self.items if isinstance(item, Finished)]

    def failures(self) -> list[tuple[int, str]]:
        return [(item.why.status, item.why.why) for _, item in self.items if isinstance(item, Failed)]


def texts(one: Generation) -> list[str]:
    return sorted(row.listener.text for row in one.samples)


def alone(language, prompt, one: Generation) -> list[str]:
    """What the model answers by itself."""
    return sorted(found.text for found in language.generate(prompt, one.config))
