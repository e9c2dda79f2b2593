"""The arrows between the folders and between their rooms, held by reading the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("states", "backends", "transports", "engine")
MAY_IMPORT = {
    "states": {"states"},
    "backends": {"backends", "states"},
    "transports": {"transports", "states"},
    "engine": {"engine", "states", "backends", "transports"},
}
# What users import or start by name; all else in the package must be reachable from here.
ENTRY_POINTS = (
    "tidekv",
    "tidekv.__main__",
    "tidekv.testing",
    "tidekv.engine.integrations.sglang.hicache",
    "tidekv.engine.integrations.sglang.handover.plugin",
    "tidekv.engine.integrations.vllm.dynamo",
    "tidekv.engine.integrations.vllm.connector",
)
IMPURE = {"asyncio", "torch", "threading", "time", "random", "os", "logging", "structlog"}


def files_of(folder: str) -> list[Path]:
    """The modules of a folder. None would mean that this test looks where nothing is any more."""
    found = sorted((ROOT / folder).rglob("*.py"))
    assert len(found) > 5, folder
    return found


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """The nodes of a module; most tests look at the same modules."""
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """Free them behind the last test, as they are many."""
    yield
    nodes_of.cache_clear()


def imports_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno} hides where it leads"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            # A name that is made at run time cannot be checked.
            found.add(str(ast.literal_eval(node.args[0])))
    return found


def reached(modules: set[str]) -> set[str]:
    """The folders that these imports lead to; a public name of the package leads to the engine."""
    inside = {module.split(".")[1] for module in modules if module.startswith("tidekv.")}
    under_wrong_name = {module.split(".")[0] for module in modules} & set(FOLDERS)
    assert not under_wrong_name, f"{under_wrong_name} exist twice if they are imported without tidekv"
    return {name if name in FOLDERS else "engine" for name in inside}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_imports_only_what_it_may(folder: str) -> None:
    for path in files_of(folder):
        assert reached(imports_of(path.read_text())) <= MAY_IMPORT[folder], path


def test_states_import_nothing_that_acts() -> None:
    # The one exception: transitions logs each trigger at DEBUG, which the table's file silences once.
    for path in files_of("states"):
        found = {module.split(".")[0] for module in imports_of(path.read_text())} & IMPURE
        assert not found, f"{path} imports {found}"


@pytest.mark.parametrize(
    ("line", "leads_to"),
    [
        ("import tidekv.engine.decode.driver", {"engine"}),
        ("import tidekv.engine.decode.driver as states", {"engine"}),
        ("from tidekv import engine", {"engine"}),
        ("from tidekv import DecodeEngine", {"engine"}),
        ("from tidekv.backends import keys", {"backends"}),
        ("def late():\n    from tidekv.transports.wire import Hello", {"transports"}),
        ("importlib.import_module('tidekv.engine.decode.driver')", {"engine"}),
        ("import asyncio, tidekv", set()),
    ],
)
def test_an_import_is_seen_in_each_of_its_forms(line: str, leads_to: set[str]) -> None:
    assert reached(imports_of(line)) == leads_to


@pytest.mark.parametrize("line", ["from ..engine import driver", "from .. import engine", "import states.core"])
def test_an_import_that_hides_where_it_leads_is_refused(line: str) -> None:
    with pytest.raises(AssertionError, match=r"hides where it leads|exist twice"):
        reached(imports_of(line))


@pytest.mark.parametrize("folder", ["states", "backends", "transports"])
def test_a_folder_loads_only_what_it_may(folder: str) -> None:
    # The imports, checked from the other side: an interpreter that has loaded every module of the folder.
    modules = [
        ".".join(("tidekv", *path.relative_to(ROOT).with_suffix("").parts))
        for path in files_of(folder)
        if path.name != "__init__.py"
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: assert not str(error.name).startswith('tidekv'), error\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('tidekv.')})\n"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert set(loaded.stdout.split()) - {"states"} == MAY_IMPORT[folder] - {"states"}


def names_in(source: str) -> set[str]:
    """Every module that a source may load: imports, and strings that are dotted names, as lazy imports have them."""
    found: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tidekv."):
            found.add(node.value)
    return found


def loaded_from(roots: tuple[str, ...], sources: dict[str, str]) -> set[str]:
    """The modules that are loaded, directly or not, by these; a module loads the packages that it is in."""
    loaded: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in sources and name not in loaded:
            loaded.add(name)
            waiting += [name.rpartition(".")[0], *names_in(sources[name])]
    return loaded


def test_every_module_of_the_package_serves_users() -> None:
    """A worker that only tests start belongs into tests/support, a measurement into benchmarks."""
    package = ROOT / "src" / "tidekv"
    files = [*package.glob("*.py"), *(file for folder in FOLDERS for file in files_of(folder))]
    sources = {}
    for file in files:
        parts = file.relative_to(package if file.is_relative_to(package) else ROOT).with_suffix("").parts
        sources[".".join(("tidekv", *(part for part in parts if part != "__init__")))] = file.read_text()
    assert set(ENTRY_POINTS) <= set(sources)
    assert set(sources) - loaded_from(ENTRY_POINTS, sources) == set()


def test_a_module_that_nothing_loads_is_found() -> None:
    sources = {
        "tidekv": "LATER = {'Engine': 'tidekv.engine.decode'}",
        "tidekv.engine": "",
        "tidekv.engine.decode": "from tidekv.engine import driver",
        "tidekv.engine.driver": "import asyncio",
        "tidekv.engine.worker": "from tidekv.engine import driver",
    }
    assert set(sources) - loaded_from(("tidekv",), sources) == {"tidekv.engine.worker"}


def test_package_is_small_files_and_links() -> None:
    package = ROOT / "src" / "tidekv"
    names = {entry.name for entry in package.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "__main__.py", "testing.py", "py.typed", *FOLDERS}
    for folder in FOLDERS:
        assert (package / folder).is_symlink()
        assert (package / folder).resolve() == ROOT / folder


def test_no_extension_module_takes_the_place_of_a_source() -> None:
    # Python imports an extension module in preference to the source beside it, however old the former is.
    suffixes = tuple(EXTENSION_SUFFIXES)
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.name.endswith(suffixes)]
    assert not found, "tidekv runs from its source: delete these files"


def test_no_module_is_over_800_lines() -> None:
    long = {
        str(path): count
        for folder in FOLDERS
        for path in files_of(folder)
        if (count := len(path.read_text().splitlines())) > 800
    }
    assert not long


# --- Cycles ---


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """By module, the modules among `sources` that it imports anywhere: in functions and for types only, too.

    The import of a package is not an import of the modules that its `__init__` imports.
    """
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        found: set[str] = set()
        for node in nodes_of(source):
            if isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & sources.keys() or {str(node.module)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = (found & sources.keys()) - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, directly or by way of others (strongly connected components, by Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            component = path[path.index(name) :]
            del path[path.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def sources_in(*folders: str) -> dict[str, str]:
    """The source of each module of these folders, by the name that it is imported under."""
    sources = {}
    for folder in folders:
        for path in files_of(folder):
            inside = ("tidekv",) if folder in FOLDERS else ()
            parts = (*inside, *path.relative_to(ROOT).with_suffix("").parts)
            sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return sources


def test_no_modules_import_one_another_not_even_for_types() -> None:
    assert cycles(import_graph(sources_in(*FOLDERS))) == []


def test_a_cycle_by_way_of_a_type_or_a_function_is_found() -> None:
    sources = {
        "a": "def late():\n    from b import thing",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import c",
        "c": "import a\nimport d",
        "d": "",
    }
    assert cycles(import_graph(sources)) == [["a", "b", "c"]]
    assert cycles(import_graph({**sources, "c": "import d"})) == []


# --- Floors ---

PROGRAMS = "*"
"""A floor for the rooms that `FLOORS` does not name: programs that no other room imports."""
FLOORS = {
    "states": (
        "errors rollback types",
        "validation pages",
        "component_specs storage_policy",
        "settings events",
        "prefix",
        "commands",
        "records",
        "raises",
        "core_state",
        "storage",
        "components handover",
        "backup hints loads",
        "request",
        "inspect",
        "core",
        "ranks",
    ),
    "backends": (
        "base completions keys layout memory",
        "checksums page_layout storage",
        "device host",
        "component_pools copies",
    ),
    "transports": (
        "blocking frames log",
        "aux_values tasks",
        "wire",
        "base process",
        "loopback slices",
        "components staging",
        "control local_rank",
        "decode nixl prefill ranks",
    ),
    "engine": (
        "config log poller ranks staging stored_layouts watching",
        "converted_storage http_server journal kv_events shared_storage",
        "trace",
        "metrics",
        "watchdog",
        "decode",
        "opentelemetry prompts",
        "prefill",
        "doctor synthetic thread",
        "cli integrations",
    ),
    "tools": (
        "browser environment",
        PROGRAMS,
    ),
    "benchmarks": (
        "collector engine_rig engine_sampler measurements nixl_child page_cache pairs peers plots ports published "
        "storage_baselines target_table throttled",
        "engine figures peer_trees restore_stages servers storage_floor transfer_pairs",
        "restore_tiers transfer",
        PROGRAMS,
    ),
}
"""The rooms of each package, from the ground up: its folders and the modules beside them. A room imports only rooms of
the floors below its own, for types and in functions too; those of one floor do not know one another.
"""
PACKAGES = ("simulation", "demo", "tools", "benchmarks")
"""What is beside the package, in the same order."""


def room_of(module: str, package: str) -> str:
    """The room of a module of the package; empty for the package itself and for modules of another one."""
    parts = module.removeprefix("tidekv.").split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else ""


def arrows_not_downwards(package: str, floors: tuple[str, ...], sources: dict[str, str]) -> list[str]:
    """The imports that lead to a room of the same floor or of one above, and the rooms that have no floor."""
    height = {room: number for number, floor in enumerate(floors) for room in floor.split()}
    found = []
    for module, imported in sorted(import_graph(sources).items()):
        room = room_of(module, package)
        if not room:
            continue
        if room not in height and PROGRAMS not in height:
            found.append(f"{room} has no floor")
            continue
        for other in sorted(imported):
            to = room_of(other, package)
            if to and to != room and height.get(to, len(floors)) >= height.get(room, len(floors) - 1):
                found.append(f"{module} imports {other}: {to} is not below {room}")
    return found


@pytest.mark.parametrize("package", FLOORS)
def test_each_room_imports_only_rooms_below_it(package: str) -> None:
    sources = sources_in(package)
    assert arrows_not_downwards(package, FLOORS[package], sources) == []
    rooms = {room_of(module, package) for module in sources}
    named = {room for floor in FLOORS[package] for room in floor.split()} - {PROGRAMS}
    assert named <= rooms, "FLOORS names rooms that are gone"


def test_what_is_beside_the_package_imports_only_what_is_before_it() -> None:
    for number, folder in enumerate(PACKAGES):
        above = set(PACKAGES[number + 1 :])
        for path in files_of(folder):
            found = {module.split(".")[0] for module in names_in(path.read_text())} & above
            assert not found, f"{path} imports {found}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from tidekv.states.core import Core", "tidekv.states.records imports tidekv.states.core: core is not below"),
        ("def late():\n    import tidekv.states.storage.admission", "storage is not below records"),
        ("if TYPE_CHECKING:\n    from tidekv.states.storage.admission import Any", "storage is not below records"),
        ("from tidekv.states import other", "other is not below records"),
    ],
)
def test_an_arrow_upwards_is_named(line: str, said: str) -> None:
    floors = ("types", "records other", "storage", "core")
    rooms = {f"tidekv.states.{name}": "" for name in ("types", "other", "storage.admission", "core")}
    (found,) = arrows_not_downwards("states", floors, {**rooms, "tidekv.states.records": line})
    assert said in found
    below = "from tidekv.states import types\nfrom tidekv.engine.log import engine_log"
    assert arrows_not_downwards("states", floors, {**rooms, "tidekv.states.records": below}) == []
    assert arrows_not_downwards("states", floors, {"tidekv.states.cellar.stairs": ""}) == ["cellar has no floor"]


def test_programs_import_what_is_named_and_not_one_another() -> None:
    floors = ("rig", PROGRAMS)
    sources = {"tools.rig": "", "tools.first": "from tools import rig", "tools.second": "import tools.first"}
    assert arrows_not_downwards("tools", floors, sources) == [
        "tools.second imports tools.first: first is not below second"
    ]


# --- States ---

MAY_COMPARE_STATES = {"table.py", "machine.py", "request.py", "guards_and_actions.py"}


def state_comparisons(source: str) -> list[int]:
    """Lines that compare the state of a request, or name one of the states."""
    lines = []
    for node in nodes_of(source):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(isinstance(side, ast.Attribute) and side.attr == "state" for side in sides):
                lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "State":
            lines.append(node.lineno)
    return lines


def test_states_are_compared_in_the_package_of_the_table_only() -> None:
    comparing = {path.name: lines for path in files_of("states") if (lines := state_comparisons(path.read_text()))}
    assert set(comparing) - MAY_COMPARE_STATES == set(), comparing


@pytest.mark.parametrize(
    "line",
    ["if it.state is READY: pass", "ok = it.state in (a, b)", "here = State.READY", "x = a == it.state"],
)
def test_a_comparison_of_states_is_found_in_each_of_its_forms(line: str) -> None:
    assert state_comparisons(line) == [1]


# --- Owners ---

OWNERS = {
    "tidekv.states.records.ahead": ("Ahead", "AheadRun", "ComponentAhead", "LookAheadRead"),
    "tidekv.states.records.reads": ("ComponentFetch", "Read"),
    "tidekv.states.records.component_plan": ("ComponentPlan",),
    "tidekv.states.records.request": ("Load", "Request", "RequestComponents", "RoomRecord"),
    "tidekv.states.records.request_parts": (
        "Admission",
        "Attempts",
        "EarlyRecord",
        "Ending",
        "Fallbacks",
        "Holdings",
        "RecomputeRecord",
        "Sources",
        "StorageAnswer",
    ),
    "tidekv.states.records.span": ("Span",),
    "tidekv.states.core_state": ("CoreState",),
}
"""Records by module. A field of them is assigned in that module only: rules call the method that says what happened."""


def targets_in(nodes: Iterable[ast.AST]) -> list[ast.Attribute]:
    """The attributes that are assigned, deleted, or assigned an item."""
    found: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.Assign | ast.Delete):
            for target in node.targets:
                found += target.elts if isinstance(target, ast.Tuple) else [target]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found.append(node.target)
    plain = [target.value if isinstance(target, ast.Subscript) else target for target in found]
    return [target for target in plain if isinstance(target, ast.Attribute)]


def last_name(node: ast.AST | None) -> str:
    """`request` of `request`, `held` of `request.held`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def fields_of(kind: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to itself."""
    return {target.attr for target in targets_in(ast.walk(kind)) if last_name(target.value) == "self"}


class Names(NamedTuple):
    """What a module says about names of variables and fields."""

    annotated: list[tuple[str, set[str]]]
    """With the classes of the annotation."""
    made: list[tuple[str, str]]
    """With the class, or function, that is called."""
    copied: list[tuple[str, str]]
    """With the name of the value."""
    targets: list[ast.Attribute]


def names_of(source: str) -> Names:
    """Read a module once."""
    found = Names([], [], [], targets_in(nodes_of(source)))
    for node in nodes_of(source):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else last_name(node.target)
            found.annotated.append((name, {last_name(part) for part in ast.walk(node.annotation)}))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(node.value, ast.Call):
                    found.made.append((last_name(target), last_name(node.value.func)))
                else:
                    found.copied.append((last_name(target), last_name(node.value)))
    return found


def holders_of(name: str, modules: Iterable[Names]) -> set[str]:
    """The names of variables and fields that are annotated with this class, made by it, or assigned one of the two."""
    modules = list(modules)
    names = {to for module in modules for to, classes in module.annotated if name in classes}
    names |= {to for module in modules for to, kind in module.made if kind == name}
    return names | {to for module in modules for to, value in module.copied if value in names} - {""}


def foreign_assignments(owners: dict[str, tuple[str, ...]], sources: dict[str, str]) -> list[str]:
    """Where a field of a record is assigned outside of the module of the record."""
    modules = {module: names_of(source) for module, source in sources.items()}
    found = []
    for owner, names in owners.items():
        kinds = {node.name: node for node in nodes_of(sources[owner]) if isinstance(node, ast.ClassDef)}
        for name in names:
            fields, holders = fields_of(kinds[name]), holders_of(name, modules.values())
            found += [
                f"{module}:{target.lineno} assigns {name}.{target.attr}"
                for module, said in modules.items()
                if module != owner
                for target in said.targets
                if target.attr in fields and last_name(target.value) in holders
            ]
    return found


def test_each_field_of_a_record_is_assigned_in_one_module() -> None:
    assert foreign_assignments(OWNERS, sources_in("states")) == []
    elsewhere = {owner: names for owner, names in OWNERS.items() if "CoreState" not in names}
    sources = {**sources_in("engine"), **{owner: sources_in("states")[owner] for owner in elsewhere}}
    assert foreign_assignments(elsewhere, sources) == []


@pytest.mark.parametrize(
    "line",
    [
        "def rule(request: Request): request.held.own = ()",
        "def rule(request: Request): request.held.own, other = (), 1",
        "def rule(request: Request): request.state += 1",
        "def rule(request: Request):\n    held = request.held\n    held.own[0] = 1",
        "def rule(request: Request): del request.held.own",
        "class Rules:\n    def __init__(self, request: Request):\n        self._request = request\n"
        "    def rule(self):\n        self._request.state = 1",
    ],
)
def test_a_field_that_is_assigned_elsewhere_is_found(line: str) -> None:
    records = (
        "class Held:\n    def __init__(self):\n        self.own = ()\n"
        "class Request:\n    def __init__(self):\n        self.held = Held()\n        self.state = 0"
    )
    assert len(foreign_assignments({"records": ("Held", "Request")}, {"records": records, "rules": line})) == 1
    other = "def rule(load: Load, request: Request):\n    load.own = request.held.own"
    assert foreign_assignments({"records": ("Held", "Request")}, {"records": records, "rules": other}) == []


# --- Names and constructors ---

PARAMETERS_MAX = 7
"""Parameters of an `__init__` that is written out. Parts that always travel together become a value: a record, whose
fields are what it is, so that records (dataclasses, named tuples, structs) may have more.
"""


def classes_in(sources: dict[str, str]) -> dict[str, list[ast.ClassDef]]:
    """By name, the classes of these modules, nested ones included."""
    found: dict[str, list[ast.ClassDef]] = {}
    for source in sources.values():
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def public_classes(sources: dict[str, str]) -> dict[str, list[ast.ClassDef]]:
    """By name, the public classes of these modules."""
    return {name: kinds for name, kinds in classes_in(sources).items() if not name.startswith("_")}


def parameters_of(kind: ast.ClassDef) -> int:
    """The number of parameters of a class's own `__init__`."""
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
    return 0


def test_no_public_class_name_exists_twice() -> None:
    assert {name for name, kinds in public_classes(sources_in(*FOLDERS)).items() if len(kinds) > 1} == set()


def test_no_constructor_takes_more_than_seven_parameters() -> None:
    classes = classes_in(sources_in(*FOLDERS))
    counts = {name: max(map(parameters_of, kinds)) for name, kinds in classes.items()}
    assert {name: count for name, count in counts.items() if count > PARAMETERS_MAX} == {}


def test_a_second_class_and_a_long_constructor_are_found() -> None:
    long = "class Room:\n    def __init__(self, a, b, /, c, *, d): pass"
    found = public_classes({"one": long, "two": "class _Key: pass", "three": "if True:\n    class Room: pass"})
    assert [*found] == ["Room"]
    assert [*map(parameters_of, found["Room"])] == [4, 0]
