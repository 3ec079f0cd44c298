"""Word links from attention. A model whose maps are planted shows which rows, columns, layers and heads are read."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from regard import draw
from regard.data.tokenizer import BOS, EOS, PAD, Tokenizer
from regard.metrics.alignment import error_rate, flip, parse_gold, parse_links
from regard.models.config import ModelConfig
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.transformer import Transformer
from regard.tasks.translate.alignment import WordMaps, align, align_both, choose_layers, read_maps, strongest

UNITS = "a b c d e@@ f@@ g@@ h i j k"
SOURCE = Tokenizer.train([UNITS], 100, "units")
TARGET = Tokenizer.train([UNITS.upper()], 100, "units")


class Planted(nn.Module):
    """Maps [layers, heads, T, S] by the source they belong to; what lies in the padding would win if it were read."""

    def __init__(self, planted):
        super().__init__()
        self.config = SimpleNamespace(kind="planted")
        self.place = nn.Parameter(torch.zeros(1))
        self.planted = {tuple(SOURCE.encode(source)): torch.as_tensor(maps) for source, maps in planted.items()}
        self.batches = []

    def maps(self, source, target, *, keep=None, target_keep=None):
        assert not self.training
        self.batches.append(tuple(source.shape))
        keep = torch.ones_like(source, dtype=torch.bool) if keep is None else keep
        target_keep = torch.ones_like(target, dtype=torch.bool) if target_keep is None else target_keep
        rows = []
        for ids, real, words, spoken in zip(source, keep, target, target_keep, strict=True):
            assert (ids[~real] == PAD).all()
            assert (words[~spoken] == PAD).all()
            *ids, last = ids[real].tolist()
            assert last == EOS
            assert words[0] == BOS
            maps = self.planted[tuple(ids)]
            L, H, T, S = maps.shape
            assert (spoken.sum(), real.sum()) == (T, S)
            row = torch.full((L, H, len(words), len(real)), 99.0)
            row[:, :, :T, :S] = maps
            rows.append(row)
        return list(torch.stack(rows, 1))


def planted(source, *maps):
    """One head a layer."""
    return Planted({source: torch.tensor(maps)[:, None]})


def links(text):
    return parse_links(text)


class TestRows:
    """Source a b, target A B: rows are the steps that read bos, A, B; columns a, b, eos."""

    MAP = [[0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [0.8, 0.1, 0.1]]

    def test_consume(self):
        (found,) = align(planted("a b", self.MAP), SOURCE, TARGET, [("a b", "A B")], read="consume")
        np.testing.assert_allclose(found.matrix, [[0.1, 0.7], [0.8, 0.1]], rtol=1e-6)
        assert found.links == links("1-0 0-1")
        assert str(found) == "0-1 1-0"
        assert (found.source, found.target) == (["a", "b"], ["A", "B"])

    def test_predict(self):
        (found,) = align(planted("a b", self.MAP), SOURCE, TARGET, [("a b", "A B")], read="predict")
        np.testing.assert_allclose(found.matrix, [[0.6, 0.3], [0.1, 0.7]], rtol=1e-6)
        assert found.links == links("0-0 1-1")

    def test_default(self):
        one, two = planted("a b", self.MAP), planted("a b", self.MAP, self.MAP)
        assert align(one, SOURCE, TARGET, [("a b", "A B")])[0].links == links("0-0 1-1")
        assert align(two, SOURCE, TARGET, [("a b", "A B")])[0].links == links("0-0 1-1")
        assert strongest(read_maps(two, SOURCE, TARGET, [("a b", "A B")], layer=0)[0].maps[0]) == links("0-0 1-1")

    def test_an_aligner_is_read_where_it_predicts(self):
        model = planted("a b", self.MAP)
        model.aligner, cross, places = nn.Identity(), model.maps, []

        def maps(source, target, *, keep=None, target_keep=None, place=None):
            places.append(place)
            return cross(source, target, keep=keep, target_keep=target_keep)

        model.maps = maps
        pairs = [("a b", "A B")]
        assert align(model, SOURCE, TARGET, pairs)[0].links == links("0-0 1-1")
        assert align(model, SOURCE, TARGET, pairs, layer="aligner")[0].links == links("0-0 1-1")
        assert align(model, SOURCE, TARGET, pairs, layer=0, read="consume")[0].links == links("1-0 0-1")
        assert places == ["aligner", "aligner", None]
        with pytest.raises(ValueError, match="read='consume' is for other layers"):
            align(model, SOURCE, TARGET, pairs, read="consume")

    def test_the_end_of_the_source_is_no_word(self):
        model = planted("a b", [[0.1, 0.2, 0.7], [0.2, 0.1, 0.7], [0, 0, 1.0]])
        (found,) = align(model, SOURCE, TARGET, [("a b", "A B")])
        assert found.links == links("1-0 0-1")
        np.testing.assert_allclose(found.matrix, [[0.1, 0.2], [0.2, 0.1]], rtol=1e-6)

    def test_a_word_that_looks_at_no_word_has_no_link(self):
        model = planted("a b", [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
        assert align(model, SOURCE, TARGET, [("a b", "A B")])[0].links == links("1-1")

    def test_one_word(self):
        (found,) = align(planted("a", [[0.4, 0.6], [0.0, 1.0]]), SOURCE, TARGET, [("a", "A")])
        assert found.links == links("0-0")
        assert found.matrix.shape == (1, 1)


class TestPieces:
    """Source a e@@f@@h b is a, efh, b; target A E@@H B is A, EH, B."""

    PAIR = ("a e@@ f@@ h b", "A E@@ H B")
    #        a    e@@  f@@  h    b    eos
    MAP = [
        [9.0, 9.0, 9.0, 9.0, 9.0, 9.0],  # bos
        [0.3, 0.2, 0.1, 0.2, 0.1, 0.1],  # A: the largest piece is a, the largest word efh
        [0.0, 0.1, 0.0, 0.0, 0.6, 0.3],  # E@@
        [0.6, 0.1, 0.0, 0.0, 0.3, 0.0],  # H: alone it is a's, with E@@ it is b's
        [0.2, 0.1, 0.2, 0.2, 0.3, 0.0],  # B
    ]

    def test_sum_over_the_source_and_mean_over_the_target(self):
        (found,) = align(planted(self.PAIR[0], self.MAP), SOURCE, TARGET, [self.PAIR], read="consume")
        assert found.source == ["a", "efh", "b"]
        assert found.target == ["A", "EH", "B"]
        np.testing.assert_allclose(found.matrix, [[0.3, 0.5, 0.1], [0.3, 0.1, 0.45], [0.2, 0.5, 0.3]], rtol=1e-5)
        assert found.links == links("1-0 2-1 1-2")

    def test_predict_moves_every_piece(self):
        (found,) = align(planted(self.PAIR[0], self.MAP), SOURCE, TARGET, [self.PAIR], read="predict")
        np.testing.assert_allclose(found.matrix, [[9, 27, 9], [0.15, 0.3, 0.35], [0.6, 0.1, 0.3]], rtol=1e-5)

    def test_bytes_and_spaces(self):
        """Byte pairs: words in several pieces, among them letters of two bytes, and runs of spaces."""
        tokenizer = Tokenizer.train(["x"], 260)
        ids, _ = tokenizer.words("ab  ü")
        T = len(ids) + 1
        model = Planted({})
        model.planted[tuple(ids)] = torch.eye(T)[None, None]
        (found,) = align(model, tokenizer, tokenizer, [("ab  ü", "ab  ü")])
        np.testing.assert_allclose(found.matrix, np.eye(2), rtol=1e-5)
        assert found.source == found.target == ["ab", "ü"]


def random_pairs(count, seed=0):
    """Sentences of 0 to 7 words, each source once, with random maps of 3 layers and 2 heads."""
    draw = np.random.default_rng(seed)
    maps, pairs = {}, []
    while len(pairs) < count:
        source = " ".join(draw.choice(UNITS.split(), draw.integers(0, 8)).tolist() + ["k"] * draw.integers(0, 2))
        target = " ".join(draw.choice(UNITS.upper().split(), draw.integers(0, 8)).tolist())
        # a last unit that continues leaves a word that has no end
        source, target = source.removesuffix("@@"), target.removesuffix("@@")
        if source not in maps and set(source.split()) <= set(UNITS.split()):
            shape = (3, 2, len(TARGET.words(target)[0]) + 1, len(SOURCE.words(source)[0]) + 1)
            maps[source] = draw.dirichlet(np.ones(shape[3]), shape[:3]).astype(np.float32)
            pairs.append((source, target))
    return maps, pairs


def by_loops(maps, source, target, shift):
    """[T words, S words] of one map [T, S], piece by piece."""
    _, rows = TARGET.words(target)
    _, columns = SOURCE.words(source)
    found = np.zeros((max(rows, default=-1) + 1, max(columns, default=-1) + 1))
    for t, word in enumerate(rows):
        for s, other in enumerate(columns):
            found[word, other] += maps[t + shift, s] / rows.count(word)
    return found


class TestBatches:
    @pytest.mark.parametrize("tokens", [1, 20, 4096])
    @pytest.mark.parametrize("read", ["consume", "predict"])
    def test_ragged(self, tokens, read):
        maps, pairs = random_pairs(40)
        model = Planted(maps)
        found = align(model, SOURCE, TARGET, pairs, layer=2, head=1, read=read, tokens=tokens)
        assert len(found) == len(pairs)
        for (source, target), alignment in zip(pairs, found, strict=True):
            expected = by_loops(maps[source][2, 1], source, target, int(read == "consume"))
            assert alignment.matrix.shape == expected.shape == (len(alignment.target), len(alignment.source))
            np.testing.assert_allclose(alignment.matrix, expected, rtol=1e-5, atol=1e-7)
            assert alignment.links == strongest(expected)
            assert alignment.source == SOURCE.split_words(source)

    def test_sizes(self):
        maps, pairs = random_pairs(40)
        model = Planted(maps)
        align(model, SOURCE, TARGET, pairs, tokens=1)
        assert [rows for rows, _ in model.batches] == [1] * 40
        model.batches.clear()
        align(model, SOURCE, TARGET, pairs, tokens=30)
        assert all(rows == 1 or rows * S <= 30 for rows, S in model.batches)
        assert max(rows for rows, _ in model.batches) > 3
        model.batches.clear()
        align(model, SOURCE, TARGET, pairs)
        assert [rows for rows, _ in model.batches] == [40]

    def test_blank_sentences(self):
        model = Planted({"": torch.rand(1, 1, 2, 1), "a": torch.rand(1, 1, 1, 2)})
        first, second = align(model, SOURCE, TARGET, [("", "A"), ("a", " ")])
        assert first.links == second.links == frozenset()
        assert (first.matrix.shape, second.matrix.shape) == ((1, 0), (0, 1))
        assert align(Planted({"": torch.rand(1, 1, 1, 1)}), SOURCE, TARGET, [("", "")])[0].matrix.shape == (0, 0)
        assert align(model, SOURCE, TARGET, []) == []


class TestLayersAndHeads:
    def setup_method(self):
        self.maps = np.random.default_rng(1).dirichlet(np.ones(3), (3, 2, 3)).astype(np.float32)
        self.model = Planted({"a b": self.maps})
        self.words = self.maps[:, :, :2, :2]

    def matrix(self, **options):
        return align(self.model, SOURCE, TARGET, [("a b", "A B")], **options)[0].matrix

    @pytest.mark.parametrize("layer", [0, 1, 2, -1, -3])
    @pytest.mark.parametrize("head", [0, 1, -1])
    def test_numbers(self, layer, head):
        np.testing.assert_allclose(self.matrix(layer=layer, head=head), self.words[layer, head], rtol=1e-5)

    def test_averages(self):
        np.testing.assert_allclose(self.matrix(layer=0), self.words[0].mean(0), rtol=1e-5)
        np.testing.assert_allclose(self.matrix(layer="average", head=1), self.words[:, 1].mean(0), rtol=1e-5)
        np.testing.assert_allclose(self.matrix(layer="average"), self.words.mean((0, 1)), rtol=1e-5)

    def test_the_default_is_the_last_but_one(self):
        np.testing.assert_allclose(self.matrix(), self.words[1].mean(0), rtol=1e-5)
        one = Planted({"a b": self.maps[:1]})
        (found,) = align(one, SOURCE, TARGET, [("a b", "A B")])
        np.testing.assert_allclose(found.matrix, self.words[0].mean(0), rtol=1e-5)

    def test_all(self):
        (found,) = read_maps(self.model, SOURCE, TARGET, [("a b", "A B")])
        np.testing.assert_allclose(found.maps, self.words.mean(1), rtol=1e-5)

    def test_the_mode_of_the_model_comes_back(self):
        for training in (True, False):
            self.model.train(training)
            self.matrix()
            assert self.model.training is training
        with pytest.raises(ValueError, match="layer"):
            self.model.train() and self.matrix(layer=7)
        assert self.model.training

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"layer": 3}, r"layer must be a number from 0 to 2 .*got 3"),
            ({"layer": -4}, "got -4"),
            ({"layer": "last"}, "layer must be .*got 'last'"),
            ({"layer": "all"}, "one layer or the average"),
            ({"head": 2}, r"head must be a number from 0 to 1 .*got 2"),
            ({"read": "both"}, "one of consume, predict, got 'both'"),
            ({"tokens": 0}, "at least 1, got 0"),
        ],
    )
    def test_refusals(self, options, match):
        with pytest.raises(ValueError, match=match):
            self.matrix(**options)

    def test_weights_that_are_not_finite(self):
        self.model.planted[tuple(SOURCE.encode("a b"))][1, 0, 1, 0] = float("nan")
        with pytest.raises(ValueError, match="pair 1 is not finite"):
            self.matrix()


class TestModels:
    def small(self, **options):
        torch.manual_seed(0)
        sizes = {"width": 16, "heads": 2, "inner": 16, "layers": 2, "vocabulary": SOURCE.size}
        return Transformer(ModelConfig(**sizes | options))

    def test_a_transformer(self):
        model = self.small(target_vocabulary=TARGET.size)
        pairs = [("a b", "A E@@ H"), ("a e@@ f@@ h b c", "B"), ("d", "C D A A")]
        together = align(model, SOURCE, TARGET, pairs)
        for pair, found in zip(pairs, together, strict=True):
            (alone,) = align(model, SOURCE, TARGET, [pair])
            np.testing.assert_allclose(found.matrix, alone.matrix, rtol=1e-4, atol=1e-6)
            assert len(found.links) == len(found.target)
            assert found.matrix.sum(1).max() < 1
        source, target = torch.tensor([[*SOURCE.encode("a b"), EOS]]), torch.tensor([[BOS, *TARGET.encode("A E@@ H")]])
        maps = model.eval().maps(source, target)[0][0].mean(0)
        expected = torch.stack([maps[0], maps[1:3].mean(0)])[:, :2]
        torch.testing.assert_close(torch.from_numpy(together[0].matrix), expected)

    def test_an_aligner(self):
        model = self.small(aligner=True)
        source, target = torch.tensor([[*SOURCE.encode("a b"), EOS]]), torch.tensor([[BOS, *SOURCE.encode("c d")]])
        expected = model.eval().maps(source, target, place="aligner")[0][0, 0, :-1, :2]
        (found,) = align(model, SOURCE, SOURCE, [("a b", "c d")])
        torch.testing.assert_close(torch.from_numpy(found.matrix), expected)
        # another head than the average is one of a layer that translates
        (found,) = align(model, SOURCE, SOURCE, [("a b", "c d")], head=1)
        torch.testing.assert_close(torch.from_numpy(found.matrix), model.maps(source, target)[0][0, 1, :-1, :2])
        with pytest.raises(ValueError, match="head must be a number from 0 to 0"):
            align(model, SOURCE, SOURCE, [("a b", "c d")], layer="aligner", head=1)

    def test_low_precision(self):
        model = self.small().to(torch.bfloat16)
        assert align(model, SOURCE, SOURCE, [("a b c", "a b c")])[0].matrix.dtype == np.float32

    @pytest.mark.parametrize("kind", ["encoder", "decoder"])
    def test_a_model_that_does_not_translate(self, kind):
        with pytest.raises(ValueError, match=f"needs a translator with attention, got a model of kind '{kind}'"):
            align(self.small(kind=kind), SOURCE, SOURCE, [("a", "a")])

    def test_recurrent(self):
        torch.manual_seed(0)
        sizes = {"vocabulary": SOURCE.size, "width": 8, "hidden": 8, "layers": 1}
        pairs = [("a b", "a e@@ h"), ("a e@@ f@@ h b c", "b")]
        model = Recurrent(RecurrentConfig(attention="additive", **sizes))
        together = align(model, SOURCE, SOURCE, pairs)
        source, target = torch.tensor([[*SOURCE.encode("a b"), EOS]]), torch.tensor([[BOS, *SOURCE.encode("a e@@ h")]])
        maps = model.eval().maps(source, target)[0][0, 0]
        expected = torch.stack([maps[0], maps[1:3].mean(0)])[:, :2]
        torch.testing.assert_close(torch.from_numpy(together[0].matrix), expected.detach())
        with pytest.raises(ValueError, match="without attention has no maps"):
            align(Recurrent(RecurrentConfig(attention=None, **sizes)), SOURCE, SOURCE, pairs)

    def test_a_model_without_maps(self):
        model = nn.Linear(1, 1)
        model.config = SimpleNamespace(kind="convolutional")
        with pytest.raises(ValueError, match="needs a translator with attention, got a model of kind 'convolutional'"):
            align(model, SOURCE, SOURCE, [("a", "a")])

    def test_attention_over_slots(self):
        model = self.small()
        for block in model.decoder.blocks:
            block.cross.facts = replace(block.cross.facts, columns="slots")
        with pytest.raises(ValueError, match="'softmax' attends to slots"):
            align(model, SOURCE, SOURCE, [("a b c", "a b c")])
        model = self.small(aligner=True, cross_attention="compressed(factor=2)")
        assert align(model, SOURCE, SOURCE, [("a b c", "a b c")])[0].matrix.shape == (3, 3)
        with pytest.raises(ValueError, match="'compressed' attends to slots"):
            align(model, SOURCE, SOURCE, [("a b c", "a b c")], layer=0)

    def test_no_aligner(self):
        with pytest.raises(ValueError, match=r"has no aligner: train one with --model\.aligner true"):
            align(self.small(), SOURCE, SOURCE, [("a", "a")], layer="aligner")

    def test_signed_attention(self):
        model = self.small(cross_attention="linformer(rank=4, longest=16)")
        found = align(model, SOURCE, SOURCE, [("a b c", "a b c"), ("a", "a b")])
        assert [alignment.matrix.shape for alignment in found] == [(3, 3), (2, 1)]


def maps_of(*layers):
    """Words maps of one pair."""
    maps = np.array(layers, dtype=np.float32)
    return WordMaps(maps, ["s"] * maps.shape[2], ["t"] * maps.shape[1])


class TestBoth:
    # [target, source] with links 0-0 1-1 1-2, and [source, target] with links 0-0 1-1 2-1, all as source-target
    FORWARD = [[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.3, 0.6, 0.1]]
    BACKWARD = [[0.8, 0.2, 0.0], [0.1, 0.5, 0.4], [0.1, 0.5, 0.4]]

    def test_by_hand(self):
        forward, backward = [maps_of(self.FORWARD)], [maps_of(self.BACKWARD)]
        for method, expected in {
            "intersection": "0-0 1-1",
            "union": "0-0 1-1 1-2 2-1",
            "grow-diagonal": "0-0 1-1 1-2 2-1",
        }.items():
            (found,) = align_both(forward, backward, method=method)
            assert found.links == links(expected)
        np.testing.assert_allclose(found.matrix[2], [0.15, 0.5, 0.25], rtol=1e-5)
        assert align_both(forward, backward)[0].links == links("0-0 1-1 1-2 2-1")
        # 0.6 * 0.5 > 1/4: a word that is the second choice one way, and 0.7 * 0.3 is none though it is the first
        (found,) = align_both(
            forward, [maps_of([[0.8, 0.2, 0.0], [0.1, 0.3, 0.5], [0.9, 0.0, 0.1]])], method="agreement"
        )
        assert found.links == links("0-0 1-2")

    def test_agreement_is_a_product(self):
        # products 0.25, 0.095, 0.27, 0.243, 0.3: neither the mean nor the smaller of the two decides
        forward, backward = [[0.5, 0.95, 0.9, 0.9, 0.6]], [[0.5], [0.1], [0.3], [0.27], [0.5]]
        (found,) = align_both([maps_of(forward)], [maps_of(backward)], method="agreement")
        assert found.links == links("2-0 4-0")

    def test_layers(self):
        identity, reversal = np.eye(3), np.eye(3)[::-1]
        shifted = np.roll(np.eye(3), 1, 0)
        # links of `shifted` are target -> source; seen from the other side they are its transpose
        forward = [maps_of(identity, shifted)]
        backward = [maps_of(reversal, shifted, shifted.T)]
        chosen = choose_layers(forward, backward)
        assert chosen[:2] == (1, 2)
        assert type(chosen.forward) is int
        expected = [
            [error_rate([strongest(ours)], [gold_of(flip(strongest(theirs)))]).aer for theirs in backward[0].maps]
            for ours in forward[0].maps
        ]
        np.testing.assert_allclose(chosen.rates, expected)
        assert align_both(forward, backward)[0].links == links("2-0 0-1 1-2")
        assert align_both(forward, backward, layers=(0, -3), method="intersection")[0].links == links("1-1")

    def test_layers_are_chosen_over_all_pairs(self):
        identity, reversal = np.eye(2), np.eye(2)[::-1]
        forward = [maps_of(reversal, identity)] + [maps_of(identity, identity)] * 2
        backward = [maps_of(reversal)] + [maps_of(reversal)] * 2
        assert choose_layers(forward, backward)[:2] == (0, 0)
        assert choose_layers(forward, [maps_of(identity)] * 3)[:2] == (1, 0)

    def test_directions_with_unequal_numbers_of_links(self):
        # three links one way, one the other, one in common
        chosen = choose_layers([maps_of([[1.0], [1.0], [1.0]])], [maps_of([[0.1, 0.8, 0.1]])])
        np.testing.assert_allclose(chosen.rates, [[1 - 2 / 4]])

    def test_through_two_models(self):
        reverse = [[0, 0, 0.9, 0.1], [0, 0.9, 0, 0.1], [0.9, 0, 0, 0.1], [0, 0, 0, 1.0]]
        forward = read_maps(planted("a b c", reverse), SOURCE, TARGET, [("a b c", "A B C")])
        other = Planted({})
        other.planted[tuple(TARGET.encode("A B C"))] = torch.tensor(reverse)[None, None]
        backward = read_maps(other, TARGET, SOURCE, [("A B C", "a b c")])
        (found,) = align_both(forward, backward)
        assert found.links == links("0-2 1-1 2-0")
        assert (found.source, found.target) == (["a", "b", "c"], ["A", "B", "C"])

    def test_refusals(self):
        one = maps_of([[1.0, 0.0]])
        with pytest.raises(ValueError, match="same pairs: got 1 and 2"):
            align_both([one], [one] * 2)
        with pytest.raises(ValueError, match=r"pair 2 has 1 target and 2 source words .*, 2 and 1 in the other.*flip"):
            align_both([maps_of([[1.0]]), one], [maps_of([[1.0]]), one])
        with pytest.raises(ValueError, match="layer must be a number from 0 to 0"):
            align_both([maps_of([[1.0]])], [maps_of([[1.0]])], layers=(0, 1))
        with pytest.raises(ValueError, match="needs pairs of sentences"):
            choose_layers([], [])
        assert align_both([], []) == []


def gold_of(found):
    return parse_gold(" ".join(f"{source}-{target}" for source, target in found))


class TestStrongest:
    def test_the_first_of_equals(self):
        assert strongest(np.array([[0.2, 0.4, 0.4], [0.1, 0.1, 0.1]])) == links("1-0 0-1")

    def test_nothing_above_zero(self):
        assert strongest(np.array([[0.0, 0.0], [-0.1, -0.2]])) == frozenset()
        assert strongest(np.zeros((2, 0))) == frozenset()


class TestPicture:
    MATRIX = np.array([[0.1, 0.7, 0.2], [0.8, 0.1, 0.1]])

    def test_words_and_links_are_where_they_belong(self, tmp_path):
        found = links("1-0 0-1 2-1")
        figure = draw.alignment_picture(self.MATRIX, ["a", "$b$", "c$"], ["X", "$Y"], found, "$5 and $6", "layer 1")
        ax = figure.axes[0]
        np.testing.assert_allclose(ax.images[0].get_array(), self.MATRIX)
        assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "$b$", "c$"]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["X", "$Y"]
        assert {tuple(map(int, point)) for point in ax.collections[-1].get_offsets()} == found
        assert not any(label.get_parse_math() for label in [*ax.get_xticklabels(), *ax.get_yticklabels()])
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("source", "target")
        for suffix in draw.SUFFIXES:
            assert draw.save(figure, tmp_path / f"links{suffix}").stat().st_size > 1000

    def test_no_links(self, tmp_path):
        figure = draw.alignment_picture(self.MATRIX, ["a", "b", "c"], ["X", "Y"], frozenset(), "none", "")
        draw.save(figure, tmp_path / "links.png")

    def test_long_words_leave_room_for_the_matrix(self, tmp_path):
        """Matplotlib warns, and a warning here is an error, where what stands outside takes all of the picture."""
        figure = draw.alignment_picture(self.MATRIX, ["a", "b" * 300, "c"], ["X" * 300, "Y"], links("1-0"), "long", "")
        draw.save(figure, tmp_path / "links.png")
        box = figure.axes[0].get_window_extent()
        assert min(box.width, box.height) > 0.5 * figure.dpi
        assert figure.axes[0].get_yticklabels()[0].get_text() == "X" * 37 + "..."

    @pytest.mark.parametrize("target", [[], ["X"], ["X", "Y", "Z"]])
    def test_refusals(self, target):
        with pytest.raises(ValueError, match="needs a matrix of at least one target x source word"):
            draw.alignment_picture(self.MATRIX[: 2 * bool(target)], ["a", "b", "c"], target, links("0-0"), "", "")
