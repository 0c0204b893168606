"""The operators and the state of their gradients, as plain data."""

from __future__ import annotations

from typing import Any

import onnx

from gradgraph import registry, rules
from gradgraph.registry import Key

assert rules  # importing them fills the registry

DOMAINS = ("", "ai.onnx.ml")


def operators() -> list[dict[str, Any]]:
    """One row per operator: those of ONNX itself, and those that are registered for other domains."""
    schemas = {(s.domain, s.name): s for s in onnx.defs.get_all_schemas() if s.domain in DOMAINS and not s.deprecated}
    keys = {*schemas, *registry.RULES, *registry.NO_GRADIENT}
    return [_row(key, schemas.get(key)) for key in sorted(keys)]


def _row(key: Key, schema: onnx.defs.OpSchema | None) -> dict[str, Any]:
    rule = registry.RULES.get(key)
    state = status(key)
    return {
        "operator": qualified(key),
        "domain": key[0] or "ai.onnx",
        "since": schema.since_version if schema is not None else None,
        "status": state,
        "differentiable": state in ("rule", "body"),
        "cases": len(rule.cases) + len(rule.points) if rule else 0,
        "family": rule.family if rule else "",
        "remark": registry.NO_GRADIENT.get(key, "it has no floating output" if state == "no gradient" else ""),
    }


def status(key: Key) -> str:
    """``rule``, ``no gradient``, ``body`` or ``none``."""
    if key in registry.RULES:
        return "rule"
    schema = onnx.defs.get_schema(key[1], domain=key[0]) if onnx.defs.has(key[1], domain=key[0]) else None
    if key in registry.NO_GRADIENT or (schema is not None and not _floating(schema)):
        return "no gradient"
    has_body = schema is not None and (schema.has_function or schema.has_context_dependent_function)
    return "body" if has_body and not key[0] else "none"


def _floating(schema: onnx.defs.OpSchema) -> bool:
    """Can any of its outputs hold floating numbers (control flow and containers: perhaps)?"""
    return any("float" in t or "double" in t for output in schema.outputs for t in output.types)


def qualified(key: Key) -> str:
    return f"{key[0]}.{key[1]}" if key[0] else key[1]
