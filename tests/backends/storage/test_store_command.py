"""`tidekv store` on directories and servers: what it lists, finds damaged, removes and copies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tidekv.backends.storage import open_storage
from tidekv.backends.storage.file.records import Geometry
from tidekv.backends.storage.label import Label, label_of
from tidekv.engine.cli.main import app
from tidekv.engine.cli.store_tools import Place, opened
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import page_ids

PAGE_BYTES = 8192
NAMESPACE, OTHER = b"n" * 32, b"o" * 32


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def fill(uri: str, numbers: range, *, namespace: bytes = NAMESPACE) -> None:
    """Store the pages of some numbers."""

    async def put() -> None:
        async with opened(open_storage(uri), namespace=namespace, page_bytes=PAGE_BYTES) as (store,):
            buffer_of = store.buffer_of
            for page, number in enumerate(numbers):
                np.copyto(np.frombuffer(buffer_of(page), np.uint8), number % 251)
            keys = [key_of(number) for number in numbers]
            assert all(await store.storage.put_from(keys, page_ids(range(len(keys))), timeout_s=30))

    asyncio.run(put())


def read(uri: str, numbers: range, *, namespace: bytes = NAMESPACE) -> list[bool]:
    """Return which of the numbered pages are present, complete and correct."""

    async def get() -> list[bool]:
        async with opened(open_storage(uri), namespace=namespace, page_bytes=PAGE_BYTES) as (store,):
            keys = [key_of(number) for number in numbers]
            good = await store.storage.get_into(keys, page_ids(range(len(keys))), timeout_s=30)
            for page, number in enumerate(numbers):
                assert not good[page] or set(store.buffer_of(page)) == {number % 251}
            return good

    return asyncio.run(get())


def tidekv(*words: str) -> Result:
    result = CliRunner().invoke(app, ["store", *words], catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    return result


def fill_with_damage(root: Path) -> None:
    """Store twenty pages, the first three of them damaged."""
    fill(f"file:{root}?capacity=1MB&io=threads", range(20))
    (segment, *_) = sorted((root / NAMESPACE.hex()[:32]).glob("*.seg"))
    slots = int.from_bytes(segment.read_bytes()[12:16], "little")
    geometry = Geometry(namespace=NAMESPACE, page_bytes=PAGE_BYTES, slots=slots)
    with segment.open("r+b") as file:
        for slot in range(3):
            file.seek(geometry.page_offset(slot) + 100)
            file.write(b"damage")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with twenty pages in one namespace, three of them damaged, and two in another."""
    root = tmp_path / "store"
    fill_with_damage(root)
    fill(f"file:{root}?capacity=1MB&io=threads", range(2), namespace=OTHER)
    return root


