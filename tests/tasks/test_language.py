"""Language models from the outside: text of any kind, blocks and documents, training, measures, generation, prompts."""

import dataclasses
import gzip
import importlib
import io
import json
import lzma
import math
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from regard import cli, models
from regard.data.documents import IGNORED, Blocks, Pieces, hold_out, read_documents, stream
from regard.data.text import BadText
from regard.data.tokenizer import EOS, Streamed, Tokenizer
from regard.decoding import DecodingConfig, Sliding, generate
from regard.decoding.greedy import draw, penalize_repetition
from regard.models.config import ModelConfig
from regard.models.registry import GPT
from regard.models.transformer import Transformer
from regard.tasks.language import LanguageConfig, LanguageOptions, fewshot
from regard.tasks.language.language_model import LanguageModel, Listener
from regard.tasks.language.task import Task
from regard.tasks.text import FILE, LanguageData
from regard.tasks.train import resume, train
from regard.training import checkpoint, loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run

RHYME = (
    "Three blind mice. Three blind mice.\nSee how they run. See how they run.\n\n"
    "They all ran after the farmer's wife,\nwho cut off their tails with a carving knife.\n\n"
)
BOOK = RHYME * 12
ODD = "naïve café — 東京 \U0001f600\n\n  two  spaces\ttab\u2028end\n"


def config(folder: Path, name: str = "run", *, data: dict | None = None, model: dict | None = None, **training):
    file = folder / "book.txt"
    if not file.exists():
        file.write_text(BOOK, encoding="utf-8")
    sizes = {"width": 16, "heads": 2, "inner": 32, "layers": 2, "dropout": 0.1} | (model or {})
    small = {"steps": 12, "tokens": 128, "evaluate_every": 5, "save_every": 3, "log_every": 1, "warmup": 4}
    kept = {"keep": 3, "tensorboard": False, "label_smoothing": 0.0, "metric": "loss", "schedule": "cosine"}
    return LanguageConfig(
        out=str(folder / name),
        data=LanguageData(**{"text": str(file), "tokenizer": "characters", "length": 16} | (data or {})),
        model=LanguageOptions(**sizes),
        training=TrainingConfig(**small | kept | training),
    )


