"""Weights get other numbers: drawn anew, from a file, or those of another weight."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, PATH, TEXT, WHOLE, as_names, checked, matching
from gradgraph.errors import DataError, GradgraphError, ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.models import Source
from gradgraph.graph.shapes import known_sizes, shape_of
from gradgraph.graph.weight_layouts import layouts
from gradgraph.runtime.saved.partial import read_values
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operated import Path, Result, closed, numbers_of, opened, set_numbers, value_named

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]


def weights_named(work: ir.Model, names: str | Sequence[str]) -> list[ir.Value]:
    """The floating initializers that these names and globs match, in the model's order.

    Raises:
        UnknownNameError: one matches nothing.
    """
    known = {n: v for n, v in work.graph.initializers.items() if v.dtype is not None and v.dtype.is_floating_point()}
    chosen: set[str] = set()
    for pattern in as_names(names):
        found = matching(pattern, list(known))
        if not found:
            raise UnknownNameError(f"no floating weight matches '{shown(pattern)}'{suggestion(pattern, known)}")
        chosen.update(found)
    return [v for n, v in known.items() if n in chosen]


# --- drawn anew -------------------------------------------------------------------------------------------


@checked(weights=NAMES, seed=WHOLE, out=PATH.or_none())
def reset_weights(model: Source, weights: str | Sequence[str], *, seed: int = 0, out: Path | None = None) -> Result:
    """The model with these weights as PyTorch's layers begin.

    Factors of Gemm, MatMul and Conv and their biases: uniform in ±1/√(fan in). Rows of an embedding: normal. Scales of
    a normalisation: 1; its biases and running means: 0; running variances: 1.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weights: names and globs.
        seed: of the numbers.
        out: write the result to this path.

    Raises:
        UnknownNameError: a name matches no floating weight.
        ModelError: nothing says what kind of weight one is.
        OutputError: ``out`` cannot be written.
    """
    work, rng = opened(model, out), np.random.default_rng(seed)
    for value in weights_named(work, weights):
        tensor = numbers_of(value)
        assert tensor is not None
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
        if node.op_type == "Add" and len(sizes) == 1:  # a bias behind a product
            products = [v.producer() for v in node.inputs if v is not None]
            node, position = next((p for p in products if p is not None and p.op_type == "MatMul"), node), 1
        linear = node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and not node.domain and position
        if linear and numbers_of(Layer(node).weight) is not None and len(Layer(node).shape) > 1:
            return rng.uniform(-1, 1, sizes) / math.sqrt(Layer(node).fan_in)
    raise ModelError(f"nothing says how the weight '{shown(value.name)}' begins: no linear layer, embedding or "
                     "normalisation reads it as its weight")  # fmt: skip


# --- one tensor for two -------------------------------------------------------------------------------------


@checked(weight=TEXT, to=TEXT, out=PATH.or_none())
def tie_weights(model: Source, weight: str, to: str, *, out: Path | None = None) -> Result:
    """The model in which all that read ``weight`` read ``to`` instead; transposed, if the shapes say so.

    Where both are square the layers say it: an embedding has its rows where a head has its outputs.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weight: the name of the weight that goes.
        to: the one that is read in both places, trained in one place and stored once.
        out: write the result to this path.

    Raises:
        UnknownNameError: there is no such value.
        ModelError: one of them is no weight, or shapes or element types differ.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    old, new = (value_named(work, name) for name in (weight, to))
    a, b = numbers_of(old), numbers_of(new)
    if a is None or b is None or old is new:
        raise ModelError(f"'{shown(weight)}' and '{shown(to)}' should be two weights of the model")
    if a.dtype != b.dtype or sorted(a.shape.numpy()) != sorted(b.shape.numpy()) or a.shape.rank() > 2 < b.shape.rank():
        raise ModelError(f"'{shown(weight)}' is {a.dtype} {list(a.shape.numpy())} and '{shown(to)}' is {b.dtype} "
                         f"{list(b.shape.numpy())}, so they cannot be one")  # fmt: skip
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


