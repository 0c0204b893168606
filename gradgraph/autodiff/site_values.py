"""Values given for the sites of a ``Net``: numbers, arrays, dicts of them by name, or new inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import described
from gradgraph.autodiff.calls import Net
from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import as_dims, record_shape

Baseline = Any  # a number, an array, a dict of them by name, or "input"


def baselines_of(
    net: Net, given: Baseline, names: Mapping[ir.Value, str], word: str = "baseline"
) -> dict[ir.Value, Var]:
    """Return the baseline of each site, in the shape of the site.

    Args:
        given: a number; an array of the shape of the site, or of one row of it; a dict of them by name; or ``"input"``,
            for new inputs ``"<name>.baseline"``.
        names: the name of each site in messages and for inputs.
    """
    if isinstance(given, Mapping):
        check_entries(given, list(names.values()), word)
    found = {}
    for x, name in names.items():
        value = value_of(net, given[name] if isinstance(given, Mapping) else given, x, name, word)
        shape = net.op.shape(net.op.wrap(x))
        found[x] = (
            net.op.full(shape, n, value.dtype) if (n := _number(value)) is not None else net.op.Expand(value, shape)
        )
        record_shape(found[x].value, None if x.shape is None else as_dims(x.shape))
    return found


def check_entries(given: Mapping[str, Any], names: Sequence[str], word: str, others: Sequence[str] = ()) -> None:
    """Raise an error unless ``given`` has an entry for each of ``names``, and none besides those of ``others``."""
    unknown = [n for n in given if n not in names and n not in others]
    missing = [n for n in names if n not in given]
    if unknown or missing:
        what = f"names '{shown(unknown[0])}'" if unknown else f"has no entry for '{shown(missing[0])}'"
        raise BuildError(f"the {word} {what}; pass one for each of {', '.join(map(shown, names))}")


def _number(value: Var) -> float | None:
    return None if value.const is None or value.const.ndim else value.const.item()


def value_of(net: Net, given: Any, x: ir.Value, name: str, word: str) -> Var:
    """Return ``given`` for the value ``x``: a number or array of its type that broadcasts to it, or a new input."""
    op, here = net.op, net.op.wrap(x)
    if isinstance(given, str) and given == "input":
        value = ir.Value(name=op.fresh(f"{name}.{word}"), type=x.type, shape=x.shape)
        net.graph.inputs.append(value)
        return op.wrap(value)
    try:
        array = np.asarray(given if given is not None else "", here.dtype.numpy())  # NumPy makes NaN of None
    except (TypeError, ValueError):
        raise BuildError(f"the {word} is {described(given)}; pass a number, an array or 'input'") from None
    shape = None if x.shape is None else as_dims(x.shape)
    if shape is not None and array.ndim and not _fits(array.shape, shape):
        raise BuildError(
            f"the {word} of '{shown(name)}' has shape {list(array.shape)}, but '{shown(name)}' has shape "
            f"{list(shape)}; pass a number, or an array of this shape or of one sample"
        )
    return op.const(array)


def _fits(mine: Sequence[int], shape: Sequence[int | str | None]) -> bool:
    """Whether an array of shape ``mine`` is a value, or a row, for a tensor of ``shape``."""
    if len(mine) not in (len(shape), len(shape) - 1):
        return False
    tail = list(zip(mine[::-1], shape[::-1], strict=False))
    first = len(mine) == len(shape)
    return all(
        a == b or not isinstance(b, int) or (first and i == len(tail) - 1 and a == 1) for i, (a, b) in enumerate(tail)
    )