def test_ls_tells_namespaces_and_pages(root: Path) -> None:
    said = tidekv("ls", f"file:{root}").stdout
    assert NAMESPACE.hex() in said and OTHER.hex() in said
    (row,) = [line for line in said.splitlines() if NAMESPACE.hex() in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    # Written by no engine that labels what it stores, as by earlier versions.
    assert cells[:-1] == [NAMESPACE.hex(), *["unknown"] * 3, "8 KiB", "20", "160 KiB"]
    assert re.fullmatch(r"\d+ (s|min|h) ago|\d+ \w+ to \d+ \w+ ago", cells[-1])


@pytest.mark.parametrize("side", ["storage", "prefill_storage"])
async def test_engines_label_what_they_store(make_pair, tmp_path: Path, side: str) -> None:
    uri = f"file:{tmp_path / 'store'}?capacity=1MB&io=threads"
    async with make_pair(**{side: open_storage(uri)}) as pair:
        identity = pair.device.layout.identity("")
    said = (await asyncio.to_thread(tidekv, "ls", uri)).stdout
    (row,) = [line for line in said.splitlines() if line.startswith("│")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:4] == ["(no name)", identity.dtype, label_of(identity).layout]
    assert cells[3] == "mha, 2 layers, 2 x 8, pages of 4 tokens"


def test_ls_shows_a_label_as_it_is(root: Path) -> None:
    label = Label(model="[red]llama[7b]", dtype="bf16", kind="mha", page_size=4, layers=2, kv_heads=2, head_dim=8)
    (root / OTHER.hex()[:32] / "label.json").write_bytes(msgspec.json.encode(label))
    assert "[red]llama[7b]" in tidekv("ls", f"file:{root}").stdout


def test_a_damaged_label_is_unknown(root: Path) -> None:
    (root / NAMESPACE.hex()[:32] / "label.json").write_bytes(b"\xff{")
    (root / OTHER.hex()[:32] / "label.json").write_bytes(b'{"model": 3}')
    said = tidekv("ls", f"file:{root}").stdout
    assert said.count("unknown") == 6


def test_gc_says_what_it_would_remove_and_why_before_it_does(root: Path) -> None:
    uri = f"file:{root}?io=threads"
    plan = tidekv("gc", uri, "--namespace", "6e", "--dry-run").stdout.splitlines()
    assert plan[-1] == "17 pages whole, 3 damaged (corrupt: 3), nothing removed"
    assert all(re.fullmatch(r"would remove [0-9a-f]{64}: corrupt", line) for line in plan[:-1])
    done = tidekv("gc", uri, "--namespace", "6e").stdout.splitlines()
    assert done[:-1] == [line.replace("would remove", "removed") for line in plan[:-1]]
    assert done[-1] == "17 pages whole, 3 damaged (corrupt: 3), 3 removed"
    assert tidekv("gc", uri, "--namespace", "6e").stdout.splitlines() == ["17 pages whole, 0 damaged, 0 removed"]


def test_verify_finds_every_damaged_page_and_gc_removes_it(root: Path) -> None:
    uri = f"file:{root}?io=threads"
    found = tidekv("verify", uri, "--namespace", NAMESPACE.hex()[:6])
    assert found.exit_code == 1
    damaged = [line.split() for line in found.stdout.splitlines() if line.endswith("corrupt")]
    assert len(damaged) == 3
    assert {bytes.fromhex(key) for key, _ in damaged} < {key_of(number) for number in range(20)}
    assert "17 pages whole, 3 damaged" in found.stdout
    assert "3 removed" in tidekv("gc", uri, "--namespace", "6e").stdout
    clean = tidekv("verify", uri, "--namespace", "6e")
    assert clean.exit_code == 0 and "17 pages whole, 0 damaged" in clean.stdout


def test_cp_copies_what_is_whole_and_not_there_yet(root: Path, tmp_path: Path) -> None:
    target = f"file:{tmp_path / 'copy'}?capacity=2MB&io=threads"
    fill(target, range(15, 20))
    first = tidekv("cp", f"file:{root}?io=threads", target, "--namespace", "6e")
    assert first.exit_code == 1
    assert "12 pages copied, 5 were there, 3 could not be" in first.stdout
    assert sum(read(target, range(20))) == 17
    assert "0 pages copied, 17 were there" in tidekv("cp", target, target).stdout


@pytest.mark.nixl
def test_cp_brings_pages_to_a_server_and_back(root: Path, tmp_path: Path, redis_server: Any) -> None:
    redis_uri = f"redis://{redis_server.address}?prefix=store-command"
    tidekv("gc", f"file:{root}", "--namespace", "6e")
    assert tidekv("cp", f"file:{root}", redis_uri, "--namespace", "6e").exit_code == 0
    assert "17" in tidekv("ls", redis_uri).stdout
    assert "17 pages whole, 0 damaged" in tidekv("verify", redis_uri).stdout
    said = tidekv("stat", redis_uri).stdout
    assert "17" in said and "ok" in said
    back = f"file:{tmp_path / 'back'}?capacity=2MB"
    assert tidekv("cp", redis_uri, back).exit_code == 0
    assert sum(read(back, range(20))) == 17


def test_looking_at_a_store_never_makes_it_smaller(root: Path) -> None:
    before = sorted(path.stat().st_size for path in root.glob("*/*.seg"))
    tidekv("stat", f"file:{root}?io=threads", "--namespace", "6e")
    tidekv("verify", f"file:{root}", "--options", json.dumps({"io": "threads"}), "--namespace", "6f")
    assert sorted(path.stat().st_size for path in root.glob("*/*.seg")) == before
    capacity_bytes = Place(f"file:{root}").open().statistics().capacity_bytes
    assert capacity_bytes == 1 << 62
    assert Place(f"file:{root}?capacity=5MB").open().statistics().capacity_bytes == 5_000_000
    assert Place(f"file:{root}", '{"capacity": "5MB"}').open().statistics().capacity_bytes == 5_000_000


def test_what_is_not_clear_is_refused_and_says_what_there_is(root: Path, tmp_path: Path) -> None:
    for words, said in (
        (["verify", f"file:{root}"], "has 2 namespaces; choose one by --namespace: 6e6e6e6e6e6e6e6e…, 6f6f"),
        (["verify", f"file:{root}", "--namespace", "abc"], "has 0 namespaces that begin with 'abc'; choose"),
        (["verify", "memory:"], "cannot list its namespaces; or give the whole --namespace and --page-bytes$"),
        # It has no such options.
        (["ls", "memory:"], "cannot list its namespaces$"),
        (["cp", f"file:{root}", f"file:{tmp_path / 'copy'}", "--namespace", "6e"], "set one: "),
        (["ls", "file:/dev/null", "--options", "{"], "must be a JSON object"),
        (["ls", "nowhere:"], "no storage engine 'nowhere'"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            tidekv(*words)
    with pytest.raises(StorageFailed, match="is not a storage directory"):
        tidekv("ls", f"file:{tmp_path / 'empty'}")
    assert not (tmp_path / "empty").exists()


def test_a_label_commands_no_terminal_and_forges_no_row(root: Path) -> None:
    label = Label("m\n│ forged │", "\x1b[2J", "mha\x07", page_size=4, layers=1, kv_heads=1, head_dim=8)
    (root / NAMESPACE.hex()[:32] / "label.json").touch(0o600)
    (root / NAMESPACE.hex()[:32] / "label.json").write_bytes(msgspec.json.encode(label))
    said = tidekv("ls", f"file:{root}").stdout
    assert "m\\n│ forged │" in said and "\\x1b[2J" in said and "mha\\x07" in said
    assert "\x1b" not in said and "\x07" not in said
    assert len([line for line in said.splitlines() if line.startswith("│")]) == 2


def test_stat_names_what_it_counts(root: Path) -> None:
    said = tidekv("stat", f"file:{root}?io=threads", "--namespace", "6e").stdout
    rows = dict([cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if "│" in line)
    assert rows["pages of this namespace"] == "20"
    whole = sum(path.stat().st_size for path in root.glob("*/*.seg"))
    assert rows["counts against the capacity"].startswith(f"{whole // 1024} KiB (segment files, of all namespaces")
    assert "their KV: pages times page size" in tidekv("ls", f"file:{root}").stdout


def test_an_engine_that_cannot_list_is_opened_by_what_is_said() -> None:
    said = tidekv("verify", "memory:", "--namespace", NAMESPACE.hex(), "--page-bytes", "4096").stdout
    assert "0 pages whole, 0 damaged" in said


def test_a_store_that_cannot_be_used_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidekv.backends.storage.file.engine import FileStorage

    async def fail(_: FileStorage) -> None:
        raise StorageFailed("the disk is gone")

    monkeypatch.setattr(FileStorage, "probe", fail)
    said = tidekv("stat", f"file:{root}?io=threads", "--namespace", "6e")
    assert said.exit_code == 1 and "failed: the disk is gone" in said.stdout


def test_the_lines_of_the_page_of_storage_work(tmp_path: Path) -> None:
    """Each line runs as it is written, with stores of this machine in place of those that it names."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "storage.md").read_text()
    lines = re.findall(r"^tidekv store .*$", text, re.MULTILINE)
    root = tmp_path / "store"
    fill_with_damage(root)
    (tmp_path / "s3.toml").write_text('io = "threads"\n')
    fill(f"file:{tmp_path / 'cache'}?capacity=1MB&io=threads", range(3))
    here = {
        "file:/var/lib/tidekv": f"file:{root}",
        "redis://cache": f"file:{tmp_path / 'cache'}?capacity=1MB",
        "s3://bucket/kv": f"file:{root}",
        "@s3.toml": f"@{tmp_path / 's3.toml'}",
    }
    codes = {}
    for line in lines:
        program, group, command, *words = shlex.split(line, comments=True)
        assert (program, group) == ("tidekv", "store")
        done = CliRunner().invoke(app, ["store", command, *(here.get(word, word) for word in words)])
        assert not isinstance(done.exception, Exception), line
        codes[command] = done.exit_code
    # Three pages are damaged until `gc` has removed them; the target of `cp` has these three.
    assert codes == {"ls": 0, "stat": 0, "verify": 1, "gc": 0, "cp": 0}
    assert read(f"file:{root}", range(20)) == [number not in range(3) for number in range(20)]
    assert all(read(f"file:{tmp_path / 'cache'}", range(20)))
