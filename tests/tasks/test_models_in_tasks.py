"""Every model in every task that it can predict for: trained, killed and resumed to the same bits, and used; and what
makes no sense is refused in words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from painted import painted, write_folders
from PIL import Image
from torch.testing import assert_close
from verbs import refused, told

from regard import tasks
from regard.data.documents import Text
from regard.models import build, registry
from regard.models.perceiver import PerceiverARConfig
from regard.tasks.language import LanguageModel
from regard.training import checkpoint
from regard.training.loss import IGNORED, ignore_all_but_last, next_token_loss

PREDICTS = {tasks.find(name).predicts: name for name in tasks.names()}
PAIRS = [(model, what) for model, entry in registry.entries().items() for what in entry.forms if what in PREDICTS]
FOREIGN = [
    (model, task)
    for model, entry in registry.entries().items()
    for what, task in PREDICTS.items()
    if what not in entry.forms
]
WORDS = ["one", "two", "three", "four", "five", "six"]
LINES = [f"{WORDS[i % 6]} {WORDS[(i + 1) % 6]} {WORDS[i * i % 6]} {i}" for i in range(60)]
SMALL = ["--model.width", "8", "--model.heads", "2", "--model.dropout", "0.1"]
LAYERS = {"swin": "[1, 1]", "funnel": "[1, 1]", "tokenlearner": "2", "gnmt": "2", "deep-att": "2", "moe-lstm": "2"}
OWN = {
    "swin": ["--model.heads", "[2, 2]", "--model.patch", "2", "--model.window", "2"],
    "perceiver-ar": ["--model.latents", "6"],
    "perceiver": ["--model.latents", "4"],
    "lstm": ["--model.hidden", "8"],
    "convs2s": ["--model.hidden", "8"],
    "gru": ["--model.hidden", "8"],
    "vit": ["--model.patch", "6"],
    "coca": ["--model.patch", "6", "--model.text_layers", "1", "--model.decoder_layers", "1", "--model.queries", "2"],
}
# of models whose sizes are those of stages
STAGES = {
    "swin": {"patch": 2, "width": 8, "heads": "[2, 2]", "inner": 8, "layers": "[1, 1]", "dropout": 0.1},
    "coatnet": {"stem_width": 4, "width": 8, "inner": 8, "head_width": 4, "layers": "[1, 1]", "convolutions": 1},
    "convnet": {"width": 4, "layers": "[1, 1]", "dropout": 0.1},
}
BATCH = {"images": ["--data.batch", "8"], "captions": ["--data.batch", "8"]}  # others: in tokens
QUICK = [
    "--training.device",
    "cpu",
    "--training.tensorboard",
    "false",
    "--training.log_every",
    "1",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, list[str]]:
    """Flags of small data for each task."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(line + "\n" for line in LINES))
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.upper()}\n" for line in LINES))
    (folder / "labels.tsv").write_text(
        "".join(f"{line}\t{'odd' if i % 2 else 'even'}\n" for i, line in enumerate(LINES))
    )
    photos = write_folders(folder / "photos", 10)
    names = [path.relative_to(folder) for path in sorted(photos.rglob("*.png"))]
    (folder / "captions.csv").write_text(
        "image,caption\n" + "".join(f"{name},a {name.parent.name}\n" for name in names)
    )
    text = ["--data.text", str(folder / "text.txt"), "--data.tokenizer", "words", "--data.length", "12"]
    labels = ["--data.text", str(folder / "labels.tsv"), "--data.columns", "[0, 1]", "--data.tokenizer", "words"]
    return {
        "translate": ["--data.source", str(folder / "pairs.tsv"), "--data.tokenizer", "units"],
        "language": text,
        "masked": text,
        "classify": [*labels, "--init", "none"],
        "images": ["--data.images", str(photos)],
        "captions": ["--data.captions", str(folder / "captions.csv"), "--data.tokenizer", "words"],
    }


def use(task: str, run: Path, picture: Path) -> list[str]:
    """A verb that uses a run."""
    return {
        "translate": ["translate", str(run), "--beam", "2", "--maximum", "4"],
        "language": ["generate", str(run), "one two", "--maximum", "6", "--seed", "1"],
        "masked": ["fill", str(run), "one [mask] three", "--json"],
        "classify": ["classify", str(run), "--json"],
        "images": ["classify", str(run), str(picture), "--json"],
        "captions": ["caption", str(run), str(picture), "--maximum", "4"],
    }[task]


