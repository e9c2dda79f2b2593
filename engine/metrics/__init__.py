"""Metrics, counted from the very events and commands that the journal holds."""

from tidekv.engine.metrics.collector import MetricsCollector
from tidekv.engine.metrics.fold import MetricsFold
from tidekv.engine.metrics.histogram import Histogram
from tidekv.engine.metrics.server import MetricsServer

__all__ = ["Histogram", "MetricsCollector", "MetricsFold", "MetricsServer"]
