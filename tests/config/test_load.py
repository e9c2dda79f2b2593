"""From file, environment, settings and flags to one configuration: the order, the origins, and every error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.engine.config import Configuration, gather, load
from tidekv.engine.config.check import errors_here
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.config.lines import option_lines
from tidekv.engine.config.options import all_options
from tidekv.states.errors import InvalidConfig

NOTHING: Mapping[str, str] = {}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def said(*, file: str | None = None, environment: Mapping[str, str] = NOTHING, settings: tuple[str, ...] = ()) -> str:
    loaded, errors = gather(file, environment=environment, settings=settings)
    return "\n".join(map(str, [*errors, *errors_here(loaded)]))


def test_nothing_given_is_the_defaults_that_embedders_have() -> None:
    loaded = load(environment=NOTHING)
    assert loaded.configuration == Configuration()
    assert loaded.configuration.engine == EngineConfig()
    assert not any(loaded.is_given(path) for path in all_options())
    assert said() == ""


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", "[::]:7000", "203.0.113.5:7000"])
def test_a_prefill_that_listens_on_the_network_needs_a_secret(listen: str, tmp_path: Path) -> None:
    on_network = f"prefill.listen={listen}"
    error = said(settings=(on_network,))
    assert f"prefill.listen: {listen} is on the network, and there is no secret" in error
    assert "\n" not in error
    file = write(tmp_path / "secret", "word")
    for allowed in (f"transport.secret_file={file}", "transport.allow_no_secret=true"):
        assert said(settings=(on_network, allowed)) == ""
    assert said(settings=(on_network,), environment={"TIDEKV_SECRET": "word"}) == ""


@pytest.mark.parametrize("listen", ["127.0.0.1:7000", "[::1]:7000", "localhost:0"])
def test_a_prefill_that_listens_on_loopback_needs_no_secret(listen: str) -> None:
    assert said(settings=(f"prefill.listen={listen}",)) == ""


def test_each_source_wins_over_the_one_before_and_is_told(tmp_path: Path) -> None:
    toml = "[engine.admission]\nqueue_max = 1\nageing_s = 1\n[engine.peer]\nattempts = 1\nlease_s = 11\n"
    file = write(tmp_path / "worker.toml", toml)
    variables = {
        "TIDEKV_ENGINE_PEER_ATTEMPTS": "2",
        "TIDEKV_ENGINE_ADMISSION_AGEING_S": "2",
        "TIDEKV_ENGINE_PEER_LEASE_S": "12",
    }
    loaded = load(
        file,
        environment=variables,
        settings=["engine.admission.ageing_s=3", "engine.peer.lease_s=13"],
        flags={"engine.peer.lease_s": ("--lease", 14), "engine.model": ("--model", None)},
        defaults={"engine.admission.queue_max": 9, "engine.storage.fetch_run_pages": 9},
    )
    engine = loaded.configuration.engine
    assert (engine.storage.fetch_run_pages, engine.admission.queue_max, engine.peer.attempts) == (9, 1, 2)
    assert (engine.admission.ageing_s, engine.peer.lease_s) == (3.0, 14)
    names = (
        "storage.fetch_run_pages", "admission.queue_max", "peer.attempts", "admission.ageing_s", "peer.lease_s", "model"
    )  # fmt: skip
    assert [loaded.origins[f"engine.{name}"] for name in names] == [
        "default of the command",
        f"{file}:2",
        "environment variable TIDEKV_ENGINE_PEER_ATTEMPTS",
        "--set engine.admission.ageing_s",
        "--lease",
        "default",
    ]


@pytest.mark.parametrize("ending", ["toml", "yaml", "yml", "json"])
def test_a_file_of_each_kind_says_the_same(tmp_path: Path, ending: str) -> None:
    if ending in ("yaml", "yml"):
        pytest.importorskip("yaml")
    texts = {
        "toml": '[cache]\nl2 = "2x"\n[decode]\nprefill = ["a:1", "b:2"]\n[storage.options]\nsegment = "8MiB"\n',
        "yaml": "cache: {l2: 2x}\ndecode: {prefill: ['a:1', 'b:2']}\nstorage: {options: {segment: 8MiB}}\n",
        "json": json.dumps(
            {
                "cache": {"l2": "2x"},
                "decode": {"prefill": ["a:1", "b:2"]},
                "storage": {"options": {"segment": "8MiB"}},
            }
        ),
    }
    file = write(tmp_path / f"worker.{ending}", texts.get(ending, texts["yaml"]))
    found = load(environment={"TIDEKV_CONFIG": file}).configuration
    assert found.cache.l2 == "2x"
    assert tuple(found.decode.prefill) == ("a:1", "b:2")
    assert found.storage.options == {"segment": "8MiB"}


def test_variables_are_read_as_their_types() -> None:
    found = load(
        environment={
            "TIDEKV_ENGINE_KEEP_OUTPUT": "false",
            "TIDEKV_ENGINE_JOURNAL_PATH": "",
            "TIDEKV_ENGINE_STORAGE_FETCH_PAGES_PER_S": "1.5",
            "TIDEKV_DECODE_PREFILL": "a:1, b:2",
            "TIDEKV_STORAGE_OPTIONS": '{"capacity": "1GB"}',
            "TIDEKV_TRANSPORT_BACKENDS": '{"UCX": {"num_workers": "2"}}',
            "TIDEKV_CACHE_L1": "4096",
            "TIDEKV_SECRET": "between us",
        }
    ).configuration
    assert found.engine.keep_output is False
    assert found.engine.journal.path is None
    assert found.engine.storage.fetch_pages_per_s == 1.5
    assert found.decode.prefill == ["a:1", "b:2"] or found.decode.prefill == ("a:1", "b:2")
    assert found.storage.options == {"capacity": "1GB"}
    assert found.transport.backends == {"UCX": {"num_workers": "2"}}
    assert found.cache.l1 == "4096"
    assert found.transport.read_secret() == "between us"


@pytest.mark.parametrize("written", ["TIDEKV_ENGINE__STORAGE__WRITE", "TIDEKV_ENGINE_STORAGE_WRTE"])
def test_a_variable_of_another_spelling_is_told_the_one_to_set(written: str) -> None:
    with pytest.raises(InvalidConfig, match=f"did you mean TIDEKV_ENGINE_STORAGE_WRITE.*{written}"):
        load(environment={written: "back"})


def test_variables_that_kubernetes_makes_of_services_are_not_ours() -> None:
    others = {
        "TIDEKV_PREFILL_SERVICE_HOST": "10.0.0.1",
        "TIDEKV_PREFILL_SERVICE_PORT": "7000",
        "TIDEKV_PREFILL_PORT": "tcp://10.0.0.1:7000",
        "TIDEKV_PREFILL_PORT_7000_TCP_ADDR": "10.0.0.1",
        "OTHER": "x",
    }
    assert load(environment=others).configuration == Configuration()


LINES = {
    "toml": """# A comment.
