"""Published tables of decode-side KV caching, repeated on a simulated clock by the unmodified core."""
