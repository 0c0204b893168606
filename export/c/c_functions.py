"""The functions of a C program: each runs one graph of the model, and all share one state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import BuildError, shown
from gradgraph.export.c.c_lowering import lowered
from gradgraph.export.c.c_memory import planned
from gradgraph.export.c.c_names import identifiers
from gradgraph.export.c.c_plan import Plan
from gradgraph.export.c.c_reading import Reader, refusal, result
from gradgraph.export.c.c_text import Text
from gradgraph.export.c.program import Shape, Tensor


@dataclass
class Function:
    """A C function: the execution plan of a graph, and the function's arguments.

    Attributes:
        suffix: the end of the function's name, such as ``step`` in ``trainer_step``.
        about: the comment above its declaration.
        inputs: input arguments, by their names in the model.
        results: output arguments, by their names in the model.
        shapes: the shapes of the results. The tensor of a result may have the same elements in another shape.
    """

    suffix: str
    about: str
    plan: Plan
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    shapes: dict[str, Shape] = field(default_factory=dict)

    @property
    def declared(self) -> dict[str, Tensor]:
        """The results in their own shapes, for the header and the manifest; they have no address."""
        return {n: replace(t, shape=self.shapes[n]) for n, t in self.results.items()}


def input_key(name: str) -> str:
    return f"< {name}"


def result_key(name: str) -> str:
    return f"> {name}"


@dataclass
class Unit:
    """The content of the generated files.

    Attributes:
        name: the prefix of all public C names.
        state: the state tensors by their names in the model, in the order of the C struct, which is that of the saved
            bytes: larger element types first, so that there is no padding.
        initial: the initial values of the state tensors, by name.
        labels: the targets that are class labels, by name.
    """

    name: str
    functions: list[Function]
    state: dict[str, Tensor]
    initial: dict[str, np.ndarray]
    kinds: dict[str, str]
    labels: dict[str, TargetSpec] = field(default_factory=dict)
    text: Text = field(default_factory=Text)

    @functools.cached_property
    def c_names(self) -> dict[str, str]:
        """The C names of the arguments of all functions, by ``input_key`` and ``result_key``: a name has one size."""
        own = [f"{self.name}_{end}" for end in ("init", "save", "load", *(f.suffix for f in self.functions))]
        keys = [key for f in self.functions for key in (*map(input_key, f.inputs), *map(result_key, f.results))]
        return identifiers(dict.fromkeys(keys), own)

    @property
    def arena(self) -> int:
        return max((f.plan.arena for f in self.functions), default=0)

    @property
    def state_bytes(self) -> int:
        return sum(t.length * np.dtype(t.dtype).itemsize for t in self.state.values())


def function(
    suffix: str,
    about: str,
    model: onnx.ModelProto,
    state: Mapping[str, Tensor],
    *,
    sizes: Mapping[str, int],
    averages: Mapping[str, str] | None = None,
    nexts: Mapping[str, str] | None = None,
    arena: int = 0,
) -> Function:
    """Return the C function that computes ``model``, whose weights become constants unless they are in ``state``.

    Args:
        state: the state tensors by name; other inputs are arguments.
        sizes: the sizes of symbolic dimensions, by name.
        averages: for each input to replace, the name of the state tensor to read instead, such as an averaged weight.
        nexts: for each state tensor, the name of the model output with its next value.
        arena: the size of the arena of other functions, which this one shares.

    Raises:
        BuildError: a size is not fixed, or an operator or element type is not supported in C.
    """
    work = lowered(model, sizes)
    reader = Reader()
    inputs: dict[str, Tensor] = {}
    for value in work.graph.inputs:
        name = value.name or ""
        if name in work.graph.initializers:
            continue
        _check_sizes(value)
        own = (averages or {}).get(name, name)
        if own in state:
            tensor = state[own]
        else:
            tensor = inputs[name] = reader.tensor(value, "input")
        reader.views[value] = tensor.whole()
    reader.read(work.graph)
    taken: set[Tensor] = set()
    made: dict[str, Tensor] = {}
    for value in work.graph.outputs:
        made[value.name or ""] = result(reader, reader.view(value), taken)
    reader.program.outputs = made
    old = {new: name for name, new in (nexts or {}).items()}
    pairs = {made[new]: state[name] for new, name in old.items() if new in made}
    plan = planned(reader.program, pairs, enough=arena)
    shapes = {value.name or "": reader.view(value).shape for value in work.graph.outputs}
    return Function(suffix, about, plan, inputs, {n: t for n, t in made.items() if n not in old}, shapes)


def _check_sizes(value: ir.Value) -> None:
    name = shown(value.name)
    if value.shape is None:
        raise BuildError(f"the number of axes of the input '{name}' is unknown", remedy="export the model with a shape")
    open_sizes = [d for d in value.shape if not isinstance(d, int)]
    if open_sizes:
        first = getattr(open_sizes[0], "value", None)
        listed = ", ".join(f"'{shown(getattr(d, 'value', None) or '?')}'" for d in open_sizes)
        key = shown(first) if first else name
        raise BuildError(
            f"the input '{name}' has dynamic sizes ({listed}), but C arrays require fixed sizes",
            remedy=f"pass sizes={{'{key}': ...}}",
            shell=f"add --size {key}=...",
        )
    if value.dtype == ir.DataType.STRING:
        raise refusal(f"input '{name}'", "it contains strings", "encode them as numbers before the model")
