"""JSON Schema of a configuration file, made from the types, for editors."""

from __future__ import annotations

import msgspec

from tidekv.engine.config.options import all_options, section_types
from tidekv.engine.config.sections import Configuration


def json_schema() -> dict[str, object]:
    """Return the schema of one configuration file, with units and effects as descriptions."""
    schema: dict[str, object] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tidekv configuration",
        **msgspec.json.schema(Configuration, schema_hook=_any_value),
    }
    definitions = schema["$defs"]
    assert isinstance(definitions, dict), "msgspec names every struct there"
    for option in all_options().values():
        described = definitions[section_types()[option.section].__name__]["properties"][option.name]
        described["description"] = option.effect + (f" Unit: {option.unit}." if option.unit else "")
    return schema


def _any_value(kind: type) -> dict[str, object]:
    """Options of storage engines may be anything here: the engines check them."""
    if kind is object:
        return {"description": "What the engine takes."}
    raise NotImplementedError(kind)
