"""Continuous batching: rows that join and leave a running batch get the answers that they would get alone."""

import itertools

import pytest
import torch
from generators import SHARED, ByHand, alone, generation, small_language, texts

from regard.decoding import DecodingConfig
from regard.http.refused import Refused
from regard.models.feedback import FeedbackConfig
from regard.models.perceiver import PerceiverARConfig
from regard.serve import batch, generating
from regard.serve.footprint import Footprint
from regard.serve.prefixes import PrefixCache
from regard.serve.requests import Generation, Update
from regard.spec import ATTENTION
from regard.testing.cases import cases

# a token, a prompt of several pieces, the empty one, and three that begin alike
PROMPTS = ("a", SHARED + "x", "b", "", SHARED + "and", "q w e r t y" * 2, SHARED + "!")
TOKENS = (12, 6, 12, 4, 6, 8, 9)


def causal():
    found = []
    for case in cases():
        if case.role == "causal":
            first = ATTENTION.find(case.spec.split("(")[0]).examples[0]
            found.append(pytest.param(case.spec, marks=() if case.spec == first else pytest.mark.exhaustive))
    return found


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """Rows stay idle until half of them are: so do some of a small batch."""
    monkeypatch.setattr(batch, "IDLE", 2)


def check(language, **limits):
    engine = ByHand(language, rows=6, **limits)
    pairs = zip(PROMPTS, TOKENS, strict=True)
    asked = [generation(language, text, i, tokens=tokens, n=1 + 2 * (i == 3)) for i, (text, tokens) in enumerate(pairs)]
    engine.run(asked)
    assert len(engine.finished()) == len(PROMPTS)
    for prompt, one in zip(PROMPTS, asked, strict=True):
        assert texts(one) == alone(language, prompt, one), prompt
    assert engine.counts.rows_stepped > engine.counts.steps, "they were decoded together"
    assert engine.counts.rows_idle, "some left while others went on"
    return engine


@pytest.mark.parametrize("spec", causal())
def test_a_batch_that_changes_gives_the_answers_of_each_alone(spec):
    check(small_language(attention=spec))


@pytest.mark.parametrize(
    ("config", "options"),
    [(FeedbackConfig, {}), (PerceiverARConfig, {"latents": 8})],
    ids=["feedback", "perceiver-ar"],
)
def test_other_models(config, options):
    check(small_language(config, **options))


@pytest.mark.parametrize(
    ("spec", "most_bytes", "hits"),
    [
        ("softmax", 1 << 20, 2),
        ("linear", 1 << 20, 2),
        ("local(window=8)", 1 << 20, 2),
        ("softmax", 100, 0),
        ("softmax", 0, 0),
    ],
    ids=["kept", "sums kept", "a window kept", "too large", "none"],
)
def test_a_prefix_is_kept_when_it_comes_again(spec, most_bytes, hits):
    language = small_language(attention=spec, position="learned(longest=300)")
    engine = ByHand(language, prefix_bytes=most_bytes)
    for number, end in enumerate(("x", "and", "!", "?")):
        one = generation(language, SHARED + end, number)
        engine.run([one])
        assert texts(one) == alone(language, SHARED + end, one)
    assert (engine.prefixes.hits, engine.prefixes.tokens_saved) == (hits, 64 * hits)
    assert engine.prefixes.bytes == sum(size for _, size in engine.prefixes.states.values())
    assert bool(engine.prefixes.states) == bool(hits)


def test_a_kept_prefix_is_all_of_a_beginning_and_not_all_of_a_prompt():
    language = small_language()
    engine = ByHand(language)
    pieces = {letter: letter * 64 for letter in "abc"}
    # a prompt of whole pieces, then one that has the second of them in common
    for prompt in (
        *[pieces["a"] + pieces["c"]] * 3,
        *[pieces["a"] + pieces["c"] + "?"] * 3,
        pieces["b"] + pieces["c"] + "?",
    ):
        one = generation(language, prompt)
        engine.run([one])
        assert texts(one) == alone(language, prompt, one)
    assert engine.prefixes.tokens_saved == 64 + 64 + 64 + 64 + 128 - 64
    scored = generation(language, pieces["a"] + pieces["c"] + "?", tokens=0, top=1, scores_prompt=True)
    engine.run([scored])
    assert len(scored.prompt_scores) == 128, "of tokens that are read"


