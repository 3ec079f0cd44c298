"""Decoding against references that share no code with it: all sequences, and a search in lists over whole forwards."""

import dataclasses
import importlib
import itertools
import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.decoding import DecodingConfig, decode, generate
from regard.decoding.base import highest, log_probabilities
from regard.decoding.beam import beam
from regard.decoding.greedy import draw
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer
from regard.spec import ATTENTION

BOS, EOS, FORBIDDEN = 2, 3, (0, 2)
SPECS = [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]


def taking(role: str) -> list[str]:
    return [spec for spec in SPECS if role in regard.facts(spec).roles]


def build(seed: int = 0, sharp: float = 4.0, **options) -> Transformer:
    """A random model that listens to its source and is sure enough of itself for the search to matter."""
    torch.manual_seed(seed)
    sizes = {"vocabulary": 12, "width": 16, "heads": 4, "inner": 32, "layers": 1, "dropout": 0.0, "tied": False}
    model = Transformer(ModelConfig(**(sizes | {"norm": "pre"} | options))).double().eval()
    with torch.no_grad():
        model.output.weight.mul_(sharp)
        for name, parameter in model.decoder.named_parameters():
            if parameter.dim() > 1 and ("cross" in name or "attention" in name):
                parameter.mul_(3)
    return model


# three sentences of 6, 2 and 4 real tokens, padded everywhere
SOURCE = torch.tensor([[4, 5, 1, 4, 4, 3, 0, 0], [0, 5, 0, 0, 0, 0, 3, 0], [0, 0, 1, 5, 0, 4, 0, 3]])
KEEP = SOURCE != 0


def alone(row: int) -> Tensor:
    return SOURCE[row : row + 1, KEEP[row]]


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def next_logprobs(
    model, source: Tensor | None, prefixes: list[tuple[int, ...]], bos: tuple[int, ...] = (BOS,)
) -> Tensor:
    """Of each prefix, from a whole forward: [prefixes, V]."""
    target = torch.tensor([bos + prefix for prefix in prefixes])
    with torch.no_grad():
        inputs = (target,) if source is None else (source.expand(len(prefixes), -1), target)
        return model(*inputs).logits[:, -1].log_softmax(-1)


def slow_beam(model, source, config: DecodingConfig, limit: int, bos=(BOS,), forbidden=FORBIDDEN):
    """Beam search of one sentence in lists: (ids, score, logprob, finished)."""
    live, finished = [((), 0.0)], []
    for step in range(limit + 1):
        table = next_logprobs(model, source, [ids for ids, _ in live], bos).tolist()
        ways = [
            (logprob + row[token], ids, token)
            for (ids, logprob), row in zip(live, table, strict=True)
            for token in range(len(row))
            if token not in forbidden and not (token == EOS and step < config.minimum)
        ]
        ways.sort(reverse=True)
        for logprob, ids, token in ways[: config.beam]:
            if token == EOS:
                finished.append((list(ids), logprob / penalty(step + 1, config.penalty), logprob, True))
        finished.sort(key=lambda hypothesis: -hypothesis[1])
        if step == limit:
            cut = [(list(ids), logprob / penalty(step, config.penalty), logprob, False) for ids, logprob in live]
            return (finished + cut)[: config.nbest]
        live = [((*ids, token), logprob) for logprob, ids, token in ways if token != EOS][: config.beam]
        reach = live[0][1] / penalty(limit + 1, config.penalty)
        if len(finished) >= config.nbest and finished[config.nbest - 1][1] >= reach:
            break
        if config.stops_early and len(finished) >= config.beam:
            break
    return finished[: config.nbest]


def same(found, expected) -> None:
    assert [h.ids for h in found] == [h[0] for h in expected]
    assert [h.finished for h in found] == [h[3] for h in expected]
    for name, column in (("score", 1), ("logprob", 2)):
        ours, theirs = [getattr(h, name) for h in found], [h[column] for h in expected]
        assert_close(torch.tensor(ours), torch.tensor(theirs), msg=lambda text, name=name: f"{name}: {text}")


