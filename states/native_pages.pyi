"""What `native_pages.c` offers where it was built."""

from tidekv.states.shapes import PageIds

def reverse(pages: PageIds, /) -> None:
    """Turn a list of page ids round, in place."""
