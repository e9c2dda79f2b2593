"""Metrics, counted from the same events and commands that the journal records."""

from tidekv.engine.metrics.collector import MetricsCollector
from tidekv.engine.metrics.fold import Histogram, MetricsFold
from tidekv.engine.metrics.prefill_collector import PrefillCollector
from tidekv.engine.metrics.server import MetricsServer

__all__ = ["Histogram", "MetricsCollector", "MetricsFold", "MetricsServer", "PrefillCollector"]
