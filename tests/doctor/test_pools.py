"""The doctor finds host pools that no process has, and frees them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidekv import HostPool, InvalidConfig, KVLayout
from tidekv.engine.cli.main import app
from tidekv.engine.doctor.pools import free_pool, host_pools

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)


def pool_in(path: Path) -> HostPool:
    path.parent.mkdir(parents=True, exist_ok=True)
    pool = HostPool.allocate(LAYOUT, 8, path=path)
    assert pool.file is not None
    pool.file.begin(b"i" * 32, "model 'm', 4 tokens a page")
    return pool


def test_a_pool_without_a_process_is_named_with_what_to_do(tmp_path: Path) -> None:
    assert host_pools(tmp_path).found == "no lasting ones in memory"
    held = pool_in(tmp_path / "dev/shm/held")
    (tmp_path / "dev/shm/other").write_text("not a pool")
    (tmp_path / "dev/shm/link").symlink_to(tmp_path / "dev/shm/held")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text("none /dev/huge hugetlbfs rw 0 0\nnone /tmp/x ext4 rw 0 0\n")
    found = host_pools(tmp_path)
    assert (found.level, found.found.count("/held")) == ("ok", 1) and f"process {os.getpid()}" in found.found
    left = pool_in(tmp_path / "dev/huge/deep/left")
    left.close()
    found = host_pools(tmp_path)
    assert found.level == "warn" and "--free-pool" in found.advice
    assert (
        f"{tmp_path}/dev/huge/deep/left (" in found.found and "model 'm', 4 tokens a page): no process" in found.found
    )
    assert "/held" not in found.found
    held.close()


def test_only_a_pool_that_no_process_has_is_freed(tmp_path: Path) -> None:
    pool = pool_in(path := tmp_path / "pool")
    with pytest.raises(InvalidConfig, match=f"process {os.getpid()} has .*: stop it first"):
        free_pool(path)
    pool.close()
    (tmp_path / "notes").write_text("notes")
    for other in ("notes", "missing"):
        with pytest.raises(InvalidConfig, match="--free-pool"):
            free_pool(tmp_path / other)
    assert (tmp_path / "notes").exists()
    result = CliRunner().invoke(app, ["doctor", "--free-pool", str(path), "--json"])
    assert result.exit_code == 0 and f"freed {path}" in result.stdout
    assert not path.exists()
