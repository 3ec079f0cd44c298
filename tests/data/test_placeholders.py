"""Placeholders: text with them comes back exactly, pairs agree on them, a search can only write what it read."""

import numpy as np
import pytest
import torch

from regard.data import placeholders
from regard.data.entities import Entity
from regard.data.generated import pairs
from regard.data.placeholders import Marked, copies, encode, mark, mark_pair, mark_target, reserve, words
from regard.data.tokenizer import SPECIAL, Tokenizer
from regard.decoding import DecodingConfig, decode
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer

TEXTS = [
    "Visit https://example.com today.",
    "12 of 30 people: 7:45, a@b.de 😀😀 and 3rd.",
    "7 dogs",
    "  7  dogs  ",
    "1 2 3 4 5 6 7 8 9 10 11",
    "no entity",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    lines = [side for pair in pairs(200, 1) for side in pair]
    return Tokenizer.train(lines, 500, reserved=reserve(lines))


def test_text_comes_back_from_its_ids(tokenizer):
    for text in TEXTS:
        marked = mark(tokenizer, text)
        (ids,) = encode(tokenizer, [marked])
        assert tokenizer.decode_between(ids, marked.surfaces()) == text
        assert [id for id in ids if id in tokenizer.placeholders] == list(marked.marks)
    assert encode(tokenizer, [mark(tokenizer, text) for text in TEXTS]) == [
        encode(tokenizer, [mark(tokenizer, text)])[0] for text in TEXTS
    ]
    # at most as many as there are; the others stay text
    assert len(mark(tokenizer, TEXTS[4]).marks) == placeholders.COUNT


def test_no_text_becomes_a_placeholder(tokenizer):
    for text in ("number 1", "⟨number 1⟩", "special number 1", "sign 8"):
        assert not set(tokenizer.encode(text)) & set(tokenizer.placeholders)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    first = tokenizer.placeholders[0]
    assert tokenizer.tokens([first]) == ["⟨number 1⟩"]
    assert tokenizer.decode([*tokenizer.encode("It is "), first]) == "It is ⟨number 1⟩"


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a.json")
    again = Tokenizer.load(tmp_path / "a.json")
    assert (again.reserved, again.size) == (tokenizer.reserved, tokenizer.size)
    assert tokenizer.size == 500
    assert again.encode("Where?") == tokenizer.encode("Where?")
    plain = Tokenizer.train(["some text"], 300)
    assert "reserved" not in plain.saved()
    assert list(plain.placeholders) == []
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    for count in ("-1", "0", '"8"', "10000000"):
        (tmp_path / "b.json").write_text(text.replace('"count": 8', f'"count": {count}'), encoding="utf-8")
        with pytest.raises(ValueError, match=r"b\.json: the tokenizer is damaged: its reserved tokens"):
            Tokenizer.load(tmp_path / "b.json")
    with pytest.raises(ValueError, match="placeholders are for kind 'bpe'"):
        Tokenizer("units", ["a"], tokenizer.reserved)


def test_pairs_have_the_same_placeholders(tokenizer):
    source, target = mark_pair(tokenizer, tokenizer, ("On May 3, 1987 at 7:45", "Am 3. Mai 1987 um 7.45 Uhr, 8"), 2)
    assert source.marks == target.marks
    assert tokenizer.names(source.marks) == ["number 3", "number 4", "time 3"]
    assert [entity.text for entity in target.entities] == ["3", "1987", "7.45"]
    crossed = mark_pair(tokenizer, tokenizer, ("a@b.de to c@d.de", "von c@d.de nach a@b.de"))
    assert crossed[1].marks == crossed[0].marks[::-1]
    # what one side does not have stays text
    assert mark_pair(tokenizer, tokenizer, ("I have 3.", "Ich habe drei.")) == (
        Marked("I have 3."),
        Marked("Ich habe drei."),
    )
    given = mark(tokenizer, "3 or 4")
    assert mark_target(given, (tokenizer, tokenizer), "4 oder 5").marks == (given.marks[1],)


def test_words_of_marked_text(tokenizer):
    for text in TEXTS:
        marked = mark(tokenizer, text)
        ids, owners = words(tokenizer, marked)
        split = text.split()
        if not split:
            assert ids == owners == []
            continue
        assert owners == sorted(owners)
        assert set(owners) == set(range(len(split)))
        for id, entity in zip(marked.marks, marked.entities, strict=True):
            assert entity.text[-1] in split[owners[ids.index(id)]]


def test_any_corpus_teaches_to_copy(tokenizer):
    lines = [(f"Tom saw Anna {number}.", f"Anna wurde von Tom gesehen, {number}.") for number in range(400)]
    made = copies(tokenizer, tokenizer, lines, seed=3)
    assert 30 < len(made.pairs) < 100
    assert copies(tokenizer, tokenizer, lines, seed=3) == made
    assert made.indices == sorted(made.indices)
    kinds = set()
    for (source, target), index in zip(made.pairs, made.indices, strict=True):
        assert source.text == lines[index][0]
        assert sorted(source.marks) == sorted(target.marks)
        assert len(source.marks) == 3
        kinds |= {name.split()[0] for name in tokenizer.names(source.marks)}
        by_mark = [dict(zip(side.marks, (one.text for one in side.entities), strict=True)) for side in (source, target)]
        assert by_mark[0] == by_mark[1]
    assert kinds == {"thing", "number", "time"}
    # without a word in common, one is put before or behind both
    made = copies(tokenizer, tokenizer, [("where is it", "wo ist es")] * 1000, seed=0)
    assert 20 < len(made.pairs) < 70
    for source, target in made.pairs:
        assert len(source.marks) == 1
        assert source.marks == target.marks
        assert {*source.parts, *target.parts} <= {"where is it ", "wo ist es ", " where is it", " wo ist es", ""}
    plain = Tokenizer.train(["some text"], 300)
    assert copies(plain, plain, lines, 0).pairs == []


def test_a_search_writes_what_was_read_once():
    torch.manual_seed(0)
    config = ModelConfig(kind="encoder-decoder", vocabulary=24, width=16, heads=2, layers=1)
    model = Transformer(config).eval()
    from regard.decoding.copying import Copying

    first, count = 16, 8
    with torch.no_grad():
        model.output.weight[first:] *= 30  # it would write nothing else
    source = torch.tensor([[5, 16, 17, 3], [6, 7, 20, 3], [8, 9, 10, 3]])
    places = torch.arange(first, first + count)
    left = (source[:, :, None] == places).any(1)
    wild = decode(model, source, config=DecodingConfig(beam=3, nbest=3))
    assert any(id >= first for row in wild for found in row for id in found.ids)
    for config in (
        DecodingConfig(beam=3, nbest=3),
        DecodingConfig(beam=1),
        DecodingConfig(sample=True, nbest=2, seed=1),
    ):
        together = decode(Copying(model, first, left, 0), source, config=config)
        for number, row in enumerate(together):
            allowed = [id for id in source[number].tolist() if id >= first]
            for found in row:
                written = [id for id in found.ids if id >= first]
                assert set(written) <= set(allowed)
                assert len(written) == len(set(written))
                # scored as the model does
                with torch.no_grad():
                    logits = model(source[number : number + 1], torch.tensor([[2, *found.ids]])).logits[0]
                ids = [*found.ids, 3][: len(found.ids) + found.finished]
                logs = logits.log_softmax(-1)[range(len(ids)), ids]
                assert found.logprob == pytest.approx(float(logs.sum()), rel=1e-4)
            alone = decode(
                Copying(model, first, left[number : number + 1], 0), source[number : number + 1], config=config
            )
            assert [found.ids for found in alone[0]] == [found.ids for found in row]
    assert any(id >= first for row in together for found in row for id in found.ids)


def test_special_ids_are_before_and_placeholders_behind(tokenizer):
    assert tokenizer.special == list(range(len(SPECIAL)))
    assert tokenizer.placeholders.stop == tokenizer.size
    assert np.unique(tokenizer.names(tokenizer.placeholders)).size == 32
    assert Marked("a", (Entity(0, 1, "sign", "a"),), (tokenizer.placeholders[0],)).parts == ["", ""]
