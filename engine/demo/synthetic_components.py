"""Windows and states whose content can be verified: a function of the prompt up to the end of the page or record.

A component's page at position p of a prompt, and a record after that page, are filled from the digest of the prompt up
to and including page p, and from the component's name. Another prompt, position or component differs in every word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from tidekv.backends.component_pools import ComponentPools
from tidekv.engine.decode.component_pages import ReadyComponent
from tidekv.engine.demo.synthetic import SyntheticKV
from tidekv.states.errors import InvalidRequest
from tidekv.states.handover.sender import RequestedComponent
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.types import PageIds


def component_digest(component: str, digest: bytes) -> bytes:
    """Return the digest of a component's page, from the digest of the prompt up to and including its position."""
    return sha256(component.encode() + b"\0" + digest).digest()


def wrong_components(
    components: Sequence[ComponentPools], component_pages: Mapping[str, ReadyComponent], digests: Sequence[bytes]
) -> dict[str, list[int]]:
    """Verify the tails of a request byte for byte; `digests` has one entry for each page of its prompt.

    Returns the positions in the prompt that differ, by component; empty if there are none.
    """
    wrong = {}
    for pools in components:
        tail = component_pages[pools.name]
        expected = [
            component_digest(pools.name, digest) for digest in digests[tail.first : tail.first + len(tail.pages)]
        ]
        found = SyntheticKV(pools.device).verify(tail.pages.tolist(), expected)
        if found:
            wrong[pools.name] = [tail.first + at for at in found]
    return wrong


class SyntheticComponents:
    """Pools of a synthetic prefill worker's components: pages for requested tails, and their content.

    Nothing is kept after a room.
    """

    def __init__(self, components: Sequence[ComponentPools]) -> None:
        self._kv = {pools.name: SyntheticKV(pools.device) for pools in components}
        self._accounts = {pools.name: PagePool(pools.name, pools.device.num_pages) for pools in components}

    def take(self, asked: Mapping[str, RequestedComponent]) -> dict[str, PageIds] | None:
        """Take pages for the tails of a room, for every component. None if there are too few now.

        Raises InvalidRequest if there can never be enough.
        """
        for name, tail in asked.items():
            account = self._accounts[name]
            if tail.page_count > account.total:
                raise InvalidRequest(
                    f"a tail of {tail.page_count} pages of component {name!r}; its pool has {account.total}"
                )
        if any(tail.page_count > self._accounts[name].free for name, tail in asked.items()):
            return None
        return {name: self._accounts[name].take(tail.page_count) for name, tail in asked.items()}

    def fill(self, tail: RequestedComponent, pages: PageIds, digests: Sequence[bytes]) -> None:
        """Overwrite pages with the content of the tail; `digests` are those of the requested positions."""
        self._kv[tail.component].fill(pages, [component_digest(tail.component, digest) for digest in digests])

    def give_back(self, held: Mapping[str, PageIds]) -> None:
        """Give pages back, which must be unused."""
        for name, pages in held.items():
            self._accounts[name].give_back(pages)