@checked(strict=FLAG, turned=FLAG.or_none(), out=PATH.or_none())
def load_weights(
    model: Source,
    weights: Arrays | Path,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    turned: bool | None = None,
    out: Path | None = None,
) -> Result:
    """The model with numbers from a ``.safetensors`` or ``.npz`` file (or a dict of arrays), found by name.

    A matrix whose file has it transposed, as ``nn.Linear`` stores what a MatMul reads, is turned. The shape of a square
    one does not say it: it is turned as others of the file are that only MatMuls read, which have a shape that does.
    Where there are none, it is turned, but not from an ``.onnx`` file.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weights: the file, or arrays by name.
        turned: of square matrices that MatMuls read, whether they are transposed in the file, if that is known.
        names: what a weight of the model is called in the file, where it is called otherwise there.
        strict: refuse if a weight of the model has nothing in the file, or the other way round; what only exporters
            make (constants of formulas) is never missed.
        out: write the result to this path.

    Raises:
        DataError: the file cannot be read; names are missing or left over; a shape does not fit.
        UnknownNameError: ``names`` has a weight that the model has not.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    given = weights if isinstance(weights, Mapping) else _read(weights)
    own = {n: v for n, v in work.graph.initializers.items() if v.const_value is not None}
    called = dict(names or {})
    for name in called:
        if name not in own:
            raise UnknownNameError(f"the model has no weight '{shown(name)}'{suggestion(name, own)}")
    found = {n: called.get(n, n) for n in own if called.get(n, n) in given}
    if strict:
        _check_all(own, found, given)
    pairs = [(own[name], np.asarray(given[source]), source) for name, source in found.items()]
    if turned is None:
        turned = _are_turned(
            pairs, by_default=isinstance(weights, Mapping) or FilePath(os.fspath(weights)).suffix != ".onnx"
        )
    for value, data, source in pairs:
        _give(work, value, data, source, turned)
    return closed(work, model, out)


def give_weights(work: ir.Model, weights: Arrays | Path) -> None:
    """Let every weight that has something of its name and shape in ``weights`` have these numbers, in place."""
    given = weights if isinstance(weights, Mapping) else _read(weights)
    for name, value in work.graph.initializers.items():
        tensor = value.const_value
        if name in given and tensor is not None and np.shape(given[name]) == tuple(tensor.shape.numpy()):
            set_numbers(work, value, np.asarray(given[name]).astype(tensor.dtype.numpy()))


def _read(path: Path) -> Arrays:
    try:
        return read_values(path)[0]
    except GradgraphError as error:
        what = f"'{shown(path)}'"
        problem = error.problem.replace(what, "it")
        raise DataError(f"cannot read the weights in {what}: {problem}; give a .safetensors or .npz file") from None


def _check_all(own: Mapping[str, ir.Value], found: Mapping[str, str], given: Arrays) -> None:
    floats = {n: v for n, v in own.items() if v.dtype is not None and v.dtype.is_floating_point() and v.uses()}
    missing = [n for n, v in floats.items() if n not in found and v.const_value is not None and v.const_value.size > 1]
    spare = [n for n in given if n not in found.values()]
    if missing or spare:
        parts = [f"{len(missing)} weights of the model are not in the file ({_some(missing)})"] if missing else []
        parts += [f"{len(spare)} tensors of the file are not in the model ({_some(spare)})"] if spare else []
        raise DataError(
            f"names do not fit: {'; '.join(parts)}",
            remedy="map names with names={...}, name the model's weights with gg.surgery.name_weights, or pass "
            "strict=False to load what fits",
            shell="name the model's weights with --name-weights, or add --partly to load what fits",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(shown(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


def _are_turned(pairs: Sequence[tuple[ir.Value, np.ndarray, str]], by_default: bool) -> bool:
    """Do matrices that MatMuls read lie the other way round in the file? Those that are not square say it."""
    for value, data, _ in pairs:
        if data.ndim == 2 and data.shape[0] != data.shape[1] and _is_only_multiplied(value):
            return data.shape != tuple(known_sizes(shape_of(value)))
    return by_default


def _is_only_multiplied(value: ir.Value) -> bool:
    return all(node.op_type == "MatMul" and place == 1 for node, place in value.uses())


def _give(work: ir.Model, value: ir.Value, data: np.ndarray, source: str, turned: bool) -> None:
    tensor = numbers_of(value)
    assert tensor is not None
    wanted = tuple(tensor.shape.numpy())
    if data.ndim == 2 and data.T.shape == wanted and (data.shape != wanted or (turned and _is_only_multiplied(value))):
        data = data.T
    if data.shape != wanted:
        raise DataError(f"'{shown(source)}' has shape {list(data.shape)} in the file, and '{shown(value.name)}' of the "
                        f"model {list(wanted)}")  # fmt: skip
    if not np.can_cast(data.dtype, tensor.dtype.numpy(), "same_kind"):
        raise DataError(f"'{shown(source)}' holds {data.dtype} numbers in the file, and the model's are {tensor.dtype}")
    set_numbers(work, value, np.array(data, tensor.dtype.numpy(), order="C"))
