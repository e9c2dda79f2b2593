"""Metrics, counted from the very events and commands that the journal holds."""

from tidekv.engine.metrics.collector import MetricsCollector
from tidekv.engine.metrics.fold import Histogram, MetricsFold
from tidekv.engine.metrics.server import MetricsServer

__all__ = ["Histogram", "MetricsCollector", "MetricsFold", "MetricsServer"]