def finish(settings: LanguageConfig) -> loop.State:
    return train(Task, settings, Display(quiet=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("language")
    settings = config(folder, steps=60, evaluate_every=30, save_every=None, learning_rate=0.01, model={"dropout": 0.0})
    finish(settings)
    return settings.out


@pytest.fixture(scope="module")
def language(run) -> LanguageModel:
    return LanguageModel.load(run, device="cpu")


def untrained(length: int = 16, text: str = BOOK, start: int | None = None, apart: bool = False, **sizes):
    tokenizer = Tokenizer.train([text], 300, "characters")
    torch.manual_seed(0)
    small = {"kind": "decoder", "width": 16, "heads": 2, "inner": 32, "layers": 2, "norm": "pre", "dropout": 0.0}
    model = Transformer(ModelConfig(vocabulary=tokenizer.size, **small | sizes)).eval()
    return LanguageModel(model, tokenizer, length, start, apart)


def greedy(most: int, **options) -> DecodingConfig:
    return DecodingConfig(beam=1, minimum=0, maximum=most, **options)


def sampled(most: int, **options) -> DecodingConfig:
    return DecodingConfig(sample=True, minimum=0, maximum=most, **options)


# tokens


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_any_text_comes_back(kind, monkeypatch):
    tokenizer = Tokenizer.train([BOOK, ODD], 400, kind)
    for text in ("", " ", ODD, BOOK, "\n\n"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_text(text).tolist() == ids
    whole = tokenizer.encode(BOOK)
    monkeypatch.setattr("regard.data.tokenizer.LONG", 50)
    assert tokenizer.encode_text(BOOK).tolist() == whole


def test_words_keep_the_ends_of_lines():
    tokenizer = Tokenizer.train(["a b\n\nb c\n"], 100, "words")
    assert tokenizer.tokens(tokenizer.encode("a  c\n\nx")) == ["a", "c", "\\n", "\\n", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("a c \n b")) == "a c\nb"
    assert tokenizer.size == 4 + 4


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe", "words"])
def test_tokenizers_are_saved_whole(kind, tmp_path):
    tokenizer = Tokenizer.train([BOOK, ODD], 400, kind)
    tokenizer.save(tmp_path / FILE)
    again = Tokenizer.load(tmp_path / FILE)
    assert again.encode(ODD) == tokenizer.encode(ODD)
    assert again.size == tokenizer.size


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe", "words"])
def test_text_that_comes_token_by_token(kind):
    tokenizer = Tokenizer.train([BOOK, ODD], 400, kind)
    text = BOOK[:300] + ODD + BOOK[:300]
    ids = tokenizer.encode(text)
    for cut in (0, 1, 40):
        streamed = Streamed(tokenizer, ids[:cut])
        pieces = [streamed.add(id) for id in ids[cut:]]
        assert len(streamed.ids) <= 16  # what is decoded again does not grow
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + streamed.pending() == tokenizer.decode(ids)[len(tokenizer.decode(ids[:cut])) :]


def test_bytes_that_never_become_text_do_not_pile_up():
    tokenizer = Tokenizer.train([], 300, "bytes")
    broken = tokenizer.encode("é")[0]
    streamed = Streamed(tokenizer, [])
    assert "".join(streamed.add(broken) for _ in range(100)).count("\ufffd") > 90
    assert len(streamed.ids) < 16


# documents


def test_files_folders_and_archives(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b" / "two.txt.gz").write_bytes(gzip.compress(b"three\n"))
    (tmp_path / "b" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"zero\n\n \nnull\n"))
    # hidden is what is hidden in the folder, not the way to it
    texts, skipped = read_documents([str(tmp_path / "b" / ".." / "b"), str(tmp_path / "a.xz")], "file")
    assert texts == ["one\ntwo\n", "three\n", "zero\n\n \nnull\n"]
    assert skipped == {}
    assert read_documents([str(tmp_path / "a.xz")], "line")[0] == ["zero\n", "null\n"]
    assert read_documents([str(tmp_path / "a.xz")], "blank")[0] == ["zero\n", " \nnull\n"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"good\nbad \xff\n", ":2: not UTF-8"),
        (b"a\0b\n", ":1: NUL"),
        (b"\x1b[31m\n", ":1: control"),
        (b"", ":1: the file is empty"),
        (b"\n \n\t\n", "no text in it"),
    ],
)
def test_B1_bad_text_is_named(tmp_path, data, words):
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(BadText, match=words):
        read_documents([str(path)], "file")
    if words.startswith(":2"):
        texts, skipped = read_documents([str(path)], "file", skip_bad=True)
        assert texts == ["good\n"]
        assert [part.count for part in skipped.values()] == [1]


def test_B1_what_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for name, words in (("pipe", "a pipe"), ("empty", "folder without any file"), ("gone", "no such file")):
        with pytest.raises(BadText, match=words):
            read_documents([str(tmp_path / name)], "file")
    long = tmp_path / "long.txt"
    long.write_bytes(b"x" * 10_000_000)
    assert len(read_documents([str(long)], "file")[0][0]) == 10_000_001


def test_the_last_part_is_held_out():
    assert hold_out(["abcdefghij"], 0.1) == (["abcdefghi"], ["j"])
    assert hold_out(["abcde", "fghij", "klmno"], 0.5) == (["abcde", "fg"], ["hij", "klmno"])
    with pytest.raises(ValueError, match="too short"):
        hold_out(["a"], 0.1)


def test_blocks_ask_for_every_token_once_an_epoch():
    ids = np.arange(4, 1000, dtype=np.int32)
    blocks = Blocks(ids, length=16, tokens=64, seed=3)
    orders = []
    for epoch in (0, 1):
        batches = [blocks.get(epoch, index) for index in range(blocks.count(epoch))]
        asked = torch.cat([batch.target.flatten() for batch in batches])
        assert len(asked.unique()) == len(asked)
        assert len(asked) > len(ids) - 2 * 16
        for batch in batches:
            assert batch.keep is None
            assert_close(batch.tokens + 1, batch.target)
        orders.append([batch.indices.tolist() for batch in batches])
    assert orders[0] != orders[1]
    other = Blocks(ids, length=16, tokens=64, seed=3)
    # no state: any batch of any epoch at any time
    assert other.get(1, 5).indices.tolist() == orders[1][5]
    assert Blocks(ids, length=16, tokens=64, seed=4).get(0, 0).indices.tolist() != orders[0][0]


@pytest.mark.parametrize("stride", [None, 1, 5, 16])
@pytest.mark.parametrize("size", [2, 17, 18, 100])
def test_measured_blocks_ask_for_every_token_exactly_once(stride, size):
    ids = np.arange(4, 4 + size, dtype=np.int32)
    blocks = Blocks(ids, length=16, tokens=48, shuffle=False, stride=stride)
    asked = []
    for index in range(blocks.count(0)):
        batch = blocks.get(0, index)
        real = batch.target != IGNORED
        real = real if batch.keep is None else real & batch.keep
        asked += batch.target[real].tolist()
    assert sorted(asked) == list(range(5, 4 + size))


def test_pieces_are_of_one_document():
    documents = [np.full(size, 4 + number, dtype=np.int32) for number, size in enumerate((3, 40, 1, 16, 17))]
    pieces = Pieces(documents, EOS, length=16, tokens=64, multiple=8)
    asked = 0
    for index in range(pieces.count(0)):
        batch = pieces.get(0, index)
        keep = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.keep is None else batch.keep
        assert batch.tokens.shape[1] % 8 == 0
        asked += int(keep.sum())
        for tokens, target, real in zip(batch.tokens, batch.target, keep, strict=True):
            assert len(set(torch.cat([tokens[real], target[real]]).tolist()) - {EOS}) == 1
    assert asked == sum(len(ids) + 1 for ids in documents)


@pytest.mark.parametrize("attention", ["softmax", "linear", "local(window=4)"])
def test_documents_apart_never_see_each_other(attention):
    texts = [RHYME[:50], RHYME[50:90], RHYME[90:150]]
    for apart in (True, False):
        language = untrained(length=512, start=EOS, apart=apart, attention=attention)
        alone = sum((found := language.measure([text])).loss * found.tokens for text in texts)
        together = language.measure(texts)
        total = together.loss * together.tokens
        assert (abs(total - alone) < 1e-3) == apart


# training


def test_R1_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    for data in ({}, {"apart": True, "documents": "blank", "tokenizer": "bpe", "vocabulary": 300}):
        whole, other = (config(tmp_path, f"{name}{len(data)}", data=data) for name in ("whole", "other"))
        finish(whole)
        update = loop.Loop._update

        def dies(self, update=update):
            if self.state.step == 7:
                raise KeyboardInterrupt
            update(self)

        monkeypatch.setattr(loop.Loop, "_update", dies)
        with pytest.raises(KeyboardInterrupt):
            finish(other)
        monkeypatch.setattr(loop.Loop, "_update", update)
        resume(other.out, Display(quiet=True))
        ours, theirs = (checkpoint.newest(Run.open(part.out).checkpoints).checkpoint for part in (whole, other))
        assert_close(ours.tensors, theirs.tensors, rtol=0, atol=0)
        assert ours.state["epoch"] == theirs.state["epoch"]
        assert ours.state["batch"] == theirs.state["batch"]


def test_a_run_learns_and_is_passed_on(run, tmp_path):
    first, last = [record for record in Run.open(run).records() if record["event"] == "evaluation"]
    assert last["loss"] < first["loss"] < math.log(34)
    small = tmp_path / "small"
    assert cli.main(["compact", run, "--out", str(small)]) == 0
    ours, theirs = (LanguageModel.load(folder).measure([RHYME]).loss for folder in (run, small))
    assert abs(ours - theirs) < 0.02
    shutil.copytree(run, tmp_path / "copy")
    assert cli.main(["average", str(tmp_path / "copy"), "--last", "2"]) == 0


def test_a_run_begins_with_another(run, tmp_path):
    """One step at a rate of nothing: the same model, tokenizer and loss, on other text."""
    (tmp_path / "book.txt").write_text("Three fine mice.\n" * 40)
    settings = config(tmp_path, steps=1, learning_rate=1e-30, weight_decay=0.0)
    first = shutil.copytree(run, tmp_path / "first")
    facts = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps(facts | {"start": 3}))
    Run(first).record("run.json")
    settings = dataclasses.replace(settings, init=str(first), model=LanguageOptions(dropout=0.2))
    finish(settings)
    shutil.rmtree(first)
    with_more = resume(settings.out, Display(quiet=True), steps=2)
    assert with_more.step == 2
    ours, theirs = LanguageModel.load(run), LanguageModel.load(settings.out)
    assert theirs.start == 3
    assert theirs.tokenizer.encode(BOOK) == ours.tokenizer.encode(BOOK)
    assert ours.measure([RHYME]).loss == pytest.approx(theirs.measure([RHYME]).loss)
    for changed, name in ((LanguageOptions(width=8), "width"), (LanguageOptions(preset="gpt2"), "preset")):
        with pytest.raises(ValueError, match=f"^model.{name} cannot change with --init: .* only dropout can"):
            finish(dataclasses.replace(settings, init=run, out=str(tmp_path / "b"), model=changed))