cache.l2 = "2x"

[storage.options] # [not.a.table]
segment = [
  "[engine]",
]
[storage]
uri = """
    + """'''
[engine]
model = "x"'''
[engine]
peer = { lease_s = 3, attempts = 2 }
""",
    "yaml": """# A comment.
cache: {l2: 2x}

storage:
  options:
    segment:
    - "engine:"
  uri: >
    model: x

engine:
  "peer": {lease_s: 3,
    attempts: 2}
""",
    "json": """{
"cache": {"l2": "2x"},
"storage": {"options":
  {"segment": ["{\\"engine\\":"]},
  "uri": "memory:"},
"engine": {"peer": {"lease_s": 3,
  "attempts": 2}}
}
""",
}


@pytest.mark.parametrize(
    ("ending", "lines"),
    [("toml", (2, 5, 9, 13, 13)), ("yaml", (2, 6, 8, 12, 13)), ("json", (2, 4, 5, 6, 7))],
)
def test_each_option_of_a_file_has_its_line(ending: str, lines: tuple[int, ...]) -> None:
    if ending == "yaml":
        pytest.importorskip("yaml")
    found = option_lines(LINES[ending], f".{ending}")
    paths = ("cache.l2", "storage.options.segment", "storage.uri", "engine.peer.lease_s", "engine.peer.attempts")
    assert tuple(found[path] for path in paths) == lines
    assert "engine.model" not in found


def test_all_errors_are_named_at_once_each_with_its_place(tmp_path: Path) -> None:
    text = (
        '[engine]\njournal_path = "x"\n[engine.admission]\nqueu_max = 5\n[engine.storage]\nprefetch = "never"\n'
        '[engine.peer]\nlease_s = -1\n[cahce]\nl1 = 5\n[cache]\npage_size = "big"\n'
    )
    file = write(tmp_path / "worker.toml", text)
    found = said(
        file=file,
        environment={
            "TIDEKV_ENGINE_ADMISSION_QUEUE_MAX": "many",
            "TIDEKV_ENGIN_X": "1",
            "TIDEKV_DECODE_PREFILL": "nowhere",
        },
        settings=("engine.admission.queue_max", "cache.l3=1", "cache.l2=lots", "prefill.listen=host:99999"),
    ).splitlines()
    assert len(found) == 13, found
    for words in (
        f"there is no option 'engine.journal_path'; did you mean engine.journal.path? ({file}:2)",
        f"there is no option 'engine.admission.queu_max'; did you mean engine.admission.queue_max? ({file}:4)",
        f"engine.storage.prefetch must be timeout, best_effort, wait_complete or soonest, not 'never' ({file}:6)",
        f"engine.peer.lease_s must be a number above 0, at most 31,536,000, not -1 ({file}:8)",
        "there is no section 'cahce'; did you mean cache? allowed: cache, storage, transport, prefill, decode, engine"
        f" ({file}:9)",
        f"cache.page_size must be a whole number, 1 or more, not 'big' ({file}:12)",
        "engine.admission.queue_max must be a whole number, 1 or more, not 'many' "
        "(environment variable TIDEKV_ENGINE_ADMISSION_QUEUE_MAX)",
        "give section.option=value (--set engine.admission.queue_max)",
    ):
        assert words in found
    for words in ("environment variable TIDEKV_ENGIN_X", "--set cache.l3", "decode.prefill must be host:port"):
        assert any(words in line for line in found), words
    with pytest.raises(InvalidConfig) as refused:
        load(file, environment=NOTHING)
    assert str(refused.value).count("\n") == 6


def test_a_value_that_is_replaced_is_not_looked_at() -> None:
    environment = {"TIDEKV_ENGINE_ADMISSION_QUEUE_MAX": "many"}
    loaded = load(environment=environment, settings=["engine.admission.queue_max=7"])
    assert loaded.configuration.engine.admission.queue_max == 7


def test_options_that_fit_together_only_are_taken_together() -> None:
    loaded = load(environment=NOTHING, settings=["engine.peer.heartbeat_s=3", "engine.peer.silence_s=9"])
    assert loaded.configuration.engine.peer.heartbeat_s == 3
    error = "engine.peer.heartbeat_s must be at most half of silence_s, 1, not 3"
    assert error in said(settings=("engine.peer.heartbeat_s=3",))
    assert "--set engine.peer.heartbeat_s" in said(settings=("engine.peer.heartbeat_s=3",))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("storage.uri=nonsense:x",), "storage.uri: there is no storage engine 'nonsense'"),
        (("storage.uri=memory:?capacity=1GB", "cache.l2=0"), "cache.l2: storage needs a host pool"),
        (('storage.options={"a": 1}',), "storage.options: there are options, but storage.uri is empty"),
        (("engine.journal.path=/nowhere/run.journal",), "engine.journal.path: there is no directory /nowhere"),
        (("engine.metrics.listen=9464",), "engine.metrics.listen must be host:port"),
        (("transport.secret_file=/nowhere/secret",), "secret_file: /nowhere/secret cannot be read: No such file or"),
        (("transport.secret=a",), "can be read by every user of the machine: give the secret in the variable"),
        (("engine.kv_events.replay=tcp://*:5558",), "kv_events.replay needs kv_events.endpoint"),
        (("engine.storage.write=never",), "engine.storage.write must be through, selective or back, not 'never'"),
        (("cache.device=tpu",), "cache.device must be cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_work_here_is_named_before_anything_starts(settings: tuple[str, ...], words: str) -> None:
    assert words in said(settings=settings)


def test_a_secret_has_one_source() -> None:
    words = said(settings=("transport.secret_file=b",), environment={"TIDEKV_SECRET": "a"})
    assert "secret and secret_file are both given" in words


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    assert "cannot be read" in said(file=str(tmp_path / "none.toml"))
    assert "is not valid TOML" in said(file=write(tmp_path / "bad.toml", "[engine\n"))
    assert "section 'engine' must be a table" in said(file=write(tmp_path / "flat.toml", "engine = 3\n"))


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", "hush\n")
    loaded = load(environment=NOTHING, settings=[f"transport.secret_file={secret}"])
    assert loaded.configuration.transport.read_secret() == "hush"
    options = all_options()
    assert options["transport.secret"].shown("hush") == "********"
    assert options["storage.uri"].shown("redis://me:hush@host:1/0") == "redis://me:********@host:1/0"
    assert options["storage.options"].shown({"password": "hush", "capacity": 1}) == {
        "password": "********",
        "capacity": 1,
    }
    for settings in (("transport.secret=hush",), ('storage.options={"hush": ',)):
        assert "hush" not in said(settings=settings)


PLAIN = {
    path: option
    for path, option in all_options().items()
    if isinstance(option.default, int | float | bool) and option.section.startswith("engine")
}


@given(st.sampled_from(sorted(PLAIN)), st.one_of(st.integers(-5, 5), st.floats(0.1, 10), st.booleans()))
def test_a_number_means_the_same_from_each_source(path: str, value: float) -> None:
    """Differential: as a flag with its type, or as text. Either both are refused, or both give the same."""
    text = json.dumps(value)

    def loaded(**source: object) -> object:
        try:
            return load(environment=NOTHING, **source).value(path)  # type: ignore[arg-type]  # One of two sources.
        except InvalidConfig:
            return "refused"

    as_text = loaded(settings=[f"{path}={text}"])
    as_value = loaded(flags={path: ("--flag", value)})
    # Text has no type of its own: 1 may stand for true.
    if not isinstance(PLAIN[path].default, bool) and not isinstance(value, bool):
        assert as_text == as_value or (isinstance(value, float) and value.is_integer())


def test_every_default_survives_being_written_to_a_file_and_read_again(tmp_path: Path) -> None:
    tables = json.loads(json.dumps(msgspec.to_builtins(Configuration())))
    file = write(tmp_path / "all.json", json.dumps(tables))
    loaded = load(file, environment=NOTHING)
    assert json.loads(json.dumps(msgspec.to_builtins(loaded.configuration))) == tables
    assert all(loaded.is_given(path) for path in all_options())


def test_kv_events_without_their_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("engine.kv_events.endpoint=tcp://127.0.0.1:5557",)
    monkeypatch.setattr("tidekv.engine.config.check.find_spec", lambda name: None)
    assert "engine.kv_events.endpoint: KV events need pyzmq: pip install 'tidekv[events]'" in said(settings=settings)
