"""Checks of a configuration against this machine, before anything starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tidekv.engine.config.load import Loaded
from tidekv.engine.config.sections import Configuration
from tidekv.engine.config.sizes import parse_memory
from tidekv.engine.config.sources import OptionError
from tidekv.engine.config.tls import check_files
from tidekv.states.errors import InvalidConfig


def errors_here(loaded: Loaded) -> Iterator[OptionError]:
    """Yield options that cannot work on this machine or with each other. Blocks; opens and changes nothing."""
    for path, problem in _problems(loaded):
        yield OptionError(loaded.origins[path], f"{path}: {problem}")


def _problems(loaded: Loaded) -> Iterator[tuple[str, str]]:
    config = loaded.configuration
    if config.storage.uri:
        # Imported late: storage engines import numpy, which a configuration without storage does not need.
        from tidekv.backends.storage.uri import open_storage

        try:
            open_storage(config.storage.uri, config.storage.options)
        except InvalidConfig as error:
            yield "storage.uri", str(error)
        size = parse_memory(config.cache.l2, what="cache.l2")
        if size.kind != "auto" and size.amount == 0:
            yield "cache.l2", "storage needs a host pool: its pages are read into it before they go to the device"
    elif config.storage.options:
        yield "storage.options", "there are options, but storage.uri is empty"
    try:
        config.transport.read_secret()
    except InvalidConfig as error:
        yield "transport.secret_file", str(error).removeprefix("transport.secret_file ")
    try:
        check_files(config.transport)
    except InvalidConfig as error:
        yield f"transport.{str(error).partition(' ')[0]}", str(error)
    if _is_open_to_the_network(config):
        yield (
            "prefill.listen",
            f"{config.prefill.listen} is on the network, and there is no secret: every program that reaches it could"
            " read and write this worker's memory, so prefill refuses to start. Set transport.secret or secret_file,"
            " require client certificates by transport.tls_authority, listen on 127.0.0.1, or set"
            " transport.allow_no_secret",
        )
    engine = config.engine
    if engine.journal.path is not None:
        path = Path(engine.journal.path)
        directory = path if path.is_dir() else path.parent
        if not directory.is_dir():
            yield "engine.journal.path", f"there is no directory {directory}"
        elif not os.access(directory, os.W_OK):
            yield "engine.journal.path", f"this user may not write in {directory}"
    if engine.kv_events.endpoint is not None and find_spec("zmq") is None:
        yield "engine.kv_events.endpoint", "KV events need pyzmq: pip install 'tidekv[events]'"


def _is_open_to_the_network(config: Configuration) -> bool:
    """Whether prefill would listen on an address of the network for peers that need neither secret nor certificate."""
    transport = config.transport
    if transport.secret or transport.secret_file or transport.tls_authority or transport.allow_no_secret:
        return False
    # Imported late, as storage engines are.
    from tidekv.transports.control.addresses import is_loopback

    return not asyncio.run(is_loopback(config.prefill.listen))
