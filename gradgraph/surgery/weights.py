"""New values for weights: reinitialised, loaded from a file, or shared with another weight."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, PATH, TEXT, WHOLE, as_names, checked, matching
from gradgraph.errors import DataError, GradgraphError, ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.models import Source
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.graph.weight_layouts import layouts
from gradgraph.passes.normal.weights.verdicts import judge_weights, verdicts
from gradgraph.runtime.saved.partial import OfModel, Stored, read_values
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operation import Path, Result, closed, layers_log, numbers_of, opened, set_numbers, value_named

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
    """Load weights from a file (or a dict of arrays) by name.

    A matrix may be transposed in the file: ``nn.Linear`` stores (outputs, inputs), and a MatMul reads (inputs,
    outputs). If its shape shows this, it is transposed. For a square matrix, the layout is known if the file is a
    model, a checkpoint or written by ``gg.export.save_weights``, or inferred from other matrices with a similar name;
    otherwise set ``turned``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weights: a ``.safetensors``, ``.npz``, ``.onnx`` or checkpoint, or arrays by name.
        turned: whether square matrices that MatMuls read are transposed in the file.
        names: the name in the file by name of a weight of the model, if they differ.
        strict: raise DataError if a weight of the model is missing in the file, or vice versa; constants of formulas
            are not weights. Otherwise, everything that fits is loaded, and the number of loaded weights is logged; it
            is an error if nothing fits.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        DataError: the file cannot be read; names are missing or unused, or none matches; a shape differs; or it is
            unknown whether a square matrix is transposed.
        UnknownNameError: the model does not have a weight in ``names``.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    stored = Stored(weights) if isinstance(weights, Mapping) else _read(weights)
    own = {n: v for n, v in work.graph.initializers.items() if v.const_value is not None}
    called = dict(names or {})
    for name in called:
        if name not in own:
            raise UnknownNameError(f"the model has no weight '{shown(name)}'{suggestion(name, own)}")
    found = {n: called.get(n, n) for n in own if called.get(n, n) in stored.values}
    _check_all(work, found, stored, strict)
    pairs = [(own[name], np.asarray(stored.values[source]), source) for name, source in found.items()]
    lying = _lying(pairs)
    for value, data, source in pairs:
        if data.ndim == 2 and data.shape[0] == data.shape[1] > 1 and _is_turned(value, source, stored, lying, turned):
            data = data.T
        _give(work, value, data, source)
    return closed(work, model, out)


def give_weights(work: ir.Model, weights: Arrays | Path) -> None:
    """Load each tensor of ``weights`` whose name and shape match an initializer of the model, in place.

    Raises:
        DataError: the file cannot be read, or nothing in it fits.
    """
    given = weights if isinstance(weights, Mapping) else _read(weights).values
    taken = False
    for name, value in work.graph.initializers.items():
        tensor = value.const_value
        if name in given and tensor is not None and np.shape(given[name]) == tuple(tensor.shape.numpy()):
            set_numbers(work, value, np.asarray(given[name]).astype(tensor.dtype.numpy()))
            taken = True
    if given and not taken:
        raise DataError(f"none of {_counted(given, 'tensor')} ({_some([*given])}) has the name and shape of a weight "
                        "of the model; pass weights trained from this model")  # fmt: skip


def _read(path: Path) -> Stored:
    try:
        return read_values(path)
    except GradgraphError as error:
        what = f"'{shown(path)}'"
        problem = error.problem.replace(what, "it")
        raise DataError(f"cannot read the weights in {what}: {problem}; use a .safetensors or .npz file") from None


def _check_all(work: ir.Model, found: Mapping[str, str], stored: Stored, strict: bool) -> None:
    """Raise DataError if weights are missing in the file or unused; log the number of loaded weights."""
    wanted = _weights_of(work)
    missing = [name for name in wanted if name not in found]
    taken = set(found.values())
    theirs = [*stored.values] if stored.model is None else _weights_of(stored.model)
    kept = {
        name for name in theirs if isinstance(stored.values, OfModel) and _is_kept(name, stored.values[name], taken)
    }
    spare = [name for name in theirs if name not in taken | kept]
    sides = ((missing, "weight", "model", "file"), (spare, "tensor", "file", "model"))
    parts = [
        f"{_counted(rest, what)} of the {here} {'is' if len(rest) == 1 else 'are'} not in the {there} ({_some(rest)})"
        for rest, what, here, there in sides
        if rest
    ]
    if (strict and parts) or not found:
        raise DataError(
            f"names do not match: {'; '.join(parts)}" if parts else "there are no weights to load",
            remedy="map names with names={...}, or name the model's weights with gg.surgery.name_weights"
            + (", or pass strict=False to load what fits" if found else ""),
            shell="name the model's weights with --name-weights"
            + (", or add --partly to load what fits" * bool(found)),
        )
    count = sum(name in found for name in wanted)
    layers_log.info("%s", "; ".join([f"loaded {count} of {_counted(wanted, 'weight')}", *parts]))


