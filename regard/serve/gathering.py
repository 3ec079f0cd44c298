"""Dynamic batching for what needs no running batch (translations, classes, gaps, vectors): while one batch is computed,
requests gather for the next."""

import concurrent.futures
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regard.http.refused import Refused

LOG = logging.getLogger("regard.serve")
PATIENCE = 0.04  # seconds that a batch waits to become as large as those before
RECENT = 4  # batches before

Ready = Callable[[int, Any], None]  # the place of a text, and its answer
# texts, settings that all of them have, a check that raises when nobody waits any more, and what may be called with
# answers that are known before others -> an answer for each text
Compute = Callable[[list[str], Any, Callable[[], None], Ready], Sequence[Any]]


class Job:
    """Texts with the same settings. The answers come through `future`."""

    def __init__(self, texts: Sequence[str], settings: Any, seconds: float = float("inf")):
        self.texts, self.settings = list(texts), settings
        self.created = time.monotonic()
        self.deadline = self.created + seconds
        self.future: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self.cancelled = False  # anybody may set it: nobody waits for the answers any more
        self.answers: dict[int, Any] = {}  # by the places of the texts, as they become known
        self.resolved = False

    def is_due(self) -> bool:
        return not self.cancelled and time.monotonic() <= self.deadline

    def answer(self, place: int, answer: Any) -> None:
        """Adds the answer for a text. The last one resolves the job."""
        self.answers[place] = answer
        if len(self.answers) == len(self.texts):
            self.resolve()

    def resolve(self, error: Exception | None = None) -> None:
        """Ends the job, with its answers or an error."""
        self.resolved = True
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result([self.answers[place] for place in range(len(self.texts))])
        else:
            self.future.set_exception(error)


class NobodyWaits(Exception):
    """All of the jobs of a batch are cancelled or late."""


class Gatherer:
    """A thread that computes for all requests to one model. The job that came first decides the settings of the next
    batch; those behind it that have the same join it, up to `texts` texts."""

    def __init__(self, compute: Compute, *, waiting: int, texts: int, threads: int | None = None):
        """`threads`: of PyTorch, which share an operator; None: as many as the process has."""
        self.compute, self.most_waiting, self.most_texts = compute, waiting, texts
        self.threads = threads or torch.get_num_threads()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.finished = self.failed = self.cancelled = self.batches = self.texts_done = 0
        self.seconds_each = 0.1  # of a batch: a moving average
        # texts of the last batches: clients that were answered come back
        self.sizes: deque[int] = deque([1], maxlen=RECENT)
        self.changed, self.closed = threading.Condition(), False
        self.thread = threading.Thread(target=self._work, name="regard-gatherer", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def submit(self, job: Job) -> None:
        with self.changed:
            if self.closed:
                raise Refused(503, "the server is shutting down: send the request to another one", retry_after=1)
            if len(self.waiting) >= self.most_waiting:
                batches = sum(len(one.texts) for one in self.waiting) / self.most_texts
                raise Refused(
                    429,
                    f"{len(self.waiting)} requests are waiting, and at most {self.most_waiting} may: try again later",
                    code="rate_limit_exceeded",
                    retry_after=min(60, max(1, math.ceil(self.seconds_each * batches))),
                )
            self.waiting.append(job)
            self.changed.notify()

    def close(self) -> None:
        """Takes no more requests; the thread ends when it has answered those that it took."""
        with self.changed:
            self.closed = True
            self.changed.notify()

    def _work(self) -> None:
        torch.set_num_threads(self.threads)  # of this thread alone, and of those that set none
        while True:
            with self.changed:
                while not (self.waiting or self.closed):
                    self.changed.wait()
                if not self.waiting:
                    return
                self.changed.wait_for(self._has_usual, PATIENCE)
            self.advance()

    def _has_usual(self) -> bool:
        return self.closed or sum(len(job.texts) for job in self.waiting) >= max(self.sizes)

    def advance(self) -> None:
        """Computes one batch."""
        self.running = self._gather()
        if self.running:
            began = time.monotonic()
            self.sizes.append(sum(len(job.texts) for job in self.running))
            self._compute()
            self.seconds_each += 0.1 * (time.monotonic() - began - self.seconds_each)
            self.running = []

    def _gather(self) -> list[Job]:
        chosen: list[Job] = []
        with self.changed:
            left: deque[Job] = deque()
            size = 0
            for job in self.waiting:
                if not job.is_due():
                    self._let_go(job, "in the queue")
                elif not chosen or (job.settings == chosen[0].settings and size + len(job.texts) <= self.most_texts):
                    chosen.append(job)
                    size += len(job.texts)
                else:
                    left.append(job)
            self.waiting = left
        return chosen

    def _let_go(self, job: Job, where: str) -> None:
        if job.cancelled:
            self.cancelled += 1
            job.resolved = True
            job.future.cancel()
            return
        self.failed += 1
        spent = time.monotonic() - job.created
        job.resolve(Refused(504, f"the request took too long: {spent:.1f} seconds {where}", retry_after=1))

    def _compute(self) -> None:
        jobs = self.running
        places = [(job, place) for job in jobs for place in range(len(job.texts))]

        def check() -> None:
            if not any(job.is_due() for job in jobs if not job.resolved):
                raise NobodyWaits

        def ready(number: int, answer: Any) -> None:
            job, place = places[number]
            if job.resolved:
                return
            if not job.is_due():
                self._let_go(job, "so far")
                return
            job.answer(place, answer)
            if job.resolved:
                self.finished += 1
                self.texts_done += len(job.texts)

        try:
            answers = self.compute([text for job in jobs for text in job.texts], jobs[0].settings, check, ready)
            for number, answer in enumerate(answers):
                ready(number, answer)
            self.batches += 1
        except NobodyWaits:
            for job in jobs:
                if not job.resolved:
                    self._let_go(job, "so far")
        except Exception as error:
            self._told_apart(jobs, error)

    def _told_apart(self, jobs: list[Job], error: Exception) -> None:
        """A job that cannot be computed fails alone: those that were with it are computed one by one."""
        if len(jobs) > 1:
            for job in jobs:
                if not job.resolved:
                    self.running = [job]
                    self._compute()
            return
        self.failed += 1
        if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
            error = Refused(400, " ".join(str(error).split())[:400])
        elif not isinstance(error, Refused):
            LOG.error("computing failed", exc_info=error)
            error = Refused(500, f"computing failed ({type(error).__name__}): the log of the server says why")
        if not jobs[0].resolved:
            jobs[0].resolve(error)
