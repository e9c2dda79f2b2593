"""OpenTelemetry spans of requests (extra `otel`)."""

from tidekv.engine.tracing.request_spans import RequestSpans, trace_requests

__all__ = ["RequestSpans", "trace_requests"]
