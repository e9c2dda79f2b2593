"""Schemas of the kinds that deploy/ uses, from published ones: `python -m tools.manifest_schemas FOLDER CRD…`.

FOLDER has Kubernetes' own as JSON Schema (`kubernetes_validate/kubernetes-json-schema/v1.34.0-local` of the package
kubernetes-validate), each CRD is a file of PodMonitor or InferencePool. What is written has types, fields and bounds,
and no words: tests/deploy checks the manifests against it without a network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # Schemas have no types.

import yaml  # type: ignore[import-untyped]  # Its hints are a package of their own.

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "tests" / "deploy" / "schemas.json"
KINDS = {
    "v1 ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "v1 Service": "io.k8s.api.core.v1.Service",
    "apps/v1 Deployment": "io.k8s.api.apps.v1.Deployment",
    "apps/v1 StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "batch/v1 Job": "io.k8s.api.batch.v1.Job",
    "policy/v1 PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "networking.k8s.io/v1 NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}
KEPT = ("enum", "minimum", "maximum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "required")
STATUS = "status"


def condensed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without descriptions, formats and states that a cluster writes."""
    if "$ref" in schema:
        return {"$ref": schema["$ref"].rpartition("/")[2]}
    found: dict[str, Any] = {name: schema[name] for name in KEPT if schema.get(name)}
    if schema.get("x-kubernetes-int-or-string") or "oneOf" in schema:
        return {"type": ["number", "string"]}  # A quantity, a port, a share.
    types = schema.get("type", [])
    found["type"] = [types] if isinstance(types, str) else [one for one in types if one != "null"]
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        found["open"] = True
    if "properties" in schema:
        found["properties"] = {name: condensed(each) for name, each in schema["properties"].items() if name != STATUS}
    if isinstance(schema.get("additionalProperties"), Mapping):
        found["values"] = condensed(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = condensed(schema["items"])
    return {name: value for name, value in found.items() if value != []}


def reached(names: list[str], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions with these names, and those that they refer to."""
    found: dict[str, Any] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found[name] = condensed(definitions[name])
            left += _references(found[name])
    return dict(sorted(found.items()))


def _references(schema: object) -> list[str]:
    if isinstance(schema, list):
        return [name for each in schema for name in _references(each)]
    if not isinstance(schema, dict):
        return []
    here = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return here + [name for each in schema.values() for name in _references(each)]


def custom(path: Path) -> dict[str, Any]:
    """Return the schema of each version of a custom resource, by API version and kind."""
    found = {}
    for document in yaml.safe_load_all(path.read_text()):
        if not document:
            continue
        spec = document["spec"]
        for version in spec["versions"]:
            schema = condensed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": ["object"], "open": True}
            found[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = schema
    return found


def main(folder: str, *files: str) -> None:
    """Write the schemas."""
    definitions = json.loads((Path(folder) / "_definitions.json").read_text())["$defs"]
    kinds: dict[str, Any] = {kind: {"$ref": name} for kind, name in KINDS.items()}
    for file in files:
        kinds |= custom(Path(file))
    parts = {"definitions": reached(list(KINDS.values()), definitions), "kinds": kinds}
    OUTPUT.write_text("{\n" + ",\n".join(f'"{name}": {_lines(part)}' for name, part in parts.items()) + "\n}\n")


def _lines(part: Mapping[str, Any]) -> str:
    """Return JSON with a line for each schema, so that a newer one shows what has changed."""
    lines = [f"{json.dumps(name)}: {json.dumps(part[name], sort_keys=True)}" for name in sorted(part)]
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main(*sys.argv[1:])
