"""Full matrices of derivatives: Jacobians and Hessians.

Both are a Scan over unit vectors whose body is a product with one vector:

- a Jacobian in reverse mode: a vjp for each element of the output;
- a Jacobian in forward mode: a jvp for each element of the inputs;
- a Hessian: the tangent of the gradient for each element of the inputs.

Nodes that do not depend on the unit vector stay outside the Scan and run once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.bodies import HAVE_BODIES
from gradgraph.autodiff.forward import write_tangents
from gradgraph.autodiff.higher import gradients_of
from gradgraph.autodiff.path import Path, carries, is_tensor
from gradgraph.autodiff.reverse import backward
from gradgraph.autodiff.samples import batched_inputs, check_independent, name_batch
from gradgraph.autodiff.scan_rows import reshaped, scanned, sizes_of
from gradgraph.autodiff.select import Names, check_scalar, content_of, find_path, select, target_of
from gradgraph.errors import DifferentiationError, Remedies, shown
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shapes import Shape, all_sizes, known_sizes
from gradgraph.passes.normal.functions.inline import copied
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.rules.containers import cotangent_type

_WHOLE: Remedies = {
    "remedy": "drop per_sample and extract each sample's block from the whole matrix",
    "shell": "drop --per-sample and extract each sample's block from the whole matrix",
}
Mode = Literal["auto", "reverse", "forward"]


def append_jacobian(
    work: ir.Model,
    output: str | None,
    wrt: Names,
    *,
    mode: Mode = "auto",
    per_sample: bool = False,
    allow_unused: bool = False,
    named_operators: bool = False,
) -> ir.Model:
    """Apply ``jacobian`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded.
    """
    target = target_of(work.graph, output)
    chosen = select(work.graph, wrt, [target])
    for x in (target, *chosen):
        _check_tensor(x)
    if per_sample:
        name_batch(work)
    path = find_path(work, [target], chosen, allow_unused)
    if per_sample:
        _check_rows(work.graph, path)
    op = builder_for(work, named_operators)
    if mode == "auto":
        mode = "forward" if _have_fewer_elements(chosen, path.targets[0]) else "reverse"
    write = _empty if _elements(path.targets) == 0 or _elements(chosen) == 0 else _MODES[mode]
    blocks = write(work, op, path, int(per_sample))
    op.finish(work.graph)
    work.graph.outputs.extend(blocks)
    return clean_up(work)


def append_hessian(
    work: ir.Model,
    output: str | None,
    wrt: Names,
    *,
    per_sample: bool = False,
    allow_unused: bool = False,
    named_operators: bool = False,
) -> ir.Model:
    """Apply ``hessian`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded.
    """
    target = target_of(work.graph, output)
    if not per_sample:
        check_scalar(target)
    chosen = select(work.graph, wrt, [target])
    for x in (target, *chosen):
        _check_tensor(x)
    if per_sample:
        name_batch(work)
        _check_numbers(target)
        _check_rows(work.graph, find_path(work, [target], chosen, allow_unused))
        target = target_of(work.graph, target.name)
    gradients, chosen = gradients_of(work, target, chosen, allow_unused)
    path = find_path(work, gradients, chosen, allow_unused=True)
    op = builder_for(work, named_operators)
    basis, rows = _tangent_rows(work, op, path, chosen, "hvp", int(per_sample))
    blocks = []
    for a, row in zip(chosen, rows, strict=True):  # H is symmetric: split by b, the rows for a are the blocks (b, a)
        for b, part in zip(chosen, basis.split(op, row), strict=True):
            name = f"{b.name}.hessian" if a is b else f"{b.name}.{a.name}.hessian"
            sizes = [sizes_of(op, b), sizes_of(op, a)]
            if per_sample:
                samples = op.Shape(op.wrap(a), start=0, end=1)
                flat = op.Reshape(part, op.Concat(_count(op, b, 1), samples, _count(op, a, 1), axis=0), allowzero=1)
                part = op.Transpose(flat, perm=[1, 0, 2])
                sizes = [sizes_of(op, b), sizes_of(op, a, 1)]
            blocks.append(reshaped(op, part, *sizes, name=name))
    count = len(chosen)
    op.finish(work.graph)
    work.graph.outputs.extend(blocks[i * count + k] for k in range(count) for i in range(count))
    return clean_up(work)


# --- the two modes ---------------------------------------------------------------------------------------


def _by_rows(work: ir.Model, op: Builder, path: Path, start: int) -> list[ir.Value]:
    """Return one Jacobian for each of ``path.wrt``, in reverse mode: by one vjp per element of the target.

    With ``start`` 1, one vjp computes a row of each sample's Jacobian, as samples are independent.
    """
    (target,) = path.targets
    basis = _Basis(op, [target], start)
    gradients = backward(op, path, {target: basis.vectors[0]})
    rows = [(gradients.get(x) or op.zeros_like(op.wrap(x))).value for x in path.wrt]
    for x, row in zip(path.wrt, rows, strict=True):
        row.type = cotangent_type(x)
    op.finish(work.graph)
    blocks = []
    for x, y in zip(path.wrt, scanned(op, work.graph, basis.slices, rows, basis.count), strict=True):
        if start:
            samples = op.Shape(op.wrap(x), start=0, end=1)
            y = op.Reshape(y, op.Concat(_count(op, target, 1), samples, _count(op, x, 1), axis=0), allowzero=1)
            y = op.Transpose(y, perm=[1, 0, 2])
        blocks.append(_block(op, y, target, x, start))
    return blocks


def _by_columns(work: ir.Model, op: Builder, path: Path, start: int) -> list[ir.Value]:
    """Return one Jacobian for each of ``path.wrt``, in forward mode: by one jvp per element of the inputs.

    With ``start`` 1, each jvp is for one element of every sample of the inputs.
    """
    (target,) = path.targets
    name = target.name
    basis, (columns,) = _tangent_rows(work, op, path, [target], "jvp", start)
    target = target_of(work.graph, name)  # its node may have been replaced by one that also computes tangents
    blocks = []
    for x, part in zip(path.wrt, basis.split(op, columns), strict=True):
        flat = op.Reshape(part, op.Concat(_count(op, x, start), _count(op, target), axis=0), allowzero=1)
        blocks.append(_block(op, op.Transpose(flat, perm=[1, 0]), target, x, start))
    return blocks


def _empty(work: ir.Model, op: Builder, path: Path, start: int) -> list[ir.Value]:
    """Return empty Jacobians, computed without a Scan, because runtimes reject a Scan over an empty tensor."""
    (target,) = path.targets
    nothing = {x: op.full(op.const([0]), 0, op.wrap(x).dtype) for x in path.wrt}
    return [_block(op, nothing[x], target, x, start) for x in path.wrt]


_MODES = {"reverse": _by_rows, "forward": _by_columns}


def _block(op: Builder, numbers: Var, target: ir.Value, x: ir.Value, start: int) -> ir.Value:
    numbers = op.cast(numbers, op.wrap(x).dtype)  # the target may have a different type
    return reshaped(op, numbers, sizes_of(op, target), sizes_of(op, x, start), name=f"{x.name}.jacobian")


def _tangent_rows(
    work: ir.Model, op: Builder, path: Path, likes: Sequence[ir.Value], suffix: str, start: int = 0
) -> tuple[_Basis, list[Var]]:
    """Return the unit vectors of ``path.wrt``, and each target's tangents for them, one row per unit vector."""
    path = _with_own_nodes(work, op, path)
    basis = _Basis(op, path.wrt, start)
    tangents = dict(zip(path.wrt, basis.vectors, strict=True))
    count = len(work.graph.outputs)
    work.graph.inputs.append(basis.place)  # until its readers move into the Scan
    rows = write_tangents(work, op, path, tangents, likes, suffix)
    work.graph.outputs[:] = work.graph.outputs[:count]
    work.graph.inputs.remove(basis.place)
    return basis, scanned(op, work.graph, basis.slices, rows, basis.count)


