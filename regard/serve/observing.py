"""What is told about the server: a line of JSON for each request, and metrics for Prometheus."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from regard.serve.gathering import Gatherer
from regard.serve.generating import Generator
from regard.serve.served import Runs

LOG = logging.getLogger("regard.serve")
WATCHED = ("/healthz", "/readyz", "/metrics")  # asked for all the time, and not logged
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class JsonLines(logging.Formatter):
    """A line of JSON for each record. Texts of requests are never among its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str) -> None:
    """Sends the records of the server to the standard error, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOG.handlers[:] = [handler]
    LOG.setLevel(level.upper())
    LOG.propagate = False


class Metrics:
    """Counters and histograms of requests, and what the workers of the runs say of themselves."""

    def __init__(self, runs: Runs):
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("regard_requests", "Requests answered", ["route", "status"], **named)
        self.in_flight = Gauge("regard_requests_in_flight", "Requests being answered", **named)
        self.seconds = Histogram(
            "regard_request_seconds", "From the request to the end of its answer", ["route"], buckets=SECONDS, **named
        )
        self.first_token = Histogram(
            "regard_first_token_seconds", "From the request to its first token", buckets=SECONDS, **named
        )
        self.registry.register(_Workers(runs))


class _Workers(Collector):
    """Reads the workers whenever metrics are asked for."""

    def __init__(self, runs: Runs):
        self.runs = runs

    def collect(self) -> Iterator[Metric]:
        found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for one in self.runs.by_name.values():
            # a run may have several workers, and has one value of each metric
            sums: dict[str, tuple[Any, str, float]] = {}
            for worker in one.workers:
                gauges, counters = _of_generator(worker) if isinstance(worker, Generator) else _of_gatherer(worker)
                gauges["waiting"] = ("Requests in the queue", len(worker.waiting))
                for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
                    for name, (about, value) in values.items():
                        sums[name] = (kind, about, value + sums.get(name, (kind, about, 0.0))[2])
            for name, (kind, about, value) in sums.items():
                family = found.setdefault(name, kind(f"regard_{name}", about, labels=["model"]))
                family.add_metric([one.name], value)
        yield from found.values()


Values = dict[str, tuple[str, float]]


def _of_generator(worker: Generator) -> tuple[Values, Values]:
    counts, prefixes, batch = worker.counts, worker.prefixes, worker.batch
    rows = len(batch.active)
    gauges: Values = {
        "rows": ("Rows that are decoded", rows),
        "state_bytes": ("Memory of the decoding states of these rows", rows * worker.footprint.bytes(batch.capacity)),
        "prefix_bytes": ("Memory of the kept states of prompts", prefixes.bytes),
    }
    counters: Values = {
        "prompt_tokens": ("Tokens of prompts that were read", counts.prompt_tokens),
        "generated_tokens": ("Tokens that were chosen", counts.generated_tokens),
        "steps": ("Steps of the batch", counts.steps),
        "prefix_hits": ("Prompts whose beginning was already read", prefixes.hits),
        "prefix_tokens_saved": ("Tokens of prompts that were not read again", prefixes.tokens_saved),
        "cancelled": ("Requests whose client left", counts.cancelled),
    }
    return gauges, counters


def _of_gatherer(worker: Gatherer) -> tuple[Values, Values]:
    counters: Values = {
        "batches": ("Batches that were computed", worker.batches),
        "texts": ("Texts that were computed", worker.texts_done),
        "cancelled": ("Requests whose client left", worker.cancelled),
    }
    return {}, counters


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
