"""Whatever a caller gives: what is wrong is refused by its name and by what is allowed, and changes nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidekv
from tests.support.inside import assert_no_call_waits, calls_of, runtime_of
from tidekv import (
    AdmissionOptions,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    InvalidConfig,
    InvalidRequest,
    JournalOptions,
    KVEventsOptions,
    KVLayout,
    ListenOptions,
    LoopbackTransport,
    MetricsOptions,
    NixlOptions,
    NixlTransport,
    PeerOptions,
    PrefillPeer,
    RankGroup,
    RequestFailed,
    SharingOptions,
    StorageOptions,
    open_storage,
)
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PromptStoreSettings, RoomSettings
from tidekv.states import errors
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.settings import CoreSettings
from tidekv.states.validation import checked

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
PROMPT = list(range(100, 122))
GROUPS = (
    EngineConfig,
    StorageOptions,
    AdmissionOptions,
    SharingOptions,
    PeerOptions,
    JournalOptions,
    MetricsOptions,
    KVEventsOptions,
)
WRONG = (2.5, True, None, "5", "\ud800", float("nan"), float("inf"), -1, 10**400, b"x", [], {}, object())


@pytest.mark.parametrize("group", GROUPS)
def test_no_field_of_the_options_takes_a_value_of_another_type(group: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(group):
        for value in WRONG:
            try:
                made = group(**{field.name: value})
            except InvalidConfig as error:
                assert field.name in str(error)
                assert " must be " in str(error)
            else:
                # What is taken is of the type: it survives being written and read in strict mode.
                msgspec.convert(msgspec.to_builtins(made), group, strict=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EngineConfig(vocabulary=2.5), "vocabulary must be a whole number from 0 to 4,294,967,296, not 2.5"),
        (lambda: EngineConfig(default_deadline_s=float("nan")), "default_deadline_s must be a number above 0, at most"),
        (lambda: EngineConfig(close_deadline_s="5"), "close_deadline_s must be a number above 0, at most 31,536,000"),
        (lambda: EngineConfig(namespace="\ud800"), "namespace must be UTF-8 text without NUL, not '\\ud800'"),
        (lambda: EngineConfig(storage={"prefetch": "timeout"}), "storage must be a StorageOptions, not {'prefetch'"),
        (lambda: PeerOptions(lease_s=float("inf")), "lease_s must be a number above 0, at most 31,536,000, not inf"),
        (lambda: PeerOptions(silence_s=20.0), "silence_s must be at most lease_s, 10, not 20"),
        (lambda: StorageOptions(prefetch="soon"), "timeout, best_effort, wait_complete or soonest, not 'soon'"),
        (lambda: AdmissionOptions(queue_max=10**400), "queue_max must be a whole number, 1 or more, not 1000"),
        (lambda: MetricsOptions(listen="127.0.0.1:99999"), "listen must be host:port such as 127.0.0.1:7000"),
    ],
)
def test_an_error_names_the_field_the_value_and_what_is_allowed(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        make()
    assert words in str(refused.value)
    assert len(str(refused.value)) < 250


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none(), st.binary()))
def test_settings_of_the_core_hold_counts_and_finite_seconds_whatever_is_given(value: object) -> None:
    for name in ("device_pages", "queue_max", "copy_deadline_s", "store_wait_s", "write_back_ahead"):
        fields = {"page_size": 4, "key_bytes": 16, "device_pages": 8, name: value}
        try:
            found = getattr(CoreSettings(**fields), name)
        except InvalidConfig as error:
            assert str(error).startswith(f"{name} must be ")
        else:
            assert type(found) in (int, float)
            assert 0 <= found < float("inf")


CALLS: dict[str, tuple[Callable, str]] = {
    "restore(None)": (lambda engine, ready: engine.restore(None), "request must be a DecodeRequest, not None"),
    "abort(5)": (lambda engine, ready: engine.abort(5), "request_id must be UTF-8 text, not 5"),
    "grow(None)": (lambda engine, ready: engine.grow(None), "ready must be a ReadyRequest, not None"),
    "grow nan": (lambda engine, ready: engine.grow(ready, float("nan")), "tokens must be a whole number, 0 or more"),
    "grow 2.5": (lambda engine, ready: engine.grow(ready, 2.5), "tokens must be a whole number, 0 or more, not 2.5"),
    "grow True": (lambda engine, ready: engine.grow(ready, True), "tokens must be a whole number, 0 or more, not True"),
    "wait_grown": (lambda engine, ready: engine.wait_grown(ready, "1"), "tokens must be a whole number"),
    "note_growth": (lambda engine, ready: engine.note_growth(ready, -1), "page_count must be a whole number"),
    "finish(None)": (lambda engine, ready: engine.finish(None, [1]), "ready must be a ReadyRequest, not None"),
    "finish None": (lambda engine, ready: engine.finish(ready, None), "tokens must be a sequence of ints"),
    "finish 5": (lambda engine, ready: engine.finish(ready, 5), "tokens must be a sequence of ints"),
    "finish floats": (lambda engine, ready: engine.finish(ready, [1.5]), "token 1.5 at position 0 is not an int"),
    "finish component_pages": (
        lambda engine, ready: engine.finish(ready, [], component_pages=[1]),
        "component_pages must be a mapping",
    ),
    "retract None": (lambda engine, ready: engine.retract(ready, None), "tokens must be a sequence of ints"),
    "resume": (lambda engine, ready: engine.resume(ready), "retracted must be a RetractedRequest"),
    "drop": (lambda engine, ready: engine.drop(None), "retracted must be a RetractedRequest, not None"),
    "flush(None)": (lambda engine, ready: engine.flush(None), "tiers must be a list of l1, l2 or l3, not None"),
    "flush('l1')": (lambda engine, ready: engine.flush("l1"), "tiers must be a list of l1, l2 or l3, not 'l1'"),
    "flush l4": (lambda engine, ready: engine.flush(("l4",)), "tiers must be a list of l1, l2 or l3, not ('l4',)"),
    "flush l3": (lambda engine, ready: engine.flush(("l1", "l3")), "not l3: no storage is attached"),
    "attach None": (lambda engine, ready: engine.attach_storage(None), "not None; detach_storage() removes it"),
    "attach 5": (lambda engine, ready: engine.attach_storage(5), "storage must be a URI or a storage engine, not 5"),
    "attach what": (lambda engine, ready: engine.attach_storage("nonsense:x"), "there is no storage engine 'nonsense'"),
    "attach options": (
        lambda engine, ready: engine.attach_storage(open_storage("memory:?capacity=1MiB"), {"capacity": 1}),
        "options need the URI of a storage",
    ),
    "policy name": (lambda engine, ready: engine.change_policy(prefech="timeout"), "did you mean prefetch?"),
    "policy value": (lambda engine, ready: engine.change_policy(write="never"), "through, selective or back"),
    "policy type": (
        lambda engine, ready: engine.change_policy(store_wait_s=float("nan")),
        "store_wait_s must be a number",
    ),
    "probe tokens": (lambda engine, ready: engine.probe_prefix(None), "tokens must be a sequence of ints"),
    "probe space": (lambda engine, ready: engine.probe_prefix([1], namespace="\ud800"), "namespace must be UTF-8 text"),
    "drain": (lambda engine, ready: engine.drain("soon"), "timeout_s must be a number from 0 to 31,536,000 or none"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_with_a_wrong_argument_is_refused_and_changes_nothing(make_pair, name: str) -> None:
    call, words = CALLS[name]
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        driver, calls = runtime_of(pair.engine).driver, calls_of(pair.engine)
        await calls_of(pair.engine).wait_until(lambda: driver.is_caught_up)
        before = (driver.events_taken, pair.core(), ready.length, ready.pages.tolist(), calls.live_ids())
        with pytest.raises(InvalidRequest) as refused:
            answer = call(pair.engine, ready)
            if answer is not None:
                await answer
        assert words in str(refused.value)
        assert driver.is_caught_up
        assert before == (driver.events_taken, pair.core(), ready.length, ready.pages.tolist(), calls.live_ids())
        assert not runtime_of(pair.engine).is_draining
        assert_no_call_waits(pair.engine)
        await pair.finish(ready, PROMPT, [1, 2])
        await pair.assert_nothing_held()


@pytest.mark.parametrize(
    ("field", "value"),
    [("deadline_s", 10**400), ("deadline_s", True), ("max_new_tokens", 2.5), ("namespace", "\ud800"), ("prefill", [5])],
)
async def test_a_request_that_cannot_be_made_leaves_its_id_free(make_pair, field: str, value: object) -> None:
    async with make_pair() as pair:
        with pytest.raises(InvalidRequest, match=field):
            await pair.engine.restore(
                DecodeRequest(**{"request_id": "r", "tokens": PROMPT, "prefill": "p", field: value})
            )
        assert pair.engine.states() == {}
        await pair.finish(await pair.restore("r", PROMPT), PROMPT, [1])
        assert (await pair.engine.drain(5.0)).live == []


def test_seconds_and_counts_of_a_request_are_checked_as_numpy_gives_them() -> None:
    assert checked(5, float | None, "deadline_s") == 5.0
    with pytest.raises(InvalidRequest, match="priority must be a whole number"):
        DecodeRequest(request_id="r", tokens=[1], prefill="p", priority=np.int64(1))


PARTS: dict[str, Callable[[str, object], object]] = {
    "RankGroup": lambda name, value: RankGroup(**{"rank": 0, "ranks": 2, "address": "127.0.0.1:7000", name: value}),
    "PromptStoreSettings": lambda name, value: PromptStoreSettings(**{name: value}),
    "RoomSettings": lambda name, value: RoomSettings(**{name: value}),
    "ListenOptions": lambda name, value: ListenOptions(**{name: value}),
    "NixlOptions": lambda name, value: NixlOptions(**{name: value}),
    "NixlTransport": lambda name, value: NixlTransport(**{"name": "decode-0", name: value}),
    "PrefillConfig": lambda name, value: PrefillConfig(**{name: value}),
    "RankPlace": lambda name, value: PrefillConfig(place=RankPlace(**{name: value})),
    "PrefillPeer": lambda name, value: PrefillPeer(
        **{"device": DevicePool.allocate(LAYOUT, 4), "transport": LoopbackTransport("prefill-0"), name: value}
    ),
    "DecodeEngine": lambda name, value: DecodeEngine(
        **{
            "config": EngineConfig(),
            "device": DevicePool.allocate(LAYOUT, 4),
            "transport": LoopbackTransport("decode-0"),
            name: value,
        }
    ),
    "open_storage": lambda name, value: open_storage(**{"uri": "memory:?capacity=1MiB", name: value}),
}
WRONG_PARTS = [
    *[("RankGroup", name, value) for name in ("rank", "ranks", "stages", "kv_heads_total") for value in (2.5, True)],
    *[("RankGroup", name, float("inf")) for name in ("silence_s", "vote_timeout_s", "hold_s", "form_timeout_s")],
    *[("RankGroup", "address", value) for value in ("nowhere", "a:0", "a:99999", 5)],
    *[("PromptStoreSettings", name, 2.5) for name in ("batch_pages", "rooms_max", "breaker_failures")],
    *[("PromptStoreSettings", name, float("nan")) for name in ("hold_s", "put_timeout_s", "close_wait_s")],
    *[("RoomSettings", name, 0) for name in ("writes_in_flight_max", "pages_per_write_max")],
    *[("NixlOptions", "progress_delay_us", value) for value in (2.5, 0, "1")],
    *[("NixlOptions", name, float("inf")) for name in ("call_timeout_s", "close_timeout_s")],
    *[("ListenOptions", "links_max", value) for value in (2.5, 0, "1")],
    *[("ListenOptions", name, 5) for name in ("announces", "allow_no_secret", "violations")],
    *[("NixlTransport", name, 5) for name in ("listening", "nixl")],
    *[("NixlTransport", name, "\ud800") for name in ("name", "secret")],
    *[("RankPlace", name, 2.5) for name in ("rank", "ranks", "stages", "kv_heads_total", "contexts", "stripe_pages")],
    *[("PrefillConfig", name, 2.5) for name in ("model", "place", "vocabulary", "rooms", "store")],
    *[("PrefillConfig", name, float("inf")) for name in ("lease_s", "close_deadline_s", "loop_stall_report_s")],
    *[("PrefillPeer", name, 2.5) for name in ("config", "on_room")],
    *[("DecodeEngine", name, 5) for name in ("config", "device", "host", "storage", "ranks")],
    *[("open_storage", name, 5) for name in ("uri", "options")],
]


@pytest.mark.parametrize(("part", "name", "value"), WRONG_PARTS)
def test_a_part_that_is_given_a_wrong_value_names_the_argument(part: str, name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match="storage" if part == "open_storage" else name):
        PARTS[part](name, value)


ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Foreign:
    """What no call takes, with the repr of every class that has none of its own."""

    def method(self) -> None:
        """What no call takes either."""


FOREIGN = (Foreign(), Foreign().method, lambda: None, [Foreign()], {"capacity": Foreign()})


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: type(value).__name__)
def test_no_error_of_a_part_has_the_address_of_an_object(part: str, value: object) -> None:
    refused = 0
    for name in inspect.signature({**vars(tidekv), **globals()}[part]).parameters:
        try:
            PARTS[part](name, value)
        except Exception as error:  # Of any type: what matters is its text.
            refused += 1
            assert not ADDRESS.search(str(error)), (name, error)
    assert refused


async def test_no_error_of_a_call_has_the_address_of_an_object(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        refused = 0
        for name in set(dir(DecodeEngine)) - {"statistics", "close", "wait_settled"}:
            call = getattr(pair.engine, name)
            parameters = list(inspect.signature(call).parameters) if not name.startswith("_") and callable(call) else []
            for value in FOREIGN:
                for wrong in parameters:
                    try:
                        good = {"ready": ready, "tokens": [1], "request_id": "r1", "retracted": value, "request": value}
                        answer = call(**{each: good.get(each, value) for each in parameters} | {wrong: value})
                        if inspect.isawaitable(answer):
                            await answer
                    except Exception as error:  # Of any type: what matters is its text.
                        refused += 1
                        assert not ADDRESS.search(str(error)), (name, wrong, error)
        assert refused > 50


def test_every_error_is_exported() -> None:
    kinds = [
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.TidekvError)
    ]
    assert [name for name in kinds if name not in tidekv.__all__ or not hasattr(tidekv, name)] == []
    assert issubclass(RequestFailed, tidekv.TidekvError)


@pytest.mark.parametrize("tokens", ["hello", None, 5, 1.5, object()])
def test_what_can_be_no_tokens_is_refused_where_the_request_is_made(tokens: object) -> None:
    with pytest.raises(InvalidRequest, match=r"request 'r1': tokens must be a sequence of ints"):
        DecodeRequest(request_id="r1", tokens=tokens, prefill="127.0.0.1:7000")  # type: ignore[arg-type]
