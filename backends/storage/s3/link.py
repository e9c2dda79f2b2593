"""One bucket, by obstore: requests, signing, TLS and checksums run outside of the interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from tidekv.backends.storage.remote import ServerFailed
from tidekv.backends.storage.s3.options import S3Options
from tidekv.states.errors import InvalidConfig, cause_of

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta
    from obstore.store import ClientConfig, S3Config


LIST_OBJECTS: Final = 1000

_SAID: Final = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]{0,200})")


class S3Link:
    """The objects of a bucket. Every method raises ServerFailed if the server fails."""

    def __init__(self, options: S3Options) -> None:
        """Connect to nothing yet. Blocks: it reads files."""
        client: ClientConfig = {
            "allow_http": bool(options.endpoint and options.endpoint.startswith("http://")),
            "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            "timeout": timedelta(seconds=options.request_timeout_s),
            "allow_invalid_certificates": options.tls_insecure,
        }
        try:
            if options.tls_ca is not None:
                client["root_certificate"] = options.tls_ca.read_bytes()
        except OSError as error:
            raise InvalidConfig(f"s3: the file of option tls_ca cannot be read: {cause_of(error)}") from error
        given = {
            "endpoint": options.endpoint,
            "region": options.region,
            "access_key_id": options.access_key_id,
            "secret_access_key": options.secret_access_key,
            "session_token": options.session_token,
        }
        config = cast("S3Config", {name: value for name, value in given.items() if value is not None})
        try:
            self._store = S3Store(
                options.bucket,
                config=config,
                virtual_hosted_style_request=not options.path_style,
                disable_bulk_delete=not options.bulk_delete,
                client_options=client,
                # An engine does not retry: the caller knows better whether that is still worthwhile.
                retry_config={"max_retries": 0},
            )
        except (BaseError, ValueError) as error:
            raise InvalidConfig(f"s3: {_words(error)}") from error

    async def get(self, name: str, *, bytes_max: int) -> Bytes | None:
        """Return an object, None if there is none. Of one that is larger, the first `bytes_max + 1` bytes: its
        size is chosen by every writer of the bucket.
        """
        try:
            found = await obstore.get_async(self._store, name)
            if found.meta["size"] <= bytes_max:
                return await found.bytes_async()
            return await obstore.get_range_async(self._store, name, start=0, end=bytes_max + 1)
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise _failed(error) from error

    async def put(self, name: str, value: memoryview | bytes) -> None:
        """Store an object. `value` must not change until this returns."""
        try:
            await obstore.put_async(self._store, name, value, use_multipart=False)
        except (BaseError, FileNotFoundError) as error:
            raise _failed(error) from error

    async def size(self, name: str) -> int | None:
        """Return the bytes of an object, None if there is none."""
        try:
            return (await obstore.head_async(self._store, name))["size"]
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise _failed(error) from error

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        try:
            await obstore.delete_async(self._store, names)
        except FileNotFoundError:
            # Without bulk deletion some servers report this; S3 does not.
            return
        except BaseError as error:
            raise _failed(error) from error

    def list(self, prefix: str) -> Iterator[Sequence[ObjectMeta]]:
        """Yield the objects below a prefix, in parts. Blocks."""
        try:
            yield from obstore.list(self._store, prefix, chunk_size=LIST_OBJECTS)
        except (BaseError, FileNotFoundError) as error:
            raise _failed(error) from error

    def below(self, prefix: str) -> Sequence[str]:
        """Return the prefixes one level below a prefix. Blocks."""
        try:
            return obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        except (BaseError, FileNotFoundError) as error:
            raise _failed(error) from error


def _failed(error: Exception) -> ServerFailed:
    text = str(error)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, FileNotFoundError)) or "non-2xx" in text:
        return ServerFailed("refused", _words(error))
    return ServerFailed("timeout" if "kind: Timeout" in text else "unreachable", _words(error))


def _words(error: Exception) -> str:
    """Return the server's message, else the first line: the rest is a dump of the library's own values."""
    said = _SAID.search(str(error))
    return f"{said[1]}: {said[2]}" if said else str(error).partition("\n")[0]