def test_what_does_not_fit_is_said_before_anything_is_written(tmp_path):
    for data, words in (
        ({"text": None}, "give data.text"),
        ({"length": 2000}, "2000 tokens does not fit into a batch"),
        ({"length": 1000, "tokenizer": "words"}, "too few for blocks|does not fit"),
        ({"text": str(tmp_path / "gone.txt")}, "no such file"),
    ):
        settings = config(tmp_path, data=data)
        with pytest.raises(ValueError, match=words):
            finish(settings)
        assert not Path(settings.out).exists()
    with pytest.raises(ValueError, match="metric of language must be one of loss"):
        finish(config(tmp_path, metric="bleu"))
    with pytest.raises(ValueError, match="150 exceeds the 64 positions of the model"):
        finish(config(tmp_path, data={"length": 150}, model={"position": "learned(longest=64)"}, tokens=2000))


GPT2 = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}


@pytest.mark.parametrize(("preset", "count"), [*GPT2.items(), ("smollm2-135m", 134_515_008)])
def test_presets_have_exactly_the_published_parameters(preset, count):
    vocabulary = 50257 if preset in GPT2 else 49152
    size = LanguageOptions(preset=preset).resolve(vocabulary=vocabulary)
    with torch.device("meta"):
        model = models.build(size)
    assert sum(part.numel() for part in model.parameters()) == count


