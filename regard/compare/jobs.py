"""Cells that are trained in other processes, several at a time. One that is stopped continues later.

A process trains one cell of a generated task after another: what it has imported, read and compiled, and the context of
a GPU, are there for the next. One whose cell failed takes no other, and if it had trained some before, that cell gets
a new one.
"""

import gc
import os
import queue
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from regard.compare import budget
from regard.compare.learn import Diverged, NotCaptured, Trial, learn
from regard.compare.measure import describe_failure, process_context
from regard.compare.runs import RunTrial, learn_run
from regard.compare.store import DONE
from regard.data.text import BadText
from regard.training.signals import Stopped

STOPPED = "stopped"  # no answer yet: what is saved is continued
UNCAPTURED = "uncaptured"  # no answer yet: it is trained without CUDA graphs, in a process that has seen none fail
PATIENCE = 30.0  # seconds for a run to save itself

Answer = tuple[dict[str, Any], dict[str, int]]
Outcome = tuple[str, str, Answer]  # status, note, and what was found


def run_cell(trial: Trial | RunTrial) -> Outcome:
    """Trains a cell."""
    import torch

    if trial.device == "cpu" or isinstance(trial, Trial):
        # of a generated task the host only draws examples: the cores are for other cells
        torch.set_num_threads(1)
    elif trial.threads:
        # those that count and prepare must not slow down the host of the one that trains
        torch.set_num_threads(trial.threads)
    try:
        return DONE, "", learn(trial) if isinstance(trial, Trial) else learn_run(trial)
    except Stopped as error:
        return STOPPED, str(error), ({}, {})
    except NotCaptured as error:
        return UNCAPTURED, str(error), ({}, {})
    except Diverged as error:
        return "broke", str(error), ({}, {})
    except budget.OverBudget as error:
        return "over", str(error), ({}, {})
    except BadText as error:
        # a file that is missing or damaged, which is the user's to mend: it is read again the next time
        return "absent", str(error), ({}, {})
    except Exception as error:
        return *describe_failure(error), ({}, {})


class Job:
    """A process, and the cell that it trains."""

    def __init__(self, trial: Trial | RunTrial):
        context = process_context("regard.compare.jobs")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,))
        self.process.start()
        theirs.close()
        self.cells = 0
        self.begin(trial)

    def begin(self, trial: Trial | RunTrial) -> None:
        """Has the process train a cell; the one before must be done."""
        self.trial, self.is_free = trial, False
        self.cells += 1
        # a process that has ended says so when it is asked for the outcome
        with suppress(OSError):
            self.connection.send(trial)

    def outcome(self) -> Outcome:
        """What was found; waits for it. Then the process is free for another cell, or it ends."""
        try:
            found = self.connection.recv()
            # a run may leave more behind: handlers of signals, threads that read
            self.is_free = found[0] == DONE and isinstance(self.trial, Trial)
            return found
        except (EOFError, OSError):
            self.process.join(1)
            code = self.process.exitcode
            if code == -signal.SIGTERM:
                return STOPPED, "stopped by a signal", ({}, {})
            killed = " (killed: out of memory?)" if code == -signal.SIGKILL else ""
            return "error", f"its process ended with status {code}{killed}", ({}, {})
        finally:
            if not self.is_free:
                self.close()

    def fails_alone(self, outcome: Outcome) -> bool:
        """Whether a failure is one of the cell itself, not of what cells before it may have left in the process."""
        return self.cells == 1 or outcome[0] not in (UNCAPTURED, "error", "memory")

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


def _work(connection: Connection) -> None:
    """The process of a job. It ends with the process that asked, also if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trials: queue.SimpleQueue[Trial | RunTrial] = queue.SimpleQueue()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                trials.put(connection.recv())
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        outcome = run_cell(trials.get())
        with suppress(OSError):
            connection.send(outcome)
        _hand_back()


def _hand_back() -> None:
    """Frees what a cell leaves on a GPU: graphs and what calls them refer to each other."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
