"""Published tables of KV caching on decode workers, reproduced on a simulated clock by the unmodified core."""
