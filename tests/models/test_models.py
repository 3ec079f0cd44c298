"""Models by their kind: each is built from its config, and from the plain values a run keeps of it."""

import dataclasses
import json

import pytest

from regard import models
from regard.config import from_json
from regard.core.options import options
from regard.data.tokenizer import Tokenizer
from regard.spec import fits
from regard.tasks.load import read_parts
from regard.training import checkpoint
from regard.training.run import Run


@pytest.mark.parametrize("kind", models.kinds())
def test_kinds(kind):
    config_class, model_class = models.kinds()[kind]
    small = {"kind": kind, "vocabulary": 20, "width": 48, "heads": 2, "inner": 16, "hidden": 16}
    known = options(config_class)
    config = config_class(
        **{name: value for name, value in small.items() if name in known and fits(value, known[name].type)}
    )
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    back = from_json(models.config_class(plain), plain)
    assert back == config
    model = models.build(back)
    assert isinstance(model, model_class)
    assert model.config == config


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="no model is of kind 'mamba'; known: encoder-decoder, decoder, encoder"):
        models.config_class({"kind": "mamba"})


# fields that take one of a few words
WORDS = [
    (config, word) for config in dict(models.kinds().values()) for word in ("norm", "cell") if word in options(config)
]


@pytest.mark.parametrize(("config", "word"), WORDS, ids=str)
def test_a_word_that_no_field_knows(config, word):
    """A norm of another name would else be taken for the other one, without a word."""
    with pytest.raises(ValueError, match=rf"{word} must be '\w+' or '\w+', got 'rms'"):
        config(**{word: "rms"})


# the kinds of models that read texts
TEXTS = [kind for kind, (config, _) in models.kinds().items() if "vocabulary" in options(config)]
# what a run says that was saved before a choice was there, and what it then was
BEFORE = {
    "funnel": {"places": "vectors"},
    "perceiver": {"query_residual": True},
    "tokenlearner": {"fuse": "end"},
    "feedback": {"normed_memory": False, "shared_position": False},
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_run_of_before_keeps_its_meaning(kind, tmp_path):
    """A default that follows a paper more closely is for new runs."""
    config_class, expected = models.kinds()[kind][0], BEFORE.get(kind, {})
    tokenizer = Tokenizer.train([], 260, "bytes")
    tokenizer.save(tmp_path / "tokenizer.json")
    named = {"tokenizer.json": checkpoint.digest(tmp_path / "tokenizer.json")}
    new = dataclasses.asdict(config_class(kind=kind, vocabulary=tokenizer.size))
    assert {name: new[name] for name in expected} != expected or not expected
    old = {name: value for name, value in new.items() if name not in expected}
    for saved, found in ((old, expected), (new, {name: new[name] for name in expected})):
        (tmp_path / "run.json").write_text(json.dumps({"task": "language", "model": saved, "tokenizers": named}))
        size = read_parts(Run.open(tmp_path)).config
        assert {name: getattr(size, name) for name in expected} == found
        assert dataclasses.asdict(size) == new | found
