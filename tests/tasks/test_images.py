"""Classifiers of images: trained, resumed to the bit, tuned from another run, classified and evaluated with."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from painted import encoded, painted, write_cifar, write_folders
from PIL import Image
from torch.testing import assert_close
from training_runs import assert_same, dying, in_child
from verbs import refused

from regard import cli, models, recipes
from regard.config import from_json
from regard.core.files import parse_yaml
from regard.data.images.augment import augment
from regard.data.images.draws import COLUMNS, AugmentConfig
from regard.tasks import load
from regard.tasks.images import ImageClassifier, ImageData, ImageOptions, ImagesConfig, Task, task
from regard.tasks.images.corpus import pixel_statistics
from regard.tasks.images.task import choose_patch
from regard.tasks.train import resume, train
from regard.training import loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run

EVERYTHING = AugmentConfig(
    flip=0.5, crop="pad", operations=2, erase=0.5, mixup=0.8, cutmix=1.0, mixed=0.9, unmixed_end=0.25
)


def config(folder, name="run", *, augment=EVERYTHING, init=None, data=None, model=None, **training):
    images = folder / "colours"
    if not images.exists():
        write_folders(images, 10)
    small = {"width": 16, "heads": 2, "inner": 16, "layers": 1, "patch": 4, "drop_path": 0.1}
    settings = {"steps": 12, "evaluate_every": 5, "save_every": 3, "log_every": 1, "warmup": 2, "metric": "accuracy"}
    return ImagesConfig(
        out=str(folder / name),
        init=init,
        data=ImageData(**{"images": str(images), "batch": 9} | (data or {})),
        augment=augment,
        model=ImageOptions(**(small if model is None else model)),
        training=TrainingConfig(**settings | {"tensorboard": False, "keep": 3, "learning_rate": 0.01} | training),
    )


def finish(settings):
    return train(Task, settings, Display(quiet=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that tells colours apart, beside its folder of images."""
    folder = tmp_path_factory.mktemp("images")
    settings = config(folder, augment=AugmentConfig(), steps=20, evaluate_every=10)
    return folder, settings.out, finish(settings)


def test_it_learns_and_says_images_per_second(trained, capsys, tmp_path):
    folder, out, state = trained
    assert state.best == 100
    line = next(record for record in Run.open(out).records() if record["event"] == "step")
    assert line["images_per_second"] > 0
    assert line["loss"] > 0
    facts = Run.open(out).read_json("run.json")
    assert facts["labels"] == ["blue", "green", "red"]
    assert facts["data"]["images"] == 27
    assert facts["data"]["valid"] == 3
    pixels = np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("colours/*/*.png"))]) / 255
    assert_close(torch.tensor(facts["mean"]), torch.tensor(pixels.mean((0, 1, 2))).float(), rtol=0.05, atol=0)
    train(Task, config(folder, tmp_path / "other", steps=1), Display())
    said = capsys.readouterr().err
    assert "images/s" in said
    assert "27 colour images of 12 x 12, 3 to validate on; 3 classes" in said
    assert "augmentation: flips, crops after padding by 1, RandAugment (2 of 15 operations), erasing" in said


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """With every augmentation and the moving average of the weights."""
    whole, killed = config(tmp_path, "whole", ema=0.9), config(tmp_path, "killed", ema=0.9)
    finish(whole)
    assert in_child(lambda: (dying(loop.Loop, "_update", 8), finish(killed))) == -signal.SIGKILL
    resume(killed.out, Display(quiet=True))
    assert_same(whole.out, killed.out)


def test_batches_that_carry_their_pixels_train_the_same(tmp_path, monkeypatch):
    one, other = config(tmp_path, "one", steps=4), config(tmp_path, "other", steps=4)
    finish(one)
    monkeypatch.setattr(task, "fits", lambda pixels, device: False)
    finish(other)
    assert_same(one.out, other.out)


