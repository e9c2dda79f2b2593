"""Names in docs/ (commands, options, metrics, errors, messages) exist, all of them are documented, and snippets run."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tidekv
from benchmarks.__main__ import app as bench
from tests.support import warm_python
from tidekv.engine.cli.main import app
from tidekv.engine.config import load
from tidekv.engine.config.engine_config import EngineConfig, JournalOptions, StorageOptions
from tidekv.engine.config.options import all_options, section_types
from tidekv.engine.metrics.collector import MetricsCollector
from tidekv.states import errors
from tidekv.states.ranks import vote_items
from tidekv.states.request import guards_and_actions
from tidekv.states.request.table import diagram
from tidekv.transports import wire
from tools.metrics_page import prefill_families

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
GROUP: Any = typer.main.get_command(app)  # Any: typer's own click or the installed one, by its version.


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Code within lines."""
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", without_blocks)


def first_cells(text: str) -> list[str]:
    """The code in the first column of tables."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def commands(group: Any = GROUP, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command without subcommands, as words."""
    if not hasattr(group, "commands"):
        yield before
        return
    for name, command in group.commands.items():
        yield from commands(command, (*before, name))


def calls(text: str) -> Iterator[list[str]]:
    """Every `tidekv …` in code, as words."""
    lines = [line for block in blocks(text, r"(?:|sh|bash|console)") for line in block.splitlines()]
    for code in (*lines, *spans(text)):
        match = re.search(r"(?:^|dev\.py |&& )tidekv ((?:[a-z-]).*)$", code)
        if match:
            yield shlex.split(match[1], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in calls(page.read_text()):
        command = GROUP
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page.name}: there is no command {words[0]} of {command.name}"
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in known | {"--help"}, f"{page.name}: {command.name} has no {word}"


def test_every_command_is_listed_and_no_other() -> None:
    assert {tuple(cell.split()[1:]) for cell in first_cells(text_of("commands.md"))} == set(commands())
    benchmarks = typer.main.get_command(bench)
    listed = (ROOT / "benchmarks" / "README.md").read_text().partition("## `python3 dev.py bench NAME`")[2]
    assert {tuple(cell.split()) for cell in first_cells(listed.partition("\n## ")[0])} == set(commands(benchmarks))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_the_configuration_exist(page: Path) -> None:
    text = page.read_text()
    sections = "|".join(section_types())
    for code in spans(text):
        match = re.fullmatch(rf"((?:{sections})\.\w+)(?: = .*)?", code)
        assert match is None or match[1] in {*all_options(), *section_types()}, f"{page.name}: {code}"
    for name in re.findall(r"EngineConfig\((\w+)=", text):
        assert name in EngineConfig.__struct_fields__, f"{page.name}: {name}"
    variables = {option.variable for option in all_options().values()} | {
        "TIDEKV_CONFIG",
        "TIDEKV_SECRET",
        "TIDEKV_SGLANG",
    }
    for code in spans(text):
        if re.fullmatch(r"TIDEKV_[A-Z0-9_]+", code):
            assert code in variables or code == "TIDEKV_", f"{page.name}: {code}"


def families() -> set[str]:
    """Names of all metrics: those of decode from the collector's source, since some exist only in a running engine."""
    source = Path(sys.modules[MetricsCollector.__module__].__file__ or "").read_text()
    return {*re.findall(r'"(tidekv_[a-z0-9_]+)"', source), *(family.name for family in prefill_families())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_exist(page: Path) -> None:
    for name in re.findall(r"`(tidekv_[a-z0-9_]+)", page.read_text()):
        family = re.sub(r"_(total|bucket|sum|count)$", "", name)
        assert family in families() or name in families(), f"{page.name}: {name}"


def test_every_metric_is_documented() -> None:
    everywhere = "\n".join(page.read_text() for page in PAGES)
    assert not [name for name in families() if name not in everywhere]


def test_every_error_is_explained_and_no_other() -> None:
    (table, *causes) = text_of("errors.md").split("## Causes")
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TidekvError)
    }
    assert set(first_cells(table)) == kinds
    for row in re.findall(r"^\| `.*$", "".join((table, *causes)), re.MULTILINE):
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_every_cause_of_a_failed_request_is_explained() -> None:
    explained = set(first_cells(text_of("errors.md").split("## Causes")[1]))
    given = set(re.findall(r'_fail\(request, "([^"]+)"', inspect.getsource(guards_and_actions)))
    assert len(given) == 3
    for source in (ROOT / "engine").rglob("*.py"):
        for call in re.findall(r"AbortRequested\((.*?)\n? *\)\n", source.read_text(), re.DOTALL):
            given |= set(re.findall(r'cause="([^"]+)"', call))
    for source in (ROOT / "states" / "ranks").glob("*.py"):
        given |= set(re.findall(r'Refusal\([^,]+, "([^"]+)"', source.read_text()))
    # A lost rank ends all requests with RankLost.
    assert given | set(vote_items.CAUSES) - {vote_items.LOST_RANK} == explained


