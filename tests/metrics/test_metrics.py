"""Scores of translations and of word links."""

import os
import random
from pathlib import Path

import pytest

from regard.metrics.alignment import (
    Gold,
    error_rate,
    flip,
    format_links,
    parse_gold,
    parse_links,
    read_gold,
    read_links,
    symmetrise,
    write_links,
)
from regard.metrics.translation import bleu, chrf, exact_match

METHODS = ("intersection", "grow-diagonal", "union", "grow-diagonal-final", "grow-diagonal-final-and")
DATA = os.environ.get("REGARD_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="REGARD_DATA names no folder with the published files")


def links(text):
    return parse_links(text)


def random_directions():
    """Links as aligners give them, one a target word, one a source word; half of them near the diagonal."""
    draw = random.Random(0)
    for index in range(300):
        size = draw.randint(1, 9)
        reach = 2 if index % 2 else size

        def near(word, size=size, reach=reach):
            return min(max(word + draw.randint(-reach, reach), 0), size - 1)

        forward = frozenset((near(word), word) for word in range(size))
        yield forward, frozenset((word, near(word)) for word in range(size))


class TestTranslation:
    def test_bleu_by_hand(self):
        # n-grams of a b c d e against a b c d f: 4/5, 3/4, 2/3, 1/2, equal lengths: (0.2) ** 0.25
        score = bleu(["a b c d e"], ["a b c d f"], tokenize="none")
        assert score.value == pytest.approx(100 * 0.2**0.25)
        assert "66.87 80.0/75.0/66.7/50.0" in score.text

    def test_bleu_is_of_the_corpus_and_keeps_the_sides_apart(self):
        # 8 of 8 words in 8 words against 16: only brevity, exp(1 - 2)
        score = bleu(["a b c d", "e f g h"], ["a b c d x x x x", "e f g h x x x x"], tokenize="none")
        assert score.value == pytest.approx(100 * 2.718281828**-1)

    def test_tokenization_is_applied_and_named(self):
        hypothesis, reference = ["one two three four ."], ["one two three four."]
        assert bleu(hypothesis, reference).value == pytest.approx(100)
        assert bleu(hypothesis, reference, tokenize="none").value < 70
        assert "tok:13a" in bleu(hypothesis, reference).signature
        assert "tok:none" in bleu(hypothesis, reference, tokenize="none").signature

    def test_the_line_carries_the_signature(self):
        score = bleu(["a b c d"], ["a b c d"])
        assert score.text.startswith(f"BLEU|{score.signature} = 100.0")
        assert "nrefs:1|case:mixed" in score.signature
        assert "version:" in score.signature

    def test_chrf_tells_characters(self):
        near, far = chrf(["translations"], ["translation"]), chrf(["xyz"], ["translation"])
        assert 80 < near.value < 100
        assert far.value == 0
        assert near.text.startswith(f"chrF2|{near.signature} = ")
        assert "nc:6" in near.signature

    def test_exact_match(self):
        score = exact_match(["a b", "c ", "d"], ["a b", "c", "D"])
        assert score.value == pytest.approx(200 / 3)
        assert "2 of 3" in score.text
        assert exact_match(["a b"], ["ab"]).value == 0

    def test_an_empty_hypothesis_counts_against(self):
        assert bleu(["", "a b c d"], ["a b c d", "a b c d"]).value == pytest.approx(100 * 2.718281828**-1)

    @pytest.mark.parametrize("metric", [bleu, chrf, exact_match])
    def test_refusals(self, metric):
        with pytest.raises(ValueError, match="got 2 hypotheses and 1 references"):
            metric(["a", "b"], ["a"])
        with pytest.raises(ValueError, match="nothing to score"):
            metric([], [])
        with pytest.raises(ValueError, match="hypotheses must be a list of sentences"):
            metric("a", ["a"])
        with pytest.raises(ValueError, match="references must be a list of sentences"):
            metric(["a"], [["a"]])

    def test_a_tokenization_that_would_download_is_refused(self):
        with pytest.raises(ValueError, match=r"one of 13a, none.*got 'flores200'"):
            bleu(["a"], ["a"], tokenize="flores200")


class TestFiles:
    def test_lines(self):
        assert parse_links("0-0 1-2\t10-3 ") == {(0, 0), (1, 2), (10, 3)}
        assert parse_links("1-1 2-3", first=1) == {(0, 0), (1, 2)}
        assert parse_links("") == frozenset()
        assert format_links({(10, 0), (2, 1), (2, 0)}) == "2-0 2-1 10-0"
        assert format_links({(0, 1)}, first=1) == "1-2"
        assert flip({(0, 1), (2, 2)}) == {(1, 0), (2, 2)}

    def test_sure_is_possible(self):
        gold = parse_gold("1-1 1p2 3p3", first=1)
        assert gold == Gold(frozenset({(0, 0)}), frozenset({(0, 0), (0, 1), (2, 2)}))

    def test_round_trip(self, tmp_path):
        alignments = [frozenset({(0, 0), (3, 1)}), frozenset(), frozenset({(7, 12)})]
        for first in (0, 1):
            write_links(tmp_path / "a.talp", alignments, first=first)
            assert read_links(tmp_path / "a.talp", first=first) == alignments
        assert (tmp_path / "a.talp").read_bytes() == b"1-1 4-2\n\n8-13\n"

    def test_gold_counts_from_one_unless_told(self, tmp_path):
        path = tmp_path / "gold"
        path.write_bytes(b"1-1 2p2\r\n3-1")
        assert read_gold(path) == [Gold(links("0-0"), links("0-0 1-1")), Gold(links("2-0"), links("2-0"))]
        assert read_gold(path, first=0)[1].sure == {(3, 1)}

    @pytest.mark.parametrize(
        ("line", "first", "match"),
        [
            (b"0-0 1:1", 0, r"expected links such as '0-0'.*got '1:1'"),
            (b"0-0 -1-1", 0, "got '-1-1'"),
            (b"0-0 1-", 0, "got '1-'"),
            (b"1-1 0-2", 1, "'0-2' has a word 0.*first=0"),
            (b"0-0 0p1", 0, "possible link"),
            (b"0-0 \xff", 0, "not UTF-8 text, byte 5"),
            (b"9" * 50 + b"-0", 0, "expected links"),
            ("\u0661-1".encode(), 0, "expected links"),
        ],
    )
    def test_errors_name_file_and_line(self, tmp_path, line, first, match):
        path = tmp_path / "links.talp"
        path.write_bytes(b"1-1\n" + line + b"\n")
        with pytest.raises(ValueError, match=match) as caught:
            read_links(path, first=first)
        assert str(caught.value).startswith(f"{path}:2: ")

    def test_counting_starts_at_zero_or_one(self):
        with pytest.raises(ValueError, match="from 0 or from 1, got first=2"):
            parse_links("3-3", first=2)


class TestErrorRate:
    def test_by_hand(self):
        gold = [parse_gold("0-0 1-1 1p2"), parse_gold("0-0 0-1 2p2")]
        scores = error_rate([links("0-0 1-2 2-2"), links("0-0 1-1")], gold)
        # A = 5, S = 4, P = 6; A∩S = 2, A∩P = 3
        assert (scores.links, scores.sure, scores.possible) == (5, 4, 6)
        assert (scores.sure_found, scores.possible_found) == (2, 3)
        assert scores.precision == pytest.approx(3 / 5)
        assert scores.recall == pytest.approx(2 / 4)
        assert scores.aer == pytest.approx(1 - 5 / 9)
        assert scores.f1 == pytest.approx(2 * 0.6 * 0.5 / 1.1)
        assert str(scores).startswith("AER = 44.44 (precision 60.00, recall 50.00, 5 links")

    def test_sentences_are_kept_apart(self):
        gold = [parse_gold("0-0"), parse_gold("1-1")]
        assert error_rate([links("1-1"), links("0-0")], gold).aer == 1

    def test_perfect_and_empty(self):
        gold = [parse_gold("0-0 1p1")]
        assert error_rate([links("0-0 1-1")], gold)[:4] == (0, 1, 1, 1)
        assert error_rate([links("")], gold)[:4] == (1, 0, 0, 0)

    def test_gold_whose_possible_links_leave_out_the_sure(self):
        assert error_rate([links("0-0")], [Gold(links("0-0"), frozenset())]).aer == 0

    def test_refusals(self):
        with pytest.raises(ValueError, match="got 1 sentences and gold links of 2"):
            error_rate([links("0-0")], [parse_gold("0-0")] * 2)
        with pytest.raises(ValueError, match="no sure link"):
            error_rate([links("0-0")], [parse_gold("0p0")])


class TestSymmetrise:
    def test_intersection_and_union(self):
        assert symmetrise(links("0-0 1-1"), links("0-0 1-2"), "intersection") == links("0-0")
        assert symmetrise(links("0-0 1-1"), links("0-0 1-2"), "union") == links("0-0 1-1 1-2")

    def test_grow_diagonal_by_hand(self):
        # Both agree on 0-0 and 3-3. 0-1 lies beside 0-0 and target 1 is free: taken. 1-2 then lies at a corner of 0-1,
        # both its words free: taken. 5-5 touches nothing. 4-3 lies beside 3-3 and source 4 is free: taken.
        forward, backward = links("0-0 0-1 3-3 5-5"), links("0-0 1-2 3-3 4-3")
        assert symmetrise(forward, backward, "grow-diagonal") == links("0-0 0-1 1-2 3-3 4-3")
        assert symmetrise(forward, backward, "grow-diagonal-final-and") == links("0-0 0-1 1-2 3-3 4-3 5-5")

    def test_a_link_between_two_linked_words_is_not_taken(self):
        # 1-0 lies beside 0-0 and 1-1, but both its words have links
        assert symmetrise(links("0-0 1-1 1-0"), links("0-0 1-1"), "grow-diagonal-final") == links("0-0 1-1")

    def test_sideways_comes_before_diagonal(self):
        # 1-0 and 0-1 leave no free word to 1-1; had it come first, it would have left none to them
        assert symmetrise(links("0-0 0-1 1-1"), links("0-0 1-0"), "grow-diagonal") == links("0-0 0-1 1-0")

    def test_growth_reaches_back(self):
        # 1-0 is found only from 2-1, that only from 3-2: each lies before the link it is found from
        forward, backward = links("3-2 2-1 1-0"), links("3-2")
        assert symmetrise(forward, backward, "grow-diagonal") == links("1-0 2-1 3-2")

    def test_final_takes_one_free_word_and_final_and_needs_two(self):
        forward, backward = links("0-0 0-5"), links("0-0 7-9")
        assert symmetrise(forward, backward, "grow-diagonal") == links("0-0")
        assert symmetrise(forward, backward, "grow-diagonal-final") == links("0-0 0-5 7-9")
        assert symmetrise(forward, backward, "grow-diagonal-final-and") == links("0-0 7-9")

    def test_final_goes_forward_first(self):
        # far from 0-0, both want source 5; the one that comes first takes it
        forward, backward = links("0-0 5-7"), links("0-0 5-9")
        assert symmetrise(forward, backward, "grow-diagonal-final-and") == links("0-0 5-7")
        assert symmetrise(backward, forward, "grow-diagonal-final-and") == links("0-0 5-9")

    def test_each_method_holds_the_one_before(self):
        strict = [0, 0]
        for forward, backward in random_directions():
            both, grown, either = (symmetrise(forward, backward, method) for method in METHODS[:3])
            assert both <= grown <= either
            strict[0] += both < grown
            strict[1] += grown < either
            for method in METHODS[3:]:
                assert grown <= symmetrise(forward, backward, method) <= either
            final = symmetrise(forward, backward, "grow-diagonal-final")
            for side in (0, 1):
                assert {link[side] for link in final} == {link[side] for link in either}
            assert symmetrise(forward, forward) == forward
        assert min(strict) > 20

    def test_grow_diagonal_against_the_published_loops(self):
        for forward, backward in random_directions():
            expected = set(forward & backward)
            grew = True
            while grew:
                grew = False
                for source in range(10):
                    for target in range(10):
                        if (source, target) not in expected:
                            continue
                        for a, b in ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
                            near = (source + a, target + b)
                            free = all(link[0] != near[0] for link in expected) or all(
                                link[1] != near[1] for link in expected
                            )
                            if free and (near in forward or near in backward):
                                expected.add(near)
                                grew = True
            assert symmetrise(forward, backward, "grow-diagonal") == expected

    def test_unknown_method(self):
        with pytest.raises(ValueError, match=r"one of intersection, union, grow-diagonal.*got 'grow'"):
            symmetrise(links("0-0"), links("0-0"), "grow")


@needs_data
class TestPublished:
    """Scores that others published for files of theirs: all links count from 0, source first, the gold from 1."""

    @pytest.mark.parametrize(
        ("file", "aer", "precision", "recall"),
        [
            ("giza.test.enfr.grow-diagonal.talp", 5.9, 97.5, 89.7),
            ("giza.test.enfr.talp", 8.0, 91.4, 92.9),
            ("fastalign.test.enfr.grow-diagonal.talp", 10.5, 90.8, 87.8),
            ("fastalign.test.enfr.talp", 16.4, 80.0, 90.1),
        ],
    )
    def test_aligners(self, file, aer, precision, recall):
        folder = Path(DATA, "alignments")
        scores = error_rate(read_links(folder / file), read_gold(folder / "enfr.gold"))
        found = [round(100 * share, 1) for share in (scores.aer, scores.precision, scores.recall)]
        assert found == [aer, precision, recall]

    def test_awesome_align(self):
        folder = Path(DATA, "alignments")
        scores = error_rate(read_links(folder / "enfr.awesome-align.out"), read_gold(folder / "enfr.gold"))
        assert round(100 * scores.aer, 2) == 4.07

    def test_wmt22(self):
        folder = Path(DATA, "wmt22")
        hypotheses, references = (
            (folder / name).read_text(encoding="utf-8").removesuffix("\n").split("\n")
            for name in ("hyp.OpenNMT.de", "generaltest2022.en-de.ref.A.de")
        )
        assert len(hypotheses) == 2037
        assert round(bleu(hypotheses, references).value, 4) == 35.6851
        assert round(chrf(hypotheses, references).value, 4) == 62.1349
