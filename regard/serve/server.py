"""One process that serves: what it opens, and how it ends.

SIGTERM and SIGINT let it drain: it takes no more requests, answers those it has taken, and ends. A second signal ends
it at once.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from regard.core.brief import in_brief_thread
from regard.http.listening import Prompt
from regard.serve.app import Api, Guard, Mail
from regard.serve.limits import Limits
from regard.serve.observing import LOG
from regard.serve.served import open_runs


@dataclass(frozen=True)
class Service:
    """What is served, to whom, and within which bounds: each process that serves has it."""

    folders: Sequence[str | Path]
    device: str
    limits: Limits
    hosts: set[str] | None
    key: str | None
    log: str = "info"

    def open(self) -> Api:
        """Loads the runs."""
        mail = Mail()
        runs = in_brief_thread(lambda: open_runs(self.folders, self.device, self.limits, mail.deliver))
        return Api(runs, self.limits, mail, Guard(self.hosts, self.key))


class DrainingServer(uvicorn.Server):
    """Tells the application when it is to drain. It ends by returning, not by the signal."""

    def __init__(self, api: Api):
        super().__init__(configured(api))
        self.api = api

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            LOG.info("draining", extra={"fields": {"signal": signal.Signals(sig).name}})
        self.drain()

    def drain(self) -> None:
        """Takes no more requests, and ends when the others are answered; the second time at once."""
        if self.should_exit:
            self.force_exit = True
        self.api.draining = self.should_exit = True


def configured(api: Api) -> uvicorn.Config:
    return uvicorn.Config(
        api.application(),
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=api.limits.connections,
        h11_max_incomplete_event_size=32 << 10,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=round(api.limits.drain),
        http=Prompt,
        ws="none",
        lifespan="on",
    )