@pytest.mark.parametrize("spec", ["softmax", "linear", "local(window=8)"])
def test_prompts_with_kept_beginnings_are_read_together(spec):
    """Each continues its own, beside one whose beginning is not known."""
    language = small_language(attention=spec)
    engine = ByHand(language)
    starts = [letter * 64 for letter in "abc"]
    for start in starts * 2:
        engine.run([generation(language, start + "?", tokens=1)])
    prompts = [start + "and then" for start in starts] + ["d" * 70]
    asked = [generation(language, prompt) for prompt in prompts]
    engine.submit(asked)
    engine.advance()
    assert engine.prefixes.hits == 3
    assert len(engine.batch.active) == 3, "the fourth has more to read"
    engine.run()
    assert [texts(one) for one in asked] == [alone(language, *pair) for pair in zip(prompts, asked, strict=True)]


@pytest.mark.parametrize("spec", ["softmax", "linear"])
def test_beginnings_are_kept_at_multiples_of_the_piece_of_the_device(spec, monkeypatch):
    monkeypatch.setitem(generating.AT_ONCE, "cpu", (16, 64))
    language = small_language(attention=spec)
    engine = ByHand(language)
    prompts = ["a" * 40 + letter * 20 for letter in "bcd"]
    asked = [generation(language, prompt) for prompt in prompts]
    for one in asked:
        engine.run([one])
    assert (engine.prefixes.hits, engine.prefixes.tokens_saved) == (1, 32)
    assert [texts(one) for one in asked] == [alone(language, *pair) for pair in zip(prompts, asked, strict=True)]


def test_no_step_waits_for_more_tokens_than_it_may(monkeypatch):
    """Padding counts, also where the first row of a group has less left than the others."""
    language = small_language()
    engine = ByHand(language, rows=16)
    engine.submit([generation(language, "x" * (64 + rest), tokens=2) for rest in (1, 63, 63, 63, 1, 1)])
    read, steps = engine._read_pieces, []

    def watched(fills, state):
        steps[-1] += len(fills) * max(engine._end(fill) - fill.at for fill in fills)
        read(fills, state)

    monkeypatch.setattr(engine, "_read_pieces", watched)
    while not engine.is_idle:
        steps.append(0)
        engine.advance()
    assert max(steps) <= engine.prompt_tokens, steps


def test_who_came_first_is_read_first():
    language = small_language()
    engine = ByHand(language, rows=16)
    asked = [generation(language, letter * 128, tokens=1) for letter in "abcdefghijkl"]
    engine.submit(asked)
    engine.run()
    assert engine.finished() == asked


def test_kept_prefixes_leave_in_the_order_of_their_use():
    language = small_language()
    size = Footprint.measure(language.model, 300, 3, language.device).bytes(64)
    engine = ByHand(language, prefix_bytes=2 * size)
    starts = [letter * 64 for letter in "abc"]
    for start in (*starts[:2] * 2, starts[0], *starts[2:] * 2, starts[0], starts[1]):
        engine.run([generation(language, start + "?", tokens=1)])
    # a, then b, then c (which pushes b out, a was used since), then a again, and b must be read anew
    assert (engine.prefixes.hits, len(engine.prefixes.states)) == (2, 2)


def test_kept_prefixes_leave_until_there_is_room():
    cache = PrefixCache(100, 64)
    for digest, size in ((b"a", 40), (b"b", 40), (b"c", 90), (b"d", 101), (b"c", 90)):
        cache.keep(digest, digest, size)
    assert (list(cache.states), cache.bytes) == ([b"c"], 90)