def test_every_cause_of_prefill_is_explained_and_whether_it_may_be_retried() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| [^|]+ \| (yes|no) \|", text_of("errors.md").split("## Causes")[2], re.MULTILINE
    )
    assert dict(rows) == {cause.value: "yes" if cause.retryable else "no" for cause in errors.PrefillCause}
    assert len(rows) == len(errors.PrefillCause)


def test_every_message_of_the_protocol_is_described_and_no_other() -> None:
    kinds = {
        name
        for name, value in vars(wire).items()
        if isinstance(value, type) and issubclass(value, wire.Message) and value is not wire.Message
    }
    assert set(first_cells(text_of("protocol.md"))) == kinds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_is_split_by_an_empty_line(page: Path) -> None:
    # What follows the empty line would be text, not rows.
    lines = page.read_text().splitlines()
    around = zip(lines, lines[1:], lines[2:], [*lines[3:], ""], strict=False)
    split = [
        row for before, empty, row, after in around if before[:1] == row[:1] == "|" and not empty and after[:3] != "|--"
    ]
    assert split == []


def test_the_diagram_of_states_is_the_tables() -> None:
    assert diagram() in blocks(text_of("how-it-works.md"), "mermaid")


@pytest.mark.nixl
def test_the_program_of_the_quick_start_prints_what_the_page_shows(tmp_path: Path) -> None:
    text = text_of("quickstart.md")
    program = blocks(text, "python")[0]
    (shown,) = blocks(text, "text")
    (tmp_path / "both.py").write_text(program)
    done = subprocess.run(
        [warm_python.executable(), "both.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_the_file_and_the_snippet_of_the_configuration_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of("configuration.md")
    (example,) = blocks(text, "toml")
    (direct, program) = blocks(text, "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.toml").write_text(example)
    names: dict[str, object] = {}
    exec(compile(direct, "configuration.md", "exec"), names)
    assert names["config"] == EngineConfig(
        model="my-model",
        storage=StorageOptions(prefetch="best_effort"),
        journal=JournalOptions(path="run.journal"),
    )
    exec(compile(program, "configuration.md", "exec"), names)
    assert names["config"] == load("worker.toml").configuration.engine
    assert load("worker.toml").configuration.cache.l2 == "2x"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_compile(page: Path) -> None:
    for number, program in enumerate(blocks(page.read_text(), "python")):
        compile(program, f"{page.name}, snippet {number}", "exec", flags=0x2000)  # Await may stand alone.


def test_every_public_name_is_in_the_reference() -> None:
    text = text_of("api.md")
    listed = {name.rsplit(".", 1)[-1] for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    errors = {name for name in tidekv.__all__ if f"`{name}`" in text_of("errors.md")}
    assert set(tidekv.__all__) - listed - errors == {"__version__"}
    # The loader of configuration files and the tools for tests are reached by their modules.
    assert listed - set(tidekv.__all__) == {"load", "testing"}


def test_pages_that_are_listed_exist() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert listed[0] == "index.md"
    assert not [name for name in listed if not (ROOT / "docs" / name).is_file()]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    folders = "states|backends|transports|engine|benchmarks|tools|tests|examples|deploy|src"
    for name in re.findall(rf"`((?:{folders})/[\w/.]*)(?:::\w+)?`", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"
    for module in re.findall(r"python -m ((?:tidekv|benchmarks|tools|tests|examples)[.\w]+)", text):
        path = ROOT / module.removeprefix("tidekv.").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.name}: {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_tables_are_whole(page: Path) -> None:
    """Each has the cells of its header: a row that goes on in the next line becomes two."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    cells = 0
    for line in text.splitlines():
        columns = re.sub(r"`[^`]*`", "", line).replace("\\|", "").count("|") - 1
        if not line.startswith("|"):
            assert not line.endswith("|"), line
            cells = 0
            continue
        cells = cells or columns
        assert line.endswith("|") and columns == cells, line
