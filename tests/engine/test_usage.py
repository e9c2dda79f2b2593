"""Errors of the command line: one line in plain words, with the allowed values and the command that helps."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.ports import free_address
from tidekv.engine.cli.main import app
from tidekv.engine.cli.usage import run_app

FOREIGN = re.compile(r" at 0x|Input should|unable to|urlopen|Errno|Traceback|[│╭╰]|\bobject\b")
"""Words of Typer, pydantic and Python that no error has."""

Fail = Callable[..., str]


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Fail:
    """Run a command that must fail; return its error without the prefix and the hint."""

    def run(*words: str, hint: str) -> str:
        code = run_app(app, words)
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.count("\n") == 1, err
        assert not FOREIGN.search(err), err
        assert err.startswith("tidekv: ") and err.endswith(f"; see '{hint} --help'\n"), err
        return err.removeprefix("tidekv: ").partition("; see '")[0]

    return run


def commands(within: Any, path: str = "tidekv") -> Iterator[tuple[str, Any]]:
    yield path, within
    for name, command in getattr(within, "commands", {}).items():
        yield from commands(command, f"{path} {name}")


EVERY = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", EVERY)
def test_an_unknown_option_of_any_command_names_the_known_ones(path: str, fail: Fail) -> None:
    words = path.split()[1:]
    text = fail(*words, "--no-such-thing", hint=path)
    assert text.startswith("there is no option '--no-such-thing'; ")
    assert "--help" in text


@pytest.mark.parametrize("path", [path for path, command in EVERY.items() if hasattr(command, "commands")])
def test_an_unknown_command_names_the_known_ones_nearest_first(path: str, fail: Fail) -> None:
    names = list(EVERY[path].commands)
    last = names[-1]
    text = fail(*path.split()[1:], f"{last}x", hint=path)
    assert text.startswith(f"there is no command '{last}x'; did you mean {last}? allowed: {last}, ")
    assert all(name in text for name in names)


def numbers() -> Iterator[tuple[str, str, str]]:
    for path, command in EVERY.items():
        for parameter in command.params:
            metavar = getattr(getattr(parameter, "type", None), "name", None) or str(parameter.type_descriptor)
            kind = re.search(r"int|float", metavar)
            if kind:
                yield path, parameter.opts[-1], kind[0]


@pytest.mark.parametrize(("path", "option", "kind"), list(numbers()))
def test_a_text_for_a_number_is_refused_in_plain_words(path: str, option: str, kind: str, fail: Fail) -> None:
    words, given = {"int": ("a whole number", [option, "many"]), "float": ("a number", [f"{option}=many"])}[kind]
    text = fail(*path.split()[1:], *given, *("anything",) * arguments_of(path), hint=path)
    assert re.fullmatch(rf"{option} must be {words}\b.*, not 'many'", text), text


def arguments_of(path: str) -> int:
    return sum(parameter.param_type_name == "argument" for parameter in EVERY[path].params)


@pytest.mark.parametrize("path", [path for path in EVERY if arguments_of(path)])
def test_a_missing_argument_is_named_with_its_meaning(path: str, fail: Fail) -> None:
    text = fail(*path.split()[1:], hint=path)
    assert re.match(r"[A-Z_]+ is missing: \w", text), text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("doctor --deadline-s 0", "--deadline-s must be a number, 1.0 or more, not '0'"),
        ("simulate --ranks 9", "--ranks must be a whole number from 1 to 8, not '9'"),
        ("run --compare=1", "--compare takes no value"),
        ("timeline --html", "--html needs a value"),
        ("run --kind chatt", "--kind must be chat or agents, not 'chatt'; did you mean chat?"),
        ("simulate --faults rule_rais", "there is no fault 'rule_rais'; did you mean rule_raises?"),
        ("top metrics", "ADDRESS must be host:port such as 127.0.0.1:7000 or [::1]:7000, port 1 to 65535, not 'met"),
        ("replay /nowhere/run.journal", "there is no journal '/nowhere/run.journal'"),
        ("run --storage fil:/tmp", "there is no storage engine 'fil'; did you mean file? allowed: file, memory, "),
        ("run --storage memory:?capasity=1GB", "there is no option 'capasity'; did you mean capacity? allowed: cap"),
        ("run --trace /nowhere", "trace /nowhere cannot be read: No such file or directory"),
        ("prefill --listen 127.0.0.1", "prefill.listen must be host:port such as 127.0.0.1:7000"),
        ("prefill --set transport.secret_file=/nowhere", "secret_file: /nowhere cannot be read: No such file or dir"),
        ("prefill --secret hush", "--secret"),
        ("decode --set transport.secret=hush", "can be read by every user of the machine"),
        ("doctor --storage redis://u:hush@host", "--storage takes a directory, not an address of 'redis'"),
        ("config show --config /nowhere/a.toml", "file /nowhere/a.toml cannot be read: No such file or directory"),
        ("config show --set cache.l3=1", "did you mean cache.l2? (--set cache.l3)"),
        ("config show --set other.l3=1", "allowed: cache.…, storage.…, transport.…"),
    ],
)  # fmt: skip
def test_what_a_command_refuses_is_one_line(words: str, text: str, fail: Fail) -> None:
    command = [word for word in words.split() if f"tidekv {word}" in EVERY or f"tidekv config {word}" in EVERY]
    refusal = fail(*words.split(), hint=" ".join(["tidekv", *command]))
    assert text in refusal
    assert "hush" not in refusal


def test_without_a_command_the_known_ones_are_named(fail: Fail) -> None:
    assert fail("-v", hint="tidekv").startswith("no command is given; allowed: run, prefill, decode, ")


def test_why_there_are_no_metrics_is_said_in_plain_words(fail: Fail) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    address = free_address()
    text = fail("top", address, hint="tidekv top")
    assert text == (
        f"no engine answers at '{address}': nothing listens there; set engine.metrics.listen, or "
        "prefill.metrics_listen, to this address"
    )
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            text = fail("top", f"127.0.0.1:{server.server_port}", hint="tidekv top")
        finally:
            server.shutdown()
            thread.join()
    assert ": the server there answers 404, Not Found; " in text


def test_a_wrong_value_of_a_configuration_file_is_named_with_its_line(fail: Fail, tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('[engine]\n\n# The policy.\neviction = "lruu"\n')
    text = fail("config", "show", "--config", str(file), hint="tidekv config show")
    assert text.endswith(f"not 'lruu'; did you mean lru? ({file}:4)")
    assert text.startswith("the configuration cannot be used: engine.eviction must be ")
