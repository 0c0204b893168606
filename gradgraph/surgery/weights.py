"""New values for weights: reinitialised, shared with another weight, or given by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, PATH, TEXT, WHOLE, as_names, checked, matching
from gradgraph.errors import DataError, GradgraphError, ModelError, UnknownNameError, counted, shown, suggestion
from gradgraph.files.models import Source
from gradgraph.graph.weight_layouts import layouts
from gradgraph.passes.normal.weights.verdicts import judge_weights, verdicts
from gradgraph.runtime.saved.partial import Stored, read_values
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operation import Path, Result, closed, numbers_of, opened, set_numbers, tensor_of, value_named

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]


def weights_named(work: ir.Model, names: str | Sequence[str]) -> list[ir.Value]:
    """Return the floating-point initializers that ``names`` (names and globs) match, in the model's order.

    Raises:
        UnknownNameError: a name or glob matches nothing.
    """
    known = {n: v for n, v in work.graph.initializers.items() if v.dtype is not None and v.dtype.is_floating_point()}
    chosen: set[str] = set()
    for pattern in as_names(names):
        found = matching(pattern, list(known))
        if not found:
            raise UnknownNameError(f"no floating-point weight matches '{shown(pattern)}'{suggestion(pattern, known)}")
        chosen.update(found)
    return [v for n, v in known.items() if n in chosen]


# --- reinitialised ----------------------------------------------------------------------------------------


@checked(weights=NAMES, seed=WHOLE, out=PATH.or_none())
def reset_weights(model: Source, weights: str | Sequence[str], *, seed: int = 0, out: Path | None = None) -> Result:
    """Reinitialise these weights as PyTorch's layers do.

    Weights and biases of Gemm, MatMul and Conv: uniform in ±1/√(fan in). Rows of an embedding: normal. Scales of a
    normalisation layer: 1; its biases and running means: 0; running variances: 1.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weights: names and globs.
        seed: seed of the random numbers.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        UnknownNameError: a name matches no floating-point weight.
        ModelError: the role of a weight is unknown.
        OutputError: ``out`` cannot be written.
    """
    work, rng = opened(model, out), np.random.default_rng(seed)
    for value in weights_named(work, weights):
        tensor = tensor_of(value)
        set_numbers(work, value, _begun(value, tuple(tensor.shape.numpy()), rng).astype(tensor.dtype.numpy()))
    return closed(work, model, out)


_NORMS = {"BatchNormalization": (1, 0, 0, 1), "InstanceNormalization": (1, 0), "LayerNormalization": (1, 0),
          "GroupNormalization": (1, 0), "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,)}  # fmt: skip


def _begun(value: ir.Value, sizes: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    for node, position in value.uses():
        if node.op_type in _NORMS and position:
            return np.full(sizes, _NORMS[node.op_type][position - 1], float)
        if node.op_type == "Gather" and position == 0:
            return rng.normal(size=sizes)
        if node.op_type == "Add" and len(sizes) == 1:  # a bias after a product
            products = [v.producer() for v in node.inputs if v is not None]
            node, position = next((p for p in products if p is not None and p.op_type == "MatMul"), node), 1
        linear = node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and not node.domain and position
        if linear and numbers_of(Layer(node).weight) is not None and len(Layer(node).shape) > 1:
            return rng.uniform(-1, 1, sizes) / math.sqrt(Layer(node).fan_in)
    raise ModelError(f"the initialisation of the weight '{shown(value.name)}' is unknown: no linear layer, embedding "
                     "or normalisation reads it as its weight; exclude it")  # fmt: skip


# --- shared -----------------------------------------------------------------------------------------------


@checked(weight=TEXT, to=TEXT, out=PATH.or_none())
def tie_weights(model: Source, weight: str, to: str, *, out: Path | None = None) -> Result:
    """Replace ``weight`` with ``to`` everywhere, transposed if the shapes require it.

    A square matrix is transposed if the layers that read the two weights have their outputs on different axes; the rows
    of an embedding are the outputs of a head.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weight: the name of the weight to remove.
        to: the weight that replaces it, trained and stored once.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        UnknownNameError: the model has no value of one of the names.
        ModelError: one of the values is not a weight, or their shapes or element types differ.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    old, new = (value_named(work, name) for name in (weight, to))
    a, b = numbers_of(old), numbers_of(new)
    if a is None or b is None or old is new:
        raise ModelError(f"'{shown(weight)}' and '{shown(to)}' must be two weights of the model")
    if a.dtype != b.dtype or sorted(a.shape.numpy()) != sorted(b.shape.numpy()) or a.shape.rank() > 2 < b.shape.rank():
        raise ModelError(f"'{shown(weight)}' is {a.dtype} {list(a.shape.numpy())} and '{shown(to)}' is {b.dtype} "
                         f"{list(b.shape.numpy())}, so they cannot be tied; tie weights of the same type and "
                         "shape")  # fmt: skip
    sides = [{layout.outputs for layout in layouts(value)} for value in (old, new)]
    is_turned = sides[0] != sides[1] and all(len(side) == 1 for side in sides)
    if a.shape != b.shape or (a.shape.rank() == 2 and a.shape[0] == a.shape[1] and is_turned):
        turn = ir.Node("", "Transpose", [new], [ir.AttrInt64s("perm", [1, 0])], name=f"{to}/Transpose")
        turn.outputs[0].name, turn.outputs[0].type = f"{to}.transposed", new.type
        work.graph.insert_before(work.graph[0], turn)
        new = turn.outputs[0]
    old.replace_all_uses_with(new)
    return closed(work, model, out)


# --- from a file ----------------------------------------------------------------------------------------------


def give_weights(work: ir.Model, weights: Arrays | Path) -> None:
    """Load each tensor of ``weights`` whose name and shape match an initializer of the model, in place.

    Raises:
        DataError: the file cannot be read, or nothing in it fits.
    """
    given = weights if isinstance(weights, Mapping) else read_weights(weights).values
    taken = False
    for name, value in work.graph.initializers.items():
        tensor = value.const_value
        if name in given and tensor is not None and np.shape(given[name]) == tuple(tensor.shape.numpy()):
            set_numbers(work, value, np.asarray(given[name]).astype(tensor.dtype.numpy()))
            taken = True
    if given and not taken:
        raise DataError(
            f"none of {counted(len(given), 'tensor')} ({first_names([*given])}) has the name and shape of a weight of "
            "the model; pass weights trained from this model"
        )


def read_weights(path: Path) -> Stored:
    """Return the arrays in a file of weights; raise DataError if it cannot be read."""
    try:
        return read_values(path)
    except GradgraphError as error:
        what = f"'{shown(path)}'"
        problem = error.problem.replace(f"no file {what}", "no such file").replace(what, "it")
        raise DataError(f"cannot read the weights in {what}: {problem}; use a .safetensors or .npz file") from None


def weights_of(model: ir.Model) -> list[str]:
    """Return the names of a model's weights with more than one number."""
    judged = model.clone()
    judge_weights(judged)
    initializers = judged.graph.initializers
    sizes = {n: v.const_value.size for n, v in initializers.items() if v.const_value is not None and v.uses()}
    return [n for n, verdict in verdicts(judged.graph).items() if verdict.is_weight and sizes.get(n, 0) > 1]


def first_names(names: Sequence[str]) -> str:
    """Return the first three names for a message, without quotes."""
    return ", ".join(shown(name) for name in names[:3]) + (", …" if len(names) > 3 else "")