def _weights_of(model: ir.Model) -> list[str]:
    """Return the names of a model's weights with more than one number."""
    judged = model.clone()
    judge_weights(judged)
    initializers = judged.graph.initializers
    sizes = {n: v.const_value.size for n, v in initializers.items() if v.const_value is not None and v.uses()}
    return [n for n, verdict in verdicts(judged.graph).items() if verdict.is_weight and sizes.get(n, 0) > 1]


def _is_kept(name: str, array: np.ndarray, taken: Collection[str]) -> bool:
    """Whether a tensor of a checkpoint is training state rather than a weight: a counter, or an optimizer tensor."""
    return array.ndim == 0 or array.dtype.kind != "f" or any(name.startswith(f"{weight}.") for weight in taken)


def _counted(things: Collection[str], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(shown(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


# --- matrices that may be transposed -----------------------------------------------------------------------------


def _outputs(value: ir.Value) -> int | None:
    """Return the output axis of a matrix; None for embeddings, and for weights that no product reads."""
    found = layouts(value)
    axes = {layout.outputs for layout in found if len(layout.outputs) == 1}
    return axes.pop()[0] if axes and all(layout.inputs is not None for layout in found) else None


def _kinds(source: str) -> list[str]:
    """Return the last two parts of a name, and the last one, without digits: ``c_proj.weight`` and ``weight``.

    Matrices with such an ending in common are assumed to have one layout.
    """
    words = [re.sub(r"\d+", "", word) for word in re.split(r"[./]", source)]
    return [".".join(words[-2:]), words[-1]] if len(words) > 1 else [""]


# possible layouts of matrices in a file, as a function of the axis of outputs in the file and in the model
_WAYS: dict[str, Callable[[int, int], bool]] = {
    "outputs first": lambda stored, own: stored == 0,
    "as in the model": lambda stored, own: stored == own,
    "inputs first": lambda stored, own: stored == 1,
}


def _lying(pairs: Sequence[tuple[ir.Value, np.ndarray, str]]) -> dict[str, set[str]]:
    """Return the possible layouts of square matrices by name ending (``_kinds``), inferred from other matrices."""
    found: dict[str, set[str]] = {}
    for value, data, source in pairs:
        if data.ndim != 2 or data.shape[0] == data.shape[1] or (own := _outputs(value)) is None:
            continue
        as_in_model = data.shape == tuple(known_sizes(shape_of(value)))
        fitting = {way for way, fits in _WAYS.items() if fits(own if as_in_model else 1 - own, own)}
        for kind in _kinds(source):
            found[kind] = found.get(kind, {*_WAYS}) & fitting
    return found


def _is_turned(
    value: ir.Value, source: str, stored: Stored, lying: Mapping[str, set[str]], turned: bool | None
) -> bool:
    """Return whether a square matrix is transposed in the file; raise DataError if that is unknown."""
    own = _outputs(value)
    if own is None:
        return False
    if turned is not None:
        return turned and own == 1
    if stored.model is not None and (theirs := _outputs(stored.model.graph.initializers[source])) is not None:
        return theirs != own
    ways = [lying.get(kind, {*_WAYS}) for kind in _kinds(source)]
    if (isinstance(stored.values, OfModel) or stored.model is not None) and "as in the model" in ways[-1]:
        return False
    for some in ways:
        likely = some - {"inputs first"} or some  # "inputs first" is assumed only if other matrices exclude the others
        sides = {not _WAYS[way](own, own) for way in likely}
        if len(sides) == 1:
            return sides.pop()
    raise DataError(
        f"'{shown(source)}' is square, and it is unknown whether it is transposed in the file: no other matrix with "
        "a similar name has a shape that shows it",
        remedy="pass turned=True for matrices of (outputs, inputs), as nn.Linear stores them, or turned=False for "
        "those of (inputs, outputs), as the model's MatMul reads them",
        shell="add --turned for matrices of (outputs, inputs), as nn.Linear stores them, or --not-turned for those of "
        "(inputs, outputs), as the model's MatMul reads them",
    )


def _give(work: ir.Model, value: ir.Value, data: np.ndarray, source: str) -> None:
    tensor = numbers_of(value)
    assert tensor is not None
    wanted = tuple(tensor.shape.numpy())
    if data.ndim == 2 and data.shape != wanted == data.T.shape:
        data = data.T
    if data.shape != wanted:
        raise DataError(f"'{shown(source)}' has shape {list(data.shape)} in the file, but '{shown(value.name)}' of "
                        f"the model has {list(wanted)}; use a file of a model with the same sizes")  # fmt: skip
    if not np.can_cast(data.dtype, tensor.dtype.numpy(), "same_kind"):
        raise DataError(
            f"'{shown(source)}' has dtype {data.dtype} in the file, but the model's weight has dtype "
            f"{tensor.dtype.numpy()}; convert it in the file"
        )
    set_numbers(work, value, np.array(data, tensor.dtype.numpy(), order="C"))
