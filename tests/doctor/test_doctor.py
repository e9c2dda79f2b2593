"""The doctor names what is wrong with a machine, never hangs, and needs neither a GPU nor RDMA."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_python
from tidekv.engine.doctor import machine, probe
from tidekv.engine.doctor.examine import probe_commands, run_probes
from tidekv.engine.doctor.finding import Finding, in_bytes

GIB = 1 << 30


def level(finding: Finding) -> str:
    """Every finding that is not ok states a remedy."""
    assert bool(finding.advice) == (finding.level != "ok"), finding
    assert not finding.advice or finding.advice.endswith((".", "?", "tidekv")), finding
    return finding.level


def test_every_check_of_this_machine_says_something() -> None:
    found = list(machine.machine_findings())
    names = [finding.check for finding in found]
    assert names == [
        "versions",
        "cpus",
        "memory",
        "locked memory",
        "open files",
        "shared memory",
        "same-host copies",
        "rdma",
        "clock",
    ]
    assert all(level(finding) in ("ok", "warn", "bad") and finding.found for finding in found)
    assert found[0].level == "ok"


@pytest.mark.parametrize(
    ("limit", "has_rdma", "wanted"),
    [
        (resource.RLIM_INFINITY, True, "ok"),
        (9 * GIB, True, "ok"),
        (64 << 10, False, "warn"),
        (64 << 10, True, "bad"),
    ],
)
def test_locked_memory_matters_where_there_is_rdma(limit: int, has_rdma: bool, wanted: str) -> None:
    assert level(machine.locked_memory(limit, has_rdma=has_rdma)) == wanted


@pytest.mark.parametrize(("soft", "wanted"), [(128, "bad"), (1024, "warn"), (8192, "ok"), (-1, "ok")])
def test_few_open_files_are_told(soft: int, wanted: str) -> None:
    assert level(machine.open_files(soft, 1 << 20)) == wanted


def test_small_quotas_little_memory_and_missing_shared_memory_are_told(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\n",
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/a/memory.max": "600000000\n",
        "sys/fs/cgroup/a/memory.current": "1000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = machine.cpus(tmp_path)
    assert level(found) == "warn"
    assert "limited to 0.5" in found.found
    small = machine.memory(tmp_path)
    assert level(small) == "warn"
    assert "control group" in small.found
    assert level(machine.shared_memory(tmp_path)) == "warn"


@pytest.mark.parametrize(("scope", "wanted"), [("0", "ok"), ("1", "warn"), ("3", "warn"), (None, "ok")])
def test_who_may_copy_between_processes_is_told(tmp_path: Path, scope: str | None, wanted: str) -> None:
    if scope is not None:
        file = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
        file.parent.mkdir(parents=True)
        file.write_text(f"{scope}\n")
    assert level(machine.same_host_copies(tmp_path)) == wanted


def test_an_rdma_device_that_cannot_be_opened_is_bad_and_none_is_a_warning(tmp_path: Path) -> None:
    assert level(machine.rdma(tmp_path, environment={})) == "warn"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert level(machine.rdma(tmp_path, environment={})) == "bad"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    found = machine.rdma(tmp_path, environment={"UCX_TLS": "rc", "HOME": "/"})
    assert (level(found), found.found) == ("ok", "devices: mlx5_0; UCX_TLS=rc")


def test_ports_of_the_data_plane_on_the_network_are_a_warning_unless_devices_are_named() -> None:
    loopback, network = ["127.0.0.1:4000", "[::1]:4000"], ["127.0.0.1:4000", "192.0.2.2:4001"]
    assert level(machine.data_plane(loopback, environment={})) == "ok"
    found = machine.data_plane(network, environment={})
    assert level(found) == "warn"
    assert "192.0.2.2:4001" in found.found
    assert level(machine.data_plane(network, environment={"UCX_NET_DEVICES": "eth1"})) == "ok"


def test_listening_sockets_of_a_process_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as v4, socket.create_server(("::1", 0), family=socket.AF_INET6) as v6:
        wanted = {f"127.0.0.1:{v4.getsockname()[1]}", f"[::1]:{v6.getsockname()[1]}"}
        assert wanted <= set(machine.listening())
        assert wanted <= set(machine.listening(pid=os.getpid()))
    assert not wanted & set(machine.listening())


@pytest.mark.parametrize(
    ("source", "state", "wanted"), [("tsc", 0, "ok"), ("hpet", 0, "warn"), ("tsc", 5, "warn"), (None, 0, "ok")]
)
def test_a_slow_or_wrong_clock_is_told(tmp_path: Path, source: str | None, state: int, wanted: str) -> None:
    if source is not None:
        file = tmp_path / "sys/devices/system/clocksource/clocksource0/current_clocksource"
        file.parent.mkdir(parents=True)
        file.write_text(f"{source}\n")
    assert level(machine.clock(tmp_path, state=state)) == wanted


def test_a_probe_that_hangs_crashes_or_talks_nonsense_is_one_bad_finding() -> None:
    python = [sys.executable, "-c"]
    found = run_probes(
        {
            "crash": [*python, "import os, sys; print('no driver', file=sys.stderr); sys.stderr.flush(); os.abort()"],
            "nonsense": [*python, "print('[1, 2]')"],
            "chatty": [*python, """print('hello'); print('[{"check":"chatty","level":"ok","found":"x"}]')"""],
            "hang": [*python, "import signal; signal.pause()"],
        },
        deadline_s=5.0,
    )
    assert [(finding.check, level(finding)) for finding in found] == [
        ("crash", "bad"),
        ("nonsense", "bad"),
        ("chatty", "ok"),
        ("hang", "bad"),
    ]
    assert "no driver" in found[0].found
    assert "gave no answer" in found[3].found


def test_a_check_for_which_no_time_is_left_is_not_called_bad() -> None:
    python = [sys.executable, "-c"]
    found = run_probes(
        {"hang": [*python, "import signal; signal.pause()"], "later": [*python, "raise AssertionError"]}, deadline_s=0.5
    )
    assert [(finding.check, level(finding)) for finding in found] == [("hang", "bad"), ("later", "warn")]
    assert "not run" in found[1].found and "--deadline-s" in found[1].advice


def test_storage_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "STORAGE_BYTES", 8 << 20)
    (found,) = probe.storage(str(tmp_path))
    assert "writes" in found.found
    assert level(found) in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []
    # The engine would make it: it is no fault that it is missing.
    (missing,) = probe.storage(str(tmp_path / "none" / "below"))
    assert level(missing) in ("ok", "warn")
    assert missing.found.startswith(f"{tmp_path} (in which {tmp_path / 'none' / 'below'} would be made): writes")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (no_directory,) = probe.storage(str(tmp_path / "file" / "none"))
    (open_to_all,) = probe.storage(str(tmp_path / "open"))
    (uri,) = probe.storage("redis://u:PASSWORD@host")
    assert level(no_directory) == level(open_to_all) == level(uri) == "bad"
    assert "written by other users" in open_to_all.found
    assert "PASSWORD" not in repr(uri)
    monkeypatch.setattr(probe, "STORAGE_BYTES", 1 << 60)
    (full,) = probe.storage(str(tmp_path))
    assert level(full) == "bad"


def test_ucx_and_the_loop_are_told() -> None:
    assert "cma" in probe.ucx("")[0].found
    assert level(probe.loop("")[0]) in ("ok", "warn")


def test_probes_are_those_that_are_asked_for() -> None:
    assert set(probe_commands(None)) | {"storage"} == set(probe.PROBES)
    assert probe_commands("/x")["storage"][-2:] == ["storage", "/x"]


@pytest.mark.parametrize(("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")])
def test_bytes_are_written_as_people_read_them(count: int, text: str) -> None:
    assert in_bytes(count) == text


@pytest.mark.nixl
def test_the_command_answers_in_json_with_a_code_that_says_whether_something_is_bad(tmp_path: Path) -> None:
    command = [warm_python.executable(), "-m", "tidekv", "doctor", "--json", "--storage", str(tmp_path / "open")]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert found["storage"]["level"] == "bad"
    assert found["nixl"]["level"] == "ok", found["nixl"]
    assert "UCX" in found["nixl"]["found"]
    assert {"gpu", "ucx", "event loop", "versions"} <= set(found)
    assert "UCX listens on" in found["data plane"]["found"]