def test_presets_are_the_shapes_of_hugging_face():
    transformers = importlib.import_module("transformers")
    for preset in GPT:
        size = LanguageOptions(preset=preset).resolve(vocabulary=5000)
        common = {"vocab_size": 5000}
        if "gpt" in preset:
            shape = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads}
            theirs = transformers.GPT2LMHeadModel, transformers.GPT2Config(**common, **shape)
        else:
            theirs = (
                transformers.LlamaForCausalLM,
                transformers.LlamaConfig(
                    **common,
                    hidden_size=size.width,
                    intermediate_size=size.inner,
                    num_hidden_layers=size.layers,
                    num_attention_heads=size.heads,
                    num_key_value_heads=size.kv_heads,
                    tie_word_embeddings=True,
                ),
            )
        with torch.device("meta"):
            counts = [
                sum(part.numel() for part in model.parameters()) for model in (models.build(size), theirs[0](theirs[1]))
            ]
        assert counts[0] == counts[1], preset


# measures


def test_measures_of_a_model_that_knows_nothing():
    """Every token costs log V: all else follows from counting."""
    text = "éa bc\n\nd\n"
    language = untrained(length=4, text=text)
    with torch.no_grad():
        language.model.output.weight.zero_()
    V = language.tokenizer.size
    found = language.measure([text])
    assert (found.tokens, found.characters, found.bytes, found.words) == (10, 9, 10, 3 + 3)
    assert found.loss == pytest.approx(math.log(V))
    assert found.perplexity == pytest.approx(V)
    assert found.bits_per_character == pytest.approx(10 * math.log2(V) / 9)
    assert found.bits_per_byte == pytest.approx(10 * math.log2(V) / 10)
    assert found.word_perplexity == pytest.approx(V ** (10 / 6))


def test_a_stride_gives_every_token_its_context():
    language = untrained(length=8)
    ids = torch.from_numpy(stream([RHYME[:40]], language.tokenizer).astype(np.int64))
    total = 0.0
    for at in range(1, len(ids)):
        before = ids[max(0, at - 8) : at]
        total -= language.model(before[None]).logits[0, -1].log_softmax(0)[ids[at]].item()
    found = language.measure([RHYME[:40]], stride=1)
    assert found.loss * found.tokens == pytest.approx(total, rel=1e-5)
    assert language.measure([RHYME[:40]]).loss != pytest.approx(found.loss, rel=1e-5)


def test_unknown_characters_are_counted(language):
    assert language.measure(["Three Ж\n" * 4]).unknown == 4


# generation


def test_text_comes_as_it_is_written_and_the_same_again(language):
    for decoding in (greedy(40), sampled(40, nbest=3, seed=5), sampled(40, temperature=2.0, top_k=3)):
        pieces: dict[int, str] = {}

        def say(sample, text, pieces=pieces):
            pieces[sample] = pieces.get(sample, "") + text

        found = language.generate("Three", decoding, on_text=say)
        assert sorted(part.text for part in found) == sorted(pieces.values())
        assert [part.text for part in language.generate("Three", decoding)] == [part.text for part in found]
        for part in found:
            assert language.tokenizer.decode(language.encode("Three") + part.ids) == "Three" + part.text
            assert part.ended in ("length", "end")
    drawn = [language.generate("Three", sampled(40, seed=seed))[0].text for seed in (1, 2)]
    assert drawn[0] != drawn[1]


