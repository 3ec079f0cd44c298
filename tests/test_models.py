"""Models by their kind: each is built from its config, and from the plain values a run keeps of it."""

import dataclasses
import json

import pytest

from regard import models
from regard.config import from_json


@pytest.mark.parametrize("kind", models.KINDS)
def test_kinds(kind):
    config_class, model_class = models.KINDS[kind]
    small = {"kind": kind, "vocabulary": 20, "width": 16, "heads": 2, "inner": 16, "hidden": 16}
    names = {field.name for field in dataclasses.fields(config_class)}
    config = config_class(**{name: value for name, value in small.items() if name in names})
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    back = from_json(models.config_class(plain), plain)
    assert back == config
    model = models.build(back)
    assert isinstance(model, model_class)
    assert model.config == config


def test_an_unknown_kind():
    with pytest.raises(ValueError, match=r"no model is of kind 'mamba'; known: encoder, decoder"):
        models.config_class({"kind": "mamba"})


@pytest.mark.parametrize("config", dict(models.KINDS.values()), ids=lambda config: config.__name__)
def test_a_word_that_no_field_knows(config):
    """A norm of another name would else be taken for the other one, without a word."""
    word = "cell" if config is models.RecurrentConfig else "norm"
    with pytest.raises(ValueError, match=rf"{word} must be '\w+' or '\w+', got 'rms'"):
        config(**{word: "rms"})