def test_the_loss_is_the_cross_entropy_of_soft_targets(tmp_path):
    settings = config(tmp_path)
    data = Task.read_data(settings)
    settings, _ = Task.complete_config(settings, data)
    torch.manual_seed(0)
    ready = Task(settings, data, {}, Task.build_model(settings, Task.model_config(settings, {}, data)).eval())
    batch = ready.batches.get(0, 0)
    found = ready.loss(ready.prepare(batch), 0.1)
    mean, deviation = torch.tensor(data.mean), torch.tensor(data.deviation)
    images = augment(data.train.pixels[batch.indices], batch.draws, ready.augment, mean, deviation)
    logp = ready.model(images).logits.double().log_softmax(1)
    share = batch.draws[:, COLUMNS["share"]][:, 0].double()
    labels, others = batch.labels, batch.labels.flip(0)
    rows = torch.arange(len(labels))
    plain = -(share * logp[rows, labels] + (1 - share) * logp[rows, others])
    assert_close(found.plain.double(), plain.sum(), rtol=1e-5, atol=1e-5)
    assert_close(found.total.double(), (0.9 * plain - 0.1 * logp.mean(1)).sum(), rtol=1e-5, atol=1e-5)
    assert int(found.tokens) == len(labels) == 9


def test_changed_images_are_refused(tmp_path, capsys):
    settings = config(tmp_path, steps=3, evaluate_every=3)
    finish(settings)
    (tmp_path / "colours" / "red" / "000.png").write_bytes(encoded(painted("red", 99)))
    with pytest.raises(ValueError, match=r"training data .* has changed"):
        resume(settings.out, Display(quiet=True), steps=4)
    assert "have changed since the run began" in refused(capsys, "evaluate", settings.out)


def test_changed_labels_are_other_data(tmp_path):
    write_folders(tmp_path / "colours", 10)
    files = [f"colours/{colour}/{number:03}.png" for colour in ("red", "blue") for number in range(10)]

    def digest(labels):
        (tmp_path / "table.csv").write_text(
            "path,label\n" + "".join(f"{f},{n}\n" for f, n in zip(files, labels, strict=True))
        )
        return Task.read_data(config(tmp_path, data={"images": str(tmp_path / "table.csv")})).facts["sha256"]

    labels = ["warm", "cold"] * 10
    assert digest(labels) == digest(labels) != digest(["cold", "warm", *labels[2:]])
    assert digest(labels) != digest([{"warm": "hot"}.get(label, label) for label in labels])


def printed(capsys, *words):
    """What a verb that ends well prints."""
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def test_validation_images_may_be_given(tmp_path):
    write_folders(tmp_path / "valid", 2, (20, 30))
    settings = config(tmp_path, steps=1, data={"valid_images": str(tmp_path / "valid")})
    data = Task.read_data(settings)
    assert data.valid.pixels.shape == (6, 3, 12, 12)
    assert len(data.train.labels) == 30
    (tmp_path / "valid" / "purple").mkdir()
    (tmp_path / "valid" / "purple" / "0.png").write_bytes(encoded(painted("red", 1)))
    with pytest.raises(ValueError, match="has the label 'purple', the classes are blue, green, red"):
        Task.read_data(settings)


def test_of_a_folder_with_both_parts_the_test_part_validates(tmp_path, trained, capsys):
    folder = tmp_path / "cifar"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), np.uint8)
    write_cifar(folder / "data_batch_1.bin", pixels, np.arange(10))
    write_cifar(folder / "test_batch.bin", pixels[:3], np.array([7, 7, 2]))
    data = Task.read_data(config(tmp_path, data={"images": str(folder), "valid_images": str(folder)}))
    assert data.train.labels.tolist() == list(range(10))
    assert data.valid.labels.tolist() == [7, 7, 2]
    assert "example 1 has the label '7'" in refused(capsys, "evaluate", trained[1], "--data", str(folder))


def test_runs_of_different_seeds_may_hold_out_the_same(tmp_path):
    corpora = [
        Task.read_data(config(tmp_path, data={"held_out_seed": held_out}, seed=seed))
        for held_out, seed in ((1, 1), (1, 2), (None, 1), (None, 2))
    ]
    names = [corpus.valid.names for corpus in corpora]
    assert names[0] == names[1] == names[2] != names[3]
    assert corpora[0].facts["sha256"] == corpora[1].facts["sha256"]


