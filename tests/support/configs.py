"""Engine options for tests, by their names alone."""

from __future__ import annotations

import msgspec

from tidekv import EngineConfig


def engine_config(**options: object) -> EngineConfig:
    """An `EngineConfig` with each option in its group: by its name, or by `group_name` if other groups have the name.

    `engine_config(model="m", prefetch="best_effort", peer_lease_s=1.0)`.
    """
    whole = EngineConfig()
    groups = {name: getattr(whole, name) for name in EngineConfig.__struct_fields__}
    groups = {name: group for name, group in groups.items() if isinstance(group, msgspec.Struct)}
    # With the default policy, plans depend on measured times; pools of tests are so small that a share would bind. A
    # prefill that a test stops is not late: it is to be lost.
    changes: dict[str, dict[str, object]] = {
        "storage": {"prefetch": "timeout"},
        "admission": {"prefill_share": 1.0},
        "peer": {"retries_late": False},
    }
    plain: dict[str, object] = {}
    for option, value in options.items():
        if option in EngineConfig.__struct_fields__:
            if option == "peer" and isinstance(value, msgspec.Struct):
                groups[option] = value
            else:
                plain[option] = value
            continue
        places = [
            (group, name)
            for group, struct in groups.items()
            for name in struct.__struct_fields__
            if option in (name, f"{group}_{name}")
        ]
        if len(places) != 1:
            raise TypeError(f"{option!r} names no option, or several: {places}")
        ((group, name),) = places
        changes.setdefault(group, {})[name] = value
    built = {group: msgspec.structs.replace(groups[group], **fields) for group, fields in changes.items()}
    return EngineConfig(**plain, **built)  # type: ignore[arg-type]  # msgspec checks the fields.
