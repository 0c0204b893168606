"""Message buffers of a step: gradients, running statistics and a few numbers, in one array per floating-point type.

gradient.onnx writes its outputs there, MPI sums them in place, and apply.onnx reads them, so nothing is copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import DataError
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.state import ALIGNMENT, aligned_empty
from gradgraph.step.manifest import SeparateSpec, StateSpec
from gradgraph.step.step import Step

NUMBERS = 8  # control numbers in a message: counts, the weight of gradients, requests to stop
RANK_STRIDE = 1 << 16  # times the rank, added to the first word of a random-number state


@dataclass(frozen=True)
class Bucket:
    """One array of a message: gradients and running statistics of one type.

    The first array ends with control numbers (counts of samples and loss terms, requests to stop), and with this rank's
    loss, metrics and sums of metrics.

    Attributes:
        array: the whole array.
        gradients: the part that gradient.onnx writes; if updates are sharded, sorted by the rank that updates the
            weight.
        counts: for each rank, the number of elements of ``gradients`` whose weights it updates.
        rest: the part after ``gradients``, which is always summed over all ranks.
        statistics: the running statistics in ``rest``.
        applied: the gradients that apply.onnx reads: ``gradients`` itself, or, if updates are sharded, a separate array
            for this rank's part.
    """

    array: Array
    gradients: Array
    counts: list[int]
    rest: Array
    statistics: Array
    applied: Array


class Buckets:
    """The arrays that ranks exchange in each step: gradients, running statistics and counts.

    Args:
        step: a step with its two halves, gradient.onnx and apply.onnx.
        owners: for each weight, the rank that updates it, if updates are sharded.
        has_joint_norms: whether norms use the samples of all ranks.
        far: allocates a gradient of a shape and type on the device that runs the graphs; None on the CPU. Such
            gradients are summed on the device, not in an array.

    Attributes:
        parts: the arrays to sum: usually one.
        views: gradients in the arrays, by their name in both halves.
        far: gradients on the device, by name; empty on the CPU.
        gradients: all gradients as OrtValues for gradient.onnx, by name.
        applied: gradients as OrtValues for apply.onnx, by name; only this rank's if updates are sharded.
        moved: running statistics by name, which are averaged with the gradients; views of the arrays.
        draws: by name, the random-number state that this rank reads, and the next state.
        weight: the divisor of the loss: of this rank before the exchange, of all ranks after it.
        counted: the number of loss terms of all ranks, for an apply.onnx that reads it.
        kept: for each part, the sum of gradients of batches whose update is not yet due; empty before the first such
            batch.
        waiting: the divisors of ``kept`` over all ranks: the sum of weights, and the number of loss terms.
    """

    def __init__(
        self,
        step: Step,
        rank: int,
        owners: Mapping[str, int] | None = None,
        ranks: int = 1,
        has_joint_norms: bool = False,
        far: Callable[[tuple[int, ...], np.dtype[Any]], ort.OrtValue] | None = None,
    ) -> None:
        spec, manifest = step.manifest.separate, step.manifest
        assert spec is not None
        self._spec, self.has_joint_norms = spec, has_joint_norms
        self.adds_up, self.weighs, self._rank = spec.adds_up, bool(spec.weight), rank
        self._counts_samples = self.weighs and _is_shape_alone(step.separate["gradient"].graph, spec.weight)
        state = {s.name: s for s in manifest.state}
        written = [state[name] for name in spec.gradient.writes]
        statistics = {s.name: (numpy_dtype(s.dtype), _shape(s)) for s in written if s.kind == "statistic"}
        self.results = [manifest.loss_output, *manifest.metrics]
        self.sizes = [math.prod(measure.shape) for measure in manifest.trained_measures]
        owner = {gradient: owners[name] if owners else 0 for name, gradient in spec.gradients.items()}
        gradients = _gradients(step, spec, owner)
        self.far = {name: far(shape, dtype) for name, (dtype, shape) in gradients.items()} if far else {}
        near = {} if far else gradients

        tail, views = NUMBERS + len(self.results) + sum(self.sizes), dict[str, Array]()
        self.parts: list[Bucket] = []
        self.applied: dict[str, ort.OrtValue] = dict(self.far)
        types = {dtype for dtype, _ in (*near.values(), *statistics.values())} or {np.dtype(np.float32)}
        for dtype in sorted(types, key=lambda d: -d.itemsize):
            own, means = ({n: shape for n, (d, shape) in group.items() if d == dtype} for group in (near, statistics))
            extra = tail if not self.parts else 0  # the first array, which has the widest type, ends with the numbers
            share = _Share(owner, rank, ranks) if owners else None
            part, own_views, applied = _bucket(dtype, own, means, extra, share)
            self.parts.append(part)
            views |= own_views
            self.applied |= applied
        first_array = self.parts[0].array
        self._tail = first_array[len(first_array) - tail :]
        self.views = {name: views[name] for name in near}
        self.gradients = {name: to_ortvalue(view) for name, view in self.views.items()} | self.far
        self.moved = {name: views[name] for name in statistics}
        draws = [s for s in written if s.kind != "statistic"]
        self.draws = {s.name: (np.zeros(_shape(s), np.int64), np.zeros(_shape(s), np.int64)) for s in draws}
        self.weight, self.counted = np.zeros((), np.float32), np.zeros((), np.float32)
        self.kept: list[Array] = []
        self._whole = (0.0, 0)
        self.waiting = (0.0, 0)

    # --- the random numbers of this rank --------------------------------------------------------------------------

    def draw_from(self, state: dict[str, Array]) -> None:
        """Set this rank's random-number states to ``state`` plus an offset, so that ranks draw different numbers."""
        for name, (here, _) in self.draws.items():
            here[...] = state[name]
            here[0] += RANK_STRIDE * self._rank

    def drawn(self) -> dict[str, Array]:
        """Return the next random-number states without this rank's offset, so that they are equal on all ranks."""
        for _, after in self.draws.values():
            after[0] -= RANK_STRIDE * self._rank
        return {name: after for name, (_, after) in self.draws.items()}

    # --- the message ----------------------------------------------------------------------------------------------

    def scale(self, rows: int, counted: int, usual: int) -> float:
        """Scale gradients and statistics of this rank, with ``rows`` samples and ``counted`` loss terms, by its share
        of the batch; return the weight of its gradients.

        Args:
            usual: the expected number of terms on all ranks. If the actual number is equal, no scaling is necessary
                after the sum.
        """
        weight = self._weight_of(rows, counted)
        for part in self.parts:
            _scale(part.gradients, self.unit(rows, counted) / (1 if self.adds_up else usual))
            _scale(part.statistics, rows / usual)
        self._own_weight, self._own_counted = weight, counted
        return weight

    def unit(self, rows: int, counted: int) -> float:
        """Return the factor of this rank's gradients in the sum over ranks, before the division by the total weight.

        With joint norms, samples of weight 0 still have gradients; their loss is treated as a mean over one term.
        """
        weight = float(bool(rows)) if self.adds_up else self._weight_of(rows, counted)
        return 1.0 if self.has_joint_norms and rows and not weight else weight

    def far_factor(self, rows: int, counted: int, whole: float) -> float:
        """Return the factor for device gradients whose sum over ranks is then the mean over weight ``whole``."""
        return self.unit(rows, counted) / (1.0 if self.adds_up or not whole else whole)

    def _weight_of(self, rows: int, counted: int) -> float:
        if self._counts_samples:  # a session for fixed sizes may compute ``weight`` only after the exchange
            return float(rows)
        return float(self.weight) if self.weighs and rows else float(counted)

    def tensors(self, part: Bucket) -> dict[str, Array]:
        """Return the gradients in ``part``, by the names of their weights."""
        views = {name: self.views[gradient] for name, gradient in self._spec.gradients.items()}
        return {name: view for name, view in views.items() if view.dtype == part.array.dtype}

    def add_kept(self) -> None:
        """Add the gradients of earlier batches, in ``kept``, to the gradients of this batch."""
        if any(self.waiting):
            for part, sums in zip(self.parts, self.kept, strict=True):
                np.add(part.gradients, sums, out=part.gradients)

    def settle(self, due: bool) -> None:
        """Finish the batch: clear ``kept`` if the weights were updated (``due``), else add the new gradients to it."""
        if due:
            self.waiting = (0.0, 0)
            return
        if not self.kept:
            self.kept = [np.empty_like(part.gradients) for part in self.parts]
        for part, sums in zip(self.parts, self.kept, strict=True):
            np.add(part.gradients, sums if any(self.waiting) else 0, out=sums)
        self.waiting = self._whole

    def sums(self, kept: Sequence[Array], usual: int) -> tuple[dict[str, Array], float]:
        """Return the mean's numerators (the accumulated gradients, by weight name) and its divisor.

        ``kept`` has one array per part, summed over all ranks; the division by ``usual`` in :meth:`scale` is undone.
        """
        found, factor = dict[str, Array](), 1 if self.adds_up else usual
        for name, gradient in self._spec.gradients.items():
            view = self.views[gradient]
            for part, sums in zip(self.parts, kept, strict=True):
                first = (view.ctypes.data - part.array.ctypes.data) // view.itemsize
                if 0 <= first < len(sums) and part.array.dtype == view.dtype:
                    found[name] = sums[first : first + view.size].reshape(view.shape) * view.dtype.type(factor)
        return found, self.waiting[0] if self.weighs else self.waiting[1]

    def write(self, numbers: Sequence[float]) -> None:
        """Write ``NUMBERS`` control numbers of the team, such as counts and requests to stop, into the message."""
        self._tail[:NUMBERS] = numbers

    def put_results(self, numbers: dict[str, float], sums: Sequence[Array], names: Sequence[str]) -> None:
        """Write this rank's loss and metrics ``names`` as shares of the total, and ``sums`` unchanged."""
        weight = 1.0 if self.adds_up else self._own_weight
        first = NUMBERS
        for i, name in enumerate(names):
            share = weight if i == 0 else self._own_counted
            self._tail[first + i] = numbers[name] * share if self._own_counted and share else 0.0
        first += len(names)
        for array in sums:
            self._tail[first : first + array.size] = array.ravel() if self._own_counted else 0.0
            first += array.size

    def read(self) -> list[float]:
        """Return the team's control numbers (see :meth:`write`), summed over all ranks."""
        found: list[float] = self._tail[:NUMBERS].tolist()
        return found

    def unscale(
        self, totals: tuple[int, int], weight: float, usual: int, due: bool, alone: float | None = None
    ) -> None:
        """Convert sums over all ranks to means: statistics always, gradients only if an update is ``due``.

        Args:
            totals: the numbers of samples and of loss terms on all ranks.
            weight: the total weight of gradients on all ranks.
            usual, due: as for :meth:`scale` and :meth:`settle`.
            alone: the weight of this rank's gradients if they are not summed over ranks (local steps).

        Raises:
            DataError: if all labels of the batch are ignored.
        """
        rows, counted = totals
        if not self.adds_up and not counted:
            raise DataError(
                "all labels of this batch are ignored on all ranks, so the loss would be a mean over nothing; drop "
                "this batch"
            )
        whole, terms = self.waiting[0] + weight, self.waiting[1] + counted
        divisor = whole if alone is None else alone
        for part in self.parts:
            if due and not self.adds_up and divisor not in (usual, 0.0):
                _scale(part.applied, usual / divisor)
            if rows != usual:
                _scale(part.statistics, usual / rows)
        self._whole = whole, terms
        self.weight[...] = whole
        self.counted[...] = terms
        self._total_weight, self._total_counted = weight, counted

    def get_results(self, names: Sequence[str], sums: Sequence[Array]) -> dict[str, float]:
        """Return loss and metrics over all ranks; overwrite ``sums`` with the sums over all ranks."""
        first = NUMBERS
        found = {}
        for i, name in enumerate(names):
            divisor = (1.0 if self.adds_up else self._total_weight) if i == 0 else self._total_counted
            found[name] = float(self._tail[first + i]) / (divisor or 1.0)  # if all weights are 0, everything is 0
        first += len(names)
        for array in sums:
            array[...] = self._tail[first : first + array.size].reshape(array.shape)
            first += array.size
        return found


