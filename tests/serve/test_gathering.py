"""Dynamic batching: requests gather while a batch is computed, and fail alone."""

import pytest

from regard.http.refused import Refused
from regard.serve.gathering import Gatherer, Job


def gatherer(compute=None, **limits):
    """One that is advanced by hand, and the batches that it computed."""
    batches = []

    def upper(texts, settings, check):
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

    def broken(texts, settings, check):
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

    def leaving(texts, settings, check):
        last.cancelled = True
        check()

    one.compute = leaving
    one.advance()
    assert last.future.cancelled()
    assert one.cancelled == 2


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


def test_a_batch_waits_for_as_many_as_the_last_had():
    one, _ = gatherer()
    submit(one, "a", "b")
    assert one._has_usual(), "the first waits for nobody"
    one.advance()
    submit(one, "c")
    assert not one._has_usual()
    submit(one, "d")
    assert one._has_usual()
