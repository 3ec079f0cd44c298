"""Runs as ONNX files: read as somebody without Regard would, by onnxruntime, tokenizers and numpy."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tokenizers
import torch
from torch.testing import assert_close
from verbs import refused

import regard
from regard import cli, models
from regard.data.tokenizer import Tokenizer
from regard.interop import onnx
from regard.interop.runs import export_run
from regard.models.feedback import FeedbackConfig
from regard.models.pooling import ClassifierConfig
from regard.models.vision.vit import VitConfig
from regard.spec import ATTENTION
from regard.tasks.classify import Classifier
from regard.tasks.images import ImageClassifier
from regard.testing.cases import facts_of, shake
from regard.training import checkpoint
from regard.training.run import Run

TEXTS = ["a bad film", "no", "the cat sat on the mat, and the dog did not"]
SMALL = {"width": 16, "heads": 4, "inner": 24, "layers": 1}


def untrained(folder: Path, task: str, config, *, tokenizer: str | None = "tokenizer.json", **facts) -> Path:
    """A run folder with random weights."""
    torch.manual_seed(0)
    model = models.build(config)
    shake(model)
    with Run.create(folder, "a test") as run:
        if tokenizer is not None:
            Tokenizer.train(TEXTS, 40, "characters").save(folder / tokenizer)
            run.record(tokenizer)
        checkpoint.write(run.checkpoints, checkpoint.step_name(0), {"model": model.state_dict()}, {"step": 0})
        named = [] if tokenizer is None else [tokenizer]
        values = {"task": task, "model": vars(config), "tokenizers": {n: checkpoint.digest(folder / n) for n in named}}
        run.write_json("run.json", values | facts)
    return folder


def size() -> int:
    """Of the vocabulary of `untrained`."""
    return Tokenizer.train(TEXTS, 40, "characters").size


class Files:
    """The files of an export in ONNX Runtime, and the model they were made of."""

    def __init__(self, folder: Path, run: Path):
        self.folder, self.about = folder, json.loads((folder / "model.json").read_text())
        names = [Path(name).stem for name in self.about["files"]]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.sessions = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx", options) for name in names}
        opened = Run.open(run)
        self.model = models.build(regard.tasks.load.read_parts(opened).config).eval()
        regard.tasks.load.load_weights(self.model, opened)

    def __call__(self, name: str, **given: np.ndarray) -> dict[str, np.ndarray]:
        session = self.sessions[name]
        return dict(zip([out.name for out in session.get_outputs()], session.run(None, given), strict=True))

    def step(self, token: np.ndarray, state: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """As the docs say: what a step gives as next.NAME is state.NAME of the one behind it."""
        made = self("step", token=token, **state)
        logits = made.pop("logits")
        return logits, state | {name.replace("next.", "state.", 1): part for name, part in made.items()}


def exported(folder: Path, run: Path, **options) -> Files:
    export_run(run, folder / "onnx", "onnx", **options)
    return Files(folder / "onnx", run)


def close(made: np.ndarray, expected: torch.Tensor) -> None:
    assert_close(torch.from_numpy(made), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("language")
    spec = {"attention": "local(window=5)", "kv_heads": 2, "position": "rotary"}
    config = models.ModelConfig(kind="decoder", vocabulary=size(), **spec, **SMALL)
    return exported(folder, untrained(folder / "run", "language", config, length=24, start=2, apart=False))


def test_a_language_model_is_a_prefill_and_a_step_with_its_state(language):
    """Prompts of different lengths in one batch, then tokens one at a time until the text has its full length."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, size(), (3, 24))
    keep = np.ones((3, 9), bool)
    keep[1, :4] = keep[2, 2:] = False
    made = language("prefill", tokens=tokens[:, :9], keep=keep)
    rows = [list(row[:9][kept]) for row, kept in zip(tokens, keep, strict=True)]
    logits, state = made.pop("logits"), made
    for number in range(16):
        for row, written in zip(logits, rows, strict=True):
            close(row, language.model(torch.tensor([written])).logits[0, -1])
        if number == 15:
            break
        token = logits.argmax(1)
        rows = [[*row, int(id)] for row, id in zip(rows, token, strict=True)]
        logits, state = language.step(token, state)
    assert list(state["state.length"]) == [24, 20, 17]