def test_greedy_is_the_best_token_of_the_whole_model(language):
    ids = language.encode("See how")
    (found,) = language.generate("See how", greedy(20))
    for token in found.ids:
        logits = language.model(torch.tensor([ids])).logits[0, -1]
        logits[[0, 1, 2]] = -math.inf
        assert int(logits.argmax()) == token
        ids.append(token)


def test_stop_strings(language):
    (whole,) = language.generate("Three", greedy(60))
    word = whole.text[10:14]
    heard = []
    (found,) = language.generate("Three", greedy(60), stop=[word, "never"], on_text=lambda _, text: heard.append(text))
    assert found.ended == "stop"
    assert found.text == whole.text[: whole.text.index(word)] == "".join(heard)
    with pytest.raises(ValueError, match="must not be empty"):
        language.generate("Three", greedy(5), stop=[""])


@pytest.mark.parametrize("stop", [["END"], ["ENDE", "ND"], ["EE"], ["x", "E\n"]])
def test_what_may_be_the_beginning_of_a_stop_is_held_back(stop):
    """Against the plain way: look at the whole text each time."""
    draw = random.Random(1)
    tokenizer = Tokenizer.train(["END x\n"], 100, "characters")
    for _ in range(200):
        text = "".join(draw.choice("END x\n") for _ in range(12))
        listener, heard = Listener(tokenizer, [], stop), ""
        for token in tokenizer.encode(text):
            part, ends = listener.add(token)
            heard += part
            seen = tokenizer.decode(listener.ids)
            first = min((at for word in stop if (at := seen.find(word)) >= 0), default=None)
            assert ends == (first is not None)
            assert seen[:first].startswith(heard)
            if ends:
                break
        heard += listener.rest()
        assert heard == listener.text == seen[:first]


def test_cuts_of_the_draws():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]).repeat(4000, 1)
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    nothing = torch.tensor([], dtype=torch.long)
    p = logits[0].softmax(0)
    for options, left in (
        ({"min_p": 0.1}, p >= 0.1 * p.max()),
        ({"min_p": 0.2}, p >= 0.2 * p.max()),
        ({"min_p": 1.0}, p >= p.max()),
        ({"min_p": 0.0}, p > 0),
        ({"min_p": 0.1, "top_k": 2}, torch.tensor([False, False, False, True, True])),
    ):
        _, token = draw(logits, nothing, uniform, DecodingConfig(sample=True, **options))
        share = torch.bincount(token, minlength=5) / 4000
        assert_close(share, torch.where(left, p, 0) / p[left].sum(), rtol=0, atol=0.03)
        assert not share[~left].any()


def test_the_penalty_on_repetition_is_that_of_hugging_face():
    processors = importlib.import_module("transformers.generation.logits_process")
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 4, 4], [0, 2, 9], [3, 3, 3]])
    used = torch.zeros(3, 11, dtype=torch.bool).scatter_(1, ids, True)
    theirs = processors.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    assert_close(penalize_repetition(logits, used, 1.7), theirs, rtol=0, atol=0)


def test_repetition_counts_prompt_and_output(language):
    ids = language.encode("Three blind")
    (found,) = language.generate("Three blind", greedy(25, repetition=1.5))
    for token in found.ids:
        logits = language.model(torch.tensor([ids])).logits[:, -1].detach()
        used = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, torch.tensor([ids]), True)
        weighed = penalize_repetition(logits, used, 1.5)[0]
        weighed[[0, 1, 2]] = -math.inf
        assert int(weighed.argmax()) == token
        ids.append(token)
    assert found.text != language.generate("Three blind", greedy(25))[0].text
    assert len(language.generate("Three blind", sampled(12, repetition=1.5, nbest=3))) == 3
    with pytest.raises(ValueError, match="beam=1"):
        DecodingConfig(beam=3, repetition=1.2)


def test_prompts_past_the_last_position(run, language):
    assert language.limit == 16
    prompt = BOOK[:40]
    with pytest.raises(ValueError, match=r"40 tokens, and the model 16 positions.*--slide"):
        language.generate(prompt, greedy(5))
    (found,) = language.generate(BOOK[:12], greedy(50))
    assert (len(found.ids), found.ended) == (4, "length")
    (found,) = language.generate(prompt, greedy(5), slide=True)
    assert len(found.ids) == 5


