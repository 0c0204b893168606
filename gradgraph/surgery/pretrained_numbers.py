"""Numbers of a file of weights, in the layout of a model: transposed, joined, and with its order of rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, shown
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.surgery.experts import Experts, interleaved
from gradgraph.surgery.linear_layers import rewritten
from gradgraph.surgery.naming import recorded_names
from gradgraph.surgery.operation import Array, numbers_of
from gradgraph.surgery.pretrained_files import Pretrained
from gradgraph.surgery.pretrained_matches import Match, Part, size_of
from gradgraph.surgery.quantised_tables import read_table
from gradgraph.surgery.recurrent_weights import in_order, is_recurrent
from gradgraph.surgery.stored_weights import is_quantised
from gradgraph.surgery.weight_places import PYTORCH, TABLE, Place, turns_of


class Numbers:
    """The numbers of matched tensors in the layout of the model.

    Args:
        work: the model.
        source: the file.
        matches: the weights with tensors, from whose shapes the order of axes in square matrices follows.
    """

    def __init__(self, work: ir.Model, source: Pretrained, matches: Sequence[Match]) -> None:
        self.work, self.source, self.matches = work, source, matches
        self._lying = self._inputs_first()
        self._is_alike = not any(self._is_transposed(match) for match in matches)

    def _inputs_first(self) -> Callable[[str], bool]:
        """Return whether a square matrix is stored as (inputs, outputs), judging by other matrices of the file."""
        votes: dict[str, Counter[bool]] = defaultdict(Counter)
        for match in self.matches:
            layer = match.place.layer
            if layer is None or layer.kind in ("Conv", "Gather"):
                continue
            for part in match.parts:
                shape = [*_matrix(self.source.tensors[part.key]).shape] if part.key else []
                if len(shape) == 2 and shape[0] != shape[1]:
                    votes[_last(part.key)][shape[1] != layer.sizes[0]] += 1
        every = Counter[bool](vote for of_one in votes.values() for vote in of_one)
        usual = bool(every) and not every[False]

        def decided(key: str) -> bool:
            own = votes.get(_last(key), Counter())
            return bool(own[True]) and not own[False] if own else usual

        return decided

    def _is_transposed(self, match: Match) -> bool:
        """Whether the model has the name of a matrix of the file, but its transpose."""
        if not _is_stored_by_name(match):
            return False
        own, shape = shape_of(match.place.value), self.source.tensors[match.parts[0].key].shape
        return own is not None and tuple(own) == shape[::-1] != shape

    def check_shape(self, match: Match) -> None:
        """Raise DataError if tensors are no floats, or do not have the shape of their weight."""
        if not match.parts:
            return
        place, first = match.place, next(part.key for part in match.parts if part.key)
        for part in match.parts:
            kind = self.source.tensors[part.key].dtype if part.key else np.dtype(np.float32)
            if kind.name not in ("float16", "bfloat16", "float32", "float64"):
                raise DataError(
                    f"'{shown(part.key)}' has dtype {kind} in the file; save the weights as floats, not quantised"
                )
        if place.experts is not None and (because := place.experts.why_not_read):
            raise DataError(f"'{shown(place.name)}' belongs to a QMoE {because}; export the new weights instead")
        found = [self.source.tensors[part.key].shape for part in match.parts if part.key]
        layer = place.layer
        if layer is None:
            rows = sum(int(np.prod(shape)) for shape in found) if match.parts[0].end is None else None
            missing = sum(part.end or 0 for part in match.parts if not part.key)
            if place.node.op_type == TABLE:
                fits = read_table(place.node).shape == found[0]
            elif rows is None:
                fits = (match.parts[0].end or 0) - match.parts[0].begin == size_of(place)
            elif place.experts is not None:
                fits = self._experts(match, place.experts, shapes_only=True) is not None
            else:
                fits = rows + missing == size_of(place) and _same_but_ones(place, found)
            if fits:
                return
            own = place.experts.shape if place.experts is not None else shape_of(place.value) or ()
            wanted = list(read_table(place.node).shape if place.node.op_type == TABLE else own)
        else:
            wanted = list(layer.shape if layer.kind in ("Conv", "Gather") else layer.sizes[::-1])
            if self.outputs_first(match, shapes_only=True) is not None:
                return
        raise DataError(
            f"'{shown(first)}' has shape {list(found[0])} in the file, but '{shown(place.name)}' of the model has "
            f"{wanted}; use a file of a model with the same sizes"
        )

    def outputs_first(self, match: Match, shapes_only: bool = False) -> Array | None:
        """Return the weight of a layer with outputs first; None if shapes do not fit.

        With ``shapes_only``, the result is any array.
        """
        layer = match.place.layer
        assert layer is not None
        arrays = [self.source.tensors[part.key] for part in match.parts]
        if layer.kind in ("Conv", "Gather"):
            array = _of_rank(arrays[0], len(layer.shape))
            if len(arrays) > 1 or array.shape != layer.shape:
                return None
            return array if layer.kind == "Conv" else array.T
        inputs, outputs = layer.sizes
        rows = []
        for part, given in zip(match.parts, arrays, strict=True):
            array = _matrix(given)
            if array.ndim != 2 or inputs not in array.shape:
                return None
            is_square = array.shape[0] == array.shape[1]
            turned = array.shape[1] != inputs if not is_square else self._is_turned(match, part.key)
            rows.append((array.T if turned else array)[part.begin : part.end])
        if sum(map(len, rows)) != outputs:
            return None
        return rows[0] if shapes_only or len(rows) == 1 else np.concatenate([*map(_wide, rows)])

    def _is_turned(self, match: Match, key: str) -> bool:
        """Whether a square matrix of the file is (inputs, outputs).

        PyTorch's exporter records whether it transposed the matrix. Otherwise, if the model has its name, and no other
        matrix that it has by name is transposed, the matrix is as in the model.
        """
        layer, recorded = match.place.layer, turns_of(match.place.value, match.place.origin)
        is_recorded = bool(recorded_names(match.place.value))
        is_known = recorded is not None if is_recorded else self._is_alike and _is_stored_by_name(match)
        if layer is None or is_quantised(layer) or not is_known:
            return self._lying(key)
        turns = sum(node.op_type == "Transpose" for node in rewritten(layer.weight)[1]) + (recorded or 0)
        return (layer.axis + turns) % 2 == 1

    def _experts(self, match: Match, experts: Experts, shapes_only: bool = False) -> Array | None:
        """Return the matrices of all experts in the order of axes in which the model stores them.

        None if the shape does not fit. The order in the file follows from experts with other numbers of inputs and
        outputs.
        """
        key, own = match.parts[0].key, experts.shape
        if len(match.parts) > 1:
            return self._joined_experts(match, experts)
        array = self.source.tensors[key]
        if array.shape not in (own, (own[0], own[2], own[1])):
            return None
        if own[1] != own[2]:
            return array if array.shape == own else array.swapaxes(1, 2)
        parent = key.rpartition(".")[0]
        others = [m for m in self.matches if m.parts and m.parts[0].key.rpartition(".")[0] == parent]
        shapes = [(m.place.experts.shape, self.source.tensors[m.parts[0].key].shape)
                  for m in others if m.place.experts is not None]  # fmt: skip
        found = {mine == theirs for mine, theirs in shapes if mine[1] != mine[2]}
        if _has_name(match.place, match.parts) and not experts.node.domain:  # as PyTorch's exporter keeps it
            found = {True}
        if len(found) != 1 and not shapes_only:
            raise DataError(
                f"the matrices of '{shown(key)}' are square, so it is unknown whether they are "
                "transposed in the file; take the other tensors with strict=False, and this one by name",
                shell="take the other tensors with --partly",
            )
        return array if found == {True} else array.swapaxes(1, 2)

    def _joined_experts(self, match: Match, experts: Experts) -> Array | None:
        """Return the matrices of experts that the file stores one by one, outputs first; None if shapes do not fit.

        Nodes other than MoE and QMoE may read them with inputs first.
        """
        own, arrays = experts.shape, [self.source.tensors[part.key] for part in match.parts]
        shapes, pieces = {array.shape for array in arrays}, len(arrays) / own[0]
        if shapes == {(own[1] / pieces, own[2])}:
            return np.concatenate(arrays).reshape(own)
        if shapes == {(own[2] / pieces, own[1])} and not experts.node.domain:
            return np.concatenate(arrays).reshape(own[0], own[2], own[1]).swapaxes(1, 2)
        return None

    def _is_reordered(self, match: Match) -> bool:
        """Whether the model has gates and linear halves of experts alternately, and the file has not."""
        return match.place.is_reordered(self.source.types, len(match.parts) > 1)

    def weight(self, match: Match) -> Array:
        """Return the new numbers of a weight: for a layer outputs first, otherwise in the shape of the stored tensor.

        Floats are float32 at least.
        """
        place = match.place
        if place.layer is not None:
            found = self.outputs_first(match)
            assert found is not None
            array = _wide(found)
        elif place.node.op_type == TABLE:
            array = _wide(self.source.tensors[match.parts[0].key])
        elif place.experts is not None:
            found = self._experts(match, place.experts)
            assert found is not None
            array = _wide(interleaved(found) if self._is_reordered(match) else found)
        elif is_recurrent(place.node):
            array = in_order(place.node, [_wide(self.source.tensors[part.key]) for part in match.parts])
        elif match.parts:
            pieces = [_wide(self.source.tensors[part.key]).reshape(-1)[part.begin : part.end]
                      if part.key else np.zeros(part.end or 0, np.float32) for part in match.parts]  # fmt: skip
            array = np.concatenate(pieces)
            array = array + self.source.norm_offset if self.has_offset(place) else array
            array = -np.exp(array.astype(np.float64)) if place.is_decay else array
            if self._is_reordered(match):
                array = interleaved(array.reshape(known_sizes(shape_of(place.value))))
        else:
            array = np.zeros(size_of(place), np.float32)
        if match.groups:
            array = array.reshape(known_sizes(shape_of(place.value)))
        return array if match.norm is None else match.norm.merged(array, match.is_kernel, match.groups)

    def has_offset(self, place: Place) -> bool:
        """Whether the stored tensor is 1 + weight: not if an Add follows, or PyTorch's exporter stores the weight."""
        added = any(use.node.op_type == "Add" for use in place.value.uses())
        is_weight = (self.work.producer_name == PYTORCH or place.is_of_torch) and bool(place.written)
        return bool(self.source.norm_offset) and place.is_norm and not (added or is_weight)


