"""The `s3:` engine: pages as objects in a bucket of S3, or of anything that speaks its protocol.

    s3://bucket/prefix?region=eu-central-1&capacity=2TB
    s3://bucket?endpoint=http://127.0.0.1:9000                      MinIO, Ceph, Garage, SeaweedFS …

Keys come from the options, else from the AWS_… environment or the machine's role. The bucket must exist. A server knows
no order of use of its objects, so each process keeps its own: the bound holds for what a process has seen, which is all
of the namespace when it starts. Where many processes write, a lifecycle rule of the bucket bounds it as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from tidekv.backends.storage.options import Number, Option, Size, read_options
from tidekv.backends.storage.remote import Limits, RemoteStorage
from tidekv.backends.storage.s3_options import S3Options
from tidekv.backends.storage.s3_pages import S3Pages
from tidekv.backends.storage.server_options import File, Flag, Text
from tidekv.states.errors import InvalidConfig

OPTIONS: Final[Mapping[str, Option]] = {
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


def open_s3(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of an `s3:` URI."""
    if importlib.util.find_spec("obstore") is None:
        raise InvalidConfig("s3: storage needs obstore; install tidekv[s3]")
    settings = read_s3_options(authority, path, options)
    at = "" if settings.endpoint is None else f"?endpoint={settings.endpoint}"
    # A page is a request, so a chunk is a page: the deadline of a call is looked at before each.
    limits = Limits(capacity_bytes=settings.capacity, chunk_bytes=1, lanes=settings.connections)
    return RemoteStorage(f"s3://{settings.bucket}/{settings.prefix}{at}", lambda: S3Pages(settings), limits)


def read_s3_options(bucket: str, path: str, given: Mapping[str, object]) -> S3Options:
    """Check options; InvalidConfig names the one that is wrong, and what is allowed."""
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
