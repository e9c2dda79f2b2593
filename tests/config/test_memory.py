"""How much memory there is, and what sizes mean: without groups, with groups of either version, in containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.engine.config.memory import Memory, cpu_limit, host_memory
from tidekv.engine.config.sections import CacheSection
from tidekv.engine.config.sizes import parse_memory
from tidekv.states.errors import InvalidConfig

GIB = 1 << 30
MakeRoot = Callable[[Mapping[str, str]], Path]


def v2(path: str, *, limit: str, used: int = 0, cached: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {cached}\n",
    }


def test_a_machine_without_groups_has_what_the_kernel_says(make_root: MakeRoot) -> None:
    memory = host_memory(make_root({}))
    assert (memory.total_bytes, memory.free_bytes, memory.bound_by) == (64 * GIB, 32 * GIB, "the machine")


def test_a_group_of_version_2_bounds_and_its_clean_files_are_free(make_root: MakeRoot) -> None:
    files = {"proc/self/cgroup": "0::/pod/worker\n", **v2("/pod/worker", limit=str(8 * GIB), used=6 * GIB, cached=GIB)}
    memory = host_memory(make_root(files))
    assert (memory.total_bytes, memory.free_bytes) == (8 * GIB, 3 * GIB)
    assert memory.bound_by.endswith("/pod/worker")


def test_a_group_further_up_may_be_the_tighter_one(make_root: MakeRoot) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/worker\n",
        **v2("/pod/worker", limit="max", used=2 * GIB),
        **v2("/pod", limit=str(4 * GIB), used=3 * GIB),
    }
    assert host_memory(make_root(files)).free_bytes == GIB


@pytest.mark.parametrize("path", ["/", "/kubepods/of/the/host", "/../../other"])
def test_in_a_container_the_mounted_group_counts_whatever_its_path_is_outside(make_root: MakeRoot, path: str) -> None:
    files = {"proc/self/cgroup": f"0::{path}\n", **v2("", limit=str(2 * GIB), used=GIB)}
    assert host_memory(make_root(files)).free_bytes == GIB


def test_a_group_of_version_1_bounds_and_its_great_number_is_no_bound(make_root: MakeRoot) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n9:memory:/job\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/memory.usage_in_bytes": f"{40 * GIB}\n",
        f"{base}/job/memory.limit_in_bytes": f"{6 * GIB}\n",
        f"{base}/job/memory.usage_in_bytes": f"{4 * GIB}\n",
        f"{base}/job/memory.stat": f"total_inactive_file {GIB}\n",
    }
    memory = host_memory(make_root(files))
    assert (memory.total_bytes, memory.free_bytes) == (6 * GIB, 3 * GIB)


def test_a_group_that_is_over_its_limit_has_nothing_free(make_root: MakeRoot) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **v2("/a", limit=str(GIB), used=2 * GIB)}
    assert host_memory(make_root(files)).free_bytes == 0


def test_cpus_are_the_least_that_any_group_allows(make_root: MakeRoot) -> None:
    root = make_root(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        }
    )
    assert cpu_limit(root) == 1.5
    assert cpu_limit(root / "nowhere") is None


def test_cpus_of_version_1(make_root: MakeRoot) -> None:
    root = make_root(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert cpu_limit(root) == 4.0


def test_this_machine_has_memory_and_the_bound_is_not_above_the_machine() -> None:
    memory = host_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


FREE = Memory(total_bytes=100_000, free_bytes=50_000, bound_by="the machine")


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        (40_000, 40),
        ("40KB", 40),
        ("32KiB", 32),
        ("80 %", 40),
        ("80%", 40),
        ("80 % of what is free", 40),
        ("80% of free", 40),
        ("25 % of total", 25),
        ("12 pages", 12),
        ("1 page", 1),
        ("2x", 20),
        ("0.5 x", 5),
        ("auto", 0),
        (0, 0),
        ("0 pages", 0),
    ],
)
def test_sizes_mean_so_many_pages(text: str | int, pages: int) -> None:
    assert parse_memory(text, what="l2").pages(page_bytes=1000, memory=FREE, l1_pages=10, what="l2") == pages


@pytest.mark.parametrize(
    "text", ["", "lots", "-1", "80 % of disk", "120 %", "0 %", "x", "3 pagez", -5, 2.5, True, None]
)
def test_a_size_that_means_nothing_is_refused_with_what_is_allowed(text: object) -> None:
    with pytest.raises(InvalidConfig, match=r"^l2 must be"):
        parse_memory(text, what="l2")


@given(st.text(max_size=12))
def test_no_text_does_anything_but_mean_a_size_or_be_refused(text: str) -> None:
    try:
        size = parse_memory(text, what="l2")
    except InvalidConfig:
        return
    assert size.amount >= 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("51 pages", "51000 bytes; the machine has 50000 free"),
        ("999", "less than one page"),
        ("60KB", "has 50000 free"),
    ],
)
def test_more_than_is_free_and_less_than_a_page_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        parse_memory(text, what="cache.l2").pages(page_bytes=1000, memory=FREE, what="cache.l2")


def test_on_the_cpu_both_pools_share_what_is_free() -> None:
    cache = CacheSection(l1="30 pages", l2="50 %")
    assert cache.pool_pages(1000, device=FREE, host=FREE) == (30, 10)
    with pytest.raises(InvalidConfig, match="has 20000 free"):
        CacheSection(l1="30 pages", l2="1x").pool_pages(1000, device=FREE, host=FREE)
    apart = CacheSection(l1="30 pages", l2="1x", device="cuda:0")
    assert apart.pool_pages(1000, device=FREE, host=FREE) == (30, 30)


def test_a_multiple_needs_something_to_multiply() -> None:
    with pytest.raises(InvalidConfig, match=r"give cache\.l1 a size"):
        CacheSection(l2="2x").pool_pages(1000, device=FREE, host=FREE)
    with pytest.raises(InvalidConfig, match="multiple of itself"):
        CacheSection(l1="2x")