def test_broken_images_are_counted(tmp_path, capsys):
    write_folders(tmp_path / "colours", 10)
    (tmp_path / "colours" / "red" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"red/broken\.png: is no image that can be read.*data\.skip_bad"):
        finish(config(tmp_path))
    train(Task, config(tmp_path, steps=1, data={"skip_bad": True, "batch": 4}), Display())
    assert "omitted 1 images: is no image that can be read, first at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "classes"),
    [((12, 12), ("blue", "green", "red")), ((20, 12), ("blue", "red")), ((12, 12), ("blue", "red"))],
)
def test_a_run_may_begin_with_another(trained, tmp_path, size, classes):
    _, out, _ = trained
    for colour in classes:
        folder = tmp_path / "some" / colour
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}.png").write_bytes(encoded(painted(colour, 50 + number)))
    data = {"images": str(tmp_path / "some"), "size": None if size == (12, 12) else size}
    settings = config(tmp_path, init=out, data=data, model={"dropout": 0.1}, steps=1)
    read = Task.read_data(settings)
    assert read.size == size
    settings, _ = Task.complete_config(settings, read)
    made = Task.build_model(settings, Task.model_config(settings, {}, read)).eval()
    source = ImageClassifier.load(out, device="cpu")
    before = models.build(source.model.config)
    load.load_weights(before, Run.open(out))
    same = made.state_dict()
    changed = {name for name, part in before.state_dict().items() if part.shape != same[name].shape}
    expected = {"answer.output.weight", "answer.output.bias"} if len(classes) == 2 else set()
    assert changed == expected | ({"position.table"} if size != (12, 12) else set())
    for name in before.state_dict().keys() - changed:
        assert_close(same[name], before.state_dict()[name], rtol=0, atol=0)
    ready = Task(settings, read, {}, made)
    assert ready.statistics == {name: Run.open(out).read_json("run.json")[name] for name in ("mean", "deviation")}
    if not changed:
        images = source.normalise(read.train.pixels[:4])
        assert_close(made(images).logits, source.model(images).logits, rtol=1e-5, atol=1e-5)
    finish(settings)
    assert Run.open(settings.out).read_json("run.json")["init"]["run"] == out


@pytest.mark.parametrize("preset", ["vit-nano", "swin-nano", "convnet"])
def test_the_output_layer_belongs_to_the_names_of_the_classes(preset):
    made = models.build(ImageOptions(preset=preset).resolve(image=(32, 32), channels=3, classes=3))
    before = {name: part.clone() for name, part in made.state_dict().items()}

    def changed():
        return {name for name, part in made.state_dict().items() if not part.equal(before[name])}

    task.fit_classes(made, ["a", "b", "c"], ["a", "b", "c"])
    assert not changed()
    task.fit_classes(made, ["c", "a", "b"], ["a", "b", "c"])
    (weight,) = (name for name in changed() if name.endswith("weight"))
    assert changed() <= {weight, weight.replace("weight", "bias")}
    assert made.state_dict()[weight].equal(before[weight][[1, 2, 0]])
    task.fit_classes(made, ["a", "b", "d"], ["a", "b", "c"])
    assert changed() <= {weight, weight.replace("weight", "bias")}
    rows = made.state_dict()[weight]
    assert not any(torch.isclose(rows[:, None], before[weight]).all(2).flatten())


def test_a_run_begins_with_an_output_layer_for_its_own_classes(trained, tmp_path):
    _, out, _ = trained
    for name, colour in (("fire", "red"), ("leaf", "green"), ("sky", "blue")):
        (tmp_path / "others" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "others" / name / f"{number}.png").write_bytes(encoded(painted(colour, 50 + number)))
    settings = config(tmp_path, init=out, data={"images": str(tmp_path / "others")}, model={}, steps=1)
    read = Task.read_data(settings)
    settings, _ = Task.complete_config(settings, read)
    ready = Task(settings, read, {}, Task.build_model(settings, Task.model_config(settings, {}, read)))
    source = ImageClassifier.load(out, device="cpu").model.state_dict()
    differ = {name for name, part in ready.model.state_dict().items() if not part.equal(source[name])}
    assert "answer.output.weight" in differ
    assert differ <= {"answer.output.weight", "answer.output.bias"}


def test_what_does_not_fit_the_other_run_is_refused(trained, tmp_path):
    _, out, _ = trained
    with pytest.raises(ValueError, match=r"model\.width cannot change with --init"):
        finish(config(tmp_path, init=out, model={"width": 32}))
    with pytest.raises(ValueError, match=r"takes images of 3 channels, data\.channels is 1"):
        finish(config(tmp_path, init=out, model={}, data={"channels": 1}))
    with pytest.raises(ValueError, match="is a run of 'masked', expected 'images'"):
        finish(config(tmp_path, init=str(load.BUNDLED / "english"), model={}))


