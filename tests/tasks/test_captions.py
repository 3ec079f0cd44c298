"""Captioners: what a run learns and says, exact resume, its verbs, and what they refuse."""

import json
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from training_runs import assert_same
from verbs import refused, told

from regard.cli import main
from regard.data.captioned import read_captioned
from regard.data.images.batches import ImageBatches
from regard.data.images.draws import AugmentConfig
from regard.decoding import DecodingConfig
from regard.metrics.retrieval import Recall, Retrieval, retrieval
from regard.page.engine import Engine
from regard.page.subjects import open_run
from regard.tasks.captions import (
    Captioner,
    CaptionerOptions,
    CaptionsConfig,
    CaptionsData,
    Task,
    evaluate,
    read_valid,
)
from regard.tasks.captions import task as captions_task
from regard.tasks.captions.captioner import nearest
from regard.tasks.captions.evaluation import Evaluation
from regard.tasks.captions.page import write_caption
from regard.tasks.captions.task import CaptionBatches, encode_captions
from regard.tasks.train import resume, train
from regard.training import loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.loss import caption_loss
from regard.training.run import Run

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230), "white": (250, 250, 250)}


def paint(colour: str) -> np.ndarray:
    """A picture in one colour."""
    return np.full((16, 16, 3), COLOURS[colour], np.uint8)


def captions_of(colour: str) -> list[str]:
    return [f"a {colour} picture .", f"all is {colour}"]


