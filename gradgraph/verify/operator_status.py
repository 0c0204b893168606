"""A table of the gradient support of every operator, for ``gradgraph ops`` and the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import onnx

from gradgraph.graph.schemas import Schema
from gradgraph.passes.normal.dialects import contrib
from gradgraph.passes.normal.opsets import downgrade
from gradgraph.rules import families, registry
from gradgraph.rules.registry import Draw, Key, Rule

assert families  # the imports fill the registry

DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview")
STATUSES = {
    "rule": "it has a gradient rule of its own, with this number of test cases",
    "body": "its ONNX function body is differentiated",
    "lowered": "it is rewritten with other operators before differentiation",
    "no gradient": "its derivative is zero or undefined; gradients stop there",
    "refused": "it has no gradient rule, for the reason in the remarks: an error if it is on a path to the loss",
    "none": "it is not supported: an error if it is on a path from a weight to the loss",
}

# floating-point inputs by index of which only the element type or the length is used, so they have no gradient
_SETTINGS = {"CastLike": {1}}


def operators() -> list[dict[str, Any]]:
    """Return a row per ONNX operator, and per other operator with a gradient rule or a rewrite into ONNX operators.

    The keys of a row are ``operator``, ``domain``, ``since`` (opset), ``status`` (see ``STATUSES``),
    ``differentiable``, ``inputs`` (names of inputs that have gradients), ``order`` (highest order of derivatives:
    ``"all"``, ``"1"`` or empty), ``cases`` (number of test cases), ``family`` (module of the rule) and ``remark``.
    """
    schemas = {(s.domain, s.name): s for s in onnx.defs.get_all_schemas() if s.domain in DOMAINS and not s.deprecated}
    keys = {*schemas, *registry.RULES, *registry.NO_GRADIENT, *registry.REFUSED, *contrib.forms()}
    return [_row(key, schemas.get(key)) for key in sorted(keys)]


def _row(key: Key, schema: Schema | None) -> dict[str, Any]:
    rule = registry.RULES.get(key)
    state = status(key)
    differentiable = state in ("rule", "body", "lowered")
    first_only = _first_order_only(rule) if rule is not None else ""
    return {
        "operator": qualified(key),
        "domain": key[0] or "ai.onnx",
        "since": schema.since_version if schema is not None else None,
        "status": state,
        "differentiable": differentiable,
        "inputs": list(_inputs(rule, schema)) if differentiable and schema is not None else [],
        "order": ("1" if first_only else "all") if differentiable else "",
        "cases": len(rule.cases) + len(rule.points) if rule else 0,
        "family": rule.family if rule else "",
        "remark": _remark(key, schema) if state in ("no gradient", "refused") else first_only,
    }


def status(key: Key) -> str:
    """Return the gradient support of an operator, one of ``STATUSES``."""
    if key in registry.RULES:
        return "rule"
    known = onnx.defs.has(key[1], domain=key[0])
    schema = cast("Schema", onnx.defs.get_schema(key[1], domain=key[0])) if known else None
    if _reason(key) or (schema is not None and not (_any_floating(schema.outputs) and _reads(schema))):
        return "no gradient"
    if key in contrib.forms() or (key[0] == "" and downgrade.is_new(key[1]) and downgrade.has_form(key[1])):
        return "lowered"
    if key in registry.REFUSED:
        return "refused"
    has_body = schema is not None and (schema.has_function or schema.has_context_dependent_function)
    return "body" if has_body and not key[0] else "none"


def _reason(key: Key) -> str:
    """Return the reason why an operator (or the ONNX operator that it fuses) has no gradient; "" if it has one."""
    return registry.NO_GRADIENT.get(("", key[1]) if key in contrib.forms() else key, "")


def qualified(key: Key) -> str:
    return f"{key[0]}.{key[1]}" if key[0] else key[1]


# --- from the schema ------------------------------------------------------------------------------------


def _remark(key: Key, schema: Schema | None) -> str:
    if reason := _reason(key):
        return reason
    if key in registry.REFUSED:
        return registry.REFUSED[key].reason
    assert schema is not None
    return "it has no floating-point output" if not _any_floating(schema.outputs) else "it has no floating-point input"


def _any_floating(parameters: Any) -> bool:
    return any(map(_floating, parameters))


def _floating(parameter: onnx.defs.OpSchema.FormalParameter) -> bool:
    """Whether a parameter can be floating-point: a tensor, or a sequence or an optional of tensors."""
    return any(f"({t}" in kind for kind in parameter.types for t in ("float", "double", "bfloat16"))


def _reads(schema: Schema) -> bool:
    """Whether an operator can read floating-point values, as inputs or captured by its subgraphs."""
    graphs = any(a.type == onnx.defs.OpSchema.AttrType.GRAPH for a in schema.attributes.values())
    return graphs or _any_floating(schema.inputs)


# --- from the rule ---------------------------------------------------------------------------------------


def _inputs(rule: Rule | None, schema: Schema) -> Iterator[str]:
    """Yield the names of the inputs that have gradients: the floating-point inputs that test cases differentiate."""
    settings = rule.settings if rule is not None else _SETTINGS.get(schema.name, set())
    tried = _tried(rule) if rule is not None else set()
    last = len(schema.inputs) - 1
    for i, parameter in enumerate(schema.inputs):
        variadic = i == last and parameter.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        known = i in tried or (variadic and max(tried, default=-1) >= i)
        if _floating(parameter) and i not in settings and (known or not tried):
            yield f"{parameter.name}…" if variadic else parameter.name
    if rule.captures if rule is not None else schema.name == "SequenceMap":
        yield "captured values"


def _tried(rule: Rule) -> set[int]:
    """Return the indices of the inputs that a test case differentiates; graph cases are not counted."""
    cases = [c for c in rule.cases if not c.graph]
    return {i for c in cases for i, x in enumerate(c.inputs) if isinstance(x, Draw) and x.differentiable}


def _first_order_only(rule: Rule) -> str:
    """Return why no case of ``rule`` is tested at second order; "" if a case is, or there are no cases."""
    reasons = Counter(c.first_order_only for c in rule.cases)
    return "" if reasons[""] or not reasons else reasons.most_common(1)[0][0]