def test_settings_that_cannot_be_meant(tmp_path):
    with pytest.raises(ValueError, match=r"training\.tokens 100 is for texts: give data\.batch"):
        config(tmp_path, tokens=100)
    with pytest.raises(ValueError, match=r"give training\.steps or training\.epochs, not minutes"):
        config(tmp_path, steps=None, minutes=1.0)
    with pytest.raises(ValueError, match=r"data\.channels must be 1 for grey or 3"):
        ImageData(channels=2)
    with pytest.raises(ValueError, match="there are no training images: give"):
        Task.read_data(ImagesConfig())


def test_defaults_follow_the_images(tmp_path):
    assert [choose_patch(size) for size in ((8, 8), (28, 28), (32, 32), (64, 64), (30, 60), (31, 31))] == [
        2,
        4,
        4,
        8,
        6,
        31,
    ]
    settings = config(tmp_path, augment=AugmentConfig(), model={})
    data = Task.read_data(settings)
    made, notes = Task.complete_config(settings, data)
    assert made.data.size == (12, 12)
    assert (made.augment.flip, made.augment.crop) == (0.5, "none")
    assert notes == ["model.patch 2, chosen for images of 12 x 12"]
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, batch=None))
    for device, batch in (("cpu", 64), ("cuda", 512)):
        made, note = Task.choose_batch_size(settings, device)
        assert made.data.batch == batch
        assert note.startswith(f"data.batch {batch}, chosen for a")


def test_what_is_measured_while_training(tmp_path):
    """Seven classes, of which the first is always the most probable and the last the least: five are among the first
    five."""
    for name in "abcdefg":
        (tmp_path / "letters" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "letters" / name / f"{number}.png").write_bytes(encoded(painted("red", number)))
    settings = config(tmp_path, data={"images": str(tmp_path / "letters")})
    read = Task.read_data(settings)
    ready = Task(settings, read, {}, Task.build_model(settings, Task.model_config(settings, {}, read)))
    assert read.valid.labels.tolist() == list(range(7))
    falling = np.arange(7, 0, -1) / 28
    ready.classifier.probabilities = lambda pixels, check: np.tile(falling, (7, 1))
    found, _ = ready.evaluate(lambda: None)
    assert (found["accuracy"], found["top5"]) == (pytest.approx(100 / 7), pytest.approx(500 / 7))
    assert found["loss"] == pytest.approx(-np.log(falling).mean())


def test_few_tokens_are_said():
    assert task.few_tokens((32, 32), 4) == task.few_tokens((1, 1), 1) == ""
    assert task.few_tokens((31, 34), 1) == ""
    assert task.few_tokens((31, 31), 31) == ": 1 token, which is little; data.size [32, 32] would give more"
    assert task.few_tokens((34, 51), 17) == ": 6 tokens, which is little; data.size [32, 48] would give more"


def test_pixels_are_normalised_by_their_mean_and_deviation():
    pixels = torch.randint(0, 256, (1500, 3, 5, 4), dtype=torch.uint8) // torch.tensor([1, 2, 5]).view(3, 1, 1)
    mean, deviation = pixel_statistics(pixels)
    values = pixels.double().movedim(1, 0).flatten(1) / 255
    assert_close(torch.tensor(mean, dtype=torch.float64), values.mean(1))
    assert_close(torch.tensor(deviation, dtype=torch.float64), values.std(1, correction=0))
    assert pixel_statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)) == ((0.2,), (1.0,))


def test_the_end_that_is_not_mixed_is_a_share_of_the_steps(tmp_path):
    for length, batches in (({"steps": 12, "accumulate": 2}, 18), ({"steps": None, "epochs": 4.0}, 9)):
        settings = config(tmp_path, **length)
        data = Task.read_data(settings)
        ready = Task(settings, data, {}, Task.build_model(settings, Task.model_config(settings, {}, data)))
        assert ready.batches.count(0) == 3
        assert ready.batches.unmixed_from == batches


def test_any_form_of_an_image_is_classified(trained, tmp_path):
    folder, out, _ = trained
    classifier = ImageClassifier.load(out, device="cpu")
    file = folder / "colours" / "blue" / "003.png"
    answer = classifier(file)
    assert answer.label == "blue"
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    pixels = np.asarray(Image.open(file))
    for image in (str(file), Image.open(file), pixels):
        assert classifier(image).probabilities == pytest.approx(answer.probabilities)
    assert classifier(painted("green", 5, (40, 70))).label == "green"
    assert classifier(pixels[..., 0]).label in classifier.labels
    with pytest.raises(ValueError, match="an image must be uint8"):
        classifier(pixels / 255)