def test_sliding_reads_the_last_half_again():
    model, longest = untrained(position="learned(longest=8)").model, 8
    text = torch.randint(4, 30, (2, 40), generator=torch.Generator().manual_seed(0))
    sliding = Sliding(model, longest)
    state, context, end = sliding.start(2), text[:, :0], 0
    for size in (3, 4, 1, 1, 1, 2, 1, 1, 1, 12, 1, 1, 1, 1, 1, 1):
        new, end = text[:, end : end + size], end + size
        context = torch.cat([context, new], 1)
        if context.shape[1] > longest:
            context = text[:, end - longest // 2 : end]
        logits, state = sliding.extend(new, state)
        assert_close(logits[:, -1], model(context).logits[:, -1])
    assert len(generate(sliding, text[:, :9], config=sampled(20, nbest=3, maximum_extra=20))[0]) == 3


def test_special_tokens_are_never_written():
    language = untrained(head_bias=True)
    with torch.no_grad():
        language.model.output.bias[:3] = 1e4
    for decoding in (greedy(9), sampled(9)):
        (found,) = language.generate("Three", decoding)
        assert min(found.ids) >= 4


def test_a_prompt_begins_as_the_documents_did(tmp_path):
    assert untrained(start=EOS).encode("Th")[0] == EOS
    assert len(untrained().encode("Th")) == 2
    assert untrained().tokenizer.decode(untrained().encode("")) == "\n"
    settings = config(tmp_path, data={"apart": True, "documents": "blank"}, steps=1)
    finish(settings)
    language = LanguageModel.load(settings.out)
    assert (language.apart, language.start, language.length) == (True, EOS, 16)


class Counted(TorchDispatchMode):
    """Operators called, and elements they write."""

    def __init__(self):
        super().__init__()
        self.steps: list[tuple[int, int]] = []
        self.calls = self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.calls += 1
        # what is read counts too: an attention over all that came before reads it, whatever it writes
        flat = [part for part in (*args, out) if isinstance(part, torch.Tensor)]
        self.size += sum(part.numel() for part in flat)
        return out

    def mark(self) -> None:
        self.steps.append((self.calls, self.size))
        self.calls = self.size = 0


@pytest.mark.parametrize("attention", ["linear", "performer", "local(window=8)", "softmax"])
def test_a_late_token_costs_what_an_early_one_costs(attention):
    """Everything that generation does for one token, counted: the mechanism, the choice, the text that is given."""
    language = untrained(attention=attention, position="sinusoidal")
    with Counted() as counted:
        language.generate("Three", greedy(800, repetition=1.01), on_text=lambda sample, text: counted.mark())
    steps = counted.steps
    if len(steps) < 700:
        pytest.fail(f"the model ended after {len(steps)} tokens: it shows nothing")
    assert steps[100][0] == steps[650][0]
    assert (steps[100][1] == steps[650][1]) == (attention != "softmax")


def test_likelihoods_are_those_of_the_whole_model():
    language = untrained(start=EOS)
    pairs = [("Three blind", " mice"), ("", "See"), ("See how they", " run"), ("T", "h")]
    found = language.likelihoods(pairs)
    for (context, rest), (logp, count) in zip(pairs, found, strict=True):
        before, after = language.encode(context), language.tokenizer.encode(rest)
        logits = language.model(torch.tensor([before + after])).logits[0].log_softmax(1)
        expected = sum(logits[len(before) - 1 + at, token].item() for at, token in enumerate(after))
        assert count == len(after)
        assert logp == pytest.approx(expected, rel=1e-4)


# prompts


class Rigged:
    """Likes what it is told to."""

    def __init__(self, likes):
        self.likes, self.asked = likes, []

    def likelihoods(self, pairs):
        self.asked += pairs
        return [self.likes(context, rest) for context, rest in pairs]


def write_task(folder: Path, **values) -> str:
    base = {
        "description": "Good or bad?",
        "prompt": "Review: {text}\nAnswer:",
        "answer": " {label}",
        "choices": ["good", "very bad"],
        "examples": [{"text": f"e{n}", "label": ("good", "very bad")[n % 2]} for n in range(6)],
        "queries": [{"text": "fine", "label": "good"}, {"text": "awful", "label": "very bad"}],
    }
    path = folder / "task.yaml"
    path.write_text(json.dumps(base | values), encoding="utf-8")
    return str(path)


def test_prompts_are_built_and_scored(tmp_path):
    loaded = fewshot.load(write_task(tmp_path))
    model = Rigged(lambda context, rest: (0.0 if ("fine" in context) == (rest == " good") else -1.0, 1))
    found = fewshot.run(model, loaded, [0, 2], draws=3)
    assert [(part.shots, part.mean, part.spread, len(part.draws)) for part in found] == [(0, 1, 0, 1), (2, 1, 0, 3)]
    assert model.asked[0] == ("Good or bad?\n\nReview: fine\nAnswer:", " good")
    assert model.asked[-1][0].count("Review:") == 3
    drawn = {context.rsplit("\n\n", 1)[0] for context, _ in model.asked if context.count("Review:") == 3}
    assert len(drawn) == 3
    wrong = Rigged(lambda context, rest: (0.0 if rest == " good" else -1.0, 1))
    assert fewshot.run(wrong, loaded, [0])[0].mean == 0.5


@pytest.mark.parametrize(
    ("normalise", "score"),
    [
        ("none", {" good": -5.0, " very bad": -8.9}),
        ("tokens", {" good": -5.0 / 2, " very bad": -8.9 / 4}),
        ("characters", {" good": -5.0 / 5, " very bad": -8.9 / 9}),
        ("prior", {" good": -5.0 + 1.0, " very bad": -8.9 + 5.5}),
    ],
)
def test_long_answers_are_made_comparable(tmp_path, normalise, score):
    def likes(context, rest):
        if not context:
            return {" good": (-1.0, 2), " very bad": (-5.5, 4)}[rest]
        return {" good": (-5.0, 2), " very bad": (-8.9, 4)}[rest]

    loaded = fewshot.load(write_task(tmp_path, normalise=normalise))
    answer = max(score, key=score.get).strip()
    assert (answer == "good") == (normalise == "none")
    assert fewshot.choose(Rigged(likes), loaded, ["p", "q"]) == [answer, answer]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"choices": None}, "needs choices"),
        ({"choices": ["good", "good"]}, "at least two different"),
        ({"answer": "x"}, "answer must contain {label}"),
        ({"prompt": "{label}"}, "prompt must not contain {label}"),
        ({"queries": []}, "queries must have at least one row"),
        ({"queries": [{"text": "a"}]}, "row 1 has no label"),
        ({"queries": [{"text": "a", "label": "so so"}]}, "expected one of"),
        ({"queries": "gone.jsonl"}, "gone.jsonl: no such file"),
        ({"wish": 1}, "has no wish"),
        ({"score": "magic"}, "score must be"),
        ({"prompt": "{text.__class__}"}, None),
    ],
)
def test_B1_task_files(tmp_path, values, words):
    path = write_task(tmp_path, **values)
    if words is None:
        loaded = fewshot.load(path)
        assert fewshot.prompt(loaded.task, [], loaded.queries[0]).endswith("{text.__class__}")
        return
    with pytest.raises(ValueError, match=words):
        fewshot.load(path)


