"""What is told about the server: a line of JSON for each request, and metrics for Prometheus."""

import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter as Counts
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from regard.serve.gathering import Gatherer
from regard.serve.generating import Generator
from regard.serve.served import Runs

LOG = logging.getLogger("regard.serve")
WATCHED = ("/healthz", "/readyz", "/metrics")  # asked for all the time, and not logged
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # in the environment, the folder of the metrics of several processes
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class JsonLines(logging.Formatter):
    """A line of JSON for each record. Texts of requests are never among its fields."""

    def __init__(self, process: int | None = None):
        """`process` is the number of this one among several."""
        super().__init__()
        self.process = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self.process,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, process: int | None = None) -> None:
    """Sends the records of the server to the standard error, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process))
    LOG.handlers[:] = [handler]
    LOG.setLevel(level.upper())
    LOG.propagate = False


def remove_metrics() -> None:
    """Removes what this process has written for the others; after the last of them, also the folder."""
    folder = Path(os.environ[SHARED])
    for path in folder.glob(f"*_{os.getpid()}.db"):
        path.unlink(missing_ok=True)
    # it is there while another process has files in it
    with contextlib.suppress(OSError):
        folder.rmdir()


class Metrics:
    """Counters and histograms of requests, and what the workers of the runs say of themselves. Shared ones are those of
    several processes: each writes its own to the folder that the environment names, and any of them tells the sums."""

    def __init__(self, runs: Runs, shared: bool):
        self.runs = runs
        self.registry = CollectorRegistry()
        self.is_shared = shared
        if self.is_shared:
            MultiProcessCollector(self.registry)
        self.requests = self._new(Counter, "requests", "Requests answered", ["route", "status"])
        self.in_flight = self._new(Gauge, "requests_in_flight", "Requests being answered", [])
        times = {"buckets": SECONDS}
        self.seconds = self._new(
            Histogram, "request_seconds", "From the request to the end of its answer", ["route"], **times
        )
        self.first_token = self._new(
            Histogram, "first_token_seconds", "From the request to its first token", [], **times
        )
        self.watched: dict[str, Any] = {}  # metrics of the workers, by name
        self.counted: dict[tuple[str, str], float] = {}  # what a counter has, by its name and the model

    def _new(self, kind: type[Any], name: str, about: str, labels: Sequence[str], **more: Any) -> Any:
        if kind is Gauge:
            more["multiprocess_mode"] = "livesum"
        # shared ones are read from their files
        return kind(f"regard_{name}", about, labels, registry=None if self.is_shared else self.registry, **more)

    def tell(self) -> bytes:
        """All of them, as Prometheus reads them."""
        self.update()
        return generate_latest(self.registry)

    def update(self) -> None:
        """Reads the gauges and counters of the workers."""
        for one in self.runs.by_name.values():
            # a run may have several workers, and has one value of each metric
            gauges, counters = Counts(), Counts()
            for worker in one.workers:
                found = _of_generator(worker) if isinstance(worker, Generator) else _of_gatherer(worker)
                for sums, more in zip((gauges, counters), found, strict=True):
                    sums.update(more)
                gauges["waiting"] += len(worker.waiting)
            for name, value in gauges.items():
                self._worker_metric(Gauge, name).labels(one.name).set(value)
            for name, value in counters.items():
                counter = self._worker_metric(Counter, name).labels(one.name)
                counter.inc(value - self.counted.get((name, one.name), 0))
                self.counted[name, one.name] = value

    def _worker_metric(self, kind: type[Any], name: str) -> Any:
        if name not in self.watched:
            self.watched[name] = self._new(kind, name, ABOUT[name], ["model"])
        return self.watched[name]


ABOUT = {
    "waiting": "Requests in the queue",
    "rows": "Rows that are decoded",
    "state_bytes": "Memory of the decoding states of these rows",
    "prefix_bytes": "Memory of the kept states of prompts",
    "prompt_tokens": "Tokens of prompts that were read",
    "generated_tokens": "Tokens that were chosen",
    "steps": "Steps of the batch",
    "prefix_hits": "Prompts whose beginning was already read",
    "prefix_tokens_saved": "Tokens of prompts that were not read again",
    "cancelled": "Requests whose client left",
    "batches": "Batches that were computed",
    "texts": "Texts that were computed",
}


def _of_generator(worker: Generator) -> tuple[dict[str, int], dict[str, int]]:
    """Its gauges and its counters."""
    counts, prefixes, batch = worker.counts, worker.prefixes, worker.batch
    rows = len(batch.active)
    gauges = {
        "rows": rows,
        "state_bytes": rows * worker.footprint.bytes(batch.capacity),
        "prefix_bytes": prefixes.bytes,
    }
    counters = {
        "prompt_tokens": counts.prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "steps": counts.steps,
        "prefix_hits": prefixes.hits,
        "prefix_tokens_saved": prefixes.tokens_saved,
        "cancelled": counts.cancelled,
    }
    return gauges, counters


def _of_gatherer(worker: Gatherer) -> tuple[dict[str, int], dict[str, int]]:
    return {}, {"batches": worker.batches, "texts": worker.texts_done, "cancelled": worker.cancelled}


class Trace:
    """One request, from its first byte to the end of its answer."""

    def __init__(self, metrics: Metrics, route: str, number: str):
        self.metrics, self.route, self.number = metrics, route, number
        self.began = time.monotonic()
        self.status = 0
        self.fields: dict[str, Any] = {}  # more to log: the model, numbers of tokens
        metrics.in_flight.inc()

    def end(self) -> None:
        """Counts and logs the request."""
        seconds = time.monotonic() - self.began
        self.metrics.in_flight.dec()
        self.metrics.requests.labels(self.route, str(self.status)).inc()
        self.metrics.seconds.labels(self.route).observe(seconds)
        fields = {"id": self.number, "route": self.route, "status": self.status, "seconds": round(seconds, 4)}
        level = logging.ERROR if self.status == 500 else logging.DEBUG if self.route in WATCHED else logging.INFO
        LOG.log(level, "request", extra={"fields": fields | self.fields})
