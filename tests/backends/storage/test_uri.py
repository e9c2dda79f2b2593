"""From a URI and options to an engine, and what is refused on the way."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.storage import open_storage, uri
from tidekv.backends.storage.memory import open_memory
from tidekv.backends.storage.options import parse_size
from tidekv.states.errors import InvalidConfig


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1kB", 1000),
        ("200GB", 200 * 1000**3),
        ("200 gb", 200 * 1000**3),
        ("64MiB", 64 << 20),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "1 GB 2", "-5", "1e9", "5 potatoes", "0x10", None, True, 1.5, [1], "1.2.3MB"]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    assert parse_size(text) is None


@given(st.integers(0, 1 << 60))
def test_plain_numbers_mean_themselves(size_bytes: int) -> None:
    assert parse_size(size_bytes) == parse_size(str(size_bytes)) == size_bytes


def test_options_come_from_the_query_and_the_mapping() -> None:
    assert open_storage("memory:?capacity=1GB").statistics().capacity_bytes == 10**9
    assert open_storage("memory:", {"capacity": "1MiB"}).statistics().capacity_bytes == 1 << 20
    made = open_storage("file:/var/lib/a%20b?capacity=5MB&io=threads", {"low_water": 0.5, "threads": "3"})
    assert made.uri == "file:/var/lib/a b?capacity=5000000"
    assert open_storage("file:///srv/kv").uri == "file:/srv/kv?capacity=10000000000"
    assert open_storage("FILE:/srv/kv").uri.startswith("file:/srv/kv?")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "starts with a scheme"),
        ("/var/lib/kv", {}, "starts with a scheme"),
        ("nothing:here", {}, "no storage engine 'nothing'; allowed: file, memory"),
        ("memory:/path", {}, "names no place"),
        ("memory://host", {}, "names no place"),
        ("memory:?size=3", {}, "no option 'size'; allowed: capacity"),
        ("memory:?capacity=lots", {}, "option capacity must be a size of at least 1 bytes.*not 'lots'"),
        ("memory:?capacity=0", {}, "option capacity must be a size"),
        ("memory:?capacity=1&capacity=2", {}, "given twice"),
        ("memory:?capacity=1", {"capacity": 2}, "given twice"),
        ("memory:?capacity", {}, "cannot be read"),
        ("memory:", {"capacity": True}, "not True"),
        ("file:", {}, "needs a directory"),
        ("file://server/path", {}, "on this machine"),
        ("file:/a#b", {}, "fragment"),
        ("file:/a%00b", {}, "zero byte"),
        ("file:/a?io=magic", {}, "option io must be one of threads, nixl, not 'magic'"),
        ("file:/a?low_water=2", {}, "a number from 0.1 to 1.0"),
        ("file:/a?low_water=nan", {}, "a number from 0.1 to 1.0"),
        ("file:/a?threads=2.5", {}, "an int from 1 to 64, not '2.5'"),
        ("file:/a", {"threads": 2.5}, "an int from 1 to 64, not 2.5"),
        ("file:/a", {"threads": True}, "an int from 1 to 64, not True"),
        (
            "file:/a?cap=1",
            {},
            "allowed: busy_timeout_s, capacity, chunk, inline, io, low_water, queue, segment",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        open_storage(text, options)


def install(monkeypatch: pytest.MonkeyPatch, **engines: str) -> None:
    found = EntryPoints(EntryPoint(name, value, uri.ENTRY_POINT_GROUP) for name, value in engines.items())
    monkeypatch.setattr(uri, "entry_points", lambda *, group: found.select(group=group))


def test_a_package_adds_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tape="tidekv.backends.storage.memory:open_memory")
    assert type(open_storage("tape:?capacity=5")) is type(open_memory(authority="", path="", options={}))
    with pytest.raises(InvalidConfig, match=r"allowed: file, memory, .*tape"):
        open_storage("drum:")


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tape="there.is.no.such.module:made")
    with pytest.raises(InvalidConfig, match=r"'tape' .*no\.such\.module.* cannot be loaded"):
        open_storage("tape:")


async def test_making_an_engine_touches_nothing(tmp_path: Any) -> None:
    engine = open_storage(f"file:{tmp_path / 'store'}")
    await engine.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("password", [20231224, 3.5, True, ["20231224"]])
def test_a_password_of_another_type_is_not_quoted(password: object) -> None:
    with pytest.raises(InvalidConfig, match="option password must be a text that is not empty, not a ") as refused:
        open_storage("redis://host", {"password": password})
    assert "20231224" not in str(refused.value)
