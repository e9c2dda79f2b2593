"""When UCX's RDMA module is left out: where no RDMA device is used, unless the user has set the modules."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tidekv.transports.nixl import rdma_module

LOOPBACK = {"engine_config": "NET_DEVICES=lo"}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a machine with one RDMA device."""
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    return tmp_path


def modules(options: dict[str, str], environment: dict[str, str], root: Path) -> str | None:
    rdma_module.leave_out_unused(options, environment, root=root)
    return environment.get("UCX_MODULES")


def test_the_module_is_left_out_without_a_device(tmp_path: Path) -> None:
    assert modules({}, {}, tmp_path) == "^ib"
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    assert modules({}, {}, tmp_path) == "^ib"


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (LOOPBACK, {}),
        ({"device_list": "eth0"}, {}),
        ({}, {"UCX_NET_DEVICES": "eth0,eth1"}),
        ({}, {"UCX_TLS": "tcp"}),
        ({}, {"UCX_TLS": "tcp,sm,self"}),
        ({}, {"UCX_TLS": "^ib"}),
    ],
)
def test_the_module_is_left_out_where_loopback_or_tcp_is_chosen(
    options: dict[str, str], environment: dict[str, str], machine: Path
) -> None:
    assert modules(options, environment, machine) == "^ib"


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({}, {}),
        ({"device_list": "eth0, mlx5_0"}, {}),
        ({"engine_config": "NET_DEVICES=eth0,mlx5_0:1"}, {}),
        (LOOPBACK, {"UCX_NET_DEVICES": "mlx5_0:1"}),
        (LOOPBACK, {"UCX_NET_DEVICES": "all"}),
        ({}, {"UCX_TLS": "rc_x,tcp"}),
        ({}, {"UCX_TLS": "all"}),
        ({}, {"UCX_TLS": "^sm"}),
    ],
)
def test_the_module_stays_where_a_device_may_be_used(
    options: dict[str, str], environment: dict[str, str], machine: Path
) -> None:
    assert modules(options, environment, machine) is None


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    assert modules({}, {"UCX_MODULES": "all"}, tmp_path) == "all"


def test_a_later_transport_that_may_use_rdma_is_told_that_it_cannot(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment: dict[str, str] = {}
    with caplog.at_level(logging.WARNING):
        modules(LOOPBACK, environment, machine)
        assert not caplog.records
        modules({}, environment, machine)
    assert "UCX runs without RDMA" in caplog.text
    assert environment == {"UCX_MODULES": "^ib"}
