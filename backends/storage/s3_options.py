"""Options of the `s3:` engine; `tidekv.backends.storage.s3` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How a bucket is used.

    `capacity`: bytes of all pages of a namespace, with their headers. `connections`: requests under way at once, each
    of one page. `path_style`: the bucket is in the path (as endpoints of one's own want it) and not in the host name.
    `bulk_delete`: delete many objects by one request, which some servers do not know. `request_timeout_s`: how long one
    request may take, and so how long pages may stay with a server that hangs.
    """

    bucket: str
    prefix: str
    capacity: int = 100 * 1000**3
    connections: int = 16
    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    path_style: bool = True
    bulk_delete: bool = True
    tls_ca: Path | None = None
    tls_insecure: bool = False
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 5.0
