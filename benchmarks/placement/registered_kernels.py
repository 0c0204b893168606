"""Comparison of ort-cuda's table with the kernels that onnxruntime-gpu registers, by operator and type.

Run in the environment of ``standins``; prints a JSON list of differences, a line each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema, get_all_opkernel_def

from gradgraph.backends.capability import Row
from gradgraph.backends.facts import type_name
from gradgraph.backends.ort_cuda.cuda_kernels import table
from gradgraph.backends.ort_operators import CONTRIB
from gradgraph.graph.shapes import OPSET

CUDA = "CUDAExecutionProvider"
NO_END = 2**31 - 1
DECIDES = {"Where": 1, "OneHot": 2}  # the input whose type selects the kernel, if not the first
BY_RESULT = ("ConstantOfShape", "RandomNormalLike", "RandomUniformLike")
VARIED = ("If", "Loop", "Scan", "NonMaxSuppression")  # carry values of every type, or name none
KNOWN = {t for row in table().rows.values() for types in row.types.values() for t in types}  # not float8, text, …


def main() -> None:
    kernels = [k for k in get_all_opkernel_def() if k.provider == CUDA]
    rows = table().rows
    own = {name.removeprefix(f"{CONTRIB}."): row for name, row in rows.items() if name.startswith(f"{CONTRIB}.")}
    standard = {name: row for name, row in rows.items() if "." not in name}
    print(json.dumps([*differences(kernels, "", standard), *differences(kernels, CONTRIB, own)]))


def differences(kernels: Iterable[Any], domain: str, rows: Mapping[str, Row]) -> Iterable[str]:
    ours = [k for k in kernels if k.domain == domain]
    # of onnxruntime's own operators, only those in the table
    names = {k.op_name for k in ours} if not domain else set()
    for name in sorted(names | set(rows)):
        found = [k.type_constraints for k in ours if k.op_name == name and serves(k, domain)]
        if bool(found) != (name in rows):
            yield f"{name}: {'the table lacks it' if found else 'there is no kernel'}"
        elif found and name not in VARIED:
            listed = set[str]().union(*rows[name].types.values())
            real = types(found, deciding_type(domain, name)) & KNOWN
            if listed != real:
                yield f"{name}: the table lacks {sorted(real - listed)}, there is no kernel for {sorted(listed - real)}"


def serves(kernel: Any, domain: str) -> bool:
    """Whether a kernel implements the operator's version in our opset."""
    first, last = kernel.version_range
    if domain:
        return True
    try:
        since = onnx.defs.get_schema(kernel.op_name, OPSET, "").since_version
    except onnx.defs.SchemaError:  # an operator of a newer opset
        return False
    return bool(first == since or (last != NO_END and first <= since <= last))


def deciding_type(domain: str, name: str) -> str:
    """Return the schema's name of the type variable that the table lists for an operator."""
    if not domain:
        schema = onnx.defs.get_schema(name, OPSET, "")
        by_result = name in BY_RESULT or not schema.inputs
        return str((schema.outputs[0] if by_result else schema.inputs[DECIDES.get(name, 0)]).type_str)
    return next(str(s.inputs[0].typeStr) for s in get_all_operator_schema() if (s.domain, s.name) == (domain, name))


def types(found: Iterable[dict[str, list[str]]], name: str) -> set[str]:
    """Return the element types for the type variable ``name``, as the table spells them."""
    named = (t for constraints in found for t in constraints.get(name, ()))
    matches = (re.fullmatch(r"(?:seq\()?tensor\((\w+)\)\)?", t) for t in named)
    return {type_name(ir.DataType[match.group(1).upper()]) for match in matches if match}


if __name__ == "__main__":
    main()
