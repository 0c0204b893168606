"""The ``recompute`` option: which forward values are stored, and how they cut the forward pass into segments."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.arguments import NAMES, WHOLE, Kind, as_names, described, matching
from gradgraph.autodiff.attention_weights import weights_of_attentions
from gradgraph.autodiff.cheapest_cuts import Course
from gradgraph.autodiff.recompute import Differentiated, Segments, Written, recompute_values
from gradgraph.errors import ArgumentError, BuildError, UnknownNameError, shown, suggestion
from gradgraph.graph.builder import Builder
from gradgraph.graph.marks import COMPUTED
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import size_factors, size_of_name
from gradgraph.passes.normal.edit import nodes_of

SQRT, ATTENTION = "sqrt", "attention"
_USUAL = {"batch": 8}  # assumed sizes of symbolic dimensions; only their ratios matter
_OTHER = 64  # the assumed size of other dimensions
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B((?:\s.*=\d+)?)\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s+(.+?)=(\d+)(?!\S)")  # names may contain spaces: exporters write names such as "batch + 1"
_PARTS = re.compile(r"[/.]")
_WRITTEN = ("loss", "metrics", "distillation")  # scopes of nodes that a step adds to the forward pass
_WORDS = "'sqrt', 'attention', names or globs of values, or a number of bytes such as '500MB'"


class Recompute:
    """The forward values to store for the backward pass; values in between are recomputed.

    Args:
        keep: the values to store. ``"sqrt"`` stores the values that minimise memory, about the square root of the
            number of layers. ``"attention"`` stores all values except attention probabilities, which are n × n numbers
            for n positions. Names and globs store the values that match. A memory budget of a step, such as ``"500MB"``
            or ``500_000_000`` (as ``gradgraph.memory`` counts it), recomputes as little as fits.
        sizes: the sizes of symbolic dimensions, such as ``batch=32``. A memory budget requires all of them;
            ``"500MB batch=32"`` is a short form.

    Raises:
        ArgumentError: ``keep`` or a size is invalid.
    """

    def __init__(self, keep: str | int | Sequence[str], **sizes: int) -> None:
        found = _BYTES.fullmatch(keep.strip()) if isinstance(keep, str) else None
        if found is not None:
            number, unit, binary, said = found.groups()
            keep = int(float(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))
            sizes = {name: int(size) for name, size in _SIZE.findall(said)} | sizes
        if not (WHOLE.fits(keep) and keep > 0 if isinstance(keep, int) else NAMES.fits(keep) and keep):
            raise ArgumentError(f"recompute is {described(keep)}; it should be {_WORDS}")
        for name, size in sizes.items():
            if not WHOLE.fits(size) or size < 1:
                raise ArgumentError(f"the size of '{shown(name)}' is {described(size)}; it should be a number above 0")
        self.keep, self.sizes = keep, sizes

    def apply(self, model: ir.Model, op: Builder, passes: Sequence[Written], beside: int) -> None:
        """Insert recomputation into the backward passes of ``model``, in place.

        Args:
            op: the builder that names new nodes; it must not have pending nodes.
            passes: the backward passes.
            beside: the bytes that a step needs in addition to these passes.

        Raises:
            BuildError: the budget is too small, sizes are unknown, or the model has no attention.
            UnknownNameError: a name matches no value or dimension.
        """
        self._check_sizes(model)
        for written in passes:
            differentiated = Differentiated(written)
            recompute_values(op, self._segments(model, differentiated, beside))

    def _segments(self, model: ir.Model, passes: Differentiated, beside: int) -> Segments:
        if self.keep != ATTENTION:
            return Segments(passes, self._cuts(model, passes, beside))
        cuts, weights = weights_of_attentions(passes.forward)
        if not cuts:
            raise BuildError(
                "the model has no attention to recompute: no Softmax between two products",
                remedy="use recompute='sqrt'",
                shell="use --recompute sqrt",
            )
        return Segments(passes, cuts, weights)

    def _cuts(self, model: ir.Model, passes: Differentiated, beside: int) -> list[int]:
        if isinstance(self.keep, int):
            sizes = self._all_sizes(model)
            course = Course(passes, lambda value: bytes_of(value, sizes, 1))
            return self._cuts_within(course, self.keep, beside)
        if self.keep == SQRT:
            return Course(passes, lambda value: bytes_of(value, _USUAL | self.sizes, _OTHER)).cheapest()
        return _places_behind(model, passes, as_names(self.keep))

    def _check_sizes(self, model: ir.Model) -> None:
        """Raise UnknownNameError if an entry of ``sizes`` is a dimension of no input."""
        known = sorted({*_open_dimensions(model), *_parts_of_dimensions(model)})
        for name in self.sizes:
            if name not in known:
                raise UnknownNameError(f"no input has a dimension called '{shown(name)}'{suggestion(name, known)}")

    def _all_sizes(self, model: ir.Model) -> Mapping[str, int]:
        """Return the sizes of symbolic dimensions; raise BuildError if one is missing."""
        for value in _inputs(model):
            _check_named(value)
        missing = [name for name in _parts_of_dimensions(model) if name not in self.sizes]
        if missing:
            named = {shown(name): 32 for name in missing}
            keywords = ", ".join(f"{name}={size}" for name, size in named.items())
            said = keywords if all(name.isidentifier() for name in named) else f"**{named}"
            typed = " ".join((f"{self.keep}B", *(f"{name}={size}" for name, size in named.items())))
            raise BuildError(
                f"a memory budget for recomputation needs the size of {', '.join(named)}, which is dynamic in the "
                "model",
                remedy=f"pass it: gradgraph.Recompute({self.keep}, {said})",
                shell=f"pass it: --recompute {shlex.quote(typed)}",
            )
        return self.sizes

    @staticmethod
    def _cuts_within(course: Course, budget: int, beside: int) -> list[int]:
        least, cuts = course.least_recomputation(budget - beside)
        if cuts is None:
            raise BuildError(
                f"a step needs at least {_readable(least + beside)} even with full recomputation (including "
                f"{_readable(beside)} for weights, state and the batch), more than the budget of {_readable(budget)}",
                remedy="raise the budget, use a smaller batch, or train fewer weights",
            )
        return cuts


Keep: TypeAlias = str | int | Sequence[str] | Recompute | None
KEEP = Kind(
    f"{_WORDS}, or gradgraph.Recompute(...)",
    lambda value: value is None or isinstance(value, Recompute) or WHOLE.fits(value) or NAMES.fits(value),
)


def as_recompute(given: Keep) -> Recompute | None:
    """Convert a user's ``recompute`` argument to ``Recompute``; None stays None."""
    return given if given is None or isinstance(given, Recompute) else Recompute(given)