# the command line


def feed(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_generate_prints(run, monkeypatch, capsys):
    short = ["--maximum", "8", "--seed", "3"]
    assert cli.main(["generate", run, "Three", *short]) == 0
    once = capsys.readouterr().out
    assert once.startswith("Three")
    feed(monkeypatch, b"Three")
    assert cli.main(["generate", run, *short]) == 0
    assert capsys.readouterr().out == once
    assert cli.main(["generate", run, "Three", *short, "--n", "3"]) == 0
    assert capsys.readouterr().out.count("----\n") == 2
    assert cli.main(["generate", run, "Ж Three Ж", *short]) == 0
    assert "2 tokens of the prompt are not in the vocabulary" in capsys.readouterr().err
    feed(monkeypatch, b"Three\n\nSee how\n")
    assert cli.main(["generate", run, *short, "--lines", "--json", "--temperature", "0"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["Three", "", "See how"]
    assert all(record["tokens"] <= 8 for record in records)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe bad", b"a\0b\r\n", b"\xef\xbb\xbfmark", "Ж <s> </s> ‮".encode()])
def test_B1_any_prompt_is_gone_on_with(run, monkeypatch, capsys, data):
    feed(monkeypatch, data)
    assert cli.main(["generate", run, "--maximum", "4"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_evaluate_prints(run, tmp_path, capsys):
    assert cli.main(["evaluate", run]) == 0
    said = capsys.readouterr().out
    for word in ("loss =", "perplexity =", "bits per character", "bits per byte", "word perplexity"):
        assert word in said
    file = tmp_path / "a.txt"
    file.write_text(RHYME)
    values = []
    for flags in ([], ["--stride", "4"]):
        assert cli.main(["evaluate", run, "--text", str(file), "--json", *flags]) == 0
        values.append(json.loads(capsys.readouterr().out))
    assert values[0]["characters"] == len(RHYME)
    assert values[1]["loss"] < values[0]["loss"]


def test_the_spread_is_the_standard_deviation_over_draws():
    assert_close(fewshot.Accuracy(1, [0.0, 0.5, 1.0]).spread, 0.5)
    assert fewshot.Accuracy(0, [0.5]).spread == 0


def test_prompt_prints(run, tmp_path, capsys):
    short = {"description": "", "prompt": "{text}:", "answer": "{label}", "separator": " ", "choices": ["a", "b"]}
    short["examples"] = [{"text": "e", "label": "a"}, {"text": "w", "label": "b"}]
    short["queries"] = [{"text": "th", "label": "a"}, {"text": "w", "label": "b"}, {"text": "o", "label": "b"}]
    path = write_task(tmp_path, **short)
    assert cli.main(["prompt", run, "--task", path, "--shots", "0,1", "--draws", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 queries, by likelihood; always the most frequent answer: 66.67%\nshots  accuracy")
    assert cli.main(["prompt", run, "--task", path, "--shots", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (len(said["results"][0]["draws"]), said["majority"]) == (5, 2 / 3)
    path = write_task(tmp_path, **short | {"score": "generation", "maximum": 3})
    assert cli.main(["prompt", run, "--task", path, "--shots", "2"]) == 0
    assert cli.main(["prompt", run, "--task", path, "--shots", "2", "--show"]) == 0
    assert capsys.readouterr().out.endswith("e:a w:b th:\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "language"], "give data.text"),
        (["train", "language", "--data.text", "gone.txt"], "gone.txt: no such file"),
        (["train", "language", "--data.text", "RUN/run.json", "--model.preset", "gpt9"], "model.preset must be one of"),
        (["train", "language", "--data.text", "RUN/run.json", "--out", "RUN"], "holds a run already"),
        (["train", "language", "--data.lenght", "3"], "did you mean 'data.length'"),
        (["train", "sing"], "no task 'sing'"),
        (["generate", "gone", "x"], "no run folder gone"),
        (["generate", "RUN", "x", "--temperature", "-1"], "--temperature must be at least 0"),
        (["generate", "RUN", "x", "--n", "0"], "--n must be at least 1"),
        (["generate", "RUN", "x", "--lines"], "leave the prompt out"),
        (["generate", "RUN", "x", "--stop", ""], "stop string must not be empty"),
        (["prompt", "RUN", "--task", "RUN/log.jsonl"], "log.jsonl"),
        (["generate", "RUN", "x", "--temperature", "0", "--n", "2"], "always gives the same"),
        (["generate", "RUN", "x", "--temperature", "0", "--top-k", "2"], "are for sampling"),
        (["generate", "RUN", "x", "--maximum", "0"], "maximum must be"),
        (["generate", "RUN", "x", "--min-p", "2"], "min_p must be"),
        (["generate", "RUN", "e" * 2000], "2000 tokens, and the model 16 positions"),
        (["evaluate", "RUN", "--source", "a"], "--source is for runs of 'translate'"),
        (["evaluate", "RUN", "--text", "gone.txt"], "gone.txt: no such file"),
        (["evaluate", "RUN", "--stride", "0"], "stride must be"),
        (["prompt", "RUN", "--task", "gone.yaml"], "gone.yaml: no such file"),
        (["prompt", "RUN", "--task", "TASK", "--shots", "few"], "--shots must be numbers"),
        (["prompt", "RUN", "--task", "TASK", "--shots", "99"], "99 shots need as many"),
        (["prompt", "RUN", "--task", "TASK", "--shots", "2"], "more than the 16 positions of the model"),
        (["translate", "RUN"], "is a run of 'language', not of 'translate'"),
        (["align", "RUN"], "is a run of 'language', not of 'translate'"),
    ],
)
def test_B1_mistakes_end_in_one_line(run, tmp_path, capsys, argv, words):
    path = write_task(tmp_path)
    argv = [part.replace("RUN", run).replace("TASK", path) for part in argv]
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out, said = capsys.readouterr()
    assert stop.value.code == 2
    assert words in said
    assert said.count("\n") == 1
    assert not out  # not even a prompt that is then refused
    assert len(said) < 1000
