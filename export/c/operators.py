"""Tables of elementwise operators and reductions, as C expressions.

In a template, ``{0}``, ``{1}``, … are the operands, ``{f}`` is the suffix of C math functions for the element type
(``f`` for float), ``{t}`` the C type of the first operand and ``{o}`` the C type of the result. Operands are names or
literals, so a template may use them several times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradgraph.export.c.program import C_TYPES, Reduction

Attributes = Mapping[str, Any]

_LOWEST = {-(2**63): "INT64_MIN", -(2**31): "INT32_MIN"}  # in C, -2147483648 negates a number that int does not have

# operators on floating-point types only
FLOATING = {
    "Neg": "-{0}",
    "Reciprocal": "1 / {0}",
    "Sqrt": "sqrt{f}({0})",
    "Exp": "exp{f}({0})",
    "Log": "log{f}({0})",
    "Sin": "sin{f}({0})",
    "Cos": "cos{f}({0})",
    "Tan": "tan{f}({0})",
    "Asin": "asin{f}({0})",
    "Acos": "acos{f}({0})",
    "Atan": "atan{f}({0})",
    "Sinh": "sinh{f}({0})",
    "Cosh": "cosh{f}({0})",
    "Asinh": "asinh{f}({0})",
    "Acosh": "acosh{f}({0})",
    "Atanh": "atanh{f}({0})",
    "Tanh": "tanh{f}({0})",
    "Erf": "erf{f}({0})",
    "Floor": "floor{f}({0})",
    "Ceil": "ceil{f}({0})",
    "Round": "rint{f}({0})",
    "Sigmoid": "1 / (1 + exp{f}(-{0}))",
    "Softplus": "({0} > 0 ? {0} + log1p{f}(exp{f}(-{0})) : log1p{f}(exp{f}({0})))",
    "Softsign": "{0} / (1 + fabs{f}({0}))",
    "HardSwish": "{0} * ({0} < -3 ? 0 : {0} > 3 ? 1 : {0} / 6 + {half})",
    "Mish": "{0} * tanh{f}({0} > 20 ? {0} : log1p{f}(exp{f}({0})))",
    "Div": "{0} / {1}",
    "Pow": "pow{f}({0}, ({t}){1})",
    "PRelu": "({0} < 0 ? {0} * {1} : {0})",
}

# operators on all numeric types
NUMERIC = {
    "Add": "{0} + {1}",
    "Sub": "{0} - {1}",
    "Mul": "{0} * {1}",
    "Relu": "({0} < 0 ? 0 : {0})",
    "Sign": "({0} > 0 ? 1 : {0} < 0 ? -1 : {0})",
    "Max": "({0} > {1} || {0} != {0} ? {0} : {1})",
    "Min": "({0} < {1} || {0} != {0} ? {0} : {1})",
}

# operators with a boolean result
PREDICATES = {
    "Equal": "{0} == {1}",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "And": "{0} && {1}",
    "Or": "{0} || {1}",
    "Xor": "{0} != {1}",
    "Not": "!{0}",
    "IsNaN": "isnan({0})",
}

# operators on integers
INTEGERS = {
    "BitwiseAnd": "{0} & {1}",
    "BitwiseOr": "{0} | {1}",
    "BitwiseXor": "{0} ^ {1}",
    "BitwiseNot": "~{0}",
}

FOLDED = {"Sum": "Add", "Max": "Max", "Min": "Min", "Mean": "Add"}  # operators with any number of operands


def expression(op_type: str, attributes: Attributes, dtypes: list[str], out: str) -> str | None:
    """Return the template of an elementwise operator; None if it is not elementwise or the types are unsupported.

    Args:
        dtypes: the element types of its operands, without omitted ones.
        out: the element type of its result.
    """
    dtype = dtypes[0]
    kind = np.dtype(dtype).kind
    if op_type in _WRITTEN:
        template = _WRITTEN[op_type](attributes, dtypes, out)
    elif op_type in PREDICATES:
        template = PREDICATES[op_type]
    elif op_type in NUMERIC and kind != "b":
        template = NUMERIC[op_type] if kind == "f" else _of_integers(op_type, dtype)
    elif op_type == "Neg" and kind == "i":
        template = "0 - " + _unsigned("{0}", dtype)
    elif (op_type in FLOATING and kind == "f") or (op_type == "Div" and kind in "iu"):
        template = FLOATING[op_type]
    elif op_type in INTEGERS and kind in "iu":
        template = INTEGERS[op_type]
    else:
        return None
    return template and typed(template, dtype, out)


def _unsigned(text: str, dtype: str) -> str:
    """Return integers cast to an unsigned type, in which sums and products wrap around instead of being undefined."""
    width = max(32, 8 * np.dtype(dtype).itemsize)
    return text if dtype == f"uint{width}" else re.sub(r"\{\w\}", rf"(uint{width}_t)\g<0>", text)


def _of_integers(op_type: str, dtype: str) -> str:
    if op_type in ("Add", "Sub", "Mul"):
        return _unsigned(NUMERIC[op_type], dtype)
    if np.dtype(dtype).kind == "u" and op_type in ("Relu", "Sign"):
        return {"Relu": "{0}", "Sign": "{0} > 0"}[op_type]
    return NUMERIC[op_type].replace(" || {0} != {0}", "")  # there is no NaN


def typed(template: str, dtype: str, out: str) -> str:
    """Return ``template`` with all fields except operands filled in, for element types ``dtype`` and ``out``."""
    suffix = "" if dtype == "float64" else "f"
    for key, text in {"f": suffix, "t": C_TYPES[dtype], "o": C_TYPES[out], "half": literal(0.5, dtype)}.items():
        template = template.replace("{" + key + "}", text)
    return template


def literal(value: Any, dtype: str) -> str:
    """Return a number as a C literal, in parentheses if negative."""
    kind = np.dtype(dtype).kind
    if kind == "f":
        number = float(value)
        if math.isnan(number) or math.isinf(number):
            return "NAN" if math.isnan(number) else "INFINITY" if number > 0 else "(-INFINITY)"
        text = str(np.float32(value)) if dtype == "float32" else repr(number)
        text = text if any(c in text for c in ".e") else text + ".0"
        text += "f" if dtype == "float32" else ""
    elif int(value) in _LOWEST:
        text = _LOWEST[int(value)]
    else:
        form = "INT64_C({})" if dtype == "int64" and abs(int(value)) >= 2**31 else "{}"
        text = {"uint64": "UINT64_C({})", "uint32": "{}u"}.get(dtype, form).format(int(value))
    return f"({text})" if text.startswith("-") else text


def _float(template: str, **defaults: float) -> Callable[..., str | None]:
    """Return a function that fills attributes of the operator, such as ``{alpha}``, into ``template`` as literals."""

    def write(attributes: Attributes, dtypes: list[str], out: str) -> str | None:
        if np.dtype(dtypes[0]).kind != "f":
            return None
        text = template
        for name, default in defaults.items():
            text = text.replace("{" + name + "}", literal(attributes.get(name, default), dtypes[0]))
        return text

    return write


def _cast(attributes: Attributes, dtypes: list[str], out: str) -> str:
    return "{0} != 0" if out == "bool" else "({o}){0}"


def _abs(attributes: Attributes, dtypes: list[str], out: str) -> str:
    kind = np.dtype(dtypes[0]).kind
    if kind == "i":
        return "({0} < 0 ? 0 - " + _unsigned("{0} : {0})", dtypes[0])
    return "fabs{f}({0})" if kind == "f" else "{0}"


def _gelu(attributes: Attributes, dtypes: list[str], out: str) -> str | None:
    if np.dtype(dtypes[0]).kind != "f":
        return None
    if attributes.get("approximate", "none") == "tanh":
        root, cube = literal(math.sqrt(2 / math.pi), dtypes[0]), literal(0.044715, dtypes[0])
        return f"{{half}} * {{0}} * (1 + tanh{{f}}({root} * ({{0}} + {cube} * {{0}} * {{0}} * {{0}})))"
    return f"{{half}} * {{0}} * (1 + erf{{f}}({{0}} * {literal(math.sqrt(0.5), dtypes[0])}))"


def _mod(attributes: Attributes, dtypes: list[str], out: str) -> str | None:
    if attributes.get("fmod", 0):
        return "fmod{f}({0}, {1})" if np.dtype(dtypes[0]).kind == "f" else None
    kind = np.dtype(dtypes[0]).kind
    return {"i": "{0} % {1} + ({0} % {1} < 0 ? {1} : 0)", "u": "{0} % {1}"}.get(kind)


def _shift(attributes: Attributes, dtypes: list[str], out: str) -> str | None:
    if np.dtype(dtypes[0]).kind != "u":
        return None
    return "{0} >> {1}" if attributes.get("direction") == "RIGHT" else "({o})({0} << {1})"


def _is_inf(attributes: Attributes, dtypes: list[str], out: str) -> str | None:
    negative, positive = attributes.get("detect_negative", 1), attributes.get("detect_positive", 1)
    return f"isinf({{0}}) && ({{0}} > 0 ? {positive} : {negative})"


_WRITTEN: dict[str, Callable[[Attributes, list[str], str], str | None]] = {
    "Where": lambda a, d, o: "({0} ? {1} : {2})",
    "Cast": _cast,
    "Identity": lambda a, d, o: "{0}",
    "Abs": _abs,
    "Gelu": _gelu,
    "Mod": _mod,
    "BitShift": _shift,
    "IsInf": _is_inf,
    "LeakyRelu": _float("({0} < 0 ? {alpha} * {0} : {0})", alpha=0.01),
    "Elu": _float("({0} < 0 ? {alpha} * (exp{f}({0}) - 1) : {0})", alpha=1.0),
    "Celu": _float("({0} < 0 ? {alpha} * (exp{f}({0} / {alpha}) - 1) : {0})", alpha=1.0),
    "Selu": _float("{gamma} * ({0} < 0 ? {alpha} * (exp{f}({0}) - 1) : {0})",
                   alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "HardSigmoid": _float("({alpha} * {0} + {beta} < 0 ? 0 : {alpha} * {0} + {beta} > 1 ? 1 : {alpha} * {0} + {beta})",
                          alpha=0.2, beta=0.5),
    "ThresholdedRelu": _float("({0} > {alpha} ? {0} : 0)", alpha=1.0),
}  # fmt: skip
ELEMENTWISE = frozenset([*FLOATING, *NUMERIC, *PREDICATES, *INTEGERS, *_WRITTEN, "Clip", "Sum", "Mean"])

SUM = Reduction("0", "{a} += {v}")
_EXTREME = {
    "ReduceMax": ("{v} > {a} || {v} != {v}", "-INFINITY", "_MIN"),
    "ReduceMin": ("{v} < {a} || {v} != {v}", "INFINITY", "_MAX"),
}

_REDUCTIONS = {
    "ReduceSum": SUM,
    "ReduceMean": Reduction("0", "{a} += {v}", "{a} / {n}"),
    "ReduceProd": Reduction("1", "{a} *= {v}"),
    "ReduceSumSquare": Reduction("0", "{a} += {v} * {v}"),
    "ReduceL1": Reduction("0", "{a} += fabs{f}({v})"),
    "ReduceL2": Reduction("0", "{a} += {v} * {v}", "sqrt{f}({a})"),
    "ReduceLogSum": Reduction("0", "{a} += {v}", "log{f}({a})"),
}
REDUCTIONS = frozenset([*_REDUCTIONS, *_EXTREME, "ArgMax", "ArgMin"])


def reduction(op_type: str, attributes: Attributes, dtype: str) -> Reduction | None:
    """Return the accumulation of a reduction operator for an element type, or None if it is not supported."""
    kind = np.dtype(dtype).kind
    if op_type in ("ArgMax", "ArgMin"):
        if kind == "b":
            return None
        than = (">" if op_type == "ArgMax" else "<") + ("=" if attributes.get("select_last_index", 0) else "")
        step = "if ({a} < 0 || {v} " + than + " {a}_best) {{ {a} = {r}; {a}_best = {v}; }}"
        return Reduction("-1", step, before=C_TYPES[dtype] + " {a}_best = 0;", c_type="int")
    if kind == "b":
        return None
    if op_type in _EXTREME:
        condition, start, limit = _EXTREME[op_type]
        if kind != "f":
            start = C_TYPES[dtype].upper()[:-2] + limit if kind == "i" or limit == "_MAX" else "0"
            condition = condition.split(" ||")[0]
        return Reduction(start, "if (" + condition + ") {a} = {v}")
    if kind != "f" and op_type not in ("ReduceSum", "ReduceProd", "ReduceSumSquare"):
        return None
    if kind == "i":
        step = _unsigned({"ReduceSum": "{a} + {v}", "ReduceProd": "{a} * {v}"}.get(op_type, "{a} + {v} * {v}"), dtype)
        return Reduction(_REDUCTIONS[op_type].start, f"{{a}} = ({C_TYPES[dtype]})({step})")
    how = _REDUCTIONS[op_type]
    suffix = "" if dtype == "float64" else "f"
    return Reduction(*(text.replace("{f}", suffix) for text in (how.start, how.step, how.finish)))
