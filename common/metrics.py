"""Prometheus metrics of both services: a registry, its HTTP port, and collectors that read what is counted anyway.

    registry = new_registry()
    registry.register(OnEventLoop(lambda: [gauge("fdfo_worker_slots_used", "Slots in use.", 3)]))
    port = listen("127.0.0.1", 0, registry)          # /metrics, on a thread of its own

docs/metrics.md lists every series.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import ServiceError

SCRAPE_TIMEOUT_S = 5.0  # for the event loop to answer; Prometheus waits 10 s by default


def new_registry() -> CollectorRegistry:
    """A registry with the series of the process. When a series began is not told: Prometheus has no use for it."""
    prometheus_client.disable_created_metrics()
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    return registry


def listen(host: str, port: int, registry: CollectorRegistry) -> int:
    """Serve the registry over HTTP until the process ends; returns the port (the free one that was taken for 0).

    Raises ServiceError, one line, when the address cannot be listened on.
    """
    try:
        server, _ = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        hint = "; choose another one, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        raise ServiceError(f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    return int(server.server_port)


class OnEventLoop(Collector):
    """Calls `read` on the event loop in which this was made, so that it may look at everything there. A loop that does
    not answer within SCRAPE_TIMEOUT_S fails the scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        self._events = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        async def read() -> list[Metric]:
            return list(self._read())

        return asyncio.run_coroutine_threadsafe(read(), self._events).result(SCRAPE_TIMEOUT_S)


def gauge(name: str, meaning: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, meaning, value=value)


def gauges(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge for each value of one label."""
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family


def counter(name: str, meaning: str, value: float) -> Metric:
    """A counter without labels; `name` ends in _total."""
    return CounterMetricFamily(name, meaning, value=value)


def counters(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter for each value of one label; `name` ends in _total."""
    family = CounterMetricFamily(name, meaning, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family


def info(name: str, meaning: str, facts: Mapping[str, str]) -> Metric:
    """Facts that do not change, as the labels of a gauge that is 1; `name` ends in _info."""
    family = GaugeMetricFamily(name, meaning, labels=list(facts))
    family.add_metric(list(facts.values()), 1)
    return family
