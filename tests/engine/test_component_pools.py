"""Windows and states as an engine is given them: what does not fit is named, and what fits is part of the identity."""

from __future__ import annotations

import pytest

from tests.support.inside import core_of
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DevicePool,
    EngineConfig,
    EngineThread,
    HostPool,
    InvalidConfig,
    KVLayout,
    LoopbackTransport,
    PageLayout,
)
from tidekv.backends.component_pools import with_components
from tidekv.backends.keys.chain import storage_namespace
from tidekv.engine.config.engine_config import DeviceMode
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.nixl.layout import extents

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
WINDOW = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
RECORD = PageLayout.of(
    full=KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="float32", page_size=32, kind="mla"),
    convolution=KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16", page_size=32, kind="mla"),
)


def window(**changes: object) -> ComponentPools:
    fields: dict[str, object] = {
        "name": "window",
        "kind": "window",
        "window_tokens": 9,
        "device": DevicePool.allocate(WINDOW, 8),
        "host": HostPool.allocate(WINDOW, 6),
    }
    return ComponentPools(**{**fields, **changes})


def state(**changes: object) -> ComponentPools:
    fields: dict[str, object] = {"name": "state", "kind": "state", "device": DevicePool.allocate(RECORD, 5)}
    return ComponentPools(**{**fields, **changes})


def engine_with(
    *components: ComponentPools,
    device: DevicePool | None = None,
    host: HostPool | None = None,
    mode: DeviceMode = "owned",
) -> DecodeEngine:
    return DecodeEngine(
        EngineConfig(model="m", device=mode),
        device=device or DevicePool.allocate(LAYOUT, 8),
        host=host,
        components=components,
        transport=LoopbackTransport("decode-0", LoopbackNetwork()),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a-b"}, "'a-b': a name must be an identifier"),
        ({"name": 3}, "component 3: a name must be an identifier"),
        ({"name": "full"}, "cannot be called 'full'"),
        ({"kind": "mirror"}, "component 'window': 'mirror' is no kind; there are window and state"),
        ({"kind": "state"}, "component 'window', a state, cannot have window_tokens=9"),
        ({"window_tokens": 0}, "component 'window', a window, cannot have window_tokens=0"),
        ({"window_tokens": 8.5}, "component 'window': window_tokens must be a count, not 8.5"),
        ({"host": HostPool.allocate(LAYOUT, 4)}, "component 'window': host pool has layout .*, device pool has"),
    ],
)
def test_a_component_that_makes_no_sense_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        window(**changes)


def test_components_that_do_not_fit_each_other_or_the_full_pools_are_named() -> None:
    host = HostPool.allocate(LAYOUT, 8)
    with pytest.raises(InvalidConfig, match="component 'window' is given 2 times"):
        engine_with(window(), window(), host=host)
    other = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype="float32", page_size=8)
    with pytest.raises(InvalidConfig, match="component 'window' has pages of 8 tokens, the full pool of 4"):
        engine_with(window(device=DevicePool.allocate(other, 8), host=None), host=host)
    with pytest.raises(InvalidConfig, match="'window' has a host pool and the full KV has none"):
        engine_with(window())
    # A tail of three pages, and the page that is being written.
    with pytest.raises(InvalidConfig, match="component 'window' has 3 device pages, one request needs 4"):
        engine_with(window(device=DevicePool.allocate(WINDOW, 3)), host=host)


def test_pools_in_the_same_memory_are_refused() -> None:
    shared = DevicePool.allocate(LAYOUT, 8)
    with pytest.raises(InvalidConfig, match=r"device pool of '(full|window)' and device pool of '.*' lie in"):
        engine_with(window(device=shared, host=None), device=shared)
    record = DevicePool.allocate(RECORD, 5)
    with pytest.raises(InvalidConfig, match="lie in the same memory"):
        engine_with(state(device=record), state(name="other", device=record))


def test_lent_pools_may_share_memory_and_host_pools_may_not() -> None:
    # A host engine gives each page to one of the pools at a time.
    shared, host = DevicePool.allocate(LAYOUT, 8), HostPool.allocate(LAYOUT, 8)
    engine_with(window(device=shared, host=None), device=shared, mode="lent")
    with pytest.raises(InvalidConfig, match=r"host pool of '(full|window)' and host pool of '.*' lie in"):
        engine_with(window(device=shared, host=host), device=shared, host=host, mode="lent")


def test_memory_that_pools_share_is_registered_once() -> None:
    pools = DevicePool.allocate(LAYOUT, 8), DevicePool.allocate(WINDOW, 8)
    shared, other = (pool.memory for pool in pools)
    assert extents(shared, shared) == extents(shared)
    assert sorted(extents(shared, other)) == sorted([*extents(shared), *extents(other)])


def test_the_core_is_told_of_the_components_and_their_pages() -> None:
    engine = engine_with(window(), state(), host=HostPool.allocate(LAYOUT, 8))
    told = {each.name: each for each in core_of(engine).settings.components}
    assert (told["window"].kind, told["window"].window_tokens) == ("window", 9)
    assert (told["window"].device_pages, told["window"].host_pages) == (8, 6)
    assert (told["state"].kind, told["state"].device_pages, told["state"].host_pages) == ("state", 5, 0)


def test_an_engine_on_a_thread_takes_them_too() -> None:
    with pytest.raises(InvalidConfig, match="'state' is given 2 times"):
        EngineThread(
            DecodeEngine(
                EngineConfig(),
                device=DevicePool.allocate(LAYOUT, 8),
                components=(state(), state()),
                transport=LoopbackTransport("decode-0", LoopbackNetwork()),
            )
        )


def test_what_makes_bytes_of_a_component_is_part_of_the_identity_and_of_the_storage_namespace() -> None:
    plain = LAYOUT.identity("m")
    assert with_components(plain, ()) == plain
    other_shape = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, dtype="float32", page_size=4)
    sets = [
        (),
        (window(),),
        (window(), state()),
        (window(name="other"), state()),
        (window(window_tokens=10), state()),
        (window(device=DevicePool.allocate(other_shape, 8), host=None), state()),
        (window(), state(device=DevicePool.allocate(RECORD.groups[0].layout, 5))),
    ]
    namespaces = [storage_namespace(with_components(plain, each)) for each in sets]
    assert len(set(namespaces)) == len(sets)
    # Their order and their sizes are each engine's own business.
    again = (state(device=DevicePool.allocate(RECORD, 7)), window())
    assert with_components(plain, again) == with_components(plain, (window(), state()))
