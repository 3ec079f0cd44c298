"""Misuse in Python: ids outside the vocabulary, batches that would broadcast, states of others, rows that are not
there. Each is refused in words, at the public boundary, and decoding does not pay for it."""

import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest
import torch

import regard
from regard import models, tasks
from regard.config import is_section
from regard.core.options import config_dataclass
from regard.decoding.base import DecodingConfig
from regard.models import FeedbackConfig, PerceiverARConfig, RecurrentConfig
from regard.models.funnel import FunnelConfig
from regard.models.perceiver import PerceiverConfig
from regard.models.pooling import ClassifierConfig
from regard.models.tokenlearner import TokenLearnerConfig
from regard.serve.limits import Limits
from regard.training.config import TrainingConfig

SMALL = {"vocabulary": 10, "width": 16, "heads": 2, "inner": 16}
KINDS = {
    "encoder": regard.ModelConfig(kind="encoder", layers=1, **SMALL),
    "decoder": regard.ModelConfig(kind="decoder", layers=2, **SMALL),
    "encoder-decoder": regard.ModelConfig(layers=1, **SMALL),
    "recurrent": RecurrentConfig(vocabulary=10, width=16, hidden=16, attention="additive", heads=1),
    "feedback": FeedbackConfig(layers=1, **SMALL),
    "perceiver-ar": PerceiverARConfig(layers=1, latents=4, **SMALL),
    "perceiver": PerceiverConfig(layers=1, latents=4, classes=2, **SMALL),
    "classifier": ClassifierConfig(layers=1, classes=2, **SMALL),
    "funnel": FunnelConfig(layers=(1, 1), classes=2, **SMALL),
    "tokenlearner": TokenLearnerConfig(layers=2, tokens=2, classes=2, **SMALL),
}
BOTH = ("encoder-decoder", "recurrent")
DECODERS = ("decoder", "feedback", "perceiver-ar", *BOTH)


@pytest.fixture(scope="module")
def built():
    torch.manual_seed(0)
    return {kind: models.build(config).eval() for kind, config in KINDS.items()}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda: regard.attention("softmax", width=8, heads=2, causal=True),
            "attention has no argument 'causal': give role=\"causal\"; it takes spec, width, heads, role, kv_heads,",
        ),
        (
            lambda: regard.attention("softmax", width=8, heads=2, is_causal=True),
            "attention has no argument 'is_causal': give role=\"causal\"; it takes spec,",
        ),
        (
            lambda: regard.attention("softmax", width=8, heads=2, cross=True),
            "attention has no argument 'cross': give role=\"cross\"; it takes spec,",
        ),
        (
            lambda: regard.attention("softmax", width=8, num_heads=2),
            "attention has no argument 'num_heads' (did you mean 'heads'?); it takes spec, width, heads,",
        ),
        (
            lambda: regard.attend("softmax", *[torch.ones(1, 1, 2, 4)] * 3, role="causal"),
            "attend has no argument 'role': give causal=True or cross=True; it takes spec, q, k, v, keep, causal,",
        ),
        (
            lambda: regard.feedforward("dense", width=8, hidden=4),
            "feedforward has no argument 'hidden'; it takes spec, width, inner, role",
        ),
        (
            lambda: regard.position("rotary", dim=8),
            "position has no argument 'dim'; it takes spec, width, heads, role",
        ),
        (
            lambda: regard.ModelConfig(vocab=10),
            "ModelConfig has no argument 'vocab' (did you mean 'vocabulary'?); it takes kind, vocabulary,",
        ),
        (
            lambda: dataclasses.replace(regard.ModelConfig(), n_layers=2),
            "ModelConfig has no argument 'n_layers' (did you mean 'layers'?); it takes kind, vocabulary,",
        ),
        (
            lambda: FeedbackConfig(vocab=3),
            "FeedbackConfig has no argument 'vocab' (did you mean 'vocabulary'?); it takes kind, vocabulary,",
        ),
        (
            lambda: DecodingConfig(beams=3),
            "DecodingConfig has no argument 'beams' (did you mean 'beam'?); it takes beam, penalty,",
        ),
        # initials are like nothing else
        (
            lambda: TrainingConfig(lr=0.1),
            "TrainingConfig has no argument 'lr' (did you mean 'learning_rate'?); it takes steps, epochs,",
        ),
        (
            lambda: dataclasses.replace(tasks.find("language").config().model, num_layers=2),
            "LanguageOptions has no argument 'num_layers' (did you mean 'layers'?); it takes preset,",
        ),
        (lambda: regard.attention("softmax"), "attention needs width and heads; it takes spec, width, heads,"),
        (
            lambda: regard.attend("softmax", torch.ones(1, 1, 2, 4), k=torch.ones(1, 1, 2, 4)),
            "attend needs v; it takes spec, q, k, v,",
        ),
    ],
)
def test_unknown_and_missing_keywords(wrong, says):
    """With the known ones, in a TypeError as Python has it."""
    with pytest.raises(TypeError, match=re.escape(says)):
        wrong()