def test_memory_bounds_the_rows():
    """A state of the largest length in each row is what a batch takes; what a window keeps does not grow."""
    windowed, cached = small_language(attention="local(window=8)"), small_language()
    growth = [Footprint.measure(one.model, 256, 3, one.device).bytes_per_token for one in (windowed, cached)]
    assert growth == [0, 2 * 2 * 16 * 4], "keys and values of two layers in float32"
    size = Footprint.measure(cached.model, 256, 3, cached.device).bytes(40)
    engine = ByHand(cached, state_bytes=3 * size)
    asked = [generation(cached, "x" * 33, tokens=8) for _ in range(5)]
    engine.submit(asked)
    engine.advance()
    assert (len(engine.batch.active), len(engine.waiting)) == (3, 2)
    engine.run()
    assert len(engine.finished()) == 5
    with pytest.raises(Refused, match=r"needs .* bytes of decoding state") as told:
        engine.submit([generation(cached, "x" * 200, tokens=8)])
    assert told.value.status == 400


def test_what_runs_counts_when_others_are_admitted():
    language = small_language()
    engine = ByHand(language, rows=4)
    engine.submit([generation(language, "ab", n=3, tokens=20), generation(language, "cd", n=2, tokens=20)])
    engine.advance()
    assert (len(engine.running), len(engine.waiting)) == (1, 1), "five samples, four rows"
    engine.submit([generation(language, "ef", tokens=20)])
    engine.advance()
    assert (len(engine.running), len(engine.waiting)) == (1, 2), "nobody overtakes"
    engine.run()
    assert len(engine.finished()) == 3
    size = Footprint.measure(language.model, 256, 3, language.device).bytes(100)
    engine = ByHand(language, state_bytes=2 * size)
    engine.submit([generation(language, "x" * 81, tokens=20)])
    engine.advance()
    engine.submit([generation(language, "ab", tokens=4) for _ in range(3)])
    engine.advance()
    assert (len(engine.running), len(engine.waiting)) == (2, 2), "short rows have room for the longest"


def test_prompts_are_read_together_until_the_tokens_between_two_steps_are_spent():
    """Those that have read something apart from those that have not; whoever waited longest comes first."""
    language = small_language()
    engine = ByHand(language, rows=16)
    short = [generation(language, "a" * (3 + number), tokens=2) for number in range(10)]
    engine.submit(short)
    engine.advance()
    assert engine.finished() == short
    long = [generation(language, "x" * 100, number, tokens=9) for number in range(6)]
    engine.submit(long)
    read = [engine.counts.prompt_tokens]
    for _ in range(3):
        engine.advance()
        read.append(engine.counts.prompt_tokens)
    # four pieces of 64; the two others, beside which the four rests of 36 do not fit; all six rests
    assert [after - before for before, after in itertools.pairwise(read)] == [256, 2 * 64, 6 * 36]
    engine.run()
    assert [texts(one) for one in long] == [alone(language, "x" * 100, one) for one in long]


def test_a_prompt_longer_than_that_is_read_at_any_rate(monkeypatch):
    """As a whole, where its answer depends on how it is cut."""
    language = small_language(attention="reformer(chunk=4, buckets=4)")
    engine = ByHand(language)
    assert not engine.splits
    monkeypatch.setattr(engine, "prompt_tokens", 16)
    asked = [generation(language, "xy" * 20), generation(language, "ab")]
    engine.submit(asked)
    engine.advance()
    assert (len(engine.batch.active), len(engine.groups)) == (1, 1)
    engine.run()
    assert [texts(one) for one in asked] == [
        alone(language, text, one) for text, one in zip(("xy" * 20, "ab"), asked, strict=True)
    ]


def test_when_to_try_again():
    language = small_language()
    engine = ByHand(language, rows=2, waiting=6)
    asked = [generation(language, "ab", tokens=1) for _ in range(6)]
    engine.submit(asked)
    engine.seconds_each = 10
    with pytest.raises(Refused) as told:
        engine.submit([generation(language, "ab")])
    assert told.value.retry_after == 30, "six requests of ten seconds, two at a time"
    asked[0].created -= 100
    engine.advance()
    assert 10 < engine.seconds_each < 20, "the recent pace"