def every(model, source, minimum: int, maximum: int, alpha: float):
    """All finished outputs of one sentence, best first."""
    tokens = [token for token in range(model.config.vocabulary) if token not in (*FORBIDDEN, EOS)]
    found = []
    for length in range(minimum, maximum + 1):
        outputs = list(itertools.product(tokens, repeat=length))
        target = torch.tensor([(BOS, *ids) for ids in outputs])
        with torch.no_grad():
            logprobs = model(source.expand(len(outputs), -1), target).logits.log_softmax(-1)
        answers = torch.tensor([(*ids, EOS) for ids in outputs])
        totals = logprobs.gather(2, answers[..., None]).sum((1, 2)).tolist()
        found += [
            (list(ids), total / penalty(length + 1, alpha), total, True)
            for ids, total in zip(outputs, totals, strict=True)
        ]
    return sorted(found, key=lambda hypothesis: -hypothesis[1])


@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("minimum", [0, 1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("V", "maximum"), [(5, 5), (6, 4)])
def test_a_beam_as_wide_as_all_sequences_finds_the_best_of_all(V, maximum, alpha, minimum, stops_early):
    model = build(seed=3, vocabulary=V)
    config = DecodingConfig(
        beam=V**maximum, nbest=4, penalty=alpha, minimum=minimum, maximum=maximum, stops_early=stops_early
    )
    source = SOURCE.clamp(max=V - 1)
    for row, found in enumerate(decode(model, source, KEEP, config)):
        same(found, every(model, source[row : row + 1, KEEP[row]], minimum, maximum, alpha)[:4])


def test_options_and_sentences_disagree():
    """The models of these tests tell the options apart: otherwise equality with a reference would show little."""
    different, apart = 0, 0
    for seed in (3, 4, 5, 6):
        model, answers = build(seed), {}
        for alpha, beams, minimum in itertools.product((0.0, 2.0), (1, 2, 4), (0, 3)):
            config = DecodingConfig(beam=beams, penalty=alpha, minimum=minimum, maximum=9)
            answers[alpha, beams, minimum] = [str(row[0].ids) for row in decode(model, SOURCE, KEEP, config)]
        different += len({tuple(answer) for answer in answers.values()})
        apart += len(set(answers[0.0, 4, 3])) == 3
    assert different >= 20
    assert apart >= 3


@pytest.mark.parametrize("seed", [3, 5, 6])
@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beams_equal_a_search_in_lists(alpha, stops_early, seed):
    model = build(seed)
    for beams, nbest, minimum, forbidden in ((2, 1, 0, ()), (3, 3, 1, FORBIDDEN), (5, 2, 2, (1,))):
        config = DecodingConfig(
            beam=beams,
            nbest=nbest,
            penalty=alpha,
            minimum=minimum,
            maximum=9,
            maximum_ratio=1.0,
            maximum_extra=3,
            stops_early=stops_early,
        )
        for row, found in enumerate(decode(model, SOURCE, KEEP, config, forbidden=forbidden)):
            limit = min(9, alone(row).shape[1] + 3)
            same(found, slow_beam(model, alone(row), config, limit, forbidden=forbidden))


@pytest.mark.parametrize("seed", [3, 4, 5, 6])
def test_one_beam_is_greedy(seed):
    model, config = build(seed), DecodingConfig(beam=1, maximum=8)
    found = decode(model, SOURCE, KEEP, config)
    for row in range(3):
        same(found[row], slow_beam(model, alone(row), config, config.limit(alone(row).shape[1])))
    with torch.inference_mode():
        state = model.start(3, memory=model.encode(SOURCE, keep=KEEP))
        logits, state = model.extend(torch.full((3, 1), BOS), state)
        pool = beam(model, logits[:, -1], state, [config.limit(int(n)) for n in KEEP.sum(1)], config, EOS, FORBIDDEN)
    for ours, theirs in zip(found, pool.lists(), strict=True):
        same(ours, theirs)


# what a mechanism gives for a token must not depend on how the tokens came, which some declare it does
@pytest.mark.parametrize("spec", [spec for spec in taking("causal") if regard.facts(spec).prefix_invariant])
def test_every_attention_of_the_decoder(spec):
    model = build(seed=5, decoder_attention=[spec, "softmax"], layers=2)
    config = DecodingConfig(beam=3, nbest=2, maximum=7)
    for row, found in enumerate(decode(model, SOURCE, KEEP, config)):
        same(found, slow_beam(model, alone(row), config, 7))


@pytest.mark.parametrize("spec", taking("cross"))
def test_every_cross_attention(spec):
    model = build(seed=6, cross_attention=spec)
    config = DecodingConfig(beam=3, nbest=2, maximum=7)
    for row, found in enumerate(decode(model, SOURCE, KEEP, config)):
        same(found, slow_beam(model, alone(row), config, 7))


@pytest.mark.parametrize("attention", ["dot", "additive", None])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_models(cell, attention):
    recurrent = importlib.import_module("regard.models.recurrent")
    torch.manual_seed(2)
    sizes = {"vocabulary": 6, "width": 8, "hidden": 12, "layers": 1, "dropout": 0.0, "tied": False}
    model = recurrent.Recurrent(recurrent.RecurrentConfig(cell=cell, attention=attention, **sizes)).double().eval()
    with torch.no_grad():
        model.output.weight.mul_(20)
    config = DecodingConfig(beam=3, nbest=2, maximum=7)
    for row, found in enumerate(decode(model, SOURCE, KEEP, config)):
        same(found, slow_beam(model, alone(row), config, 7))


CONFIGS = [
    DecodingConfig(beam=1),
    DecodingConfig(beam=4, nbest=3),
    DecodingConfig(beam=3, penalty=0.0, minimum=3, stops_early=False),
    DecodingConfig(sample=True, nbest=3),
    DecodingConfig(sample=True, top_k=3, top_p=0.9, temperature=1.5, seed=7),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_sentence_alone_and_in_any_batch(config):
    """Sentences of many lengths, in other orders, with other neighbours and other padding."""
    model = build(seed=3, vocabulary=30, sharp=2.0)
    random = torch.Generator().manual_seed(0)
    sentences = [torch.randint(4, 30, (n,), generator=random) for n in (1, 2, 3, 3, 5, 8, 13, 21, 4, 4, 7, 1)]

    def batch(order, width, seed):
        ids, keep = torch.full((len(order), width), 9), torch.zeros(len(order), width, dtype=torch.bool)
        random = torch.Generator().manual_seed(seed)
        for row, index in enumerate(order):
            at = torch.randperm(width, generator=random)[: len(sentences[index])].sort().values
            ids[row, at], keep[row, at] = sentences[index], True
        return decode(model, ids, keep, config)

    single = [decode(model, sentence[None], None, config)[0] for sentence in sentences]
    assert len({len(h.ids) for row in single for h in row}) >= 3
    for seed, width in enumerate((21, 30)):
        order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(seed)).tolist()
        for index, found in zip(order, batch(order, width, seed), strict=True):
            same(found, single[index])
    same(batch([4, 4], 5, 0)[1], single[4])


class Script(NamedTuple):
    """The state of a scripted model: what was read, and of the memory the first token of the source."""

    read: Tensor  # [B * K, t]
    memory: Tensor  # [B]

    def select(self, rows):
        return Script(self.read[rows], self.memory[rows])

    def reorder(self, rows):
        SCRIPT["reordered"] += 1
        return Script(self.read[rows], self.memory)


SCRIPT = Counter()


class Scripted(torch.nn.Module):
    """Next-token probabilities from a function of the first source token and the prefix, and what was asked of it."""

    def __init__(self, rule, vocabulary: int = 6):
        super().__init__()
        self.rule, self.vocabulary, self.rows = rule, vocabulary, []
        SCRIPT.clear()

    def encode(self, source, *, keep=None):
        return source[:, 0]

    def start(self, batch, *, memory, capacity=None):
        self.capacity = capacity
        return Script(torch.zeros(batch, 0, dtype=torch.long), memory)

    def extend(self, tokens, state, *, keep=None):
        self.rows.append(len(tokens))
        read = torch.cat([state.read, tokens], 1)
        assert read.shape[1] <= self.capacity
        memory = state.memory.repeat_interleave(len(read) // len(state.memory))
        logits = torch.full((len(read), 1, self.vocabulary), -math.inf)
        for row, (first, prefix) in enumerate(zip(memory.tolist(), read[:, 1:].tolist(), strict=True)):
            for token, probability in self.rule(first, tuple(prefix)).items():
                logits[row, 0, token] = math.log(probability)
        return logits, Script(read, state.memory)


def counts_down(first, prefix):
    """`first` times token 4, then eos, nearly surely."""
    return {4: 0.001, 5: 0.001, EOS: 0.998} if len(prefix) >= first else {4: 0.9, 5: 0.099, EOS: 0.001}


@pytest.mark.parametrize("beams", [1, 3])
def test_finished_sentences_leave_the_batch(beams):
    model = Scripted(counts_down).eval()
    lengths = [1, 2, 2, 3, 4, 5, 9, 9, 12, 6]
    found = decode(model, torch.tensor(lengths)[:, None], None, DecodingConfig(beam=beams, maximum_extra=30))
    assert [len(row[0].ids) for row in found] == lengths
    width, rows = beams, model.rows[1:]
    assert model.rows[0] == len(lengths)
    assert sorted(rows, reverse=True) == rows
    assert rows[0] <= width * len(lengths)
    assert rows[-1] == width
    # a row costs what its sentence is long, and little more
    assert sum(rows) <= width * (sum(lengths) + 2 * beams * len(lengths))


def test_sentences_that_need_fewer_hypotheses_are_done_earlier():
    """Each gets those that it would get in a batch of its own kind, and leaves that early."""
    for seed in range(4):
        model, steps = build(seed), []
        extend = model.extend
        model.extend = lambda tokens, state, extend=extend, steps=steps: (
            steps.append(len(tokens)) or extend(tokens, state)
        )
        config = DecodingConfig(beam=4, nbest=3, stops_early=False, maximum=7)
        found = decode(model, SOURCE, KEEP, config, needed=[1, 3, 2])
        mixed = sum(steps)
        for row, count in enumerate((1, 3, 2)):
            same(found[row], slow_beam(model, alone(row), dataclasses.replace(config, nbest=count), 7))
        steps.clear()
        decode(model, SOURCE, KEEP, config)
        assert mixed <= sum(steps)


def test_a_sentence_is_reported_when_it_leaves_the_search():
    model, told = Scripted(counts_down).eval(), {}
    lengths, needed = [3, 12, 1, 9], [1, 2, 2, 1]

    def report(row: int, found: list) -> None:
        assert row not in told
        told[row] = found, len(model.rows)

    config = DecodingConfig(beam=2, nbest=2, maximum_extra=30)
    found = decode(model, torch.tensor(lengths)[:, None], None, config, needed=needed, report=report)
    assert [told[row][0] for row in range(4)] == found
    assert list(told) == [2, 0, 3, 1], "as they end"
    steps = [told[row][1] for row in (2, 0, 3, 1)]
    assert len(set(steps)) == 4, "each at its own step"


def test_samples_leave_the_batch_together():
    model = Scripted(counts_down).eval()
    config = DecodingConfig(sample=True, nbest=3, top_k=1, maximum_extra=20)
    found = decode(model, torch.tensor([[2], [9], [4]]), None, config)
    assert [[len(h.ids) for h in row] for row in found] == [[2] * 3, [9] * 3, [4] * 3]
    assert model.rows == [3] + [9] * 2 + [6] * 2 + [3] * 5


def test_rows_are_moved_only_when_beams_moved():
    sure = Scripted(lambda first, prefix: {4: 0.9, 5: 0.05, EOS: 0.05}).eval()
    decode(sure, torch.tensor([[1]]), None, DecodingConfig(beam=1, maximum=10))
    assert SCRIPT["reordered"] == 0

    def apart(first, prefix):
        """Each beam goes on with its own token."""
        return {4: 0.6, 5: 0.4} if not prefix else {prefix[0]: 0.99, EOS: 0.01}

    # once from one row to two
    found = decode(Scripted(apart).eval(), torch.tensor([[1]]), None, DecodingConfig(beam=2, nbest=2, maximum=6))
    assert SCRIPT["reordered"] == 1
    assert [(h.ids, h.finished) for h in found[0]] == [([4] * 6, False), ([5] * 6, False)]


def late(first, prefix):
    """Ends at once with 0.3, or after token 4 and three sure 5s with 0.28."""
    if not prefix:
        return {EOS: 0.3, 4: 0.28, 5: 0.42}
    if prefix[0] == 5:
        return {1: 0.3, 4: 0.3, 5: 0.39, EOS: 0.01}
    return {5: 1.0} if len(prefix) < 4 else {EOS: 1.0}


def test_a_short_output_does_not_win_by_being_first():
    def run(**options):
        model = Scripted(late).eval()
        config = DecodingConfig(beam=3, minimum=0, maximum=10, **options)
        return decode(model, torch.tensor([[1]]), None, config)[0][0], len(model.rows)

    short, steps = run(penalty=0.0)
    assert short.ids == []
    # the log probability of what lives can only fall, so nothing can overtake 0.3
    assert steps <= 3
    assert run(penalty=0.0, stops_early=False) == (short, steps)
    for early in (True, False):
        best, _ = run(penalty=1.0, stops_early=early)
        assert best.ids == [4, 5, 5, 5]
        assert best.score == pytest.approx(math.log(0.28) / (10 / 6))
    # the bound stands at the longest output, not at the present length: log 0.28 beats log 0.3 only from |Y| = 3 on
    assert math.log(0.28) / penalty(2, 0.2) < math.log(0.3) / penalty(1, 0.2) < math.log(0.28) / penalty(5, 0.2)
    assert run(penalty=0.2, stops_early=False)[0].ids == [4, 5, 5, 5]


def overtaken(first, prefix):
    """Short outputs fill the beam early; a better long one comes late."""
    if first > 1:
        return counts_down(first, prefix)
    if len(prefix) < 2:
        return {EOS: 0.45, 4: 0.55}
    return {4: 0.9, EOS: 0.1} if len(prefix) < 8 else {EOS: 1.0}


def test_the_beam_ends_at_its_finished_hypotheses_or_at_the_bound():
    config = {"beam": 2, "penalty": 2.0, "minimum": 0, "maximum": 12}
    early = decode(Scripted(overtaken).eval(), torch.tensor([[1]]), None, DecodingConfig(**config))
    # a sentence that is done stays as it is, also while it waits for others before it leaves the batch
    source = torch.tensor([1] + [11] * 15)[:, None]
    model = Scripted(overtaken).eval()
    assert decode(model, source, None, DecodingConfig(**config))[:1] == early
    assert model.rows[6] == 32
    config |= {"stops_early": False}
    patient = decode(Scripted(overtaken).eval(), torch.tensor([[1]]), None, DecodingConfig(**config))
    assert early[0][0].ids == []
    assert patient[0][0].ids == [4] * 8
    assert patient[0][0].score > early[0][0].score


def test_the_best_that_goes_on_is_found_behind_one_that_ends():
    """With two beams the first step needs three candidates of its only row."""
    model = Scripted(lambda first, prefix: {EOS: 0.5, 4: 0.3, 5: 0.2} if not prefix else {EOS: 1.0}).eval()
    config = DecodingConfig(beam=2, nbest=2, minimum=0, penalty=8.0)
    found = decode(model, torch.tensor([[1]]), None, config, forbidden=())[0]
    assert [h.ids for h in found] == [[4], [5]]
    assert model.rows == [1, 2]


@pytest.mark.parametrize("beams", [1, 4])
def test_lengths_are_bounded_sentence_by_sentence(beams):
    endless = Scripted(lambda first, prefix: {4: 0.9, 5: 0.1}).eval()
    source = torch.tensor([[1, 1, 1, 1], [1, 9, 9, 9]])
    keep = torch.tensor([[True] * 4, [True, False, False, False]])
    config = DecodingConfig(beam=beams, nbest=beams, maximum_ratio=2.0, maximum_extra=3)
    found = decode(endless, source, keep, config)
    assert [{len(h.ids) for h in row} for row in found] == [{11}, {5}]
    assert not any(h.finished for row in found for h in row)
    assert found[0][0].logprob == pytest.approx(11 * math.log(0.9), rel=1e-5)
    assert found[0][0].score == pytest.approx(11 * math.log(0.9) / (16 / 6), rel=1e-5)

    ready = Scripted(lambda first, prefix: {4: 0.1, EOS: 0.9}).eval()
    for minimum in (0, 1, 4):
        config = DecodingConfig(beam=beams, minimum=minimum, maximum=6)
        assert [row[0].ids for row in decode(ready, source, keep, config)] == [[4] * minimum] * 2
    # the minimum of the user stands above the ratio
    config = DecodingConfig(beam=beams, minimum=20, maximum_ratio=1.0, maximum_extra=0)
    assert [len(row[0].ids) for row in decode(ready, source, keep, config)] == [20, 20]


def test_cut_outputs_only_fill_empty_places():
    """At most one token, 4 or 5: two outputs end, two do not, and one that ends comes first even if less likely."""

    def rule(first, prefix):
        if first > 1:
            return counts_down(first, prefix)
        return {4: 0.6, 5: 0.4} if not prefix else {4: 0.5, 5: 0.4, EOS: 0.1}

    model = Scripted(rule).eval()
    config = {"beam": 10, "maximum_ratio": 1.0, "maximum_extra": 0}
    found = decode(model, torch.tensor([[1]]), None, DecodingConfig(nbest=4, **config))[0]
    assert [(h.ids, h.finished) for h in found] == [([4], True), ([5], True), ([4], False), ([5], False)]
    assert found[2].score > found[0].score
    # it stays so in a batch in which others are far from done
    source, keep = torch.full((16, 11), 11), torch.ones(16, 11, dtype=torch.bool)
    source[3, 0], keep[3, 1:] = 1, False
    assert decode(model, source, keep, DecodingConfig(nbest=4, **config))[3] == found
    best = decode(model, torch.tensor([[1]]), None, DecodingConfig(nbest=2, **config))[0]
    assert best == found[:2]
    # there are no more
    assert decode(model, torch.tensor([[1]]), None, DecodingConfig(nbest=10, **config))[0] == found


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_best_are_sorted_and_distinct(alpha):
    for seed in range(5):
        found = decode(build(seed, vocabulary=20), SOURCE, KEEP, DecodingConfig(beam=6, nbest=6, penalty=alpha))
        for row in found:
            assert len(row) == 6
            assert len({tuple(h.ids) for h in row}) == 6
            done = [h.score for h in row if h.finished]
            assert done == sorted(done, reverse=True)
            assert not any(token in (*FORBIDDEN, EOS) for h in row for token in h.ids)
            for h in row:
                assert h.score == pytest.approx(h.logprob / penalty(len(h.ids) + h.finished, alpha))


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-6}])
def test_sampling_without_chance_is_greedy(options):
    for seed in range(4):
        model = build(seed, vocabulary=20, sharp=1.0)
        greedy = decode(model, SOURCE, KEEP, DecodingConfig(beam=1))
        for ours, theirs in zip(
            decode(model, SOURCE, KEEP, DecodingConfig(sample=True, **options)), greedy, strict=True
        ):
            same(ours, theirs)