def _has_name(place: Place, parts: Sequence[Part]) -> bool:
    """Whether the tensor of the file has the name of the stored tensor, apart from the beginning of its path."""
    short, long = sorted([place.origin, parts[0].key], key=len)
    return len(parts) == 1 and bool(short) and f".{long}".endswith(f".{short}")


def _is_stored_by_name(match: Match) -> bool:
    """Whether a match is a matrix that the model stores as floats under its name in the file."""
    layer = match.place.layer
    if layer is None or layer.kind in ("Conv", "Gather") or is_quantised(layer) or not match.parts:
        return False
    return _has_name(match.place, match.parts)


def _same_but_ones(place: Place, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tensor has the shape of a weight, apart from axes of size 1."""
    tensor = numbers_of(place.value)
    own = () if tensor is None else tuple(tensor.shape.numpy())
    return len(shapes) > 1 or [n for n in own if n != 1] == [n for n in shapes[0] if n != 1]


def _matrix(array: Array) -> Array:
    """Return a matrix from the kernel of a pointwise convolution."""
    return array.reshape(array.shape[:2]) if array.ndim > 2 and set(array.shape[2:]) == {1} else array


def _of_rank(array: Array, rank: int) -> Array:
    """Return a kernel with further axes of size 1, if a matrix is stored for it."""
    return array.reshape(*array.shape, *[1] * (rank - array.ndim)) if array.ndim < rank else array


def _last(key: str) -> str:
    """Return the last part of the path of a tensor's module."""
    return key.rpartition(".")[0].rpartition(".")[2]


def _wide(array: Array) -> Array:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