def test_the_folder_of_a_language_model(language):
    names = sorted(path.name for path in language.folder.iterdir())
    assert names == [
        "model.json",
        "prefill.onnx",
        "step.onnx",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights.bin",
    ]
    assert language.about["sizes"] == {"batch": {"least": 1, "most": None}, "length": {"least": 2, "most": 24}}
    assert language.about["tokens"] == {"pad": 0, "unk": 1, "bos": 2, "eos": 3}
    assert 0 < language.about["largest_difference"] < 1e-4
    given = language.about["files"]["step.onnx"]["inputs"]
    assert given["token"] == "int64[batch]"
    assert given["state.blocks.0.attention.parts.0"] == "float32[batch,2,6,4]", "the window and the token"
    for path in language.folder.glob("*.onnx"):
        assert b".py" not in path.read_bytes(), "it names files of this machine"
    # both files read the same weights
    parameters = sum(part.numel() for part in language.model.parameters())
    assert (language.folder / "weights.bin").stat().st_size <= 4 * parameters


def test_a_translator_is_an_encoder_and_a_step(tmp_path):
    config = models.ModelConfig(vocabulary=size(), **SMALL)
    run = untrained(tmp_path / "run", "translate", config, tokenizer="source.json", longest=12)
    files = exported(tmp_path, run)
    draw = np.random.default_rng(0)
    for length in (7, 11):
        source, target = draw.integers(0, size(), (2, length)), draw.integers(0, size(), (2, 5))
        keep = np.ones((2, length), bool)
        keep[1, 4:] = False
        state = files("encoder", source=source, source_keep=keep)
        inputs = torch.from_numpy(source), torch.from_numpy(target)
        expected = files.model(*inputs, keep=torch.from_numpy(keep)).logits
        for t in range(5):
            logits, state = files.step(target[:, t], state)
            close(logits, expected[:, t])
    inputs, outputs = files.about["files"]["step.onnx"].values()
    assert "float32[batch,4,42,4]" in inputs.values(), "a KV cache with room for a translation"
    assert not [name for name in outputs if ".cross." in name], "the memory stays as it is"


def test_a_classifier_of_texts(tmp_path, capsys):
    """Through the command line, and from text: tokenizer.json adds bos and eos as Regard does."""
    config = ClassifierConfig(vocabulary=size(), classes=2, pooling="pma", **SMALL)
    run = untrained(tmp_path / "run", "classify", config, labels=["bad", "good"], longest=60)
    assert cli.main(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "onnx")]) == 0
    said = capsys.readouterr()
    assert "checked in ONNX Runtime: batch from 1, length from 2" in said.err
    files = Files(tmp_path / "onnx", run)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "onnx" / "tokenizer.json"))
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(TEXTS)
    tokens, keep = np.array([row.ids for row in rows]), np.array([row.attention_mask for row in rows], bool)
    logits = files("model", tokens=tokens, keep=keep)["logits"]
    expected = Classifier.load(run, device="cpu").probabilities(TEXTS)
    close(logits, torch.from_numpy(expected).log().float() + torch.from_numpy(logits).logsumexp(1, keepdim=True))
    assert files.about["labels"] == ["bad", "good"]


def test_an_encoder_of_fixed_length(tmp_path, monkeypatch):
    """A mechanism that reads tokens one by one takes one length: shorter texts are padded."""
    config = models.ModelConfig(kind="encoder", vocabulary=size(), attention="recurrent", pooler=True, **SMALL)
    monkeypatch.setattr(onnx, "SHORTEST", 4)  # each token is recorded
    run = untrained(tmp_path / "run", "masked", config, length=4, apart=True)
    found = export_run(run, tmp_path / "onnx", "onnx")
    assert "the length is fixed (length 4)" in found.notes[0]
    assert "attention recurrent reads tokens one by one" in found.notes[0]
    files = Files(tmp_path / "onnx", run)
    tokens, keep = np.random.default_rng(0).integers(0, size(), (2, 4)), np.ones((2, 4), bool)
    keep[1, 3:] = False
    made = files("model", tokens=tokens, keep=keep)
    inputs = torch.from_numpy(tokens), torch.from_numpy(keep)
    assert sorted(made) == ["logits", "pooled", "vectors"]
    close(made["logits"], files.model(inputs[0], keep=inputs[1]).logits)
    close(made["vectors"][1, :3], files.model.encode(inputs[0][1:, :3]).x[0])
    close(made["pooled"], files.model.pooled(inputs[0], keep=inputs[1]))


