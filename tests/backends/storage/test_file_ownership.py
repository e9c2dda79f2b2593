"""A storage directory that is not this user's alone: refused, and no file elsewhere is read, changed or removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidekv.backends.storage.file import directory, ownership, segments
from tidekv.backends.storage.file.schema import LABEL_NAME, file_holdings
from tidekv.backends.storage.file.segments import namespace_directory
from tidekv.backends.storage.label import LABEL_BYTES_MAX, read_label
from tidekv.states.errors import StorageFailed

# The rig of conftest.py, which test modules cannot import.
Rig = Any


@pytest.fixture(params=[0o000, 0o777], ids=["umask 000", "umask 777"])
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    former = os.umask(request.param)
    yield
    os.umask(former)


async def test_a_directory_of_another_user_is_refused(files: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await files.open()).close()
    before = sorted(path.name for path in files.root.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(ownership.os, "geteuid", lambda: 4242)
        with pytest.raises(StorageFailed, match=r"belongs to user \d+, and this process runs as user 4242"):
            await files.open()
        with pytest.raises(StorageFailed, match="belongs to user"):
            file_holdings(files.root)
    assert sorted(path.name for path in files.root.rglob("*")) == before
    await files.open()


async def test_a_directory_that_another_process_makes_at_the_same_moment_is_opened(
    files: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ownership._make

    def make_after_another(path: Path) -> None:
        make(path)
        make(path)

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "_make", make_after_another)
        store = await files.open()
    assert all(await files.put(store, range(3)))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o722])
async def test_a_directory_that_others_can_write_to_is_refused(files: Rig, mode: int) -> None:
    files.root.mkdir()
    files.root.chmod(mode)
    with pytest.raises(StorageFailed, match=r"can be written by other users.*chmod go-w"):
        await files.open()
    assert not list(files.root.iterdir())
    files.root.chmod(0o755)
    assert all(await files.put(await files.open(), range(3)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a link of another user")
async def test_a_link_of_another_user_on_the_way_to_the_directory_is_refused(files: Rig, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("victim")
    os.chown(link, 4242, 4242, follow_symlinks=False)
    files.root = link / "store"
    with pytest.raises(StorageFailed, match="a symbolic link of user 4242"):
        await files.open()
    files.root = link
    with pytest.raises(StorageFailed, match="a symbolic link of user 4242"):
        await files.open()
    # A link of ours that leads over that one is no better.
    (tmp_path / "own").symlink_to(tmp_path / "link")
    files.root = tmp_path / "own"
    with pytest.raises(StorageFailed, match="a symbolic link of user 4242"):
        await files.open()
    assert not list(victim.iterdir())


async def test_a_link_of_this_user_on_the_way_to_the_directory_is_followed(files: Rig, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    files.root = tmp_path / "link" / "store"
    assert all(await files.put(await files.open(), range(3)))
    assert (tmp_path / "disk" / "store" / "index.sqlite").exists()
    (tmp_path / "round").symlink_to("round")
    files.root = tmp_path / "round" / "store"
    with pytest.raises(StorageFailed, match="cannot be used"):
        await files.open()


@pytest.mark.parametrize("name", ["tick", "open.lock", "index.sqlite", "writers", "the namespace"])
async def test_a_link_in_the_directory_is_refused_and_its_target_untouched(
    files: Rig, tmp_path: Path, name: str
) -> None:
    engine = await files.open()
    await files.put(engine, range(3))
    await engine.close()
    path = namespace_directory(files.root, files.NAMESPACE) if name == "the namespace" else files.root / name
    path.rename(tmp_path / "moved")
    target = tmp_path / "target"
    if (tmp_path / "moved").is_dir():
        target.mkdir()
        (target / "0000000077.seg").write_text("the user's")
        (target / ("ab" * 16 + ".lock")).write_text("the user's")
    else:
        target.write_text("the user's")
    path.symlink_to(target)
    with pytest.raises(StorageFailed, match=r"cannot be used: .*(is a symbolic link|not a directory of this user)"):
        await files.open()
    found = list(target.iterdir()) if target.is_dir() else [target]
    assert [each.read_text() for each in found] == ["the user's"] * (2 if target.is_dir() else 1)


async def test_a_link_in_the_place_of_a_segment_or_a_label_is_not_followed(files: Rig, tmp_path: Path) -> None:
    engine = await files.open()
    await files.put(engine, range(3))
    await engine.close()
    target = tmp_path / "target"
    target.write_text("the user's")
    segment = files.only_segment()
    for path in (segment, segment.parent / LABEL_NAME):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    engine = await files.open()
    assert await files.get(engine, range(3)) == [False] * 3
    await files.put(engine, range(3))
    await engine.set_label(b"label")
    await engine.clear()
    await engine.close()
    assert [holding.label for holding in file_holdings(files.root)] == [b""]
    assert target.read_text() == "the user's"


async def test_only_the_owner_may_read_under_any_umask(files: Rig, any_umask: None) -> None:
    files.root = files.root / "below" / "missing directories"
    engine = await files.open()
    await files.put(engine, range(3))
    await engine.set_label(b"label")
    probes: list[int] = []

    def write_all(file: int, content: memoryview, offset: int) -> None:
        probes.append(stat.S_IMODE(os.fstat(file).st_mode))
        segments.write_all(file, content, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "write_all", write_all)
        await engine.probe()
    assert probes == [0o600]
    for path in [files.root, *files.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(files.root.parent.stat().st_mode) & 0o722 == 0o700
    assert all(await files.get(engine, range(3)))


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
async def test_a_directory_that_machines_share_is_refused(
    files: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 - {kind} server:/export rw\n"
    mounts.write_text("35 1 98:0 / / rw - ext4 /dev/root rw\n" + line)
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "_MOUNTS", mounts)
        with pytest.raises(StorageFailed, match=f"is on {kind}, which machines share.*local disk"):
            await files.open()
        patch.setattr(ownership, "_MOUNTS", tmp_path / "no such file")
        assert ownership.file_system_of(device) == ""
    assert all(await files.put(await files.open(), range(3)))


async def test_a_label_is_not_read_beyond_its_limit(files: Rig) -> None:
    engine = await files.open()
    await engine.set_label(b"label")
    label = namespace_directory(files.root, files.NAMESPACE) / LABEL_NAME
    os.truncate(label, 3 << 30)
    (holding,) = file_holdings(files.root)
    assert len(holding.label) == LABEL_BYTES_MAX + 1
    assert read_label(holding.label) is None
    # A pipe would keep its reader waiting for ever.
    label.unlink()
    os.mkfifo(label)
    (holding,) = file_holdings(files.root)
    assert holding.label == b""
