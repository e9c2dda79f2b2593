"""Workloads for the main job, benchmarks and tests: conversations, recorded traces, synthetic KV and a small model."""
