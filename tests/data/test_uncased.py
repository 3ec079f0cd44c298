"""Byte pairs of small letters: however a text is spaced and written, it has the same ids."""

import json

import numpy as np
import pytest
import tokenizers

from regard.data.masking import whole_words, word_edges
from regard.data.tokenizer import SPECIAL, Tokenizer
from regard.interop.runs import published

TEXT = [
    "It's a well-made film, and I don't think the actors' work was 'bad' in 1999 ...",
    "The café can't be <br /> this!!",
]


@pytest.fixture(scope="module")
def uncased() -> Tokenizer:
    return Tokenizer.train(TEXT * 3, 400, "uncased")


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("It's a FILM.", "it 's a film ."),
        ("I don't", "i do n't"),
        ("they can’t", "they ca n't"),
        ("well-made", "well - made"),
        ("one<br /><br />two", "one two"),
        ("(so bad)", "( so   bad )"),
        ("in 1999", "in 1 9 9 9"),
    ],
)
def test_one_text_however_it_is_spaced(uncased, text, other):
    assert uncased.encode(text) == uncased.encode(other)
    assert uncased.decode(uncased.encode(text)) == " ".join(other.split())


def test_runs_of_a_sign_stay_together_and_other_letters_are_kept(uncased):
    assert uncased.decode(uncased.encode("Well... ÉCOLE, 東京 🙂!?")) == "well ... école , 東京 🙂 ! ?"


def test_text_is_never_special_and_never_unknown(uncased):
    ids = uncased.encode("<s> <pad> </s> <unk> \x07")
    assert min(ids) >= len(SPECIAL)
    assert not uncased.unknown(["<unk> 東"])


def test_words_are_those_of_the_text(uncased):
    text = "  Don't go, café-goers   there "
    ids, places = uncased.words(text)
    assert ids == uncased.encode(text)
    words = text.split()
    for number, word in enumerate(words):
        of_word = [id for id, place in zip(ids, places, strict=True) if place == number]
        assert of_word == uncased.encode(word)
    assert uncased.words("  ") == ([], [])


def test_saved_and_loaded_is_the_same(uncased, tmp_path):
    uncased.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.kind == "uncased"
    assert loaded.encode_batch(TEXT) == uncased.encode_batch(TEXT)
    assert loaded.encode_text(TEXT[0]).tolist() == uncased.encode(TEXT[0])


def test_gaps_stand_between_words(uncased):
    gap = uncased.encode_around(["It's a ", " film"])
    assert gap == [*uncased.encode("It's a"), uncased.mask, *uncased.encode("film")]


def test_a_word_begins_where_its_first_piece_does(uncased):
    edges = word_edges(uncased)
    ids = np.array(uncased.encode("unthinkably made films"))
    assert edges.opens[ids].sum() == 3
    assert edges.opens[ids[0]]


def test_whole_words_are_taken_one_by_one():
    """The quick way of rows that need no search is the slow way."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        sizes = draw.integers(1, 4, (8, 12))
        scores = np.array([np.repeat(np.arange(12) / 12, size)[:12] for size in sizes])
        free, budget = draw.integers(0, 13, 8), draw.integers(0, 6, 8)
        budget = np.minimum(budget, free)
        found = whole_words(scores, free, budget)
        for row, count, left in zip(range(8), free.tolist(), budget.tolist(), strict=True):
            expected = np.zeros(12, bool)
            for score in np.unique(scores[row, :count]):
                word = np.flatnonzero(scores[row] == score)
                word = word[word < count]
                if len(word) <= left:
                    expected[word], left = True, left - len(word)
            assert (found[row] == expected).all()


def test_an_exported_tokenizer_has_the_same_ids(uncased):
    made = tokenizers.Tokenizer.from_str(json.dumps(published(uncased, {"task": "masked"})))
    for text in [*TEXT, "Don't  STOP<br/>here"]:
        assert made.encode(text, add_special_tokens=False).ids == uncased.encode(text)
        assert made.decode(uncased.encode(text)) == uncased.decode(uncased.encode(text))
