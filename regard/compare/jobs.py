"""Cells that are trained in processes of their own, several at a time. One that is stopped continues later."""

import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from regard.compare import budget
from regard.compare.learn import Broke, Lesson, NotCaptured, learn
from regard.compare.measure import describe_failure, process_context
from regard.compare.runs import RunLesson, learn_run
from regard.compare.store import DONE
from regard.training.signals import Stopped

STOPPED = "stopped"  # no answer yet: what is saved is continued
UNCAPTURED = "uncaptured"  # no answer yet: it is trained without CUDA graphs, in a process that has seen none fail
PATIENCE = 30.0  # seconds for a run to save itself

Answer = tuple[dict[str, Any], dict[str, int]]
Outcome = tuple[str, str, Answer]  # status, note, and what was found


def run_cell(lesson: Lesson | RunLesson) -> Outcome:
    """Trains a cell."""
    import torch

    if lesson.device == "cpu" or isinstance(lesson, Lesson):
        # of a generated task the host only draws examples: the cores are for other cells
        torch.set_num_threads(1)
    try:
        return DONE, "", learn(lesson) if isinstance(lesson, Lesson) else learn_run(lesson)
    except Stopped as error:
        return STOPPED, str(error), ({}, {})
    except NotCaptured as error:
        return UNCAPTURED, str(error), ({}, {})
    except Broke as error:
        return "broke", str(error), ({}, {})
    except budget.OverBudget as error:
        return "over", str(error), ({}, {})
    except Exception as error:
        return *describe_failure(error), ({}, {})


class Job:
    """A cell in its process."""

    def __init__(self, lesson: Lesson | RunLesson):
        context = process_context("regard.compare.jobs")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, lesson))
        self.process.start()
        theirs.close()

    def outcome(self) -> Outcome:
        """What was found; waits for it."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(1)
            code = self.process.exitcode
            if code == -signal.SIGTERM:
                return STOPPED, "stopped by a signal", ({}, {})
            killed = " (killed: out of memory?)" if code == -signal.SIGKILL else ""
            return "error", f"its process ended with status {code}{killed}", ({}, {})
        finally:
            self.close()

    def close(self) -> None:
        """Ends the process: a run saves itself first, a cell of a generated task was saved seconds ago."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def finished(jobs: list[Job], seconds: float) -> list[Job]:
    """The jobs that have ended, at most after these seconds."""
    done = set(wait([job.connection for job in jobs], seconds))
    return [job for job in jobs if job.connection in done]


def _work(connection: Connection, lesson: Lesson | RunLesson) -> None:
    """The process of a cell. It ends with the process that asked, also if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    outcome = run_cell(lesson)
    with suppress(OSError):
        connection.send(outcome)