def test_refusals():
    language = small_language()
    engine = ByHand(language, waiting=2, rows=2)
    with pytest.raises(Refused, match="at most 300 fit") as told:
        engine.submit([generation(language, "x" * 290, tokens=11)])
    assert (told.value.status, told.value.code) == (400, "context_length_exceeded")
    with pytest.raises(Refused, match="n must be at most 2"):
        engine.submit([generation(language, "x", n=3)])
    with pytest.raises(Refused, match="at most 2 prompts here, got 3") as told:
        engine.submit([generation(language, "x") for _ in range(3)])
    assert told.value.status == 400, "it would never fit the queue"
    engine.submit([generation(language, "x")])
    with pytest.raises(Refused, match="1 requests are waiting") as told:
        engine.submit([generation(language, "x"), generation(language, "y")])
    assert told.value.status == 429
    assert told.value.retry_after >= 1
    assert len(engine.waiting) == 1, "all or none"
    engine.close()
    with pytest.raises(Refused, match="shutting down"):
        engine.submit([generation(language, "x")])
    engine.run()
    assert len(engine.finished()) == 1, "what was taken is answered"


def test_who_leaves_or_is_late_makes_room():
    language = small_language()
    engine = ByHand(language, rows=2)
    gone, late, queued, stays = (generation(language, text, tokens=20) for text in ("ab", "cd", "ef", "gh" * 60))
    late_in_queue = generation(language, "ij", tokens=20, seconds=0)
    engine.submit([gone, late, queued, stays, late_in_queue])
    engine.advance()
    gone.cancelled, queued.cancelled, late.deadline = True, True, 0
    engine.advance()
    # the prompt of one that leaves is not read to its end
    stays_out = generation(language, "kl" * 60, tokens=2)
    engine.submit([stays_out])
    engine.advance()
    stays_out.cancelled = True
    engine.run()
    assert engine.finished() == [stays]
    assert texts(stays) == alone(language, "gh" * 60, stays)
    assert [status for status, _ in engine.failures()] == [504, 504]
    assert engine.counts.cancelled == 3


def test_idle_rows_that_read_more_than_the_others_keep_their_room():
    language = small_language()
    engine = ByHand(language, rows=8)
    long = [generation(language, "x" * 40, tokens=2) for _ in range(2)]
    short = [generation(language, "ab", tokens=12) for _ in range(6)]
    engine.submit(short + long)
    for _ in range(2):
        engine.advance()
    assert (engine.finished(), len(engine.batch.rows)) == (long, 8)
    last = generation(language, "cd", tokens=3)
    engine.run([last])
    assert engine.failures() == []
    assert texts(last) == alone(language, "cd", last)


def test_who_leaves_the_queue_makes_room_in_it():
    language = small_language()
    engine = ByHand(language, rows=1)
    engine.submit([generation(language, "ab", tokens=20)])
    engine.advance()
    gone, late = generation(language, "cd"), generation(language, "ef", seconds=0)
    engine.submit([gone, late])
    gone.cancelled = True
    engine.advance()
    assert not engine.waiting
    assert [status for status, _ in engine.failures()] == [504]


@pytest.mark.parametrize("broken", ["prefixes.find", "model.start", "batch.join", "batch.step"])
def test_a_failure_ends_what_runs_and_not_the_generator(broken, caplog, monkeypatch):
    language = small_language()
    engine = ByHand(language)
    lost = generation(language, "ab")
    engine.submit([lost])
    with monkeypatch.context() as patch:
        part, method = broken.split(".")
        patch.setattr(getattr(engine, part), method, lambda *_, **__: 1 / 0)
        engine.advance()
    (failure,) = engine.failures()
    assert failure == (500, "decoding failed (ZeroDivisionError): the log of the server says why")
    assert "Traceback" in caplog.text
    assert not engine.running
    after = generation(language, "ab")
    engine.run([after])
    assert engine.finished() == [after]


def test_broken_weights_are_told():
    language = small_language()
    torch.nn.init.constant_(language.model.output.weight, torch.nan)
    engine = ByHand(language)
    engine.run([generation(language, "ab", n=2)])
    ((status, why),) = engine.failures()
    assert status == 500
    assert "NaN" in why


