"""The conditions of pages as mypyc compiles them best: one loop over machine integers, at a nanosecond or two a page.

Compiled, it replaces `conditions.VectorConditions`, and answers as that does; as source it is slow, and only tests use
it. Needs what mypy brings along, and a machine whose numbers begin with their lowest byte.
"""

from __future__ import annotations

from librt.strings import read_i32_le
from librt.vecs import vec
from mypy_extensions import i64, u8

from tidekv.states.shapes import PageIds


class NativeConditions:
    """See PageConditions."""

    __slots__ = ("_conditions",)

    def __init__(self, page_count: int) -> None:
        self._conditions = vec[u8]([u8(0)] * page_count)

    def of(self, page: int) -> int:
        """See PageConditions."""
        return int(self._conditions[page])

    def change(self, pages: PageIds, source: int, target: int) -> bool:
        """See PageConditions."""
        conditions, before, after = self._conditions, u8(source), u8(target)
        total = len(conditions)
        ids = pages.tobytes()
        at, end = i64(0), i64(len(ids))
        while at < end:
            page = i64(read_i32_le(ids, at))
            # A page named twice is found here too: its second time it is no longer in the source's condition.
            if page < 0 or page >= total or conditions[page] != before:
                while at > 0:
                    at -= 4
                    conditions[i64(read_i32_le(ids, at))] = before
                return False
            conditions[page] = after
            at += 4
        return True

    def put(self, pages: PageIds, target: int) -> None:
        """See PageConditions."""
        conditions, after = self._conditions, u8(target)
        ids = pages.tobytes()
        at, end = i64(0), i64(len(ids))
        while at < end:
            conditions[i64(read_i32_le(ids, at))] = after
            at += 4

    def to_bytes(self) -> bytes:
        """See PageConditions."""
        return bytes(self._conditions)