IMAGES = {"labels": ["cat", "dog"], "mean": [0.4, 0.5, 0.6], "deviation": [0.2, 0.3, 0.25]}


def of_images(folder: Path) -> Path:
    config = VitConfig(image=(8, 8), patch=4, classes=2, **SMALL)
    return untrained(folder, "images", config, tokenizer=None, **IMAGES)


def test_a_classifier_of_images_reads_pixels(tmp_path):
    run = of_images(tmp_path / "run")
    files = exported(tmp_path, run)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), np.uint8)
    logits = torch.from_numpy(files("model", pixels=pixels)["logits"])
    classifier = ImageClassifier.load(run, device="cpu")
    close(logits.numpy(), classifier.model(classifier.normalise(torch.from_numpy(pixels))).logits)
    assert files.about["labels"] == ["cat", "dog"]


def test_a_wrong_file_is_never_left_behind(tmp_path, monkeypatch):
    save = onnx._save

    def save_wrongly(folder, files):
        save(folder, files)
        path = folder / onnx.WEIGHTS
        path.write_bytes(bytes(len(path.read_bytes())))

    monkeypatch.setattr(onnx, "_save", save_wrongly)
    with pytest.raises(ValueError, match="logits of model for 3 rows of images differs from the model by"):
        export_run(of_images(tmp_path / "run"), tmp_path / "onnx", "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_not_exported_says_so(tmp_path, capsys, monkeypatch):
    config = FeedbackConfig(vocabulary=size(), **SMALL)
    run = untrained(tmp_path / "run", "language", config, length=24)
    out = ["--out", str(tmp_path / "onnx")]
    flags = ["export", str(run), "--format", "onnx", *out]
    assert "models of kind 'feedback' are not exported to ONNX: a step there needs a state of fixed size" in refused(
        capsys, *flags
    )
    assert "--length must be from 8, got 4" in refused(capsys, *flags, "--length", "4")
    assert "--family is for the format huggingface" in refused(capsys, *flags, "--family", "gpt2")
    other = ["export", str(run), "--format", "huggingface", *out, "--length", "9"]
    assert "--length is for the format onnx" in refused(capsys, *other)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install 'regard[onnx]'" in refused(capsys, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# what the table of docs/interop.md says
REFUSED = {("efficient", "causal"), ("performer", "causal")} | {
    ("synthesizer", role) for role in ("self", "causal", "cross")
}
FIXED = {("axial", "causal"), ("compressed", "causal"), ("recurrent", "self"), ("recurrent", "causal")} | {
    ("swin", "self"),
    ("xl", "causal"),
}
TASKS = {"self": "masked", "causal": "language", "cross": "translate"}
KINDS = {"self": "encoder", "causal": "decoder", "cross": "encoder-decoder"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "role"),
    [(name, role) for name in ATTENTION.names() for role in facts_of(ATTENTION.find(name).examples[0]).roles],
)
def test_every_mechanism(tmp_path, name, role):
    """`write` compares what it wrote with the model; the docs say which lengths stay open."""
    spec = ATTENTION.find(name).examples[0]
    specs = {"attention": "linear", "cross_attention": spec} if role == "cross" else {"attention": spec}
    torch.manual_seed(0)
    model = models.build(models.ModelConfig(kind=KINDS[role], vocabulary=50, **specs, **SMALL | {"width": 32})).eval()
    facts = {"task": TASKS[role], "longest": 40} if role == "cross" else {"task": TASKS[role], "length": 64}
    if (name, role) in REFUSED:
        with pytest.raises(ValueError, match="cannot be recorded"):
            onnx.write(tmp_path / "onnx", model, facts, {}, None)
        return
    written = onnx.write(tmp_path / "onnx", model, facts, {}, None)
    assert bool(written.notes) == ((name, role) in FIXED), written.notes
