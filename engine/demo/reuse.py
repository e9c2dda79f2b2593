"""The part of each prompt that an unlimited cache could have served, as a reference for the hits of a replay.

Deliberately naive: a set of known prefixes, one request at a time, in order; no eviction, no tiers, no concurrency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidekv.backends.keys.chain import TOKEN_BYTES, page_digests


def reusable_tokens(
    requests: Iterable[tuple[bytes, bytes]], page_size: int, *, keep_output: bool = True
) -> Iterator[int]:
    """Yield, for each (prompt, output) of packed tokens, how many tokens of the prompt are in known pages.

    Each request is assumed to finish before the next one arrives, and to leave the full pages of its prompt and, with
    `keep_output`, of its output without the last token, which has no KV yet.
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