def left(probabilities: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """The definition: temperature, then the k most probable, then the fewest that hold p of what is left."""
    heated = [p ** (1 / temperature) for p in probabilities]
    order = sorted(range(len(heated)), key=lambda token: -heated[token])[:top_k]
    whole, held, kept = sum(heated[token] for token in order), 0.0, []
    for token in order:
        kept.append(token)
        held += heated[token] / whole
        if top_p is not None and held >= top_p:
            break
    total = sum(heated[token] for token in kept)
    return [heated[token] / total if token in kept else 0.0 for token in range(len(heated))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.6, None, None), (1.0, 2, None), (1.0, None, 0.8), (1.7, 3, 0.75), (2.0, 99, 0.4)],
)
def test_samples_have_the_probabilities_of_the_definition(temperature, top_k, top_p):
    """Over all outputs of at most two tokens, cut ones included."""
    model, count = build(seed=8, vocabulary=6, sharp=1.0), 6000
    config = DecodingConfig(
        sample=True, nbest=count, temperature=temperature, top_k=top_k, top_p=top_p, maximum=2, minimum=1, seed=5
    )
    drawn = Counter((tuple(h.ids), h.finished) for h in decode(model, alone(0), None, config)[0])
    assert sum(drawn.values()) == count

    def step(prefix):
        probabilities = next_logprobs(model, alone(0), [prefix])[0].exp().tolist()
        for token in (*FORBIDDEN, *([EOS] if not prefix else [])):
            probabilities[token] = 0.0
        return left(probabilities, temperature, top_k, top_p)

    expected = Counter()
    for first, p in enumerate(step(())):
        if p:
            for second, q in enumerate(step((first,))):
                if second == EOS:
                    expected[(first,), True] += p * q
                elif q:
                    last = step((first, second))[EOS]
                    expected[(first, second), True] += p * q * last
                    expected[(first, second), False] += p * q * (1 - last)
    assert set(drawn) <= {key for key, p in expected.items() if p > 0}
    for key, p in expected.items():
        assert abs(drawn[key] / count - p) <= 4.5 * math.sqrt(p * (1 - p) / count) + 1e-9, key