@pytest.mark.parametrize(("model", "what"), PAIRS, ids=lambda part: part.replace(" ", "-"))
def test_a_model_in_a_task(model, what, data, tmp_path, monkeypatch, capsys):
    task, whole, cut = PREDICTS[what], tmp_path / "whole", tmp_path / "cut"
    sizes = [*SMALL[: 2 if model == "bytenet" else None], "--model.layers", LAYERS.get(model, "1"), *OWN.get(model, [])]
    if model in STAGES:
        sizes = [word for name, value in STAGES[model].items() for word in (f"--model.{name}", str(value))]
    batch = BATCH.get(task, ["--training.tokens", "64"])
    train = ["train", task, *data[task], "--model.preset", model, *sizes, *QUICK, *batch, "--training.keep", "9"]
    told(monkeypatch, capsys, *train, "--training.steps", "4", "--training.save_every", "2", "--out", str(whole))
    facts = json.loads((whole / "run.json").read_text())
    assert registry.entries()[model].forms[what].config.__name__ == type(build_config(facts)).__name__
    # as killed behind the checkpoint of step 2
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000004")
    told(monkeypatch, capsys, "resume", str(cut))
    ends = [checkpoint.read(run / "checkpoints" / "step-00000004").tensors["model"] for run in (whole, cut)]
    assert ends[0].keys() == ends[1].keys()
    for name, part in ends[0].items():
        assert_close(part, ends[1][name], rtol=0, atol=0)
    picture = tmp_path / "red.png"
    Image.fromarray(painted("red", 0)).save(picture)
    out, _ = told(monkeypatch, capsys, *use(task, whole, picture), stdin=b"one two three .\n")
    assert out.strip()
    out, _ = told(monkeypatch, capsys, "evaluate", str(whole), "--json")
    assert json.loads(out)["loss"] > 0


def build_config(facts: dict):
    from regard.config import from_json
    from regard.models import complete_config, config_class

    return from_json(config_class(facts["model"]), complete_config(facts["model"]))


@pytest.mark.parametrize(("model", "task"), FOREIGN, ids=str)
def test_what_makes_no_sense_is_refused(model, task, data, tmp_path, capsys):
    said = refused(capsys, "train", task, *data[task], "--model.preset", model, "--out", str(tmp_path / "none"))
    assert f"model.preset {model!r} cannot be used here: {model} predicts" in said
    assert f"that predict {tasks.find(task).predicts}; choose one of" in said
    assert not (tmp_path / "none").exists()


def test_a_model_by_its_name_is_the_first_of_its_presets():
    for what, task in PREDICTS.items():
        options = type(tasks.find(task).config().model)
        name = {"image class": "vit", "caption": "coca"}.get(what, "transformer")
        first = next(iter(registry.find(name).forms[what].presets))
        sizes = {"classes": 2} if what == "image class" else {"vocabulary": 20}
        sizes |= {"classes": 2} if what == "class" else {}
        assert options(preset=name).resolve(**sizes) == options(preset=first).resolve(**sizes)


def test_perceiver_ar_learns_only_what_it_predicts():
    """At the prefix its logits are zeros: they count neither in training nor in a measure."""
    torch.manual_seed(0)
    sizes = {"vocabulary": 20, "width": 8, "heads": 2, "inner": 16, "layers": 1, "latents": 4, "dropout": 0.0}
    model = build(PerceiverARConfig(**sizes)).double()
    tokens, target = torch.randint(20, (2, 2, 9))
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    for real, counts in ((None, 8), (keep, 8)):
        found = next_token_loss(model, Text(tokens, target, real, torch.arange(2)))
        logits = model(tokens, keep=real).logits.log_softmax(-1)
        asked = ignore_all_but_last(target, real, 4)
        asked = asked if real is None else torch.where(real, asked, IGNORED)
        assert int(found.tokens) == int((asked != IGNORED).sum()) == counts
        expected = -sum(logits[b, t, asked[b, t]] for b, t in (asked != IGNORED).nonzero().tolist())
        assert_close(found.plain, expected)


def test_perceiver_ar_is_measured_on_every_token(data, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    flags = [*SMALL, "--model.layers", "1", "--model.latents", "6", *QUICK, "--training.steps", "1", "--out", str(run)]
    told(monkeypatch, capsys, "train", "language", *data["language"], "--model.preset", "perceiver-ar", *flags)
    language = LanguageModel.load(run, device="cpu")
    documents = ["one two three four five six one two three four five six\n" * 3]
    plain, strided = language.measure(documents), language.measure(documents, stride=3)
    assert plain.tokens == strided.tokens == len(language.tokenizer.encode_text(documents[0])) + 1
    with pytest.raises(ValueError, match="at most the 6 latents of the model, got 7"):
        language.measure(documents, stride=7)
    # a text no longer than the latents is read as it is generated
    ((logp, count),) = language.likelihoods([("one", " two three")])
    ids = torch.tensor([language.encode("one two three")])
    expected = language.model(ids[:, :-1]).logits.log_softmax(-1)[0, -2:].gather(1, ids[0, -2:, None]).sum()
    assert (count, logp) == (2, pytest.approx(float(expected), abs=1e-5))
