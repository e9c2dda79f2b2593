"""How much of each prompt an unlimited cache could have served: what a replay's hits are compared with.

Deliberately naive: a set of the prefixes seen, one at a time, in order. No eviction, no tiers, no concurrency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidekv.backends.keys import TOKEN_BYTES, page_digests


def reusable_tokens(
    requests: Iterable[tuple[bytes, bytes]], page_size: int, *, keep_output: bool = True
) -> Iterator[int]:
    """Yield, for each (prompt, output) of packed tokens, how many tokens of the prompt are in pages seen before.

    Each request is taken to have finished before the next one comes, and to have left the full pages of its prompt and,
    with `keep_output`, of its output but the last token, which has no KV yet.
    """
    seen: set[bytes] = set()
    for prompt, output in requests:
        pages = 0
        for digest in page_digests(prompt, page_size):
            if digest not in seen:
                break
            pages += 1
        yield pages * page_size
        seen.update(page_digests(prompt + output[:-TOKEN_BYTES] if keep_output else prompt, page_size))