def test_samples_carry_the_log_probability_of_the_model():
    model = build(seed=9, vocabulary=20, sharp=1.0)
    config = DecodingConfig(sample=True, nbest=5, temperature=1.8, top_k=9, maximum=6, penalty=0.7)
    for row, found in enumerate(decode(model, SOURCE, KEEP, config)):
        assert len({tuple(h.ids) for h in found}) > 1
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for h in found:
            target = h.ids + [EOS] * h.finished
            prefixes = [tuple(target[:n]) for n in range(len(target))]
            total = sum(
                float(next_logprobs(model, alone(row), [p])[0, token])
                for p, token in zip(prefixes, target, strict=True)
            )
            assert h.logprob == pytest.approx(total)
            assert h.score == pytest.approx(total / penalty(len(target), 0.7))


def test_the_seed_decides_the_samples():
    model = build(seed=9, vocabulary=20, sharp=0.5)

    def run(seed, source=SOURCE, keep=KEEP):
        return decode(model, source, keep, DecodingConfig(sample=True, nbest=2, seed=seed))

    assert run(1) == run(1)
    assert run(1) != run(2)
    # sentences do not share their draws
    flat = Scripted(lambda first, prefix: dict.fromkeys((1, *range(4, 50)), 1 / 47), vocabulary=50).eval()
    rows = decode(flat, torch.tensor([[5], [6]]), None, DecodingConfig(sample=True, nbest=2, maximum=8))
    assert len({tuple(h.ids) for row in rows for h in row}) == 4


