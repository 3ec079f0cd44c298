"""Models that name hidden tokens: what is hidden and how often, whole words, the loss, training, filling gaps."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from training_runs import assert_same, dying, in_child
from verbs import refused, told

from regard.data.batches import drawing
from regard.data.documents import IGNORED
from regard.data.masking import MaskedBatches, Masking, Texts, word_edges
from regard.data.tokenizer import BOS, EOS, PAD, SPECIAL, Tokenizer
from regard.models import build
from regard.models.config import ModelConfig
from regard.models.registry import BERT, presets
from regard.models.transformer import Transformer
from regard.tasks.masked import MaskedConfig, MaskedData, MaskedModel, MaskedOptions
from regard.tasks.masked.task import Task
from regard.tasks.train import resume, train
from regard.training import loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.loss import masked_token_loss

LINES = [f"the {colour} {animal} eats {food} ." for colour, animal, food in [
    ("black", "cat", "fish"), ("brown", "dog", "meat"), ("grey", "mouse", "cheese"), ("white", "rabbit", "carrots")
]] * 12  # fmt: skip
TOKENIZER = Tokenizer.train(LINES, 400, "words")


def config(folder: Path, name: str = "run", *, data: dict | None = None, model: dict | None = None, **training):
    file = folder / "lines.txt"
    if not file.exists():
        file.write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    wishes = {"text": str(file), "documents": "line", "apart": True, "tokenizer": "words", "length": 16}
    sizes = {"width": 16, "heads": 2, "inner": 32, "layers": 1, "dropout": 0.1, "norm": "pre"}
    small = {"steps": 12, "tokens": 100, "evaluate_every": 5, "save_every": 3, "log_every": 1, "warmup": 4}
    kept = {"keep": 3, "tensorboard": False, "label_smoothing": 0.0, "metric": "loss", "schedule": "cosine"}
    return MaskedConfig(
        out=str(folder / name),
        data=MaskedData(**wishes | (data or {})),
        model=MaskedOptions(**sizes | (model or {})),
        training=TrainingConfig(**small | kept | training),
    )


def finish(settings: MaskedConfig) -> loop.State:
    return train(Task, settings, Display(quiet=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """One that knows which animal eats what."""
    torch.set_num_threads(1)
    settings = config(
        tmp_path_factory.mktemp("masked"),
        model={"dropout": 0.0, "width": 32},
        data={"masked": 0.3},
        steps=250,
        tokens=400,
        evaluate_every=250,
        save_every=None,
        learning_rate=0.01,
    )
    finish(settings)
    return settings.out


def rows(count: int, length: int, tokenizer: Tokenizer = TOKENIZER) -> tuple[np.ndarray, np.ndarray]:
    """Random ids between bos and eos, the last rows shorter and padded."""
    draw = np.random.default_rng(0)
    ids = draw.integers(len(SPECIAL), tokenizer.size, (count, length))
    lengths = np.where(np.arange(count) < count // 2, length, draw.integers(2, length, count))
    ids[:, 0] = BOS
    ids[np.arange(count), lengths - 1] = EOS
    real = np.arange(length) < lengths[:, None]
    return np.where(real, ids, PAD), real


# what is hidden


def test_shares_are_those_of_the_paper():
    ids, real = rows(400, 60)
    changed, places, targets = Masking(TOKENIZER, 0.15)(ids, real, np.random.default_rng(1))
    asked = targets != IGNORED
    free = real & (ids >= len(SPECIAL))
    assert asked.sum() / free.sum() == pytest.approx(0.15, abs=0.005)
    now = np.take_along_axis(changed, places, 1)[asked]
    before = targets[asked]
    assert (now == PAD).mean() == pytest.approx(0.8, abs=0.02)
    # of the tokens drawn at random a few are what was there
    assert (now == before).mean() == pytest.approx(0.1 + 0.1 / len(Masking(TOKENIZER).others), abs=0.02)
    drawn = now[(now != PAD) & (now != before)]
    assert len(set(drawn)) == TOKENIZER.size - len(SPECIAL)
    assert drawn.min() >= len(SPECIAL)


def test_nothing_else_changes_and_targets_are_what_stood_there():
    ids, real = rows(50, 30)
    changed, places, targets = Masking(TOKENIZER, 0.4)(ids, real, np.random.default_rng(1))
    for row in range(len(ids)):
        asked = targets[row] != IGNORED
        chosen = places[row][asked]
        assert len(set(chosen)) == len(chosen)
        assert (ids[row][chosen] == targets[row][asked]).all()
        assert real[row][chosen].all()
        assert (ids[row][chosen] >= len(SPECIAL)).all()
        rest = np.setdiff1d(np.arange(ids.shape[1]), chosen)
        assert (changed[row][rest] == ids[row][rest]).all()


def test_short_rows_are_hidden_as_often_as_long_ones():
    ids = np.full((4000, 3), 7)
    ids[:, 0], ids[:, 2] = BOS, EOS
    _, _, targets = Masking(TOKENIZER, 0.15)(ids, np.ones_like(ids, bool), np.random.default_rng(0))
    assert (targets != IGNORED).mean() * targets.shape[1] == pytest.approx(0.15, abs=0.02)


def test_a_shape_has_always_as_many_places():
    masking = Masking(TOKENIZER, 0.15)
    for length in (1, 2, 7, 8, 33):
        ids, real = np.full((5, length), 7), np.ones((5, length), bool)
        shapes = {masking(ids, real, np.random.default_rng(seed))[1].shape for seed in range(20)}
        assert len(shapes) == 1


BPE = Tokenizer.train(["the unbelievable carrots", "the carrots"] * 5, 270, "bpe")
KINDS = {
    "bpe": (BPE, "the unbelievable carrots"),
    "characters": (Tokenizer.train(["a bc, def"], 99, "characters"), "a bc, def a"),
    "bytes": (Tokenizer.train([], 300, "bytes"), "a bc, déf"),
    "units": (Tokenizer.train(["un@@ told t@@ a@@ les of"], 99, "units"), "un@@ told t@@ a@@ les of"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whole_words_are_chosen_whole(kind):
    tokenizer, text = KINDS[kind]
    ids, numbers = tokenizer.words(text)
    # blanks belong to the word before them here, and to the one behind them there: only ink is compared
    ink = [name.strip("▁") != "" for name in tokenizer.tokens(ids)]
    table = np.array([tokenizer.framed(ids)] * 200)
    _, places, targets = Masking(tokenizer, 0.5, whole_words=True)(table, table >= 0, np.random.default_rng(0))
    assert (targets != IGNORED).sum() > 200
    for row in range(len(table)):
        chosen = set(places[row][targets[row] != IGNORED] - 1)
        hit = {numbers[place] for place in chosen if ink[place]}
        assert {place for place in range(len(ids)) if ink[place] and numbers[place] in hit} <= chosen
    single = Masking(tokenizer, 0.5)(table, table >= 0, np.random.default_rng(0))
    split = 0
    for row in range(len(table)):
        chosen = set(single[1][row][single[2][row] != IGNORED] - 1)
        hit = {numbers[place] for place in chosen if ink[place]}
        split += not {place for place in range(len(ids)) if ink[place] and numbers[place] in hit} <= chosen
    assert split > 100  # without, words are split


def test_edges_of_words():
    opens, closes = word_edges(BPE)
    names = BPE.tokens(range(BPE.size))
    assert all(
        opens[id] == name.startswith("▁")
        for id, name in enumerate(names)
        if id >= len(SPECIAL) and name != "\\n" and name != "\\t"
    )
    assert not closes[len(SPECIAL) :].any()


def test_hidden_tokens_are_a_function_of_seed_epoch_and_batch():
    texts = [TOKENIZER.framed(TOKENIZER.encode(line)) for line in LINES]

    def made(seed: int = 1, anew: bool = True) -> MaskedBatches:
        return MaskedBatches(Texts(texts, length=16, tokens=60, seed=seed), Masking(TOKENIZER, 0.3), anew=anew)

    first, second = made(), made()
    wanted = first.get(1, 2)
    np.random.seed(3)
    torch.manual_seed(3)
    second.get(0, 0)
    assert_close(second.get(1, 2), wanted, rtol=0, atol=0)
    other = made(seed=2)
    assert any(not torch.equal(first.get(0, i).targets, other.get(0, i).targets) for i in range(3))
    fixed = MaskedBatches(Texts(texts, length=16, tokens=60, shuffle=False), Masking(TOKENIZER, 0.3), anew=False)
    assert_close(fixed.get(0, 1), fixed.get(7, 1), rtol=0, atol=0)
    moving = MaskedBatches(Texts(texts, length=16, tokens=60, shuffle=False), Masking(TOKENIZER, 0.3))
    assert not torch.equal(moving.get(0, 1).targets, moving.get(1, 1).targets)
    assert drawing(1, 2, 3).random() != drawing(1, 3, 2).random()


# the loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_cross_entropy_at_the_hidden_places(smoothing):
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocabulary=TOKENIZER.size,
            **presets("hidden tokens")["bert-tiny"].values
            | {"width": 16, "heads": 2, "inner": 24, "layers": 2, "dropout": 0.0},
        )
    )
    texts = [TOKENIZER.framed(TOKENIZER.encode(line)[:size]) for line, size in zip(LINES, range(2, 14), strict=False)]
    batch = MaskedBatches(Texts(texts, length=16, tokens=400), Masking(TOKENIZER, 0.4)).get(0, 0)
    found = masked_token_loss(model, batch, smoothing)
    logits = model(batch.tokens, keep=batch.keep).logits
    total, count = 0.0, 0
    for row in range(len(batch.tokens)):
        for place, target in zip(batch.places[row], batch.targets[row], strict=True):
            if target != IGNORED:
                total = total + F.cross_entropy(logits[row, place], target, label_smoothing=smoothing)
                count += 1
    assert count > 10
    assert int(found.tokens) == count
    assert_close(found.total, total)
    ours, theirs = (
        torch.autograd.grad(part, list(model.parameters()), retain_graph=True, allow_unused=True)
        for part in (found.total, total)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)


# runs


def test_it_learns_what_goes_with_what(run):
    masked = MaskedModel.load(run, device="cpu")
    found = masked.fill("the brown [mask] eats [mask] .", top=3)
    assert found.text == "the brown dog eats meat ."
    assert [gap[0].text for gap in found.gaps] == ["dog", "meat"]
    for gap in found.gaps:
        assert len(gap) == 3
        assert sum(one.probability for one in gap) <= 1 + 1e-5
        assert sorted((one.probability for one in gap), reverse=True) == [one.probability for one in gap]
    assert not {one.id for gap in masked.fill("the [mask] cat", top=1000).gaps for one in gap} & set(
        range(len(SPECIAL))
    )


def test_gaps_are_filled_in_sight_of_each_other_the_surest_first(run, monkeypatch):
    masked = MaskedModel.load(run, device="cpu")
    cat, dog, fish, meat = (masked.tokenizer.encode(word)[0] for word in ("cat", "dog", "fish", "meat"))

    def chances(row, places):
        """Of two open gaps the second is surer of meat; the first is a cat, but a dog beside meat."""
        found = torch.zeros(len(places), masked.tokenizer.size)
        for number, place in enumerate(places):
            first = place == 1
            best = (dog if meat in row else cat) if first else (meat if len(places) > 1 else fish)
            found[number, best] = 0.5 if first else 0.9
        return found

    monkeypatch.setattr(masked, "_chances", chances)
    found = masked.fill("[mask] eats [mask]", top=1)
    assert found.text == "dog eats meat"
    assert [gap[0].id for gap in found.gaps] == [cat, meat]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("bpe", "the [mask] carrots", ["▁", "t", "h", "e", None, "▁", "c"]),
        ("bpe", "[mask] carrots", [None, "▁", "c"]),
        ("bpe", "the un[mask].", ["▁", "t", "h", "e", "▁", "u", "n", None, "."]),
        ("characters", "the [mask] c", ["t", "h", "e", "▁", None, "▁", "c"]),
        ("words", "the [mask] carrots.", ["the", None, "carrots."]),
    ],
)
def test_what_stands_around_a_gap(kind, text, expected):
    tokenizer = Tokenizer.train(["the carrots. un carrots."], 260, kind)
    ids = tokenizer.encode_around(text.split("[mask]"))
    names = [None if id == tokenizer.mask else name for id, name in zip(ids, tokenizer.tokens(ids), strict=True)]
    assert names[: len(expected)] == expected


@pytest.mark.parametrize("apart", [True, False])
def test_R1_killed_runs_go_on_bit_for_bit(tmp_path, apart):
    torch.set_num_threads(1)
    whole, other = (config(tmp_path, name, data={"apart": apart, "whole_words": True}) for name in ("whole", "other"))
    finish(whole)
    assert in_child(lambda: (dying(loop.Loop, "_update", 8), finish(other))) < 0
    resume(other.out, Display(quiet=True))
    assert_same(whole.out, other.out)


def test_training_goes_on_from_another_run(run, tmp_path):
    settings = config(tmp_path, model=dict.fromkeys(("width", "heads", "inner", "layers", "norm")) | {"dropout": 0.2})
    settings = dataclasses.replace(settings, init=run)
    data = Task.read_data(settings)
    tokenizers = Task.train_tokenizers(data, settings)
    model = Task.build_model(settings, Task.model_config(settings, tokenizers, data)).eval()
    before = MaskedModel.load(run, device="cpu")
    ids = torch.tensor([tokenizers["tokenizer.json"].framed(tokenizers["tokenizer.json"].encode(LINES[0]))])
    assert_close(model(ids).logits, before.model(ids).logits)
    assert model.config.dropout == 0.2
    finish(settings)
    wrong = dataclasses.replace(settings, model=MaskedOptions(width=8))
    with pytest.raises(ValueError, match=r"^model\.width cannot change with --init: .* only dropout can"):
        Task.model_config(wrong, tokenizers, data)


@pytest.mark.parametrize("preset", BERT)
def test_presets_have_the_sizes_of_bert(preset):
    """Parameters of BERT (Turc et al. 2019 for the small ones) with 30,522 tokens and 512 positions, segments and
    pooler apart."""
    counts = {"bert-tiny": 4.4, "bert-mini": 11.2, "bert-small": 28.8, "bert": 109.5, "bert-large": 335.1}
    size = ModelConfig(
        vocabulary=30522, **presets("hidden tokens")[preset].values | {"position": "learned(longest=512)"}
    )
    with torch.device("meta"):
        model = build(size)
    ours = sum(part.numel() for part in model.parameters())
    assert ours / 1e6 == pytest.approx(counts[preset], rel=0.02)


# verbs


def test_a_document_alone_has_no_end_of_its_last_line():
    tokenizer = Tokenizer.train(["the dog\neats\n"], 99, "characters")
    model = Transformer(ModelConfig(kind="encoder", vocabulary=tokenizer.size, width=8, heads=1, inner=8, layers=1))
    framed = MaskedModel(model, tokenizer, 64, True).frames(["the dog\neats\n"])[0]
    assert framed == tokenizer.framed(tokenizer.encode("the dog\neats"))


def test_what_is_shown_of_a_run_is_one_line_each():
    text = "the dog\neats meat\n" * 9
    tokenizer = Tokenizer.train([text], 99, "characters")
    sizes = {"width": 16, "heads": 2, "inner": 16, "layers": 1}
    model = Transformer(ModelConfig(kind="encoder", vocabulary=tokenizer.size, **sizes)).eval()
    shown = MaskedModel(model, tokenizer, 64, False).samples([text], Masking(tokenizer))
    assert shown
    for sample in shown:
        assert not any("\n" in value for value in sample.values())


def test_fill_prints_candidates_and_text(run, monkeypatch, capsys):
    out, _ = told(monkeypatch, capsys, "fill", run, "the grey [mask] eats cheese .", "--top", "2")
    lines = out.splitlines()
    assert lines[0] == "[mask]"
    assert lines[1].split()[1] == "mouse"
    assert lines[-1] == "the grey mouse eats cheese ."
    assert len(lines) == 4
    out, _ = told(monkeypatch, capsys, "fill", run, "the grey ___ eats cheese .", "--mark", "___", "--json")
    assert json.loads(out)["gaps"][0][0]["text"] == "mouse"


def test_fill_gives_as_many_lines_as_come(run, monkeypatch, capsys):
    lines = [
        b"the grey [mask] eats cheese .",
        b"",
        b"no gap",
        b"\xff [mask] \x07",
        b"[mask] " * 300,
        "dog\u2028 [mask]".encode(),
        b"<pad> </s> [mask]",
    ]
    for flags in ((), ("--json",)):
        out, err = told(monkeypatch, capsys, "fill", run, *flags, stdin=b"\n".join(lines) + b"\n")
        assert len(out.split("\n")) == len(lines) + 1
        assert "line 5: the text has" in err
        assert "not UTF-8" in err
    assert json.loads(out.split("\n")[4])["text"] == ("[mask] " * 300)


def test_evaluate(run, monkeypatch, capsys, tmp_path):
    out, _ = told(monkeypatch, capsys, "evaluate", run, "--json")
    found = json.loads(out)
    assert found["accuracy"] > 60
    assert found == json.loads(told(monkeypatch, capsys, "evaluate", run, "--json")[0])
    text = tmp_path / "text.txt"
    text.write_text("the brown dog eats meat .\n" * 30)
    out, _ = told(monkeypatch, capsys, "evaluate", run, "--text", str(text))
    assert "30 documents" in out
    assert "accuracy" in out


def test_B1_what_cannot_be_is_said_in_one_line(run, tmp_path, capsys):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\n\xff\n")
    assert f"{bad}:2: not UTF-8" in refused(capsys, "train", "masked", "--data.text", str(bad))
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    assert "the file is empty" in refused(capsys, "train", "masked", "--data.text", str(empty))
    assert "give data.text" in refused(capsys, "train", "masked")
    assert "data.masked must be above 0" in refused(capsys, "train", "masked", "--data.masked", "1")
    text = tmp_path / "lines.txt"
    text.write_text("a b c\n" * 50)
    few = ("train", "masked", "--data.text", str(text), "--out", str(tmp_path / "none"))
    assert "raise training.tokens" in refused(capsys, *few, "--training.tokens", "8")
    assert "positions" in refused(capsys, *few, "--model.position", "learned(longest=4)", "--data.tokenizer", "words")
    assert "training.metric of masked must be one of" in refused(capsys, *few, "--training.metric", "bleu")
    assert not (tmp_path / "none").exists()
    assert "no [mask] in the text" in refused(capsys, "fill", run, "no gap")
    assert "top must be at least 1" in refused(capsys, "fill", run, "[mask]", "--top", "0")
    assert "--stride is for runs of 'language'" in refused(capsys, "evaluate", run, "--stride", "3")
    assert "is a run of 'masked', not of 'classify'" in refused(capsys, "classify", run)
    assert "is a run of 'masked', not of 'language'" in refused(capsys, "generate", run, "x")