def configs() -> dict[str, type]:
    """Every config that a user can build, by name, with those of its sections."""
    forms = [form.config for model in models.registry.entries().values() for form in model.forms.values()]
    waiting = [DecodingConfig, Limits, *(tasks.find(name).config for name in tasks.names()), *forms]
    found: dict[str, type] = {}
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = cls
        waiting += [hint for hint in get_type_hints(cls).values() if is_section(hint)]
    return dict(sorted(found.items()))


@pytest.mark.parametrize("name", configs())
def test_every_config_refuses_unknown_keywords_in_words(name):
    cls = configs()[name]
    names = ", ".join(field.name for field in dataclasses.fields(cls))
    with pytest.raises(TypeError, match=re.escape(f"{name} has no argument 'qqq'; it takes {names}")):
        cls(qqq=1)
    # as a tool that reads signatures sees it
    assert list(inspect.signature(cls).parameters) == names.split(", ")


def test_a_config_may_need_a_keyword():
    @config_dataclass
    class Sizes:
        width: int
        depth: int = 2

    assert Sizes(3) == Sizes(width=3) == dataclasses.replace(Sizes(1), width=3)
    with pytest.raises(TypeError, match=r"^Sizes needs width; it takes width, depth$"):
        Sizes(depth=4)
    # what Python says of it is plain enough
    with pytest.raises(TypeError, match="multiple values for argument 'width'"):
        Sizes(3, width=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sizes(3).width = 4


@pytest.mark.parametrize("name", ["attention", "attend", "feedforward", "position", "ModelConfig"])
def test_signatures_are_shown_as_they_are_written(name):
    public = getattr(regard, name)
    kinds = {parameter.kind for parameter in inspect.signature(public).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    assert public.__doc__
    assert public.__name__ == name


def ids(*shape):
    return torch.randint(0, 10, shape)


def begun(kind, model, batch=2):
    memory = {"memory": model.encode(ids(batch, 3))} if kind in BOTH else {}
    return model.start(batch, **memory)


@pytest.mark.parametrize("wrong", [10, -1, 2**40])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary(built, kind, wrong):
    tokens = ids(2, 5)
    tokens[1, 3] = wrong
    words = f"token id {wrong} is not in the vocabulary, which has the ids 0 to 9"
    given = [(tokens, ids(2, 4)), (ids(2, 4), tokens)] if kind in BOTH else [(tokens,)]
    for pair in given:
        with pytest.raises(ValueError, match=words):
            built[kind](*pair)
    # what is padding may be anything
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1, 3] = False
    built[kind](tokens, *([ids(2, 4)] if kind in BOTH else []), keep=keep)


@pytest.mark.parametrize("kind", DECODERS)
def test_ids_of_a_step(built, kind):
    with pytest.raises(ValueError, match="token id 11 is not in the vocabulary"):
        built[kind].extend(torch.tensor([[1], [11]]), begun(kind, built[kind]))


@pytest.mark.parametrize(
    "tokens",
    [torch.rand(2, 3), torch.ones(2, 3, dtype=torch.bool), ids(3), ids(1, 2, 3), [[1, 2]], ids(2, 3).to(torch.uint8)],
    ids=["float", "bool", "one dimension", "three", "list", "uint8"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_are_no_ids(built, kind, tokens):
    with pytest.raises(ValueError, match="token ids must be whole numbers"):
        built[kind](tokens, *([ids(2, 4)] if kind in BOTH else []))


@pytest.mark.parametrize("kind", KINDS)
def test_keep_does_not_broadcast(built, kind):
    for keep in (torch.ones(1, 5, dtype=torch.bool), torch.ones(5, dtype=torch.bool), torch.ones(2, 5), [True] * 5):
        with pytest.raises(ValueError, match="keep must be boolean"):
            built[kind](ids(2, 5), *([ids(2, 4)] if kind in BOTH else []), keep=keep)


@pytest.mark.parametrize("kind", BOTH)
def test_sources_do_not_broadcast(built, kind):
    for source, target in ((1, 2), (2, 1), (2, 3)):
        with pytest.raises(ValueError, match="rows"):
            built[kind](ids(source, 5), ids(target, 4))
        with pytest.raises(ValueError, match="rows"):
            built[kind].maps(ids(source, 5), ids(target, 4))
    with pytest.raises(ValueError, match="rows"):
        built[kind].start(3, memory=built[kind].encode(ids(2, 5)))


@pytest.mark.parametrize("kind", DECODERS)
def test_states_do_not_broadcast(built, kind):
    for batch in (1, 3, 4):
        with pytest.raises(ValueError, match=f"tokens have {batch} rows and the state 2"):
            built[kind].extend(ids(batch, 1), begun(kind, built[kind]))


@pytest.mark.parametrize("kind", DECODERS)
def test_states_of_other_models(built, kind):
    for other in DECODERS:
        if other not in (kind, "perceiver-ar" if kind == "decoder" else kind):
            with pytest.raises(ValueError, match=r"state|rows"):
                built[kind].extend(ids(2, 1), begun(other, built[other]))
    for state in (None, (), torch.zeros(2)):
        with pytest.raises(ValueError, match="expected the state of this model"):
            built[kind].extend(ids(2, 1), state)


def test_states_of_models_of_another_mechanism():
    def model(spec):
        return regard.Transformer(regard.ModelConfig(kind="decoder", attention=spec, layers=2, **SMALL))

    kept_alike = (("softmax", "strided(stride=2)"), ("linear", "efficient"), ("local(window=2)", "sparse(stride=2)"))
    pairs = (("softmax", "linear"), ("linear", "local(window=2)"), ("local(window=2)", "softmax"), *kept_alike)
    for one, other in pairs:
        with pytest.raises(ValueError, match=f"not one of attention '{one.split('(')[0]}'"):
            model(one).extend(ids(2, 1), model(other).start(2))


LAYERS = (
    "softmax",
    "additive",
    "linear",
    "local(window=2)",
    "xl(segment=4, memory=4)",
    "heads(softmax, linear)",
    "luna",
)


@pytest.mark.parametrize("role", ["causal", "cross"])
@pytest.mark.parametrize("spec", LAYERS)
def test_states_of_another_mechanism(spec, role):
    sizes = {"width": 8, "heads": 2, "role": role}
    memory = {"memory": torch.randn(2, 3, 8)} if role == "cross" else {}
    layer = regard.attention(spec, **sizes) if role in regard.facts(spec).roles else None
    if layer is None:
        return
    state = layer.start(2, **memory)
    layer.extend(torch.randn(2, 1, 8), state)
    for other in (
        "softmax",
        "bilinear",
        "strided(stride=2)",
        "linear",
        "efficient",
        "local(window=2)",
        "heads(linear, softmax)",
        "reformer",
    ):
        if role not in regard.facts(other).roles:
            continue
        if other == spec:
            continue
        foreign = regard.attention(other, **sizes).start(2, **memory)
        with pytest.raises(ValueError, match=r"not one of attention|expected a state from start"):
            layer.extend(torch.randn(2, 1, 8), foreign)


STATES = [*LAYERS, "reformer", "compressed(factor=2)"]


@pytest.mark.parametrize("spec", STATES)
def test_rows_that_a_state_does_not_have(spec):
    layer = regard.attention(spec, width=8, heads=2, role="causal")
    state = layer.extend(torch.randn(3, 2, 8), layer.start(3))[1]
    own = getattr(state, "select", None)  # some states have a method for it
    for way in (lambda rows: regard.select(state, rows), *([] if own is None else [own])):
        for rows in (torch.tensor([-1]), torch.tensor([0, 3]), torch.tensor([2, -3, 0])):
            with pytest.raises(ValueError, match=r"row (-1|3|-3) is not in the state, which has the rows 0 to 2"):
                way(rows)
        for rows in (-1, [0, 1], torch.tensor(1), torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([True] * 3)):
            with pytest.raises(ValueError, match="rows must be a tensor of row numbers"):
                way(rows)
    assert len(regard.select(state, torch.tensor([2, 0], dtype=torch.int)).progress.length) == 2


@pytest.mark.parametrize("kind", DECODERS)
def test_rows_that_the_state_of_a_model_does_not_have(built, kind):
    state = begun(kind, built[kind])
    for rows in (torch.tensor([-1]), torch.tensor([0, 2])):
        for way in (state.select, state.reorder, lambda rows: regard.select(state, rows)):
            with pytest.raises(ValueError, match="which has the rows 0 to 1"):
                way(rows)


def test_what_is_compiled_asks_nothing(monkeypatch):
    """The checks that look at values are not part of a graph, and a step of a model looks at none on any device."""
    model = regard.Transformer(KINDS["decoder"]).eval()
    state = model.start(2)
    seen = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: seen.append("item"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: seen.append("bool") or True)
    with torch.inference_mode():
        model.extend(ids(2, 1), state)
    assert seen == []
