"""Options of the `s3:` engine: pages as objects in a bucket of S3, or of a server with its protocol.

    s3://bucket/prefix?region=eu-central-1&capacity=2TB
    s3://bucket?endpoint=http://127.0.0.1:9000                      MinIO, Ceph, Garage, SeaweedFS …

Access keys come from the options, else from the AWS_… environment or the machine's role. The bucket must exist. A
server keeps no order of use of its objects, so each process keeps its own: the capacity holds for what a process has
seen, which is all of the namespace when it starts. If many processes write, let a lifecycle rule bound the bucket as
well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidekv.backends.storage.options import File, Flag, Number, Size, Text, UriOption, read_options
from tidekv.states.errors import InvalidConfig

OPTIONS: Final[Mapping[str, UriOption]] = {
    "capacity": Size(),
    "connections": Number(1, 64),
    "endpoint": Text(),
    "region": Text(),
    "access_key_id": Text(),
    "secret_access_key": Text(),
    "session_token": Text(),
    "path_style": Flag(),
    "bulk_delete": Flag(),
    "tls_ca": File(),
    "tls_insecure": Flag(),
    "connect_timeout_s": Number(0.05, 60.0),
    "request_timeout_s": Number(0.05, 600.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Settings of one bucket.

    `capacity`: maximum bytes of all pages of a namespace, with their headers. `connections`: maximum concurrent
    requests, each of one page. `path_style`: the bucket is in the path (as self-hosted servers expect) and not in the
    host name. `bulk_delete`: delete many objects by one request, which some servers do not support.
    `request_timeout_s`: seconds that one request may take, and so how long pages may stay with a server that hangs.
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


def read_s3_options(bucket: str, path: str, given: Mapping[str, object]) -> S3Options:
    """Check options; InvalidConfig names the wrong one, and what is allowed."""
    if not bucket or "@" in bucket or ":" in bucket:
        raise InvalidConfig("s3: storage needs a bucket and no more; write s3://bucket/prefix?endpoint=https://host")
    prefix = path.strip("/") or "tidekv"
    if any(part in ("", ".", "..") for part in prefix.split("/")) or not prefix.isprintable():
        raise InvalidConfig(f"s3: the prefix {path!r} has an empty part, or one that is . or ..")
    values = read_options("the s3: engine", given, OPTIONS)
    settings = S3Options(
        bucket=bucket,
        prefix=prefix,
        **values,  # type: ignore[arg-type]  # Each option has checked the type of its value.
    )
    if (settings.access_key_id is None) != (settings.secret_access_key is None):
        raise InvalidConfig("s3: access_key_id and secret_access_key go together")
    endpoint = settings.endpoint
    if endpoint is not None and (not endpoint.startswith(("http://", "https://")) or "@" in endpoint):
        raise InvalidConfig("s3: option endpoint must be http://host:port or https://host, with no password in it")
    return settings
