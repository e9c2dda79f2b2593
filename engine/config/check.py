"""Checks of a configuration against this machine, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tidekv.engine.config.load import Loaded
from tidekv.engine.config.sizes import parse_memory
from tidekv.engine.config.sources import Mistake
from tidekv.engine.config.tls import check_files
from tidekv.states.errors import InvalidConfig


def mistakes_here(loaded: Loaded) -> Iterator[Mistake]:
    """Yield options that cannot work on this machine or with each other. Blocks; opens and changes nothing."""
    for path, problem in _problems(loaded):
        yield Mistake(loaded.origins[path], f"{path}: {problem}")


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
            yield "cache.l2", "storage needs a host pool: its pages land there before they go to the device"
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