def _with_own_nodes(work: ir.Model, op: Builder, path: Path) -> Path:
    """Return ``path`` over copies of its nodes if any has a body, because tangents are written into bodies."""
    if not any(node.op_type in HAVE_BODIES for node in path.nodes):
        return path
    nodes, copies = copied(path.nodes, op.fresh)
    work.graph.extend(nodes)
    return Path(work.graph, [copies.get(y, y) for y in path.targets], [copies.get(x, x) for x in path.wrt])


class _Basis:
    """The unit vectors over all elements of several tensors; with ``start`` 1, over the elements of one row of each.

    Attributes:
        count: the number of unit vectors, if known.
        place: a scalar in the graph, the index of the current unit vector.
        vectors: the current unit vector, split into one part per tensor, in its shape; with ``start`` 1 the part is
            repeated in each row.
        slices: maps ``place`` to the vector of all indices, which the Scan runs over.
    """

    def __init__(self, op: Builder, tensors: Sequence[ir.Value], start: int = 0) -> None:
        self._sizes = [_count(op, x, start) for x in tensors]
        self.count = _elements(tensors, start)
        places = op.Range(0, op.ReduceSum(op.Concat(*self._sizes, axis=0), keepdims=0), 1)
        self.place = ir.Value(name=op.fresh("place"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        self.slices = {self.place: places}
        parts = self.split(op, op.Equal(places, op.wrap(self.place)))
        self.vectors = [_vector(op, x, part, start) for x, part in zip(tensors, parts, strict=True)]

    def split(self, op: Builder, rows: Var) -> list[Var]:
        """Split ``rows`` (one row per unit vector) along axis 0 into one part per tensor."""
        if len(self._sizes) == 1:
            return [rows]
        parts = all_of(op.Split(rows, op.Concat(*self._sizes, axis=0), axis=0, outputs=len(self._sizes)))
        for part in parts:
            part.value.type = rows.value.type
        return parts


def _vector(op: Builder, x: ir.Value, part: Var, start: int) -> Var:
    """Return ``part``, the elements of a unit vector that belong to ``x``, in the shape and type of ``x``."""
    assert x.dtype is not None
    row = op.Reshape(op.Cast(part, to=int(x.dtype)), sizes_of(op, x, start)[0], allowzero=1)
    return op.like(op.Expand(row, op.shape(op.wrap(x))) if start else row, op.wrap(x))


def _count(op: Builder, x: ir.Value, start: int = 0) -> Var:
    """Return the number of elements of ``x`` as a vector of length 1; with ``start`` 1, of one row of ``x``."""
    known = _elements([x], start)
    return op.const([known]) if known is not None else op.ReduceProd(op.Shape(op.wrap(x), start=start), keepdims=1)


# --- sizes -----------------------------------------------------------------------------------------------


def _check_tensor(x: ir.Value) -> None:
    if not carries(x) or not is_tensor(x):
        raise DifferentiationError(
            f"'{shown(x.name)}' {content_of(x)}, but a Jacobian needs floating-point tensors; choose another tensor"
        )


def _check_rows(graph: ir.Graph, path: Path) -> None:
    """Raise an error unless each row of the target depends only on the input row with the same index."""
    (target,) = path.targets
    batched = batched_inputs(graph)
    if other := [x for x in path.wrt if x not in batched]:
        raise DifferentiationError(
            f"'{shown(other[0].name)}' is not an input with one row per sample",
            remedy="drop per_sample, or remove it from `wrt`",
            shell="drop --per-sample, or remove it from --wrt",
        )
    if check_independent(graph, batched, target, path, _WHOLE) != 0:
        raise DifferentiationError(f"output '{shown(target.name)}' does not have one row per sample", **_WHOLE)


def _check_numbers(target: ir.Value) -> None:
    """Raise an error unless ``target`` has one number for each sample; unknown sizes are accepted."""
    shape = _shape(target)
    if shape is not None and (not shape or any(d not in (1, None) for d in shape[1:])):
        raise DifferentiationError(
            f"output '{shown(target.name)}' has shape {list(shape)}, but a Hessian per sample needs one number for "
            "each sample; choose an output of shape [batch], such as a vector of losses"
        )


def _elements(tensors: Sequence[ir.Value], start: int = 0) -> int | None:
    """Return the total number of elements of ``tensors``, or with ``start`` 1 of one row of each; None if unknown."""
    shapes = [_shape(x) for x in tensors]
    sizes = [None if s is None else all_sizes(s[start:]) for s in shapes]
    return None if any(s is None for s in sizes) else sum(math.prod(s or ()) for s in sizes)


def _shape(x: ir.Value) -> Shape | None:
    return Var(Builder(), x).shape


def _have_fewer_elements(tensors: Sequence[ir.Value], than: ir.Value) -> bool:
    """Whether ``tensors`` have fewer elements in total than ``than`` for any values of the symbolic sizes."""
    shapes, bound = [_shape(x) for x in tensors], _shape(than)
    if bound is None or any(s is None for s in shapes):
        return False
    common = Counter(d for d in bound if not isinstance(d, int))
    sizes = [s for s in shapes if s is not None]
    if None in common or any(Counter(d for d in s if not isinstance(d, int)) != common for s in sizes):
        return False
    return sum(math.prod(known_sizes(s)) for s in sizes) < math.prod(known_sizes(bound))
