"""Workloads with a small model or synthetic KV: `tidekv run`, and its sides `tidekv prefill` and `tidekv decode`."""