def test_no_token_without_mass_is_drawn():
    """Also by the largest number below one and by zero."""
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf, -math.inf]]).repeat(2, 1)
    uniform = torch.tensor([0.0, 1 - 2**-24])
    for options in ({}, {"top_k": 4}, {"top_p": 1.0}):
        config = DecodingConfig(sample=True, **options)
        value, token = draw(logits, torch.tensor([0]), uniform, config)
        assert token.tolist() == [1, 2]
        assert_close(value, torch.full((2,), math.log(0.5)))


@pytest.mark.parametrize("spec", ["softmax", "local(window=3)", "linear"])
def test_a_decoder_continues_prompts(spec):
    """Ragged prompts with holes, against each prompt alone in whole forwards."""
    model = build(seed=11, kind="decoder", attention=spec, layers=2)
    for config in (DecodingConfig(beam=1, maximum=6), DecodingConfig(beam=3, nbest=2, maximum=6)):
        for row, found in enumerate(generate(model, SOURCE, KEEP, config)):
            prompt = tuple(alone(row)[0].tolist())
            same(found, slow_beam(model, None, config, 6, bos=prompt))
            same(generate(model, alone(row), None, config)[0], found)


def test_what_stands_in_padding_was_not_said_before():
    """The penalty on repetition is of real tokens, whatever the others are."""
    model, config = build(seed=11, kind="decoder", layers=2), DecodingConfig(beam=1, maximum=6, repetition=3.0)
    (plain,) = generate(model, alone(1), None, config)
    for junk in range(4, model.config.vocabulary):
        same(generate(model, torch.where(KEEP, SOURCE, junk), KEEP, config)[1], plain)


