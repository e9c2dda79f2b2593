"""Storage interfaces of other engines, implemented with tidekv's parts. Each module needs the engine it is for."""
