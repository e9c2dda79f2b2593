"""Windows and states whose content can be verified: a function of the prompt up to the end of the page or record.

A component's page at position p of a prompt, and a record after that page, are filled from the digest of the prompt up
to and including page p, and from the component's name. Another prompt, position or component differs in every word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from tidekv.backends.component_pools import ComponentPools
from tidekv.engine.decode.component_pages import ReadyComponent
from tidekv.engine.synthetic.kv import SyntheticKV
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
    """Verify the component pages of a request byte for byte; `digests` has one entry for each page of its prompt.

    Returns the positions in the prompt that differ, by component; empty if there are none.
    """
    wrong = {}
    for pools in components:
        part = component_pages[pools.name]
        expected = [
            component_digest(pools.name, digest) for digest in digests[part.first : part.first + len(part.pages)]
        ]
        found = SyntheticKV(pools.device).verify(part.pages.tolist(), expected)
        if found:
            wrong[pools.name] = [part.first + at for at in found]
    return wrong


class SyntheticComponents:
    """Pools of a synthetic prefill worker's components: pages to send, and their content.

    Nothing is kept after a room.
    """

    def __init__(self, components: Sequence[ComponentPools]) -> None:
        self._kv = {pools.name: SyntheticKV(pools.device) for pools in components}
        self._pools = {pools.name: PagePool(pools.name, pools.device.num_pages) for pools in components}

    def take(self, asked: Mapping[str, RequestedComponent]) -> dict[str, PageIds] | None:
        """Take pages for a room, for every component. None if there are too few now.

        Raises InvalidRequest if there can never be enough.
        """
        for name, part in asked.items():
            pool = self._pools[name]
            if part.page_count > pool.total:
                raise InvalidRequest(f"{part.page_count} pages of {name!r} exceed its pool of {pool.total}")
        if any(part.page_count > self._pools[name].free for name, part in asked.items()):
            return None
        return {name: self._pools[name].take(part.page_count) for name, part in asked.items()}

    def fill(self, part: RequestedComponent, pages: PageIds, digests: Sequence[bytes]) -> None:
        """Overwrite pages with the content of a component's pages; `digests` are those of the requested positions."""
        self._kv[part.component].fill(pages, [component_digest(part.component, digest) for digest in digests])

    def give_back(self, held: Mapping[str, PageIds]) -> None:
        """Give pages back, which must be unused."""
        for name, pages in held.items():
            self._pools[name].give_back(pages)
