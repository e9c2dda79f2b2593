"""A copy of SGLang's package in which functions have other names, and what a server on it says at its start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.servers.model import make_model
from benchmarks.servers.plugins import write_entry_points
from benchmarks.sglang_pair.server import STAND_INS, ServerOptions
from benchmarks.sglang_pair.storage import StorageFolder
from benchmarks.sglang_pair.variants import VARIANTS, Place

ROOT: Final = Path(__file__).parents[2]
PLUGIN: Final = "tidekv.engine.integrations.sglang.handover.plugin"
SETTINGS: Final = json.dumps({"dials": ["127.0.0.1:*"], "host": "1MB"})
END_S: Final = 300.0
"""Maximum seconds in which a server that cannot serve ends."""
START: Final = """
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

try:
    print("given out:", get_kv_class(TransferBackend("tidekv"), KVClassType.MANAGER))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
"""What each scheduler of SGLang does first: it loads plugins, and asks for the classes of its transfer backend."""


class CopyOfSglang:
    """A folder with SGLang's package: links to its files, of which `rename` replaces one."""

    def __init__(self, python: Path, folder: Path) -> None:
        """`python`: that of an environment with SGLang."""
        self.python, self._folder = python, folder
        find = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
        found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
        self._original = Path(found.stdout.strip())
        subprocess.run(["cp", "-rs", str(self._original), str(folder / "sglang")], check=True)
        write_entry_points(folder, "tidekv_copy", "sglang.srt.plugins", {"tidekv": f"{PLUGIN}:register"})

    def rename(self, target: str) -> None:
        """Give a function, by its dotted name, another one in its own class."""
        module, owner, name = target.rsplit(".", 2)
        path = Path("sglang", *module.split(".")[1:]).with_suffix(".py")
        text = (self._original.parent / path).read_text()
        before, head, body = text.partition(f"\nclass {owner}")
        changed, count = re.subn(rf"(\n    def ){name}\b", rf"\1{name}_v2", body, count=1)
        assert head and count, f"this SGLang has no {target}"
        self._replace(path, before + head + changed)

    def restore(self, target: str) -> None:
        """Undo `rename`."""
        path = Path("sglang", *target.rsplit(".", 2)[0].split(".")[1:]).with_suffix(".py")
        (self._folder / path).unlink()
        (self._folder / path).symlink_to(self._original.parent / path)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that takes this copy, with the plugin and its settings."""
        path = [str(self._folder), str(STAND_INS), str(ROOT / "src"), str(ROOT)]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SGLANG_PLUGINS": "tidekv",
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TIDEKV_SGLANG": SETTINGS,
        }

    def serve(self, folder: Path) -> tuple[int, str]:
        """Start a decode server, which is expected to end. Returns its exit status, and what it printed."""
        options = ServerOptions(model=make_model(folder), tokens=2048)
        place = Place(
            StorageFolder(folder / "storage"), 2048, 2048, options.page_size, options.shape.kv_bytes_per_token
        )
        server = VARIANTS["tidekv"].server("decode", 0, options=options, folder=folder, place=place)
        environment = server.environment()
        environment["PYTHONPATH"] = os.pathsep.join((str(self._folder), environment["PYTHONPATH"]))
        command = [str(self.python), *server.command()[1:]]
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(END_S)
            finally:
                # Its schedulers are of its group, and outlive it if it is killed.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return status, log.read_text(errors="replace")

    def start(self) -> str:
        """Return what a scheduler's start prints."""
        done = subprocess.run(
            [self.python, "-c", START], env=self.environment(), capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def _replace(self, path: Path, text: str) -> None:
        copy = self._folder / path
        copy.unlink()
        copy.write_text(text)
