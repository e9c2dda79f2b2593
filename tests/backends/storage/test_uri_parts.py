"""A storage URI is cut the same way by every Python, also where it names several servers."""

from __future__ import annotations

import string
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidekv.backends.storage import open_storage
from tidekv.backends.storage.options import read_authority
from tidekv.backends.storage.uri import UriParts, split_uri
from tidekv.states.errors import InvalidConfig

PLAIN = string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@%"
SCHEMES = st.from_regex(r"[a-z][a-z0-9+.-]{0,5}", fullmatch=True)
SERVERS = st.lists(st.sampled_from(["a", "b:7000", "10.0.0.1:1", "[::1]", "[::1]:7001", "[fe80::2]:65535"]), min_size=1)


@given(
    scheme=SCHEMES,
    authority=st.text(PLAIN + "[]") | SERVERS.map(",".join),
    path=st.text(PLAIN + "/"),
    query=st.text(PLAIN + "/?"),
)
@example(scheme="valkeys", authority="me:pw@a,b:7000,[::1]:7001", path="/0", query="cluster=true")
@example(scheme="file", authority="", path="//not-a-server", query="")
def test_what_was_put_together_is_cut_at_the_same_places(scheme: str, authority: str, path: str, query: str) -> None:
    rooted = path if path.startswith("/") or not path else f"/{path}"
    whole = f"{scheme.upper()}://{authority}{rooted}" + (f"?{query}" if query else "")
    assert split_uri(whole) == UriParts(scheme=scheme, authority=authority, path=rooted, query=query)


@given(st.text(PLAIN + "/?", min_size=1).map(lambda text: f"redis:{text}"))
def test_the_standard_library_cuts_plain_ones_alike(uri: str) -> None:
    there = urlsplit(uri)
    assert split_uri(uri) == UriParts(scheme=there.scheme, authority=there.netloc, path=there.path, query=there.query)


@pytest.mark.parametrize("text", ["", ":", "/srv/kv", "/srv/a:b", "1file:/srv", " file:/srv", "fi le:/srv", "?a:b"])
def test_without_a_scheme_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="starts with a scheme"):
        open_storage(text)


@pytest.mark.parametrize("text", ["file:/a#b", "file:/a#", "file:/a?capacity=1GB#b"])
def test_a_fragment_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="'file' has a fragment"):
        open_storage(text)


def test_line_ends_in_a_path_are_kept_as_they_are() -> None:
    # The standard library takes them out, which would open another directory than the one that was named.
    assert split_uri("file:/srv/a\nb").path == "/srv/a\nb"


@given(SERVERS)
def test_servers_of_all_kinds_are_read_beside_each_other(servers: list[str]) -> None:
    read = read_authority("redis", ",".join(servers), default_port=6379)
    again = read_authority("redis", read.text, default_port=1)
    assert again == read
    assert len(read.servers) == len(servers)


@pytest.mark.parametrize("server", ["[::1", "::1]", "[]", "[]:5", "[::1]7", "[[::1]]", "a[::1]", "a]:5", ":5"])
def test_an_address_with_a_bracket_too_many_or_too_few_is_refused(server: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot read the server"):
        open_storage(f"redis://{server}/0", {"capacity": "1GB"})


def test_a_colon_without_a_port_is_the_usual_port() -> None:
    read = read_authority("redis", "[::1]:,a:", default_port=6379)
    assert read.servers == (("::1", 6379), ("a", 6379))