def _scale(array: Array, factor: float) -> None:
    if factor == 0.0:
        array[...] = 0  # a product would keep NaN and infinity
    elif factor != 1.0:
        np.multiply(array, array.dtype.type(factor), out=array)


def _is_shape_alone(graph: onnx.GraphProto, name: str) -> bool:
    """Return whether the value ``name`` depends only on the shapes of tensors."""
    maker = {y: node for node in graph.node for y in node.output}
    fed = {v.name for v in graph.input}
    waiting = [name]
    while waiting:
        value = waiting.pop()
        if value in fed:
            return False
        node = maker.get(value)
        if node is not None and node.op_type not in ("Shape", "Size"):
            waiting += node.input
    return True


def _padded(count: int, step: int) -> int:
    return -(-count // step) * step


def _shape(spec: StateSpec) -> tuple[int, ...]:
    return tuple(int(d or 0) for d in spec.shape)


# --- the arrays -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """A rank's share of the updates: ``owner`` contains, for each gradient, the rank that updates its weight."""

    owner: Mapping[str, int]
    rank: int
    ranks: int


def _gradients(step: Step, spec: SeparateSpec, owner: Mapping[str, int]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return the element type and shape of each gradient, sorted by the rank that updates its weight."""
    types = {o.name: o.type.tensor_type.elem_type for o in step.separate["gradient"].graph.output}
    shapes = {s.name: _shape(s) for s in step.manifest.state}
    weights = {gradient: name for name, gradient in spec.gradients.items()}
    return {
        gradient: (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(types[gradient])), shapes[weights[gradient]])
        for gradient in sorted(weights, key=owner.__getitem__)
    }


def _bucket(
    dtype: np.dtype[Any],
    gradients: Mapping[str, tuple[int, ...]],
    statistics: Mapping[str, tuple[int, ...]],
    extra: int,
    share: _Share | None,
) -> tuple[Bucket, dict[str, Array], dict[str, ort.OrtValue]]:
    """Allocate one array of a message, for gradients and statistics by name and shape, and ``extra`` numbers.

    Returns:
        The array, its views by name, and the gradients that apply.onnx reads on this rank.
    """
    shapes = {**gradients, **statistics}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    padded = {name: _padded(size, ALIGNMENT // dtype.itemsize) for name, size in sizes.items()}
    starts = dict(zip(padded, itertools.accumulate(padded.values(), initial=0), strict=False))
    length, whole = sum(padded[name] for name in gradients), sum(padded.values())
    array = aligned_empty((whole + extra,), dtype)
    array[...] = 0

    def view(array: Array, name: str, begin: int = 0) -> Array:
        start = starts[name] - begin
        return array[start : start + sizes[name]].reshape(shapes[name])

    applied, counts, begin, mine = array[:length], [length], 0, list(gradients)
    if share is not None:
        counts = [sum(padded[name] for name in gradients if share.owner[name] == r) for r in range(share.ranks)]
        begin = sum(counts[: share.rank])
        applied = aligned_empty((counts[share.rank],), dtype)
        mine = [name for name in gradients if share.owner[name] == share.rank]
    part = Bucket(array, array[:length], counts, array[length:], array[length:whole], applied)
    views = {name: view(array, name) for name in shapes}
    return part, views, {name: to_ortvalue(view(applied, name, begin)) for name in mine}