def test_classify_prints_a_line_for_each_image(trained, tmp_path, capsys):
    folder, out, _ = trained
    files = [str(folder / "colours" / colour / "001.png") for colour in ("red", "blue")]
    lines = printed(capsys, "classify", out, *files, "--device", "cpu").splitlines()
    assert [line.split("\t")[:2] for line in lines] == [[files[0], "red"], [files[1], "blue"]]
    rows = [json.loads(line) for line in printed(capsys, "classify", out, *files, "--json").splitlines()]
    assert [row["label"] for row in rows] == ["red", "blue"]
    assert rows[0]["probabilities"]["red"] == rows[0]["probability"] > 0.5
    assert not rows[0]["unsure"]


def test_an_unsure_answer_says_so(trained, capsys, monkeypatch):
    folder, out, _ = trained
    file = str(folder / "colours" / "red" / "001.png")
    for shares, said in (
        ([0.41, 0.21, 0.38], "unsure: blue 0.41, red 0.38"),
        ([0.49, 0.21, 0.30], "unsure: blue 0.49, red 0.30"),
        ([0.25, 0.25, 0.50], "red\t0.5000"),
    ):
        monkeypatch.setattr(ImageClassifier, "probabilities", lambda self, pixels, shares=shares: np.array([shares]))
        assert printed(capsys, "classify", out, file) == f"{file}\t{said}\n"


def test_broken_images_do_not_stop_the_others(trained, tmp_path, capsys):
    folder, out, _ = trained
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff")
    assert cli.main(["classify", out, str(broken), str(folder / "colours" / "red" / "001.png")]) == 1
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert "broken.jpg: " in said.err


def test_classify_without_a_run_takes_the_bundled_one(trained, tmp_path, capsys, monkeypatch):
    folder, out, _ = trained
    file = str(folder / "colours" / "red" / "001.png")
    monkeypatch.setattr(load, "BUNDLED", tmp_path)
    assert "give a run folder before the images" in refused(capsys, "classify", file)
    (tmp_path / "cifar10").symlink_to(out)
    assert cli.main(["classify", file]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{file}\tred\t")
    assert said.err.count("the bundled classifier knows 3 classes") == 1
    assert said.err.endswith("blue, green, red\n")
    assert cli.main(["classify", file, "--json"]) == 0
    assert not capsys.readouterr().err


def test_the_bundled_classifier(tmp_path, capsys):
    """Ten classes in at most 4 MB, without an image of its data; a picture of one colour is no reason to be sure."""
    folder = load.BUNDLED / "cifar10"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.suffix == ".safetensors") <= 4_000_000
    assert not (folder / "samples.json").exists()
    file = tmp_path / "sky.png"
    Image.new("RGB", (60, 40), (90, 150, 230)).save(file)
    answer = json.loads(printed(capsys, "classify", str(file), "--json"))
    assert len(answer["probabilities"]) == 10
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    # one image of the class of each place: the first five places are among the first five answers
    places = sorted(answer["probabilities"], key=answer["probabilities"].get, reverse=True)
    np.savez(tmp_path / "sky.npz", images=np.stack([np.asarray(Image.open(file))] * 10), labels=np.array(places))
    assert "accuracy = 10.00 %, top-5 accuracy = 50.00 %" in printed(
        capsys, "evaluate", str(folder), "--data", str(tmp_path / "sky.npz")
    )


def test_a_run_begins_with_the_bundled_classifier(trained, tmp_path):
    folder, out = trained[0], tmp_path / "tuned"
    flags = ["--init", "cifar10", "--training.steps", "1", "--training.learning_rate", "1e-12", "--out", str(out)]
    assert cli.main(["train", "images", "--data.images", str(folder / "colours"), *flags]) == 0
    tuned, bundled = (ImageClassifier.load(run).model.state_dict() for run in (out, load.BUNDLED / "cifar10"))
    assert_close(tuned["stem.convolve.1.weight"], bundled["stem.convolve.1.weight"])
    assert tuned["answer.output.weight"].shape == (3, 256)
    assert Run.open(out).read_json("run.json")["init"]["run"] == str(load.BUNDLED / "cifar10")


