"""regard swap: the weights of a run under another attention."""

from dataclasses import replace

import pytest
import torch
from reviews import reviews
from torch.testing import assert_close
from verbs import refused, told

from regard import models
from regard.models.config import ModelConfig
from regard.tasks.language import LanguageModel
from regard.tasks.swap import outer_attentions, swap_attention, transfer
from regard.training import checkpoint
from regard.training.run import Run

DECODER = ModelConfig(
    kind="decoder", vocabulary=40, width=24, heads=6, kv_heads=3, inner=32, layers=2, position="rotary"
)
BOTH = ModelConfig(vocabulary=40, width=24, heads=6, inner=32, layers=2, position="buckets", bias=True)


def built(config: ModelConfig, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = models.build(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases begin at zero
    return model


def swapped(config: ModelConfig, **changes: str) -> tuple[torch.nn.Module, torch.nn.Module, list[str]]:
    before, after = built(config, 0), built(replace(config, **changes), 1)
    return before, after, transfer(before, after)


@pytest.mark.parametrize(
    "spec",
    [
        "local(window=64)",
        "longformer(window=64, globals=3)",
        "heads(softmax, local(window=64), longformer(window=64, globals=2))",
        "[softmax, local(window=64)]",
        "sparse(stride=64)",
    ],
)
@torch.no_grad()
def test_wide_windows_compute_the_same(spec):
    before, after, notes = swapped(DECODER, attention=spec)
    ids = torch.randint(40, (2, 33))
    assert_close(after(ids).logits, before(ids).logits)
    assert not notes
    # and back: nothing of the way is seen
    again = built(DECODER, 2)
    transfer(after, again)
    for (name, one), other in zip(before.named_parameters(), again.parameters(), strict=True):
        assert_close(other, one, msg=name)


@torch.no_grad()
def test_encoder_and_decoder_with_biases():
    """Biases of mixed heads are added once, and positions that layers learn are kept."""
    halves = "heads(softmax, softmax)"
    before, after, notes = swapped(BOTH, attention=halves, cross_attention=halves)
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 7))
    # the tables of the halves are those of three heads: they begin anew
    assert notes[0].startswith("begins as in a new model: encoder.blocks.*.attention.parts.0.position")
    bare = replace(BOTH, position="sinusoidal")
    before, after, notes = swapped(bare, attention=halves, cross_attention=halves)
    assert_close(after(source, target).logits, before(source, target).logits)
    assert not notes
    again = built(bare, 2)
    assert not transfer(after, again)
    assert_close(again(source, target).logits, before(source, target).logits)
    before, after, notes = swapped(BOTH, attention="local(window=64)")
    assert_close(after(source, target).logits, before(source, target).logits)
    assert not notes


def test_what_begins_anew_is_said():
    _, after, notes = swapped(DECODER, attention="rfa(features=8)")
    assert notes == ["begins as in a new model: decoder.blocks.*.attention.sigma"]
    fresh = built(replace(DECODER, attention="rfa(features=8)"), 1)
    for name, layer in outer_attentions(after).items():
        assert_close(layer.sigma, outer_attentions(fresh)[name].sigma)
    before = replace(DECODER, attention="longformer(window=4, globals=2)")
    *_, notes = swapped(before, attention="local(window=4)")
    assert len(notes) == 1
    assert notes[0].startswith("not kept: decoder.blocks.*.attention.project.global_q.weight, ")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("softmax", "linear", "cannot take position 'rotary'"),
        ("softmax", "poolingformer", "'poolingformer' has no queries, keys and values of the usual kind"),
        ("scaling", "softmax", "'scaling' of the run has no queries"),
    ],
)
def test_refusals(before, after, words):
    with pytest.raises(ValueError, match=words):
        swapped(replace(DECODER, heads=4, kv_heads=4, attention=before), attention=after)


def check_origin(folder) -> None:
    """A swapped run says what it was made of, has the weights of the checkpoint that was asked for, and new parameters
    are the same each time."""
    run = Run.open(folder / "run")
    assert run.read_json("run.json")["parameters"] == Run.open(folder / "window").read_json("run.json")["parameters"]
    first, _, last = (checkpoint.read(run.checkpoints / name) for name in checkpoint.names(run.checkpoints))
    for name, expected in (("first", first), ("last", last), ("again", last)):
        made = swap_attention(run.folder, folder / name, {"attention": "rfa"}, which=expected.state["step"]).run
        init = made.read_json("run.json")["init"]
        assert init == {"run": str(run.folder), "sha256": checkpoint.listed_digest(expected.path)}
        weights = made.find().tensors["model"]
        assert torch.equal(weights["decoder.embedding.weight"], expected.tensors["model"]["decoder.embedding.weight"])
    again = Run.open(folder / "last").find().tensors["model"]
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_the_verb(tmp_path, capsys, monkeypatch):
    """A run is swapped, measured, and trained further; refusals write nothing."""
    (tmp_path / "text.txt").write_text("\n".join(text for text, _ in reviews()) + "\n")
    run, window = str(tmp_path / "run"), str(tmp_path / "window")
    data = ["--data.text", str(tmp_path / "text.txt"), "--data.length", "16", "--training.tensorboard", "false"]
    short = [*data, "--training.steps", "3", "--training.tokens", "128", "--training.evaluate_every", "1"]
    small = ["--model.width", "16", "--model.heads", "2", "--model.inner", "32", "--model.layers", "2"]
    words = ["--data.tokenizer", "words", "--model.position", "rotary"]
    told(monkeypatch, capsys, "train", "language", *short, *small, *words, "--out", run)
    out, _ = told(monkeypatch, capsys, "swap", run, "--attention", "[local(window=3), softmax]", "--out", window)
    assert out == f"{window}: attention [local(window=3), softmax]; tune it: regard train language --init {window}\n"
    before, after = (LanguageModel.load(folder, device="cpu") for folder in (run, window))
    assert [layer.facts.name for layer in outer_attentions(after.model).values()] == ["local", "softmax"]
    text = ["What a film about a dog and a cat, and so on it goes!\n"]
    assert before.measure(text, length=4).loss == pytest.approx(after.measure(text, length=4).loss, rel=1e-5)
    assert before.measure(text).loss != pytest.approx(after.measure(text).loss, rel=1e-5)
    told(monkeypatch, capsys, "train", "language", *short, "--init", window, "--out", str(tmp_path / "tuned"))
    tuned = LanguageModel.load(tmp_path / "tuned", device="cpu")
    assert [layer.facts.name for layer in outer_attentions(tuned.model).values()] == ["local", "softmax"]
    _, notes = told(
        monkeypatch, capsys, "swap", run, "--attention", "linear", "--position", "none", "--out", f"{run}-b"
    )
    assert "positions were rotary in training, and are now none" in notes
    check_origin(tmp_path)
    nothing = str(tmp_path / "nothing")
    assert "--position" in refused(capsys, "swap", run, "--out", nothing)
    assert "cannot take position 'rotary'" in refused(capsys, "swap", run, "--attention", "linear", "--out", nothing)
    held = refused(capsys, "swap", run, "--attention", "dot", "--out", window)
    assert held.endswith("holds a run already: choose another --out\n")
    told_to = refused(capsys, "train", "language", *short, "--init", run, "--model.attention", "dot", "--out", nothing)
    assert "'regard swap'" in told_to
    assert not (tmp_path / "nothing").exists()
    length = refused(capsys, "evaluate", run, "--length", "0")
    assert "must be at least 1" in length
