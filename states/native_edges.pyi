"""What `native_edges.c` offers where it was built."""

def begins_with(keys: bytes, edge: bytes | memoryview, at: int, /) -> bool:
    """Tell whether `edge` is what `keys` go on with from byte `at` on."""
