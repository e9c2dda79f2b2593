"""TLS from a configuration: files are checked before anything starts; half a configuration is refused."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.waits import LIMIT_S
from tidekv.engine.config import load
from tidekv.engine.config.check import errors_here
from tidekv.engine.config.sections import TransportSection
from tidekv.engine.config.tls import dial_context, listen_context
from tidekv.states.errors import InvalidConfig

PEM = str(Path(__file__).resolve().parent.parent / "transports" / "localhost.pem")


def test_nothing_given_is_no_tls() -> None:
    assert listen_context(TransportSection()) is None
    assert dial_context(TransportSection()) is None


def test_each_side_gets_its_context() -> None:
    alone = listen_context(TransportSection(tls_certificate=PEM))
    assert alone is not None
    assert alone.verify_mode is ssl.CERT_NONE
    both = TransportSection(tls_certificate=PEM, tls_authority=PEM)
    strict = listen_context(both)
    assert strict is not None
    assert strict.verify_mode is ssl.CERT_REQUIRED
    for section in (TransportSection(tls_authority=PEM), both):
        dialled = dial_context(section)
        assert dialled is not None
        assert dialled.verify_mode is ssl.CERT_REQUIRED
        assert dialled.check_hostname


def test_half_a_configuration_is_refused_and_never_goes_without_tls() -> None:
    with pytest.raises(InvalidConfig, match="needs tls_certificate"):
        listen_context(TransportSection(tls_authority=PEM))
    with pytest.raises(InvalidConfig, match="needs tls_authority"):
        dial_context(TransportSection(tls_certificate=PEM))
    with pytest.raises(InvalidConfig, match="tls_key is given without"):
        TransportSection(tls_key=PEM)


@pytest.mark.parametrize("name", ["tls_certificate", "tls_authority"])
def test_a_file_that_cannot_be_used_is_named_before_anything_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.pem").write_text("")
    for file in (tmp_path / "none.pem", tmp_path / "empty.pem"):
        loaded = load(environment={}, settings=[f"transport.{name}={file}"])
        (error,) = errors_here(loaded)
        assert str(error).startswith(f"transport.{name}: {name} {file} cannot be used")
        assert error.origin == f"--set transport.{name}"
    whole = load(environment={}, settings=[f"transport.tls_certificate={PEM}", f"transport.tls_authority={PEM}"])
    assert list(errors_here(whole)) == []


@pytest.mark.nixl
@pytest.mark.slow
def test_both_sides_work_under_tls_by_configuration(
    tmp_path: Path,
    prefill_command: Callable[[dict[str, str]], AbstractContextManager[tuple[subprocess.Popen[str], str]]],
) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'[transport]\nsecret = "between us"\ntls_certificate = "{PEM}"\ntls_authority = "{PEM}"\n')
    configured = {"TIDEKV_CONFIG": str(file)}
    with prefill_command(configured) as (prefill, address):
        decode = [warm_python.executable(), "-m", "tidekv", "decode", "--prefill", address]
        decode += ["--conversations", "1", "--rounds", "1"]
        served, plain = (
            subprocess.run(
                decode, env={**os.environ, **added}, capture_output=True, text=True, timeout=120, check=False
            )
            for added in (configured, {"TIDEKV_SECRET": "between us"})
        )
        assert served.returncode == 0, served.stdout + served.stderr
        assert plain.returncode == 2, plain.stdout + plain.stderr
        prefill.send_signal(signal.SIGTERM)
        prefill.communicate(timeout=LIMIT_S)