def test_updates_have_all_of_the_text_and_its_tokens():
    language = small_language()
    engine = ByHand(language)
    whole = generation(language, "the", 1, tokens=40)
    engine.run([whole])
    (text,) = texts(whole)
    stop = text[12:15]
    streamed = generation(language, "the", 1, tokens=40, top=2, streams=True)
    stopped = generation(language, "the", 1, tokens=40, top=2, streams=True, stop=[stop])
    engine.run([streamed, stopped])
    for one, expected in ((streamed, text), (stopped, text[: text.index(stop)])):
        updates = [item for generation, item in engine.items if generation is one and isinstance(item, Update)]
        assert "".join(update.text for update in updates) == expected
        tokens = [token for update in updates for token in update.tokens]
        assert [token.offset for token in tokens] == sorted(token.offset for token in tokens)
        assert "".join(token.text for token in tokens).startswith(expected)
        assert all(token.offset < len(expected) for token in tokens)
        assert all(len(token.top) == 2 and token.top[0][1] >= token.top[1][1] for token in tokens)
        assert all(token.logprob <= 0 for token in tokens)
        assert updates[-1].ended == ("stop" if one is stopped else "length")


def test_rows_of_one_batch_keep_their_own_settings():
    language = small_language()
    settings = [{}, {"top_k": 1}, {"top_k": 50}, {"temperature": 0.3}, {"temperature": 2.0}, {"top_p": 0.3}]
    settings += [{"min_p": 0.5}, {"min_p": 0.8}]
    configs = [DecodingConfig(sample=True, maximum=12, seed=3, **one) for one in settings]
    asked = [Generation(language.encode("the"), config, language.tokenizer, tokens=12) for config in configs]
    engine = ByHand(language)
    engine.submit(asked)
    engine.run()
    assert engine.counts.rows_stepped > 7 * engine.counts.steps, "most of the time together"
    found = [texts(one) for one in asked]
    assert found == [alone(language, "the", one) for one in asked]
    assert len(set(map(tuple, found))) == len(settings)


def test_log_probabilities_are_those_of_the_model():
    """Also of drawn tokens, and for as many others as each request asks for."""
    language = small_language()
    engine = ByHand(language)
    tops = {"the": None, "a cat": 1, "sat": 3, "on": 0}
    asked = [generation(language, prompt, 1, tokens=12, top=top) for prompt, top in tops.items()]
    engine.submit(asked)
    engine.run()
    for one, top in zip(asked, tops.values(), strict=True):
        (row,) = one.samples
        ids = torch.tensor([*one.ids, *row.listener.ids])
        with torch.no_grad():
            logits = language.model(ids[None]).logits
        chances = logits[0, len(one.ids) - 1 : -1].log_softmax(1)
        assert len(row.scores) == (0 if top is None else len(row.listener.ids))
        for place, scored in enumerate(row.scores):
            best = chances[place].topk(top).values
            assert scored.logprob == pytest.approx(float(chances[place, scored.id]), abs=1e-4)
            assert [value for _, value in scored.top] == pytest.approx(best.tolist(), abs=1e-4)


def test_log_probabilities_of_a_prompt():
    language = small_language()
    engine = ByHand(language)
    asked = generation(language, SHARED, tokens=0, top=1, scores_prompt=True)
    engine.run([asked])
    values = sum(token.logprob for token in asked.prompt_scores)
    ((expected, count),) = language.likelihoods([(SHARED[0], SHARED[1:])])
    assert len(asked.prompt_scores) == count
    assert abs(values - expected) < 1e-3
    assert "".join(token.text for token in asked.prompt_scores) == SHARED[1:]


def test_the_thread_answers_and_ends():
    from regard.serve.generating import Generator, GeneratorLimits

    language, items = small_language(), []
    engine = Generator(language, GeneratorLimits(), items.extend)
    engine.start()
    asked = [generation(language, "ab", number) for number in range(5)]
    for one in asked:
        engine.submit([one])
    engine.close()
    engine.thread.join(30)
    assert not engine.thread.is_alive()
    assert len(items) == 5
    assert [texts(one) for one in asked] == [alone(language, "ab", one) for one in asked]