def _readable(size: int) -> str:
    if size < 1e6:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _inputs(model: ir.Model) -> list[ir.Value]:
    """Return the graph inputs that are not initializers."""
    return [v for v in model.graph.inputs if not v.is_initializer()]


def _open_dimensions(model: ir.Model) -> set[str]:
    return {d for v in _inputs(model) for d in shape_of(v) or () if isinstance(d, str)}


def _check_named(value: ir.Value) -> None:
    """Raise BuildError if an axis of an input has neither a size nor a name."""
    name, dims = shown(value.name), shape_of(value)
    if dims is None:
        raise BuildError(
            f"a memory budget for recomputation needs all sizes, but the axes of '{name}' are unknown",
            remedy="use recompute='sqrt'",
            shell="use --recompute sqrt",
        )
    if None in dims:
        axis = dims.index(None)
        raise BuildError(
            f"a memory budget for recomputation needs all sizes, but axis {axis} of '{name}' has neither size nor name",
            remedy=f"name it: gradgraph.surgery.open_axes(model, {{'{name}': {{{axis}: 'batch'}}}})",
            shell=f"name it: `gradgraph surgery MODEL --open {shlex.quote(f'{name}:{axis}=batch')}`",
        )


def _parts_of_dimensions(model: ir.Model) -> list[str]:
    """Return the names that occur in symbolic dimensions of inputs: ``batch`` and ``time`` for ``batch*time``."""
    parts = {part for d in _open_dimensions(model) for part in size_factors(d)}
    return sorted(part for part in parts if not part.isdecimal())


def bytes_of(value: ir.Value, sizes: Mapping[str, int], other: int) -> int:
    """Return the bytes of a tensor, with ``sizes`` by symbolic dimension; other unknown sizes count as ``other``."""
    dims = shape_of(value)
    if dims is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        return 0
    numbers = (d if isinstance(d, int) else other if d is None else size_of_name(d, sizes, other) for d in dims)
    return math.ceil(math.prod(numbers) * value.dtype.itemsize)


def _places_behind(model: ir.Model, passes: Differentiated, names: Sequence[str]) -> list[int]:
    """Return possible cuts: the index after each forward node that computes a value matching one of ``names``.

    Raises UnknownNameError if a name matches no forward value, and BuildError if it matches a value in a body.
    """
    known = {y.name: i + 1 for i, node in enumerate(passes.forward) for y in node.outputs if y.name}
    cuts: set[int] = set()
    for pattern in names:
        found = matching(pattern, list(known))
        if not found:
            inside = {
                y.name
                for n in nodes_of(model)
                if n not in passes.place
                for y in n.outputs
                if n.graph is not model.graph
            }
            if pattern in inside:
                raise BuildError(
                    f"'{shown(pattern)}' is in the body of an If, Loop or Scan, whose values cannot be stored "
                    "separately; name a value outside"
                )
            fed = {v.name for v in (*model.graph.inputs, *model.graph.initializers.values())}
            why = (
                "is an input or a weight, which is stored anyway; name a value that nodes compute"
                if pattern in fed
                else f"matches no value of the forward pass{suggestion(pattern, _names_in_file(model, passes, fed))}"
            )
            raise UnknownNameError(f"'{shown(pattern)}' {why}")
        cuts.update(known[name] for name in found)
    return sorted(cuts - {len(passes.forward)})


def _names_in_file(model: ir.Model, passes: Differentiated, fed: Collection[str | None]) -> list[str]:
    """Return the names of values that the original model computes, excluding values added for the training step.

    If the model does not record these names, added values are recognised by prefixes.
    """
    own = [(y.name, node) for node in passes.forward for y in node.outputs if y.name]
    in_file: Collection[str] = model.meta.get(COMPUTED, ())
    if known := [name for name, _ in own if name in in_file]:
        return known
    names = {name for name, _ in own}.union(fed)
    return [
        name
        for name, node in own
        if (node.name or "").partition("/")[0] not in _WRITTEN
        and not any(name[: found.start()] in names for found in _PARTS.finditer(name))
    ]
