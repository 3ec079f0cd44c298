"""A batch of fixed size, as on a GPU: rows that join and leave its places get the answers that they would get alone."""

from functools import partial

import pytest
import torch
from generators import SHARED, ByHand, alone, generation, small_language, texts

from regard.decoding.captured import WARM, on_a_stream
from regard.models.perceiver import PerceiverARConfig
from regard.serve import fixed as fixed_batch
from regard.serve.fixed import FixedBatch, refusal
from regard.testing.cases import cases

PROMPTS = ("a", SHARED + "x", "b", "", SHARED + "and", "q w e r t y" * 2, SHARED + "!")
TOKENS = (12, 6, 12, 4, 6, 8, 9)
CPU = torch.device("cpu")
GROWING = {"axial", "compressed", "longshort"}  # sizes of their states depend on the number of tokens read


@pytest.fixture(autouse=True)
def some(monkeypatch):
    """Samples of one request join in two parts."""
    monkeypatch.setattr(fixed_batch, "SOME", 2)


class Repeated:
    """What stands for a CUDA graph: it counts how often a step is repeated, over which buffers."""

    def __init__(self):
        self.captured = self.repeated = 0

    def __call__(self, work):
        self.captured += 1

        def repeat():
            self.repeated += 1
            work()

        return repeat


def fixed(language, rows):
    """A generator with a batch of fixed size, advanced by hand, and its graph."""
    engine, graph = ByHand(language, rows=rows), Repeated()
    engine.makes_batch = partial(FixedBatch, language.model, CPU, rows, engine.context, graph)
    engine.batch = engine.makes_batch()
    return engine, graph


# one for each kind of state; all others in make test-all
OFTEN = {"softmax", "local(window=3)", "linear", "recurrent", "xl(segment=4, memory=6)", "axial(width=6)"}


def causal():
    specs = [case.spec for case in cases() if case.role == "causal"]
    return [pytest.param(spec, marks=() if spec in OFTEN else pytest.mark.exhaustive) for spec in specs]


@pytest.mark.parametrize("spec", causal())
def test_rows_that_come_and_go_get_the_answers_of_each_alone(spec):
    language = small_language(attention=spec)
    engine, graph = fixed(language, rows=5)
    why = refusal(language.model, engine.context, 3, CPU)
    # without its summaries, longshort is a window
    assert (why is not None) == (spec.split("(")[0] in GROWING and "rank=0" not in spec), why
    if why is not None:
        return
    asked = [
        generation(language, text, i, tokens=tokens, n=1 + 2 * (i == 3))
        for i, (text, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True))
    ]
    engine.run(asked)
    assert len(engine.finished()) == len(PROMPTS)
    for prompt, one in zip(PROMPTS, asked, strict=True):
        assert texts(one) == alone(language, prompt, one), prompt
    assert (graph.captured, graph.repeated) == (1, engine.counts.steps - WARM)


def test_a_model_without_a_state_of_fixed_size_is_refused():
    language = small_language(PerceiverARConfig, latents=8)
    assert refusal(language.model, 300, 3, CPU) == "PerceiverAR has no state of fixed size"


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", "local(window=8)", "linear"])
def test_on_a_gpu_the_same_graph_serves_any_batch(spec):
    language = small_language(attention=spec)
    language.model.cuda()
    engine = ByHand(language, rows=5)
    assert isinstance(engine.batch, FixedBatch)
    asked = [
        generation(language, text, i, tokens=tokens)
        for i, (text, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True))
    ]
    with on_a_stream(language.device):
        engine.run(asked)
    for prompt, one in zip(PROMPTS, asked, strict=True):
        assert texts(one) == alone(language, prompt, one), prompt
    assert engine.batch.repeat != engine.batch._advance, "it was captured"
    # as much memory as a row of 300 tokens takes is too little for five
    short = ByHand(language, rows=5, state_bytes=engine.footprint.bytes(300))
    assert not isinstance(short.batch, FixedBatch)
