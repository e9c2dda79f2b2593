"""Envelopes of KV hints."""

from __future__ import annotations


def envelope(kind: str, version: str = "1.0", **payload: object) -> dict[str, object]:
    """An envelope with one action."""
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
