"""A process of the warm server is like one of Python: what it is given, how it ends, and what its parent does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.waits import LIMIT_S

pytestmark = pytest.mark.slow  # The first one waits for the imports of the server.
WAITS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [warm_python.executable(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **options)  # type: ignore[call-overload,no-any-return]


@contextmanager
def started(code: str, **options: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has printed its id, and that id."""
    command = [warm_python.executable(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:  # type: ignore[call-overload]
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_process_has_torch_its_arguments_folder_environment_input_and_files(tmp_path: Path) -> None:
    code = (
        "import os, sys; print('torch' in sys.modules, __name__, sys.argv, os.getcwd(), os.environ['HERE'], input());"
        "os.write(int(sys.argv[1]), b'passed on'); sys.exit('a word')"
    )
    read, write = os.pipe()
    with os.fdopen(read, "rb") as end:
        done = run(
            "-c", code, str(write), cwd=tmp_path, env={**os.environ, "HERE": "x"}, input="said\n", pass_fds=(write,)
        )
        os.close(write)
        assert end.read() == b"passed on"
    assert done.stdout == f"True __main__ ['-c', '{write}'] {tmp_path} x said\n"
    assert (done.returncode, done.stderr) == (1, "a word\n")


def test_modules_and_files_run_as_the_main_program(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "program.py").write_text("import beside, sys\nif __name__ == '__main__': print(beside.WORD, sys.argv)")
    assert run("program.py", "a", cwd=tmp_path).stdout == "beside ['program.py', 'a']\n"
    assert run("-m", "program", "b", cwd=tmp_path).stdout == f"beside ['{tmp_path}/program.py', 'b']\n"
    refused = run("-P", "-m", "program", cwd=tmp_path)
    assert (refused.returncode, "No module named program" in refused.stderr) == (1, True)


def test_an_error_has_its_traceback_and_exit_code() -> None:
    done = run("-c", "import atexit; atexit.register(print, 'at the end'); 1 / 0")
    assert (done.returncode, done.stdout) == (1, "at the end\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_the_parent_ends_the_process_by_a_signal_and_sees_how_it_ended() -> None:
    with started(WAITS) as (process, _):
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM
    with started(f"import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); {WAITS}") as (process, pid):
        assert pid != process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 7
    with started(WAITS) as (process, pid):
        os.kill(pid, signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_the_process_dies_with_the_program_that_stands_for_it() -> None:
    # The pipe ends when the last process that has it is gone.
    with started(WAITS) as (process, _):
        process.kill()
        assert process.stdout is not None and process.stdout.read() == ""


def test_what_a_process_starts_comes_from_the_server_as_well() -> None:
    inner = "import sys; print('torch' in sys.modules)"
    done = run("-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])")
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("options", "environment"),
    [(["-X", "importtime"], {}), ([], {"PYTHONPATH": "/nowhere"})],
    ids=["an option of Python", "another path"],
)
def test_what_the_interpreter_reads_at_its_start_gets_a_new_one(
    options: list[str], environment: dict[str, str]
) -> None:
    done = run(*options, "-c", "import sys; print('torch' in sys.modules)", env={**os.environ, **environment})
    assert done.stdout == "False\n"


def test_the_server_ends_with_the_run_of_tests() -> None:
    code = "from tests.support import warm_python; print(warm_python.executable())"
    # A run of its own, not a worker of this one.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    folder = Path(done.stdout.strip()).parent
    deadline = time.monotonic() + LIMIT_S
    while folder.exists():
        assert time.monotonic() < deadline, folder
        time.sleep(0.05)
