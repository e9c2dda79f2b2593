"""How salts and pairs of tokens are written, by the routers that listen: no form is understood by all of them.

| router | salt of a page | EAGLE keys |
|---|---|---|
| Dynamo | `extra_keys` with "dynamo-cache-salt:" before the name, or the field `cache_salt` | pairs of tokens |
| Dynamo's standalone indexer | the same | no word for them |
| llm-d | `extra_keys` with the bare name | no word for them |
| vllm-router | none: it leaves out groups above 0, and would credit plain prompts otherwise | no word for them |

The salt stands in a prompt's first page only. Salted pages are a group of full attention of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from tidekv.backends.keys.namespaces import split_namespace
from tidekv.engine.config.routers import Router

DYNAMO_SALT: Final = "dynamo-cache-salt:"


class PageNames(NamedTuple):
    """What the events say of the pages of one namespace."""

    lora_name: str | None
    first_key: str | None
    """What `extra_keys` says of a prompt's first page."""
    cache_salt: str | None

    @property
    def is_salted(self) -> bool:
        """Whether the pages belong to the group of salted ones."""
        return self.first_key is not None


class Wording:
    """The forms for a set of routers, which `check_routers` has checked. Without routers salts are digests."""

    def __init__(self, routers: Sequence[Router] = ("dynamo",), *, bigrams: bool = False) -> None:
        named = set(routers)
        self._to_dynamo = bool(named & {"dynamo", "dynamo-indexer"})
        self._to_llm_d = "llm-d" in named
        self.pairs = bigrams and "dynamo" in named
        """Whether `token_ids` are pairs: a token and the next one."""

    def of(self, namespace: str) -> PageNames:
        """Return what is said of the pages of a namespace."""
        names = split_namespace(namespace)
        lora_name = names.lora_name or None
        if not names.salt:
            return PageNames(lora_name, None, None)
        if self._to_llm_d:
            return PageNames(lora_name, names.salt, names.salt if self._to_dynamo else None)
        if self._to_dynamo:
            return PageNames(lora_name, f"{DYNAMO_SALT}{names.salt}", None)
        return PageNames(lora_name, digest_of(names.salt), None)


def digest_of(salt: str) -> str:
    """Return a salt's published name where no router listens that reads salts: a digest, 32 characters."""
    return sha256(b"tidekv KV events of " + salt.encode()).hexdigest()[:32]
