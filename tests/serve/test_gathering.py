"""Dynamic batching: requests gather while a batch is computed, and fail alone."""

import pytest

from regard.http.refused import Refused
from regard.serve.gathering import RECENT, Gatherer, Job


def gatherer(compute=None, **limits):
    """One that is advanced by hand, and the batches that it computed."""
    batches = []

    def upper(texts, settings, check, ready):
        check()
        batches.append((texts, settings))
        if "bad" in texts:
            raise ValueError("bad is no text")
        return [text.upper() for text in texts]

    return Gatherer(compute or upper, **{"waiting": 8, "texts": 4} | limits), batches


def submit(one, *texts, settings=None, **options):
    job = Job(texts, settings, **options)
    one.submit(job)
    return job


def test_those_with_the_same_settings_are_computed_together_in_order():
    one, batches = gatherer()
    first, other, second, third = (
        submit(one, "a", "b"),
        submit(one, "x", settings=1),
        submit(one, "c"),
        submit(one, "d", "e"),
    )
    for _ in range(3):
        one.advance()
    assert batches == [(["a", "b", "c"], None), (["x"], 1), (["d", "e"], None)]
    assert [job.future.result() for job in (first, other, second, third)] == [["A", "B"], ["X"], ["C"], ["D", "E"]]
    assert (one.finished, one.batches, one.texts_done) == (4, 3, 6)


def test_a_job_that_cannot_be_computed_fails_alone(caplog):
    one, _ = gatherer()
    right, wrong = submit(one, "a"), submit(one, "bad")
    one.advance()
    assert right.future.result() == ["A"]
    told = wrong.future.exception()
    assert (told.status, told.why) == (400, "bad is no text")

    def broken(texts, settings, check, ready):
        raise RuntimeError("secret")

    one, _ = gatherer(broken)
    lost = submit(one, "a")
    one.advance()
    told = lost.future.exception()
    assert (told.status, "secret" in told.why, "secret" in caplog.text) == (500, False, True)


def test_who_leaves_or_is_late_is_not_computed():
    one, batches = gatherer()
    gone, late, stays = submit(one, "a"), submit(one, "b", seconds=-1), submit(one, "c")
    gone.cancelled = True
    one.advance()
    assert batches == [(["c"], None)]
    assert gone.future.cancelled()
    assert late.future.exception().status == 504
    assert stays.future.result() == ["C"]
    # those who leave in the middle of a batch end it
    last = submit(one, "d")

    def leaving(texts, settings, check, ready):
        last.cancelled = True
        check()

    one.compute = leaving
    one.advance()
    assert last.future.cancelled()
    assert one.cancelled == 2


def test_who_leaves_or_is_late_in_a_batch_with_others_is_counted_as_such():
    def change(texts, settings, check, ready):
        gone.cancelled, late.deadline = True, late.created - 1
        check()
        return [text.upper() for text in texts]

    one, _ = gatherer(change)
    gone, late, stays = submit(one, "a", "b"), submit(one, "c"), submit(one, "d")
    one.advance()
    assert (stays.future.result(), gone.future.cancelled(), late.future.exception().status) == (["D"], True, 504)
    assert (one.finished, one.cancelled, one.failed, one.texts_done) == (1, 1, 1, 1)


def test_the_queue_is_bounded_and_closes():
    one, _ = gatherer(waiting=1)
    job = submit(one, "a")
    with pytest.raises(Refused, match="1 requests are waiting") as told:
        submit(one, "b")
    assert (told.value.status, told.value.retry_after) == (429, 1)
    one.seconds_each = 10
    one.waiting[0].texts *= 6
    with pytest.raises(Refused) as told:
        submit(one, "b")
    assert told.value.retry_after == 15, "six texts, four in a batch of ten seconds"
    one.waiting[0].texts = ["a"]
    one.close()
    with pytest.raises(Refused, match="shutting down"):
        submit(one, "b")
    one.start()
    one.thread.join(30)
    assert not one.thread.is_alive()
    assert job.future.result() == ["A"]


def test_a_batch_waits_for_as_many_as_the_last_ones_had():
    one, _ = gatherer()
    submit(one, "a", "b")
    assert one._has_usual(), "the first waits for nobody"
    one.advance()
    for _ in range(RECENT):
        submit(one, "c")
        assert not one._has_usual()
        submit(one, "d")
        assert one._has_usual()
        one.waiting.pop()
        one.advance()
    submit(one, "e")
    assert one._has_usual(), "of late there was one text at a time"


def test_answers_that_are_known_early_are_given_at_once():
    given = []

    def in_turn(texts, settings, check, ready):
        for place in (2, 1, 3):
            ready(place, texts[place].upper())
            given.append([job.future.done() for job in jobs])
        return [text.upper() for text in texts]

    one, _ = gatherer(in_turn)
    jobs = [submit(one, "a", "b"), submit(one, "c"), submit(one, "d")]
    one.advance()
    assert given == [[False, True, False], [False, True, False], [False, True, True]]
    assert [job.future.result() for job in jobs] == [["A", "B"], ["C"], ["D"]]
    assert (one.finished, one.batches, one.texts_done) == (3, 1, 4)


def test_who_has_an_answer_keeps_it_when_the_batch_fails_or_the_others_leave():
    batches = []

    def failing(texts, settings, check, ready):
        batches.append(texts)
        ready(0, texts[0].upper())
        if "bad" in texts:
            raise ValueError("bad is no text")
        check()
        return [text.upper() for text in texts]

    one, _ = gatherer(failing, texts=5)
    first, second, wrong = submit(one, "a"), submit(one, "b", "c"), submit(one, "d", "bad")
    one.advance()
    assert first.future.result() == ["A"]
    assert second.future.result() == ["B", "C"]
    assert wrong.future.exception().status == 400
    assert batches == [["a", "b", "c", "d", "bad"], ["b", "c"], ["d", "bad"]]
    assert (one.finished, one.failed, one.texts_done) == (2, 1, 3)
    stays, leaves = submit(one, "a"), submit(one, "b")
    leaves.cancelled = True
    one.waiting[1].is_due = lambda: not batches[3:]  # it leaves in the middle
    one.advance()
    assert stays.future.result() == ["A"]
    assert leaves.future.cancelled()
    assert (one.finished, one.cancelled) == (3, 1)