def test_what_classify_cannot_do_with_images(trained, capsys):
    folder, out, _ = trained
    file = str(folder / "colours" / "red" / "001.png")
    assert "name some, regard classify" in refused(capsys, "classify", out)
    assert "--recall is for classifiers of texts" in refused(capsys, "classify", out, file, "--recall", "0.9")
    assert "is a run of 'masked'" in refused(capsys, "classify", str(load.BUNDLED / "english"))
    said = refused(capsys, "classify", str(load.BUNDLED / "english"), file)
    assert "is no run of images" in said
    assert "is a folder of images and no run: name the files" in refused(capsys, "classify", str(folder / "colours"))
    for flags in ((file,), (file, "--labels", "a,b")):
        assert "there is no run folder" in refused(capsys, "classify", str(folder / "nowhere"), *flags)
    (folder / "notes").write_text("no run")
    assert "notes is a file and no run folder: a picture" in refused(capsys, "classify", str(folder / "notes"), *flags)
    assert "the bundled classifier has labels of its own" in refused(capsys, "classify", file, "--labels", "a,b")


def test_evaluate(trained, tmp_path, capsys):
    folder, out, _ = trained
    said = printed(capsys, "evaluate", out)
    assert said.startswith(f"3 images: the validation images of {out}\naccuracy = 100.00 %, loss = ")
    assert "truth \\ answer" in said
    assert "top-5" not in said, "of three classes all are among the first five"
    other = tmp_path / "other.npz"
    images = np.stack([painted(colour, 7) for colour in ("red", "green", "red")])
    np.savez(other, images=images, labels=np.array(["red", "green", "blue"]))
    picture = tmp_path / "report.svg"
    found = json.loads(printed(capsys, "evaluate", out, "--data", str(other), "--json", "--plot", str(picture)))
    assert found["examples"] == 3
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["confusion"] == [[0, 0, 1], [0, 1, 0], [0, 0, 1]]
    assert picture.exists()
    assert "--recall is for runs of 'classify'" in refused(capsys, "evaluate", out, "--recall", "0.5")
    table = tmp_path / "table.csv"
    table.write_text(f"where,what\n{folder}/colours/red/001.png,red\n")
    assert "1 image: " in printed(capsys, "evaluate", out, "--data", str(table), "--columns", "where,what")


def test_a_run_of_images_is_compacted(trained, tmp_path, capsys):
    folder, out, _ = trained
    printed(capsys, "compact", out, "--out", str(tmp_path / "small"))
    file = str(folder / "colours" / "red" / "001.png")
    assert printed(capsys, "classify", str(tmp_path / "small"), file).startswith(f"{file}\tred\t")
    assert "does not say which images it validates on" in refused(capsys, "evaluate", str(tmp_path / "small"))


def test_damaged_facts_are_refused(trained, tmp_path, monkeypatch):
    _, out, _ = trained
    facts = Run.open(out).read_json("run.json")
    monkeypatch.setattr(load, "load_weights", lambda *arguments: None)
    wrong = [("mean", [1.0]), ("deviation", [0.5, 0.0, 0.5]), ("labels", ["a"]), ("mean", "x")]
    for number, (name, value) in enumerate(wrong):
        with Run.create(tmp_path / str(number), "test") as run:
            run.write_json("run.json", facts | {name: value})
        with pytest.raises(ValueError, match="is damaged"):
            ImageClassifier.load(run.folder, device="cpu")


@pytest.mark.parametrize(("name", "most"), [("cifar10-vit", 3_300_000), ("cifar10-cct", 3_800_000)])
def test_recipes_have_their_sizes(name, most):
    path = recipes.find(name, "images").path
    settings = from_json(ImagesConfig, parse_yaml(path.read_text(), path))
    with torch.device("meta"):
        built = models.build(settings.model.resolve(image=(32, 32), channels=3, classes=10))
    assert 3_000_000 < sum(part.numel() for part in built.parameters()) <= most


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_a_run_on_a_gpu_goes_on_bit_for_bit(tmp_path, monkeypatch, graphs):
    """Every augmentation, the moving average and batches made ahead, with and without CUDA graphs."""
    options = {"ema": 0.9, "device": "cuda", "deterministic": True, "graphs": graphs}
    whole, stopped = config(tmp_path, "whole", **options), config(tmp_path, "stopped", **options)
    finish(whole)
    update, count = loop.Loop._update, iter(range(7))

    def stop(self):
        if next(count, None) is None:
            raise InterruptedError
        update(self)

    with monkeypatch.context() as changed:
        changed.setattr(loop.Loop, "_update", stop)
        with pytest.raises(InterruptedError):
            finish(stopped)
    resume(stopped.out, Display(quiet=True))
    assert_same(whole.out, stopped.out)
