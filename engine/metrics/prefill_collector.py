"""Metrics of a prefill worker in the Prometheus data model, made on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidekv.engine.metrics.collector import labeled_counter, one_histogram
from tidekv.engine.metrics.fold import Histogram

ROOM_STATES = ("pending", "sending", "finished", "draining")
SENT = {
    "bytes_sent": "Bytes of KV written to decode workers.",
    "pages_sent": "Pages written to decode workers, those of components included.",
    "pages_withdrawn": "Pages that decode had asked for, and that were not sent.",
}
GAUGES = {
    "writes_in_flight": "Writes to decode workers that have not ended.",
    "rooms_waited_for": "Calls that wait for the promise of a request.",
    "peers": "Links to decode workers.",
}


class PrefillCollector(Collector):
    """Collector for a `prometheus_client.CollectorRegistry`.

    `statistics` are those of a `PrefillPeer`, `ended` the rooms that have ended by outcome, `aborts` those of them that
    decode did not receive by cause, `write_s` the durations of writes, `loop_lag` the lateness of the loop. A scrape
    may come from any thread.
    """

    def __init__(
        self,
        statistics: Callable[[], Mapping[str, int | float]],
        *,
        ended: Mapping[str, int],
        aborts: Mapping[str, int],
        write_s: Histogram,
        loop_lag: Histogram,
    ) -> None:
        self._statistics = statistics
        self._ended = ended
        self._aborts = aborts
        self._write_s = write_s
        self._loop_lag = loop_lag

    def collect(self) -> Iterator[Metric]:
        """Return all families, always in the same order."""
        counts = dict(self._statistics())
        rooms = GaugeMetricFamily(
            "tidekv_prefill_rooms",
            "Rooms by state: pending (promised by some ranks of decode only), sending, finished (not yet received),"
            " draining (ended, with writes in flight).",
            labels=("state",),
        )
        for state in ROOM_STATES:
            rooms.add_metric((state,), counts.pop(f"rooms_{state}", 0))
        yield rooms
        yield labeled_counter("tidekv_prefill_rooms_ended", "Rooms that ended, by outcome.", "outcome", self._ended)
        yield labeled_counter(
            "tidekv_prefill_aborts", "Rooms that ended before decode had received all, by cause.", "cause", self._aborts
        )
        for name, meaning in SENT.items():
            yield CounterMetricFamily(f"tidekv_prefill_{name}", meaning, value=counts.pop(name, 0))
        yield one_histogram(
            "tidekv_prefill_write_seconds", "From posting a write to a decode worker to its end.", self._write_s
        )
        yield one_histogram(
            "tidekv_prefill_loop_lag_seconds", "How late the event loop was, while rooms were open.", self._loop_lag
        )
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(f"tidekv_prefill_{name}", meaning, value=counts.pop(name, 0))
        peer = GaugeMetricFamily(
            "tidekv_prefill", "The other statistics of a `PrefillPeer`, as they are.", labels=("name",)
        )
        for name, value in counts.items():
            peer.add_metric((name,), value)
        yield peer