@pytest.mark.parametrize("V", [7, 64, 700, 1000, 4097])
@pytest.mark.parametrize("count", [1, 4, 12])
def test_highest(V, count):
    logits = torch.randn(9, V, generator=torch.Generator().manual_seed(V))
    assert torch.equal(highest(logits, count), logits.topk(min(count, V)).indices)
    # the best at both ends
    logits[:, -1], logits[:, 0] = 9.0, 8.0
    assert highest(logits, count)[:, :2].tolist() == [[V - 1, 0][:count]] * 9


def test_log_probabilities_of_many_rows_and_low_precision():
    logits = torch.randn(50, 2**18 + 1, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(2**18, (50, 3), generator=torch.Generator().manual_seed(1))
    assert_close(log_probabilities(logits, ids), logits.log_softmax(1).gather(1, ids))
    half = log_probabilities(logits[:, :99].bfloat16(), ids % 99)
    assert_close(half, logits[:, :99].bfloat16().float().log_softmax(1).gather(1, ids % 99))


def test_low_precision_decodes():
    """Scores are float32 sums whatever the model computes in."""
    model = build(seed=4, vocabulary=20).bfloat16()
    for config in CONFIGS:
        for row in decode(model, SOURCE, KEEP, config):
            assert row
            assert all(math.isfinite(h.score) for h in row)


def test_a_model_trains_after_decoding():
    model = build()
    decode(model, SOURCE, KEEP, DecodingConfig(beam=2))
    model.train()
    model(SOURCE, SOURCE, keep=KEEP, target_keep=KEEP).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", CONFIGS)
def test_logits_that_are_no_numbers_end_in_words(config, value):
    class Broken(Scripted):
        def extend(self, tokens, state, *, keep=None):
            logits, state = super().extend(tokens, state)
            if state.read.shape[1] == 3:
                logits[-1] = value
            return logits, state

    model = Broken(lambda first, prefix: {4: 0.6, 5: 0.4}).eval()
    with pytest.raises(ValueError, match=r"logits for token 3 are not numbers"):
        decode(model, torch.tensor([[1], [2]]), None, config)
    assert len(model.rows) == 3


def test_bad_input():
    model = build()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        decode(build().train(), SOURCE, KEEP)
    with pytest.raises(ValueError, match="source must be whole numbers"):
        decode(model, SOURCE.double(), KEEP)
    with pytest.raises(ValueError, match="keep must be boolean"):
        decode(model, SOURCE, KEEP.long())
    with pytest.raises(ValueError, match="from 0 to 11"):
        decode(model, SOURCE, KEEP, eos=12)
    with pytest.raises(ValueError, match="different ids"):
        decode(model, SOURCE, KEEP, forbidden=(0, 3))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(build(kind="decoder"), SOURCE, KEEP & torch.tensor([[True], [False], [True]]))
    assert decode(model, SOURCE[:0], KEEP[:0]) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beam": 0}, "beam must be a whole number of at least 1"),
        ({"beam": 2.5}, "beam must be a whole number"),
        ({"beam": True}, "beam must be a whole number"),
        ({"nbest": 6}, "make beam at least nbest"),
        ({"penalty": -0.1}, "penalty must be a number from 0 to 100"),
        ({"penalty": math.nan}, "penalty"),
        ({"minimum": -1}, "minimum"),
        ({"maximum": 0}, "maximum"),
        ({"minimum": 5, "maximum": 4}, "maximum 4 is below minimum 5"),
        ({"maximum_ratio": math.inf}, "maximum_ratio"),
        ({"sample": True, "temperature": 0.0}, "temperature must be above 0"),
        ({"sample": True, "top_k": 0}, "top_k"),
        ({"sample": True, "top_p": 0.0}, "top_p must be above 0"),
        ({"sample": True, "top_p": 1.1}, "top_p"),
        ({"top_k": 5}, "sample=True"),
        ({"temperature": 0.5}, "sample=True"),
    ],
)
def test_bad_configs(options, words):
    with pytest.raises(ValueError, match=words):
        DecodingConfig(**options)


def test_the_ids_of_the_tokenizer():
    tokenizer = importlib.import_module("regard.data.tokenizer")
    module = importlib.import_module("regard.decoding.searching")
    assert (module.PAD, module.BOS, module.EOS) == (tokenizer.PAD, tokenizer.BOS, tokenizer.EOS)