def write_data(folder, count=48, seed=0):
    """Pictures in an array, whose noise makes each its own, and two captions for each."""
    draw, noise = random.Random(seed), np.random.default_rng(seed)
    colours = [draw.choice(list(COLOURS)) for _ in range(count)]
    images = np.stack([paint(colour) for colour in colours]) + noise.integers(0, 6, (count, 16, 16, 3)).astype(np.uint8)
    np.savez(folder / "images.npz", images=images)
    rows = (f"{number}\t" + "\t".join(captions_of(colour)) for number, colour in enumerate(colours))
    (folder / "captions.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def settings(folder, name="run", **training) -> CaptionsConfig:
    small = {"steps": 12, "evaluate_every": 6, "save_every": 3, "log_every": 1, "warmup": 2, "device": "cpu"}
    sizes = {"width": 16, "heads": 2, "inner": 24, "layers": 1, "text_layers": 1, "decoder_layers": 1, "queries": 3}
    return CaptionsConfig(
        out=str(folder / name),
        data=CaptionsData(
            captions=str(folder / "captions.tsv"),
            images=str(folder / "images.npz"),
            columns=(0, 1, 2),
            batch=8,
            held_out=6,
            tokenizer="words",
        ),
        model=CaptionerOptions(preset="coca-nano", patch=8, **sizes),
        training=TrainingConfig(**small | {"tensorboard": False, "threads": 1} | training),
    )


def stop_after(steps, monkeypatch, config) -> None:
    """Begins a run and interrupts it."""
    update, count = loop.Loop._update, iter(range(steps))

    def stop(self):
        if next(count, None) is None:
            raise InterruptedError
        update(self)

    with monkeypatch.context() as changed:
        changed.setattr(loop.Loop, "_update", stop)
        with pytest.raises(InterruptedError):
            train(Task, config, Display(quiet=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data and a trained run."""
    torch.set_num_threads(1)
    folder = write_data(tmp_path_factory.mktemp("captions"))
    longer = {"steps": 80, "evaluate_every": 80, "save_every": None, "log_every": 40}
    config = settings(folder, learning_rate=0.015, label_smoothing=0.0, **longer)
    train(Task, config, Display(quiet=True))
    for number, colour in enumerate(("red", "blue")):
        Image.fromarray(paint(colour)).save(folder / f"{number}.png")
    (folder / "texts.txt").write_text("all is red\nall is blue\nall is green\n")
    return folder


@pytest.fixture(scope="module")
def captioner(folder):
    return Captioner.load(folder / "run", device="cpu")


class TestTraining:
    def test_it_learns_what_it_sees(self, captioner, folder):
        valid = read_captioned(folder / "captions.tsv", folder / "images.npz", columns=(0, 1, 2))
        found = evaluate(captioner, valid.pixels, valid.captions)
        assert found.loss < 0.4
        assert found.scores["cider"].value > 4
        assert found.retrieval.pictures.at[10] > 2 * found.chance.pictures.at[10]
        colours = [next(word for word in COLOURS if word in text) for text in found.hypotheses]
        right = [colour in texts[0] for colour, texts in zip(colours, valid.captions, strict=True)]
        assert np.mean(right) > 0.9

    def test_resume_is_exact(self, tmp_path, monkeypatch):
        """Interrupted between two checkpoints, in the second epoch: captions and crops are drawn as before."""
        write_data(tmp_path, 24)
        train(Task, settings(tmp_path, "whole"), Display(quiet=True))

        stop_after(7, monkeypatch, settings(tmp_path, "parts"))
        resume(tmp_path / "parts", Display(quiet=True))
        assert_same(tmp_path / "whole", tmp_path / "parts")

    def test_batches(self, tmp_path):
        """Every picture at most once per epoch, with one of its captions; others in another epoch."""
        config = settings(write_data(tmp_path, 30))
        data = Task.read_data(config)
        config = Task.complete_config(config, data)[0]
        tokenizers = Task.train_tokenizers(data, config)
        model = Task.build_model(config, Task.model_config(config, tokenizers, data))
        task = Task(config, data, tokenizers, model)
        tokenizer, texts = tokenizers["tokenizer.json"], []
        for epoch in range(2):
            batches = [task.batches.get(epoch, index) for index in range(task.batches.count(epoch))]
            numbers = torch.cat([batch.indices for batch in batches])
            assert len(numbers) == len(set(numbers.tolist())) == 24
            said = {}
            for batch in batches:
                for row, number in enumerate(batch.indices.tolist()):
                    keep = slice(None) if batch.keep is None else batch.keep[row]
                    ids = batch.tokens[row][keep].tolist()
                    assert ids[0] == tokenizer.bos
                    assert batch.target[row][keep].tolist() == [*ids[1:], tokenizer.eos]
                    said[number] = tokenizer.decode(ids[1:])
                    assert said[number] in data.train.captions[number]
            texts.append(said)
        assert any(texts[0][number] != texts[1][number] for number in texts[0].keys() & texts[1].keys())
        again = task.batches.get(1, 0)
        assert all(
            torch.equal(one, other) for one, other in zip(again, task.batches.get(1, 0), strict=True) if one is not None
        )

    @pytest.mark.parametrize("counts", [[1, 2, 3, 1, 2, 3], [3] * 6])
    def test_each_caption_is_drawn_in_some_epoch(self, counts):
        """Of pictures with one, two or three captions; in another epoch, others at the same places of a batch."""
        captions = [[[10 * picture + number] for number in range(count)] for picture, count in enumerate(counts)]
        pixels, config = torch.zeros(6, 3, 8, 8, dtype=torch.uint8), AugmentConfig()
        images = ImageBatches(pixels, torch.arange(6), config, size=6, seed=1)
        batches = CaptionBatches(images, captions, special=(2, 3), multiple=1)
        found, places = set(), set()
        for epoch in range(30):
            batch = batches.get(epoch, 0)
            ids = batch.tokens[:, 1]
            assert torch.equal(ids // 10, batch.indices)
            found |= set(ids.tolist())
            places.add(tuple((ids % 10).tolist()))
        assert found == {one for rows in captions for [one] in rows}
        assert len(places) > 20

    def test_the_loss_has_its_weights(self, tmp_path):
        config = replace(settings(write_data(tmp_path, 20)), captioning=0.0, contrastive=3.0)
        data = Task.read_data(config)
        config = Task.complete_config(config, data)[0]
        tokenizers = Task.train_tokenizers(data, config)
        task = Task(config, data, tokenizers, Task.build_model(config, Task.model_config(config, tokenizers, data)))
        task.model.eval()
        loss = task.loss(task.prepare(task.batches.get(0, 0)), 0.0)
        assert_close(loss.total / loss.tokens, 3 * loss.statistics["contrastive.loss"])

    def test_recall_is_the_mean_of_both_directions(self, tmp_path, monkeypatch):
        config = settings(write_data(tmp_path, 20))
        data = Task.read_data(config)
        config = Task.complete_config(config, data)[0]
        tokenizers = Task.train_tokenizers(data, config)
        task = Task(config, data, tokenizers, Task.build_model(config, Task.model_config(config, tokenizers, data)))
        planted = Retrieval(Recall({1: 0.1}, 9.0), Recall({1: 0.4}, 3.0))
        found = Evaluation(1.0, {}, planted, planted, ["a"] * len(data.valid.names))
        monkeypatch.setattr(captions_task, "evaluate", lambda *arguments, **options: found)
        assert task.evaluate(lambda: None)[0]["recall@1"] == pytest.approx(25)

    def test_what_follows_from_the_data(self, tmp_path):
        config = replace(settings(write_data(tmp_path, 20)), model=CaptionerOptions(patch=4))
        data = Task.read_data(config)
        config, notes = Task.complete_config(replace(config, data=replace(config.data, batch=None)), data)
        assert notes == ["chosen for 36 captions on a CPU: data.vocabulary 1,000, model.preset coca-nano"]
        assert Task.choose_batch_size(config, "cpu")[0].data.batch == 32
        assert Task.choose_batch_size(config, "cuda")[1] == "data.batch 256, chosen for a GPU"
        made = Task.model_config(config, Task.train_tokenizers(data, config), data)
        assert (made.image, made.channels, made.patch) == ((16, 16), 3, 4)
        for position in ("learned", "fourier"):
            placed = replace(config, model=CaptionerOptions(patch=4, position=position))
            made = Task.model_config(placed, Task.train_tokenizers(data, config), data)
            assert made.position == f"{position}(longest=66)"
        other = replace(config, data=replace(config.data, size=20), model=CaptionerOptions())
        read = Task.read_data(other)
        made, notes = Task.complete_config(other, read)
        assert notes == ["chosen for 36 captions on a CPU: model.preset coca-nano, model.patch 4"]
        assert Task.model_config(made, Task.train_tokenizers(read, made), read).patch == 4

    def test_long_captions_are_omitted(self):
        class Letters:
            encode_batch = staticmethod(lambda texts: [list(text) for text in texts])

        ids, kept, dropped = encode_captions(Letters(), [["ab", "abcd"], ["abcd"], ["a"]], 3)
        assert (ids, kept, dropped) == ([[["a", "b"]], [["a"]]], [0, 2], 2)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"captions": None}, "give data.captions"),
            ({"columns": ("image",)}, "data.columns must be that of the picture and one or more of captions"),
            ({"valid_images": "a.npz"}, "needs data.valid_captions"),
            ({"maximum_length": 1}, "no caption has at most 1 tokens"),
        ],
    )
    def test_refusals(self, tmp_path, change, match):
        config = settings(write_data(tmp_path, 20))
        with pytest.raises(ValueError, match=match):
            train(Task, replace(config, data=replace(config.data, **change)), Display(quiet=True))
        assert not (tmp_path / "run").exists()

    def test_mixing_and_nothing_to_train_for_are_refused(self, tmp_path):
        config = settings(tmp_path)
        with pytest.raises(ValueError, match="captions cannot be mixed"):
            replace(config, augment=replace(config.augment, mixup=0.5))
        with pytest.raises(ValueError, match=r"training\.tokens 64 is for texts: give data\.batch"):
            replace(config, training=replace(config.training, tokens=64))
        with pytest.raises(ValueError, match="nothing to train for"):
            replace(config, captioning=0.0, contrastive=0.0)


class TestCaptioner:
    def test_loss_is_that_of_the_model(self, captioner, folder):
        """A mean over the words of all captions, also where pictures have different numbers of them."""
        valid = read_captioned(folder / "captions.tsv", folder / "images.npz", columns=(0, 1, 2)).take(np.arange(5))
        captions = [texts[: 1 + number % 2] for number, texts in enumerate(valid.captions)]
        total, count = 0.0, 0
        for pixels, texts in zip(valid.pixels, captions, strict=True):
            for text in texts:
                ids = captioner.tokenizer.encode(text)
                logits = captioner.model(captioner.images(pixels[None]), torch.tensor([[2, *ids]])).logits[0]
                total -= float(logits.log_softmax(-1)[range(len(ids) + 1), [*ids, 3]].detach().sum())
                count += len(ids) + 1
        assert captioner.loss(valid.pixels, captions) == pytest.approx(total / count, rel=1e-5)

    def test_a_picture_alone_and_among_others(self, captioner, folder):
        paths = [folder / "0.png", folder / "1.png"]
        both = captioner.caption(captioner.read_pictures(paths), DecodingConfig(beam=3))
        assert [best[0].text for best in both] == [captioner(path) for path in paths]
        assert "red" in both[0][0].text
        assert "blue" in both[1][0].text

    def test_vectors_and_labels(self, captioner, folder):
        pixels = captioner.read_pictures([folder / "0.png", folder / "1.png"])
        vectors, texts = (
            captioner.picture_vectors(pixels),
            captioner.caption_vectors(["all is red", "all is blue"]),
        )
        assert_close(torch.from_numpy(vectors).norm(dim=1), torch.ones(2))
        assert [matches[0].number for matches in nearest(vectors, texts, 1)] == [0, 1]
        found = captioner.probabilities(pixels, ["all is red", "all is blue", "all is green"])
        assert found.argmax(1).tolist() == [0, 1]
        assert_close(found.sum(1), np.ones(2))
        expected = torch.tensor(float(captioner.model.scale()) * vectors @ texts.T).softmax(1)
        assert_close(
            torch.from_numpy(captioner.probabilities(pixels, ["all is red", "all is blue"])).float(),
            expected,
        )

    def test_long_texts_are_cut_with_a_warning(self, captioner):
        said = []
        [row] = captioner.encode(["red " * 100], said.append)
        assert len(row) == captioner.longest + 1
        assert "only the first" in said[0]


class TestPage:
    def test_a_run_is_opened_with_some_of_its_pictures(self, folder):
        found = Task.open_for_page(folder / "run", "cpu")
        valid = read_valid(folder / "run")
        assert [sample.label for sample in found.samples] == [texts[0] for texts in valid.captions]
        assert np.array_equal(found.samples[0].pixels, valid.pixels[0])
        assert (found.size, found.channels, found.labels) == ((16, 16), 3, ())

    def test_each_word_is_written_by_what_stands_before_it(self, captioner, folder, monkeypatch):
        pixels, read, maps = torch.from_numpy(captioner.read_pictures([folder / "0.png"])), [], captioner.model.maps
        monkeypatch.setattr(
            captioner.model, "maps", lambda *given, **options: read.append(given) or maps(*given, **options)
        )
        write_caption(captioner, pixels, "all is red")
        [(_, tokens)] = read
        assert tokens.tolist() == [[2, *captioner.tokenizer.encode("all is red")]]

    def test_a_caption_word_by_word(self, captioner, folder):
        """A word is written by what stands before it; each looks at all patches, in shares that sum to one."""
        pixels = torch.from_numpy(captioner.read_pictures([folder / "0.png"]))
        own = write_caption(captioner, pixels, " ")
        assert own.text == captioner(folder / "0.png")
        assert own.tokens[:-1] == own.text.split()
        read = write_caption(captioner, pixels, "all is red")
        assert (read.text, len(read.tokens)) == ("all is red", 4)
        maps = captioner.model.maps(
            captioner.images(pixels), torch.tensor([[2, *captioner.tokenizer.encode(read.text)]])
        )
        assert [part.shape for part in read.weights] == [(2, 4, 4)]
        assert_close(read.weights[0], maps[0][0])
        assert_close(read.weights[0].sum(-1), torch.ones(2, 4))

    def test_the_page_shows_it(self, folder):
        engine = Engine({"captions": lambda: open_run(folder / "run", "captions")})
        [about] = engine.answer("about", {}).meta["runs"]
        assert about["captions"]
        engine.answer("see", {"run": "captions", "image": "0"})
        found = engine.answer("caption", {"run": "captions", "image": "0", "layer": 0, "text": "all is red"})
        assert found.arrays["weights"].shape == (2, 4, 4)


class TestVerbs:
    def test_caption(self, monkeypatch, capsys, folder):
        run, pictures = str(folder / "run"), [str(folder / "0.png"), str(folder / "1.png")]
        out, _ = told(monkeypatch, capsys, "caption", run, pictures[0])
        assert "red" in out
        assert out.count("\n") == 1
        out, _ = told(monkeypatch, capsys, "caption", run, str(folder), "--nbest", "2", "--scores")
        rows = [line.split("\t") for line in out.splitlines()]
        assert [row[0] for row in rows] == [pictures[0]] * 2 + [pictures[1]] * 2
        assert all(float(row[2]) < 0 for row in rows)
        out, _ = told(monkeypatch, capsys, "caption", run, pictures[0], "--json", "--sample", "--seed", "3")
        assert json.loads(out)["picture"] == pictures[0]
        assert len(json.loads(out)["captions"]) == 1

    def test_retrieve(self, monkeypatch, capsys, folder):
        run, pictures = str(folder / "run"), [str(folder / "0.png"), str(folder / "1.png")]
        out, _ = told(monkeypatch, capsys, "retrieve", run, "--pictures", str(folder), "all is blue")
        assert [line.split("\t")[0] for line in out.splitlines()] == pictures[::-1]
        each = [part for picture in pictures for part in ("--pictures", picture)]
        assert told(monkeypatch, capsys, "retrieve", run, *each, "all is blue")[0] == out
        texts = ("--texts", str(folder / "texts.txt"))
        out, _ = told(monkeypatch, capsys, "retrieve", run, *texts, "--count", "1", *pictures)
        assert [line.split("\t")[:2] for line in out.splitlines()] == [
            [pictures[0], "all is red"],
            [pictures[1], "all is blue"],
        ]
        out, _ = told(monkeypatch, capsys, "retrieve", run, *texts, "--json", pictures[0])
        assert json.loads(out)["query"] == pictures[0]
        answers = json.loads(out)["answers"]
        assert (answers[0]["answer"], len(answers)) == ("all is red", 3)

    def test_classify(self, monkeypatch, capsys, folder):
        """By the texts of labels that no training text was marked with."""
        run, pictures = str(folder / "run"), [str(folder / "0.png"), str(folder / "1.png")]
        labels = ("--labels", "all is red, all is blue")
        out, _ = told(monkeypatch, capsys, "classify", run, *labels, "--", *pictures)
        rows = [line.split("\t") for line in out.splitlines()]
        assert [row[:2] for row in rows] == [[pictures[0], "all is red"], [pictures[1], "all is blue"]]
        assert all(0.5 < float(row[2]) <= 1 for row in rows)
        out, _ = told(monkeypatch, capsys, "classify", run, *labels, "--json", pictures[0])
        assert sum(json.loads(out)["probabilities"].values()) == pytest.approx(1)

    def test_what_was_not_learned_is_said(self, monkeypatch, capsys, folder, tmp_path):
        copied, picture = Run(shutil.copytree(folder / "run", tmp_path / "run")), str(folder / "0.png")
        run, text = str(copied.folder), copied.read_text("config.yaml")
        both = {
            "contrastive": (
                ("retrieve", run, "--pictures", picture, "a"),
                ("classify", run, "--labels", "a,b", picture),
            ),
            "captioning": (("caption", run, picture),),
        }
        for loss, verbs in both.items():
            assert all("not learned" not in told(monkeypatch, capsys, *verb)[1] for verb in verbs)
            copied.write_text("config.yaml", re.sub(rf"^{loss}: .*", f"{loss}: 0.0", text, flags=re.M))
            assert all(f"trained with {loss} 0" in told(monkeypatch, capsys, *verb)[1] for verb in verbs)
            copied.write_text("config.yaml", text)

    def test_a_broken_picture_stops_no_other(self, capsys, folder, tmp_path):
        """It is named, and the status is 1."""
        run, good, broken = str(folder / "run"), str(folder / "0.png"), tmp_path / "broken.png"
        broken.write_bytes((folder / "0.png").read_bytes()[:40])
        labels, texts = ("--labels", "all is red,all is blue"), ("--texts", str(folder / "texts.txt"))
        for words in (
            ("caption", run, str(broken), good),
            ("classify", run, str(broken), good, *labels),
            ("retrieve", run, str(broken), good, *texts),
            ("retrieve", run, "--pictures", str(broken), "--pictures", good, "all is red"),
        ):
            assert main([*words, "--device", "cpu"]) == 1
            out, notes = capsys.readouterr()
            assert good in out
            assert str(broken) not in out
            assert f"{broken}: is no image that can be read" in notes
        assert "is no image that can be read" in refused(capsys, "caption", run, str(broken))

    def test_evaluate(self, monkeypatch, capsys, captioner, folder, tmp_path):
        run = str(folder / "run")
        out, _ = told(monkeypatch, capsys, "evaluate", run, "--out", str(tmp_path / "out.txt"))
        assert out.startswith("4 pictures, 8 captions: validation pictures of")
        for name in ("BLEU|", "chrF2|", "CIDEr-D|", "loss = ", "captions find pictures: recall@1", "chance: recall@1"):
            assert name in out
        assert len((tmp_path / "out.txt").read_text().splitlines()) == 4
        data = ("--data", str(folder / "captions.tsv"), "--images", str(folder / "images.npz"), "--columns", "0,2")
        out, _ = told(monkeypatch, capsys, "evaluate", run, *data, "--json", "--beam", "1")
        found = json.loads(out)
        assert (found["pictures"], found["captions"]) == (48, 48)
        assert found["chance"]["pictures"]["recall@1"] == pytest.approx(1 / 48)
        valid = read_captioned(folder / "captions.tsv", folder / "images.npz", columns=(0, 2))
        expected = evaluate(captioner, valid.pixels, valid.captions, DecodingConfig(beam=1))
        assert found["loss"] == pytest.approx(expected.loss)
        assert found["bleu"]["value"] == pytest.approx(expected.scores["bleu"].value)
        assert found["retrieval"]["captions"] == expected.retrieval.captions.to_json()

    def test_refusals(self, capsys, folder, tmp_path):
        run, picture = str(folder / "run"), str(folder / "0.png")
        assert "give --pictures or --texts" in refused(capsys, "retrieve", run, "a dog")
        assert "two or more different texts" in refused(capsys, "classify", run, picture, "--labels", "a")
        assert "which knows no labels: give some" in refused(capsys, "classify", run, picture)
        assert "classifies pictures: name some" in refused(capsys, "classify", run, "--labels", "a,b")
        assert "folder without pictures" in refused(capsys, "caption", run, str(tmp_path))
        assert "no such file" in refused(capsys, "caption", run, "nowhere.jpg")
        assert "is for sampling: give --sample too" in refused(capsys, "caption", run, picture, "--top-p", "0.5")
        assert "--images needs --data" in refused(capsys, "evaluate", run, "--images", "x")
        assert "a query is blank" in refused(capsys, "retrieve", run, "--pictures", picture, "a dog", " ")
        assert "--count must be at least 1" in refused(capsys, "retrieve", run, "--texts", "x", picture, "--count", "0")

    def test_changed_data_is_noticed(self, capsys, tmp_path):
        write_data(tmp_path, 20)
        train(Task, settings(tmp_path, steps=1, evaluate_every=1), Display(quiet=True))
        write_data(tmp_path, 20, seed=1)
        assert "has changed since the run began" in refused(capsys, "evaluate", str(tmp_path / "run"))


def test_a_blank_picture_finds_nothing(captioner):
    """Pictures that are all alike are found as chance finds them."""
    pixels = np.zeros((3, 3, 16, 16), np.uint8)
    found = evaluate(captioner, pixels, [["all is red"], ["all is blue"], ["all is white"]])
    assert found.retrieval.pictures == found.chance.pictures
    assert isinstance(found.chance.captions, Recall)


def test_pictures_may_have_different_numbers_of_captions(captioner, folder):
    valid = read_captioned(folder / "captions.tsv", folder / "images.npz", columns=(0, 1, 2))
    captions = [texts[: 1 + (number > 4)] for number, texts in enumerate(valid.captions[:8])]
    found = evaluate(captioner, valid.pixels[:8], captions)
    vectors = captioner.caption_vectors([text for texts in captions for text in texts])
    similarity = captioner.picture_vectors(valid.pixels[:8]).astype(np.float64) @ vectors.T
    expected = retrieval(similarity, np.array([0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7]))
    assert found.retrieval == expected
    assert expected != retrieval(similarity, np.array([0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7]))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_a_run_on_a_gpu_goes_on_bit_for_bit(tmp_path, monkeypatch, graphs):
    """Two epochs, so that every shape of a batch comes again and is captured."""
    write_data(tmp_path)
    options = {"device": "cuda", "deterministic": True, "graphs": graphs, "precision": "bfloat16"}
    whole, stopped = settings(tmp_path, "whole", **options), settings(tmp_path, "stopped", **options)
    train(Task, whole, Display(quiet=True))
    stop_after(7, monkeypatch, stopped)
    resume(stopped.out, Display(quiet=True))
    assert_same(whole.out, stopped.out)


@pytest.mark.gpu
def test_captions_on_a_gpu_are_those_of_a_cpu(folder):
    cpu, gpu = (Captioner.load(folder / "run", device=device) for device in ("cpu", "cuda"))
    valid = read_valid(folder / "run")
    for decoding in (DecodingConfig(beam=1, minimum=20, maximum=24), DecodingConfig(beam=3)):
        ours, theirs = (one.caption(valid.pixels, decoding) for one in (cpu, gpu))
        assert [best[0].text for best in ours] == [best[0].text for best in theirs]
    assert_close(cpu.picture_vectors(valid.pixels), gpu.picture_vectors(valid.pixels), rtol=1e-3, atol=1e-3)
    assert cpu.loss(valid.pixels, valid.captions) == pytest.approx(gpu.loss(valid.pixels, valid.captions), rel=1e-3)


def test_the_loss_of_the_task_is_that_of_the_model(captioner):
    assert caption_loss.__kwdefaults__ == {"captioning": 2.0, "contrastive": 1.0}
    config = CaptionsConfig()
    assert (config.captioning, config.contrastive) == (2.0, 1.0)
