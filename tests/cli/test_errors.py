"""Bad input: a ValueError that says what is wrong, what came, what was expected and what to do."""

import contextlib
import itertools
import re

import pytest
import torch

import regard
from regard import cli
from regard.core.state import same_form, state_form
from regard.spec import ATTENTION

BUILD = [
    (dict(width=10, heads=4), ["width 10", "heads 4", "head_width"]),
    (dict(width=16, heads=0), ["heads", "at least 1", "0"]),
    (dict(width=16.0, heads=4), ["width", "16.0"]),
    (dict(width=16, heads=4, kv_heads=3), ["heads 4", "kv_heads 3"]),
    (dict(width=16, heads=4, role="decoder"), ["'self', 'causal' or 'cross'", "'decoder'"]),
    (dict(width=16, heads=4, memory_width=8), ["memory_width", "'cross'"]),
    (dict(width=16, heads=4, position="rotory"), ["unknown position 'rotory'", "did you mean 'rotary'"]),
]


@pytest.mark.parametrize(("sizes", "words"), BUILD, ids=str)
def test_sizes(sizes, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        regard.attention("softmax", **sizes)
    for word in words:
        assert word in str(error.value)


SPECS = [
    ("sofmax", ["unknown attention 'sofmax'", "did you mean 'softmax'", "longformer"]),
    ("local(windw=3)", ["'local' has no option 'windw'", "did you mean 'window'", "it takes"]),
    ("local(window='wide')", ["'window' of 'local'", "whole number", "'wide'"]),
    ("local(window=True)", ["'window'", "whole number", "True"]),
    ("local(window=-1)", ["window", "-1"]),
    ("local(window=3, window=4)", ["window"]),
    ("local(window=open('x'))", ["plain value", "open"]),
    ("local(window=abc)", ["'window' of 'local' must be a whole number", "got abc, such as local(window=256)"]),
    ("heads(local(window=abc), softmax)", ["'window' of 'local' must be a whole number", "got abc"]),
    ("sparse(pattern=fixed)", ["'strided' or 'fixed', got fixed: write it in quotes, sparse(pattern='fixed')"]),
    ("local(windw=abc)", ["plain value", "'abc'"]),
    ("local(**{})", ["**"]),
    ("local(softmax)", ["'local'", "by name only", "'softmax'"]),
    ("sparse(pattern='diagonal')", ["'strided' or 'fixed'", "'diagonal'"]),
    ("softmax; import os", ["cannot read the spec"]),
    ("__import__('os').system('true')", ["cannot read the spec"]),
    ("os.system", ["cannot read the spec"]),
    ("(" * 500, ["cannot read the spec"]),
    ("", ["cannot read the spec"]),
    ("heads(softmax, softmax, softmax)", ["4 heads", "3 parts", "multiple of 3"]),
    ("heads()", ["needs the specs"]),
    ("heads(softmax, nonsense)", ["unknown attention 'nonsense'"]),
    ("heads(local(windows=3), softmax)", ["no option 'windows'"]),
]


@pytest.mark.parametrize(("spec", "words"), SPECS, ids=[spec[:40] for spec, _ in SPECS])
def test_specs(spec, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        regard.attention(spec, width=16, heads=4)
    for word in words:
        assert word in str(error.value)


def test_a_spec_is_a_string():
    with pytest.raises(ValueError, match="a spec is a string"):
        regard.attention(3, width=16, heads=4)


def test_lists_repeat_over_layers():
    names = [spec.name for spec in regard.over_layers(["local(window=4)", "softmax"], 5)]
    assert names == ["local", "softmax", "local", "softmax", "local"]
    assert regard.over_layers("[local(window=4), softmax]", 2) == regard.over_layers(["local(window=4)", "softmax"], 2)
    assert len(regard.over_layers("softmax", 3)) == 3
    # as YAML cuts "[longformer(window=4, globals=1), softmax]"
    cut = regard.over_layers(["longformer(window=4", "globals=1)", "softmax"], 2)
    assert cut == regard.over_layers(["longformer(window=4, globals=1)", "softmax"], 2)
    with pytest.raises(ValueError, match="3 specs for 2 layers"):
        regard.over_layers(["softmax"] * 3, 2)
    with pytest.raises(ValueError, match="empty"):
        regard.over_layers([], 2)
    with pytest.raises(ValueError, match="cannot read the list"):
        regard.over_layers("[softmax", 2)


def test_a_spec_prints_as_it_is_written():
    text = "heads(local(window=64), strided(stride=8), sparse(pattern='fixed', stride=4))"
    assert str(regard.spec.parse(text)) == text


@pytest.fixture
def x():
    return torch.zeros(2, 5, 16)


INPUTS = [
    (dict(keep=torch.ones(2, 4, dtype=torch.bool)), ["keep must be [2, 5]", "[2, 4]"]),
    (dict(keep=torch.ones(2, 5)), ["keep must be boolean", "torch.float32", "keep != 0"]),
    (dict(keep=[[True] * 5] * 2), ["keep must be boolean", "list"]),
    (dict(memory=torch.zeros(2, 5, 16)), ["memory", "role 'self'", "role='cross'"]),
]


@pytest.mark.parametrize(("given", "words"), INPUTS, ids=[words[0] for _, words in INPUTS])
def test_inputs(x, given, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        regard.attention("softmax", width=16, heads=4)(x, **given)
    for word in words:
        assert word in str(error.value)


def test_tokens(x):
    layer = regard.attention("softmax", width=16, heads=4)
    for bad, words in [
        (x.long(), "embed token ids"),
        (x[0], r"\[batch >= 1, tokens >= 1, 16\], got \[5, 16\]"),
        (x[..., :8], r"got \[2, 5, 8\]"),
        (x[:, :0], "tokens >= 1"),
        (x.double(), "torch.float64 and the layer torch.float32"),
        ([1.0], "got list"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer(bad)


def test_no_cross_attention_at_all(x):
    with pytest.raises(ValueError, match="It has no cross-attention"):
        regard.attention("local(window=2)", width=16, heads=4)(x, memory=x)
    with pytest.raises(ValueError, match="'local' cannot take role 'cross'"):
        regard.attention("local(window=2)", width=16, heads=4, role="cross")


def test_memory(x):
    layer = regard.attention("softmax", width=16, heads=4, role="cross", memory_width=8)
    with pytest.raises(ValueError, match="needs memory"):
        layer(x)
    with pytest.raises(ValueError, match=r"memory must be \[batch >= 1, tokens >= 1, 8\]"):
        layer(x, memory=x)
    with pytest.raises(ValueError, match="memory has 3 rows, expected 2"):
        layer(x, memory=torch.zeros(3, 4, 8))
    with pytest.raises(ValueError, match=r"memory_keep must be \[2, 4\]"):
        layer(x, memory=torch.zeros(2, 4, 8), memory_keep=torch.ones(2, 5, dtype=torch.bool))


def test_beyond_linformers_length():
    layer = regard.attention("linformer(rank=4, longest=8)", width=16, heads=4)
    layer(torch.zeros(1, 8, 16))
    with pytest.raises(ValueError, match="9") as error:
        layer(torch.zeros(1, 9, 16))
    assert "longest" in str(error.value)
    assert "8" in str(error.value)
    with pytest.raises(ValueError, match="'linformer' cannot take role 'causal'"):
        regard.attention("linformer(rank=4, longest=8)", width=16, heads=4, role="causal")


def test_states(x):
    layer = regard.attention("softmax", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="x has 2 rows and the state 3"):
        layer.extend(x, layer.start(3))
    with pytest.raises(ValueError, match="memory"):
        layer.start(2, memory=x)
    with pytest.raises(ValueError, match="role='causal' to decode"):
        regard.attention("softmax", width=16, heads=4).start(2)
    cross = regard.attention("softmax", width=16, heads=4, role="cross")
    with pytest.raises(ValueError, match="x has 2 rows and the state 3"):
        cross.extend(x, cross.start(3, memory=torch.zeros(3, 4, 16)))


def test_states_of_another_kind(x):
    layer = regard.attention("softmax", width=16, heads=4, role="causal")
    cross = regard.attention("softmax", width=16, heads=4, role="cross")
    for bad in (None, cross.start(2, memory=x), 3):
        with pytest.raises(ValueError, match="expected a state from start"):
            layer.extend(x, bad)
    with pytest.raises(ValueError, match="x has 2 rows and the state 3"):
        layer.weights(x, state=layer.start(3))
    with pytest.raises(ValueError, match="holds the memory already"):
        cross.weights(x, state=cross.start(2, memory=x), memory=x)
    for batch, capacity in ((0, None), (-1, None), ("2", None), (2, -1)):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            layer.start(batch, capacity=capacity)
    with pytest.raises(ValueError, match="memory"):
        layer.start(2, memory_keep=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"bias must be True, False, 'inputs' .* or 'output'"):
        regard.attention("softmax", width=16, heads=4, bias="no")
    with pytest.raises(ValueError, match="batch >= 1"):
        layer(x[:0])


@pytest.mark.parametrize("role", ["causal", "cross"])
def test_states_of_any_other_mechanism(x, role):
    """No two mechanisms have states of one form, whatever they keep: every pair of them is refused."""
    forms = {}
    for name in ATTENTION.names():
        with contextlib.suppress(ValueError):  # it does not take the role
            layer = regard.attention(ATTENTION.find(name).examples[0], width=16, heads=4, role=role)
            forms[name] = state_form(layer.start(2, memory=x if role == "cross" else None))
    assert len(forms) > 15
    same = [(a, b) for a, b in itertools.permutations(forms, 2) if same_form(forms[a], forms[b])]
    assert same == []


def test_attend(x):
    q = torch.zeros(2, 4, 5, 4)
    for given, words in [
        ((q[0], q, q), "q must be"),
        ((q, q[..., :2], q), "got q"),
        ((q, q.double(), q), "one floating-point dtype"),
        ((q, q[:, :3], q[:, :3]), "G dividing H"),
    ]:
        with pytest.raises(ValueError, match=words):
            regard.attend("softmax", *given)
    with pytest.raises(ValueError, match="at most as many queries as keys"):
        regard.attend("softmax", q, q[:, :, :3], q[:, :, :3], causal=True)
    for keep in (torch.ones(2, 5), [[True] * 5] * 2):
        with pytest.raises(ValueError, match="keep must be boolean"):
            regard.attend("softmax", q, q, q, keep=keep)
    with pytest.raises(ValueError, match="k is empty"):
        regard.attend("softmax", q, q[:, :0], q[:, :0])
    with pytest.raises(ValueError, match=r"parameters of its own.*regard\.attention"):
        regard.attend("additive", q, q, q)
    with pytest.raises(ValueError, match="unknown kind"):
        regard.names("colour")


def test_errors_of_train_begin_with_the_verb(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "language", "--data.text", str(tmp_path / "nowhere")])
    assert capsys.readouterr().err.startswith("regard train: ")
