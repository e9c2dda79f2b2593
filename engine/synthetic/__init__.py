"""KV without a model, whose every byte can be verified: for `tidekv.testing`, benchmarks and the demo."""
