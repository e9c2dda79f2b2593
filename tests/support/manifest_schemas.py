"""Kubernetes manifests against published schemas: unknown and missing fields, types, and bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # Parsed YAML has no types.

SCHEMAS = Path(__file__).resolve().parent.parent / "deploy" / "schemas.json"
"""Written by tools/manifest_schemas.py."""
TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def schema_errors(document: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in a manifest, each with its place."""
    schemas = json.loads(SCHEMAS.read_text())
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    if kind not in schemas["kinds"]:
        return [f"{kind} is no kind that is known here"]
    return _in_value(document, schemas["kinds"][kind], schemas["definitions"], document["kind"])


def _in_value(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str) -> list[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"]]
    types = schema.get("type", list(TYPES))
    # A boolean is an int in Python, and none here.
    if not isinstance(value, tuple(one for name in types for one in TYPES[name])) or (
        isinstance(value, bool) and "boolean" not in types
    ):
        return [f"{place}: {value!r} is no {' or '.join(types)}"]
    found = [f"{place}: {value!r} {words}" for words in _beyond_bounds(value, schema)]
    if isinstance(value, list):
        for at, each in enumerate(value):
            found += _in_value(each, schema.get("items", {}), definitions, f"{place}[{at}]")
    if isinstance(value, dict):
        found += [f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        fields, others = schema.get("properties", {}), schema.get("values")
        for name, each in value.items():
            if name in fields:
                found += _in_value(each, fields[name], definitions, f"{place}.{name}")
            elif others is not None:
                found += _in_value(each, others, definitions, f"{place}.{name}")
            elif fields and "open" not in schema:
                found.append(f"{place}.{name} is no field")
    return found


def _beyond_bounds(value: Any, schema: Mapping[str, Any]) -> list[str]:
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"is none of {schema['enum']}")
    if isinstance(value, int | float):
        found += ["is too small"] if value < schema.get("minimum", value) else []
        found += ["is too large"] if value > schema.get("maximum", value) else []
    if isinstance(value, str):
        found += [] if re.search(schema.get("pattern", ""), value) else [f"does not match {schema['pattern']}"]
    if isinstance(value, str | list):
        name = "Length" if isinstance(value, str) else "Items"
        found += ["is too short"] if len(value) < schema.get(f"min{name}", 0) else []
        found += ["is too long"] if len(value) > schema.get(f"max{name}", len(value)) else []
    return found
