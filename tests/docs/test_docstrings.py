"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from folders import RUNS
from painted import write_folders
from torch import nn

import regard
from regard.cli import main

BUNDLED = Path(regard.__file__).parent / "bundled"


def examples() -> dict[str, doctest.DocTest]:
    """Every docstring with examples, by its full name; one that is imported elsewhere counts where it is written."""
    found = {}
    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        file = importlib.util.find_spec(module.name).origin
        # modules without examples need not be imported
        if not module.name.endswith(("__main__", ".lazy")) and "    >>> " in Path(file).read_text(encoding="utf-8"):
            loaded = importlib.import_module(module.name)
            found |= {test.name: test for test in doctest.DocTestFinder().find(loaded) if test.examples}
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the runs that docstrings name: bundled ones, one saved long ago, and a small one of our own."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("docstrings")
    runs = folder / "runs"
    runs.mkdir()
    for name in ("masked", "minilm"):
        (runs / name).symlink_to(BUNDLED / "english")
    (runs / "shakespeare").symlink_to(RUNS / "before-manifest" / "run")
    texts = folder / "reviews.csv"
    texts.write_text("text,label\n" + "".join(f"Film {i} is fine.,good\nFilm {i} is dull.,bad\n" for i in range(20)))
    sizes = ["--model.width", "8", "--model.heads", "2", "--model.inner", "8", "--model.layers", "1"]
    settings = ["--init", "none", "--data.tokenizer", "words", "--training.steps", "1", "--training.device", "cpu"]
    out = ["--out", str(runs / "reviews")]
    assert main(["train", "classify", "--data.text", str(texts), *sizes, *settings, *out]) == 0
    images = write_folders(folder / "colours", 10)
    (folder / "red.png").write_bytes((images / "red" / "000.png").read_bytes())
    settings = ["--training.steps", "1", "--training.device", "cpu", "--out", str(runs / "images")]
    assert main(["train", "images", "--data.images", str(images), *sizes, *settings]) == 0
    (folder / "dog.jpg").write_bytes((folder / "red.png").read_bytes())
    files = [path.relative_to(folder) for path in sorted(images.rglob("*.png"))]
    captions = folder / "captions.csv"
    captions.write_text("image,caption\n" + "".join(f"{file},a {file.parent.name} picture\n" for file in files))
    data = ["--data.captions", str(captions), "--data.tokenizer", "words", "--model.patch", "6"]
    settings = ["--training.steps", "1", "--training.device", "cpu", "--out", str(runs / "captions")]
    assert main(["train", "captions", *data, *sizes, *settings]) == 0
    return folder


def names() -> dict[str, object]:
    """What a reader of an example has at hand."""
    torch.manual_seed(0)
    tokens = torch.randint(3, 20, (2, 6))
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    heads = {name: torch.randn(2, 4, 6, 16) for name in "qkv"}
    seen = {"tokens": tokens, "ids": tokens, "source": tokens, "target": tokens, "keep": keep}
    return {
        **heads,
        **seen,
        "regard": regard,
        "nn": nn,
        "source_keep": keep,
        "target_keep": keep,
        "x": torch.randn(2, 6, 512),
        "images": torch.randn(2, 3, 64, 64),
        "module": nn.MultiheadAttention(32, 4, batch_first=True),
    }


def translators() -> dict[str, object]:
    """For an example that has a translator of each direction; one stands for both."""
    from regard.tasks.translate import Translator

    one = Translator.load(device="cpu")
    both = {"english_german": one.model, "german_english": one.model, "english": one.source, "german": one.target}
    return both | {"pairs": [("A house.", "Ein Haus.")]}


def small(kind: str, vocabulary: int) -> regard.Transformer:
    sizes = {"width": 16, "heads": 2, "inner": 16, "layers": 1}
    return regard.Transformer(regard.ModelConfig(kind=kind, vocabulary=vocabulary, **sizes))


def small_recurrent() -> regard.models.Recurrent:
    return regard.models.Recurrent(regard.models.RecurrentConfig(vocabulary=20, width=16, hidden=16, layers=1))


def small_captioner() -> dict[str, object]:
    sizes = {"width": 16, "heads": 2, "inner": 16, "layers": 1, "text_layers": 1, "decoder_layers": 1, "queries": 2}
    config = regard.models.CocaConfig(vocabulary=20, image=(64, 64), patch=16, **sizes)
    return {"captioner": regard.models.Coca(config)}


def reader() -> dict[str, object]:
    from regard.tasks.translate import Translator

    tokenizer = Translator.load(device="cpu").source
    return {"model": small("encoder", tokenizer.size), "tokenizer": tokenizer}


MORE = {
    "regard.tasks.translate.alignment.align_both": translators,
    "regard.page.notebook.show": reader,
    "regard.decoding.searching.decode": lambda: {"model": small("encoder-decoder", 20)},
    "regard.decoding.searching.caption": small_captioner,
    "regard.decoding.ensemble.Ensemble": lambda: {"one": small("encoder-decoder", 20), "another": small_recurrent()},
    "regard.models.pooling.Pooling": lambda: {"x": torch.randn(2, 6, 64)},
}


class Shown(doctest.OutputChecker):
    """A value that is not shown may be any, and what a run of the reader's own gives is an illustration."""

    def __init__(self, own: bool):
        self.own = own

    def check_output(self, want: str, got: str, flags: int) -> bool:
        return not want or self.own or super().check_output(want, got, flags)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    test = EXAMPLES[name]
    own = 'load("runs/' in test.docstring.split("#")[0]
    test.globs = {**test.globs, **names(), **MORE.get(name, dict)()}
    said: list[str] = []
    results = doctest.DocTestRunner(Shown(own), verbose=False).run(test, out=said.append, clear_globs=False)
    assert results.attempted > 0
    assert results.failed == 0, "".join(said)


def test_examples_are_found():
    assert {"regard.api.attention", "regard.models.transformer.Transformer"} <= set(EXAMPLES)
