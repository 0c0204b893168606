"""Weights that were trained elsewhere, matched with those of a finished model: plain, packed, fused or quantised.

Each weight of the model (``weight_places``) is matched with tensors of the file by its module (``weight_names``):

- A packed layer (queries, keys and values; gate and up projections) is joined from the tensors of its pieces, and a
  piece is a part of a packed tensor (``peft_names``).
- A convolution whose BatchNormalization was merged into it is merged with the new one again (``folded_norms``).
- A last layer without a tensor is tied to the embedding.
- Normalisation layers of some families multiply by 1 + weight; a file contains this sum.

``pretrained_writing`` writes them, once everything is matched and checked.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, listed, shown
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.surgery.folded_norms import Conv, Norm, contains_norm, epsilon_of, folded, norms_of
from gradgraph.surgery.linear_layers import rewritten
from gradgraph.surgery.operation import numbers_of
from gradgraph.surgery.peft_names import PIECES, packs_of, pieces_of
from gradgraph.surgery.pretrained_files import CONFIG, Pretrained
from gradgraph.surgery.quantised_tables import read_table, table_rounding
from gradgraph.surgery.recurrent_weights import in_order, is_recurrent, numbered, parameters
from gradgraph.surgery.stored_weights import (
    as_read,
    canonical,
    canonical_rounding,
    is_quantised,
    rounding_of,
)
from gradgraph.surgery.weight_names import TensorNames, meaning
from gradgraph.surgery.weight_places import (
    TABLE,
    Place,
    computes_scores,
    is_computed,
    is_path,
    places_of,
    recorded_names,
    scope_of,
    turns_of,
    unknown_steps,
)
from gradgraph.surgery.weights import weights_of

Array = np.ndarray[Any, Any]

# tensors that are not weights: counters, buffers that models compute themselves, and masks of training (wav2vec2)
_BUFFERS = ("num_batches_tracked", "inv_freq", "position_ids", "token_type_ids", "masked_bias", "attn.bias",
            "attention.bias", "relative_position_index", "rotary_emb.cos_cached", "rotary_emb.sin_cached",
            "masked_spec_embed")  # fmt: skip


_SUMS = 1e-5  # relative rounding errors of sums and products of float32 that an exporter computed
_SHARED = re.compile(
    r"((en|de)coder\.)?embed_tokens\.weight$"
)  # of T5 and BART: folders have it once, as shared.weight
_OWN_ORDER = frozenset({"Attention", "GRU", "LSTM", "RNN"})  # of gates and heads, other than PyTorch's


@dataclass(frozen=True)
class Part:
    """A tensor of the file, or the rows of it, that is a weight or a piece of one.

    Attributes:
        key: the name of the tensor; empty for zeros.
        begin, end: the rows; all if ``end`` is None.
    """

    key: str
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Match:
    """A weight of the model with its tensors.

    Attributes:
        place: the weight.
        parts: the tensors, joined along the outputs.
        is_tied: whether the tensor belongs to another weight of the model, with which this one is tied.
        norm: the BatchNormalization that is merged into this weight or bias; None if there is none.
        is_named: whether the model's file says that the stored tensor is this parameter. Otherwise it was matched by
            the module that reads it, and the exporter may have computed it from the parameter.
    """

    place: Place
    parts: tuple[Part, ...]
    is_tied: bool = False
    norm: Norm | None = None
    is_named: bool = True

    @property
    def keys(self) -> list[str]:
        """The names of the tensors of the file that this weight consists of."""
        return [*(part.key for part in self.parts if part.key), *(self.norm.keys if self.norm else ())]


class Plan:
    """The matches of a model's weights with the tensors of a file.

    Args:
        work: the model.
        source: the file.
        epsilon: the epsilon of BatchNormalizations that are merged into convolutions.

    Attributes:
        matches: the weights with tensors.
        missing: names of weights without tensors.
        spare: names of tensors that are used nowhere, without buffers.
        buffers: names of unused tensors that are not weights.
        constants: names of stored floating-point tensors of several numbers that are no weights and have no tensor.

    Raises:
        DataError: a tensor fits several weights, or a weight several tensors; or a shape differs.
    """

    def __init__(self, work: ir.Model, source: Pretrained, epsilon: float | None = None) -> None:
        self.work, self.source, self._epsilon = work, source, epsilon
        places = places_of(work)
        self._names = TensorNames(source.tensors, [name for place in places for name in place.names])
        self._layers = {meaning(place.module): place.layer for place in places if place.layer is not None}
        wanted = {*weights_of(work)} | _statistics(work)
        self._numbers = numbered((place.node, scope_of(place.node)) for place in places)
        found = [(place, self._parts_of(place, place.names[: place.own])) for place in places]
        self._claimed = {part.key for _, parts in found for part in parts}
        found = [(place, parts or self._by_scope(place)) for place, parts in found]
        self._claimed |= {part.key for _, parts in found for part in parts}
        found = [(place, parts or self._of_module(place)) for place, parts in found]
        matches = [Match(place, parts, is_named=self._is_named(place, parts)) for place, parts in found if parts]
        matches += self._tied([place for place, parts in found if not parts], matches)
        sure = {match.place.value for match in matches if match.is_named}  # whatever reads it
        matches = [replace(match, is_named=match.place.value in sure) for match in matches]
        matches = self._with_norms(places, matches)
        self.matches = [match for match in matches if match.parts or match.norm is not None]
        self._places = places
        held = {match.place.value for match in self.matches}
        missing = {place.value: place.name for place in places if place.value not in held}
        required = {place.value for place in places if place.value.name in wanted or is_integer(place)}
        lost = {value: name for value, name in missing.items() if value in required and not _is_neutral(value, name)}
        self.missing = [*lost.values()]
        self.constants = [value.name or "" for value in missing if value not in lost and _is_array(value)]
        used = {key for match in self.matches for key in match.keys}
        rest = [key for key in source.tensors if key not in used]
        self.buffers = [key for key in rest if key.endswith(_BUFFERS) or self._is_copy(key, used)]
        self.spare = [key for key in rest if key not in self.buffers]
        self._lying = self._inputs_first()
        self._is_alike = not any(self._is_transposed(match) for match in self.matches)
        self._check()

    # --- matching ---------------------------------------------------------------------------------------------------

    def _parts_of(self, place: Place, names: Sequence[str]) -> tuple[Part, ...]:
        """Return the tensors with one of the names, of the pieces of a packed layer, or of its packed layer."""
        if self._is_computed(place):
            return ()
        if is_recurrent(place.node):
            return self._recurrent(place)
        for name in [*names, *(_SHARED.sub("shared.weight", name) for name in names if _SHARED.search(name))]:
            if (key := self._names.find(name)) is not None:
                return (Part(key),)
        if not names:
            return ()
        module, _, role = meaning(names[0]).rpartition(".")
        pieces = [self._names.find(f"{piece}.{role}") for piece in pieces_of(module)]
        if len(pieces) > 1 and (all(pieces) or (role == "bias" and any(pieces))):
            return self._with_zeros(place, module, pieces)
        if place.is_of_experts and (experts := self._each_expert(place, module)):
            return experts
        for pack in packs_of(module):
            if (key := self._names.find(f"{pack}.{role}")) is not None:
                return (self._piece(module, pack, key),)
        return ()

    def _each_expert(self, place: Place, module: str) -> tuple[Part, ...]:
        """Return the matrices of experts that the file stores one by one, each with its pieces in order."""
        parent, _, last = module.rpartition(".")
        count = (known_sizes(shape_of(place.value)) or [0])[0]
        names = [f"{parent}.{i}.{piece}.weight" for i in range(count) for piece in PIECES.get(last, (last,))]
        keys = [self._names.find(name) for name in names]
        return tuple(Part(key) for key in keys if key) if all(keys) else ()

    def _is_computed(self, place: Place) -> bool:
        """Whether an exporter computed the tensor from a weight; the sum 1 + weight of some families is known."""
        known = is_recurrent(place.node) or (place.is_norm and bool(self.source.norm_offset))
        return is_computed(place.value, place.origin) and not known

    def _is_named(self, place: Place, parts: tuple[Part, ...]) -> bool:
        """Whether the model's file says that a stored tensor is what the parts are.

        A BatchNormalization may be merged into a weight that keeps its name; PyTorch's exporter records this.
        """
        paths = place.written
        if place.is_norm and self.source.norm_offset and is_computed(place.value, place.origin):
            paths = tuple(recorded_names(place.value))  # 1 + weight
        if is_recurrent(place.node) or contains_norm(place.node):
            return False
        return any(self._parts_of(place, (path,)) == parts and not _is_lengthened(path, parts) for path in paths) and (
            self._is_moved(place, parts)
        )

    def _is_moved(self, place: Place, parts: tuple[Part, ...]) -> bool:
        """Whether at most one step to the stored tensor has no name, and has changed the shape, so it moved numbers."""
        unknown, own = unknown_steps(place.value, place.origin), numbers_of(place.value)
        if not unknown:
            return True
        is_reshaped = own is not None and tuple(own.shape.numpy()) != self.source.tensors[parts[0].key].shape
        return unknown == 1 and len(parts) == 1 and is_reshaped

    def _by_scope(self, place: Place) -> tuple[Part, ...]:
        """Return the tensors that are called as the scope of the weight's reader, if they fit and no other has them."""
        parts = self._parts_of(place, place.names[place.own :])
        fits = place.layer is not None or sum(self.source.tensors[p.key].size for p in parts if p.key) == _size(place)
        return parts if fits and self._claimed.isdisjoint(part.key for part in parts) else ()

    def _recurrent(self, place: Place) -> tuple[Part, ...]:
        names = parameters(place.node, place.value, self._numbers[place.node])
        for module in dict.fromkeys([scope_of(place.node), place.module]):
            keys = [self._names.find(f"{module}.{name}") for name in names]
            if keys and all(keys):
                return tuple(Part(key) for key in keys if key)
        return ()

    def _with_zeros(self, place: Place, module: str, pieces: Sequence[str | None]) -> tuple[Part, ...]:
        """Return the biases of a packed layer's pieces; a piece that has none here or in the model has zeros."""
        sizes = [None if key is None else len(self.source.tensors[key]) for key in pieces]
        if None not in sizes:
            return tuple(Part(key or "") for key in pieces)
        weights = [self._names.find(f"{piece}.weight") for piece in pieces_of(module)]
        outputs = [0 if key is None else len(self.source.tensors[key]) for key in weights]
        parts = tuple(Part(key or "", 0, None if key else size) for key, size in zip(pieces, outputs, strict=True))
        old = np.split(self.stored(Match(place, parts)).reshape(-1), np.cumsum(outputs)[:-1])
        had = any(numbers.any() for part, numbers in zip(parts, old, strict=True) if not part.key)
        return () if had or 0 in outputs else parts

    def _piece(self, module: str, pack: str, key: str) -> Part:
        """Return the rows of a packed tensor that belong to the layer ``module`` of the model."""
        names = pieces_of(pack)
        layers = [self._layers.get(name) for name in names]
        sizes = [layer.sizes[1] for layer in layers if layer is not None]
        total = self.source.tensors[key].shape[0]
        if len(sizes) != len(names) or (sum(sizes) not in self.source.tensors[key].shape):
            raise DataError(
                f"'{shown(key)}' has {total} outputs, but the model's layers of it have {sizes}; use a folder of a "
                "model with the same sizes"
            )
        at = names.index(module)
        return Part(key, sum(sizes[:at]), sum(sizes[: at + 1]))

    def _of_module(self, place: Place) -> tuple[Part, ...]:
        """Return the only unused tensor of the weight's module that has its number of elements."""
        if place.node.op_type in _OWN_ORDER or self._is_computed(place):
            return ()
        size = _size(place)
        for module in filter(None, dict.fromkeys(name.rpartition(".")[0] for name in place.names)):
            keys = [key for key in self._names.of_module(module) if key not in self._claimed]
            fitting = [key for key in keys if self.source.tensors[key].size == size > 1]
            fitting = [key for key in fitting if place.layer is not None or _has_one_layout(self.source.tensors[key])]
            if len(fitting) == 1:
                self._claimed.add(fitting[0])
                return (Part(fitting[0]),)
        return ()

    def _tied(self, missing: Sequence[Place], matches: Sequence[Match]) -> list[Match]:
        """Return matches of a last layer, or of an embedding, with the tensor of the other one."""
        if self.source.is_untied:
            return []
        tables = [m for m in matches if m.place.node.op_type in ("Gather", TABLE) and len(m.parts) == 1]
        heads = [m for m in matches if m.place.layer is not None and m.place.layer.kind not in ("Conv", "Gather")]
        found = []
        for place in missing:
            is_table = place.node.op_type in ("Gather", TABLE)
            if place.layer is None and not is_table:
                continue
            others = [m for m in (heads if is_table else tables) if self._could_be_tied(place, m)]
            others = [m for m in others if self.source.is_tied or self._were_equal(place, m.place)]
            if len({m.parts for m in others}) == 1 and (is_table or computes_scores(place)):
                is_named = any(is_path(path) and path.endswith(".weight") for path in place.written)
                found.append(Match(place, others[0].parts, is_tied=True, is_named=is_named))
        return found

    def _could_be_tied(self, place: Place, other: Match) -> bool:
        """Whether an embedding and a last layer may have one tensor (rows, columns): (outputs, inputs) of the layer."""
        is_table = place.node.op_type in ("Gather", TABLE)
        head = other.place.layer if is_table else place.layer
        if head is None or len(other.parts) != 1 or (is_table and not computes_scores(other.place)):
            return False
        return bool(self.source.tensors[other.parts[0].key].shape == head.sizes[::-1])

    def _were_equal(self, one: Place, other: Place) -> bool:
        """Whether an embedding and a last layer of the model are one tensor, or copies apart from rounding."""
        if one.value is other.value:
            return True
        old = [self.stored(Match(place, ())) for place in (one, other)]
        old = [a.T if place.node.op_type == "Gather" else a for a, place in zip(old, (one, other), strict=True)]
        return old[0].shape == old[1].shape and bool(np.linalg.norm(old[0] - old[1]) < 0.5 * np.linalg.norm(old[1]))

    def _with_norms(self, places: Sequence[Place], matches: Sequence[Match]) -> list[Match]:
        """Add the BatchNormalizations of the file that the model's convolutions contain."""
        kept = {meaning(place.module) for place in places if place.node.op_type == "BatchNormalization"}
        kept |= {self._names.module_of(m.parts[0].key) for m in matches if m.place.node.op_type == "BatchNormalization"}
        norms = norms_of(self._names, self.source.tensors, kept)
        biases = {place.node: place for place in places if place.role == "bias"}
        biased = {match.place.node for match in matches if match.place.role == "bias"}
        layers = [(m.place.layer, m.parts[0].key) for m in matches if m.place.layer is not None]
        layers = [(layer, key) for layer, key in layers if layer.kind == "Conv" and layer.node in biases]
        convs = [layer.node for layer, _ in layers]
        given = [Conv(self._names.module_of(key), layer.sizes[1], layer.node in biased,
                      self._names.module_called(scope_of(layer.node))) for layer, key in layers]  # fmt: skip
        merged = folded(given, norms)
        chosen = {convs[i]: replace(norm, epsilon=epsilon_of(convs[i]) or self._epsilon)
                  for i, norm in merged.items()}  # fmt: skip
        for norm in chosen.values():
            norm.check_epsilon()
        said = {m.place.node for m in matches if m.place.layer is not None and self._says_kernel(m)}
        sure = {convs[i] for i, norm in merged.items()
                if epsilon_of(convs[i]) is not None and given[i].scope == norm.module} & said  # fmt: skip
        found = [replace(m, norm=chosen[m.place.node], is_named=m.place.node in sure)
                 if m.place.node in chosen and (m.place.layer is not None or m.place.role == "bias") else m
                 for m in matches]  # fmt: skip
        return found + [Match(biases[node], (), norm=norm, is_named=node in sure)
                        for node, norm in chosen.items() if node not in biased]  # fmt: skip

    def _says_kernel(self, match: Match) -> bool:
        """Whether the file calls the weight of a convolution as its tensor, apart from a norm merged into it."""
        return any(self._parts_of(match.place, (path,)) == match.parts for path in match.place.written)

    def _is_copy(self, key: str, used: Iterable[str]) -> bool:
        """Whether a tensor is equal to one that is used: the second name of a tied weight."""
        array = self.source.tensors[key]
        tied = {m.parts[0].key for m in self.matches if m.place.node.op_type in ("Gather", TABLE) or m.is_tied}
        same = [self.source.tensors[other] for other in tied & {*used}]
        return array.ndim == 2 and any(a.shape == array.shape and np.array_equal(a, array) for a in same)

    # --- shapes -----------------------------------------------------------------------------------------------------

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

    def _check(self) -> None:
        """Raise DataError if a shape differs, or weights that the model stores once have different tensors."""
        for match in self.matches:
            self._check_shape(match)
        stored: dict[ir.Value, Match] = {}
        places: dict[tuple[Part, ...], Match] = {}
        for match in self.matches:
            other = stored.setdefault(match.place.value, match)
            if other.parts != match.parts and not self._are_equal(other, match):
                raise DataError(
                    f"the model stores '{shown(match.place.name)}' and '{shown(other.place.name)}' once, but the file "
                    f"has different tensors for them, {listed([p.key for m in (other, match) for p in m.parts])}; "
                    "untie them first",
                    shell="untie them first: --untie WEIGHT",
                )
            twin = places.setdefault(match.parts, match)
            if match.parts and not (match.is_tied or twin.is_tied) and _differ(twin.place, match.place):
                raise DataError(
                    f"'{shown(match.parts[0].key)}' of the file fits '{shown(twin.place.name)}' and "
                    f"'{shown(match.place.name)}' of the model; map it with names={{...}}",
                    shell="load the file in Python (gg.surgery.load_weights), which takes a map of names",
                )

    def _are_equal(self, one: Match, other: Match) -> bool:
        keys = [match.parts[0].key for match in (one, other) if len(match.parts) == 1 and match.parts[0].key]
        arrays = [self.source.tensors[key] for key in keys]
        return len(arrays) == 2 and np.array_equal(arrays[0], arrays[1])

    def _check_shape(self, match: Match) -> None:
        if not match.parts:
            return
        place, first = match.place, next(part.key for part in match.parts if part.key)
        for part in match.parts:
            kind = self.source.tensors[part.key].dtype if part.key else np.dtype(np.float32)
            if kind.name not in ("float16", "bfloat16", "float32", "float64"):
                raise DataError(
                    f"'{shown(part.key)}' has dtype {kind} in the file; save the weights as floats, not quantised"
                )
        found = [self.source.tensors[part.key].shape for part in match.parts if part.key]
        layer = place.layer
        if layer is None:
            rows = sum(int(np.prod(shape)) for shape in found) if match.parts[0].end is None else None
            missing = sum(part.end or 0 for part in match.parts if not part.key)
            if place.node.op_type == TABLE:
                fits = read_table(place.node).shape == found[0]
            elif rows is None:
                fits = (match.parts[0].end or 0) - match.parts[0].begin == _size(place)
            elif place.is_of_experts:
                fits = self._experts(match, shapes_only=True) is not None
            else:
                fits = rows + missing == _size(place) and _same_but_ones(place, found)
            if fits:
                return
            wanted = list(read_table(place.node).shape if place.node.op_type == TABLE else shape_of(place.value) or ())
        else:
            wanted = list(layer.shape if layer.kind in ("Conv", "Gather") else layer.sizes[::-1])
            if self._outputs_first(match, shapes_only=True) is not None:
                return
        raise DataError(
            f"'{shown(first)}' has shape {list(found[0])} in the file, but '{shown(place.name)}' of the model has "
            f"{wanted}; use a file of a model with the same sizes"
        )

    def _outputs_first(self, match: Match, shapes_only: bool = False) -> Array | None:
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

    def _experts(self, match: Match, shapes_only: bool = False) -> Array | None:
        """Return the matrices of all experts in the order of axes in which the model stores them.

        None if the shape does not fit. The order in the file follows from experts with other numbers of inputs and
        outputs.
        """
        key = match.parts[0].key
        own = shape_of(match.place.value)
        if own is None or len(match.parts) > 1:
            return None if own is None else self._joined_experts(match, known_sizes(own))
        array = self.source.tensors[key]
        if array.shape not in (own, (own[0], own[2], own[1])):
            return None
        if own[1] != own[2]:
            return array if array.shape == own else array.swapaxes(1, 2)
        parent = key.rpartition(".")[0]
        others = [m for m in self.matches if m.place.is_of_experts and m.parts[0].key.rpartition(".")[0] == parent]
        shapes = [(shape_of(m.place.value), self.source.tensors[m.parts[0].key].shape) for m in others]
        found = {mine == theirs for mine, theirs in shapes if mine is not None and mine[1] != mine[2]}
        if len(found) != 1 and not shapes_only:
            raise DataError(
                f"the matrices of '{shown(key)}' are square, so it is unknown whether they are "
                "transposed in the file; take the other tensors with strict=False, and this one by name",
                shell="take the other tensors with --partly",
            )
        return array if found == {True} else array.swapaxes(1, 2)

    def _joined_experts(self, match: Match, own: Sequence[int]) -> Array | None:
        """Return the matrices of experts that the file stores one by one, outputs first; None if shapes do not fit."""
        arrays = [self.source.tensors[part.key] for part in match.parts]
        rows, columns = own[1] * own[0] / len(arrays), own[2]
        if match.place.node.op_type != "MoE" or any(array.shape != (rows, columns) for array in arrays):
            return None
        return np.concatenate(arrays).reshape(own)

    def _alternating(self, match: Match, experts: Array) -> Array:
        """Return the gates and linear halves of experts in the order of rows in which the model reads them.

        Raises:
            DataError: the order in the file is unknown.
        """
        if not match.place.is_interleaved:
            return experts
        is_interleaved = False if len(match.parts) > 1 else self.source.has_interleaved_experts
        if is_interleaved is None:
            raise DataError(
                f"it is unknown whether the rows of gates and linear halves alternate in "
                f"'{shown(match.parts[0].key)}', since no {CONFIG} is next to the tensors; copy {CONFIG} there"
            )
        if is_interleaved:
            return experts
        halves = experts.reshape(len(experts), 2, -1, *experts.shape[2:])
        return halves.swapaxes(1, 2).reshape(experts.shape)

    # --- numbers ----------------------------------------------------------------------------------------------------

    def weight(self, match: Match) -> Array:
        """Return the new numbers of a weight: for a layer outputs first, otherwise in the shape of the stored tensor.

        Floats are float32 at least.
        """
        place = match.place
        if place.layer is not None:
            found = self._outputs_first(match)
            assert found is not None
            array = _wide(found)
        elif place.node.op_type == TABLE:
            array = _wide(self.source.tensors[match.parts[0].key])
        elif place.is_of_experts:
            found = self._experts(match)
            assert found is not None
            array = _wide(self._alternating(match, found))
        elif is_recurrent(place.node):
            array = in_order(place.node, [_wide(self.source.tensors[part.key]) for part in match.parts])
        elif match.parts:
            pieces = [_wide(self.source.tensors[part.key]).reshape(-1)[part.begin : part.end]
                      if part.key else np.zeros(part.end or 0, np.float32) for part in match.parts]  # fmt: skip
            array = np.concatenate(pieces)
            array = array + self.source.norm_offset if self._has_offset(place) else array
            array = -np.exp(array.astype(np.float64)) if place.is_decay else array
            array = self._alternating(match, array.reshape(shape_of(place.value))) if place.is_interleaved else array
        else:
            array = np.zeros(_size(place), np.float32)
        return array if match.norm is None else match.norm.merged(array, place.layer is not None)

    def _has_offset(self, place: Place) -> bool:
        """Whether the stored tensor is 1 + weight: not if an Add follows, or PyTorch's exporter stores the weight."""
        added = any(use.node.op_type == "Add" for use in place.value.uses())
        is_weight = self.work.producer_name == "pytorch" and bool(place.written)
        return bool(self.source.norm_offset) and place.is_norm and not (added or is_weight)

    def stored(self, match: Match) -> Array:
        """Return the numbers in the model that ``weight`` replaces, in the same shape for a layer."""
        place = match.place
        if place.layer is not None:
            return canonical(place.layer)
        if place.node.op_type == TABLE:
            return read_table(place.node)
        return as_read(_read_from(place)) if is_integer(place) else as_read(place.value)

    def add_equal(self, before: Plan) -> None:
        """Match weights without a tensor with the unused tensors that they are equal to, in the weights of the export.

        Constants that an exporter moved from one module to another, such as positions, have no name and no module.

        Args:
            before: the plan for the weights from which the model was exported; it gets the same matches.
        """
        lost = {place.value: place for place in self._places if place.name in {*self.missing} & {*before.missing}}
        for place in lost.values():
            keys = [key for key in before.spare if key in self.spare and before._is_equal(place, key)]
            if len(keys) == 1:
                for plan in (self, before):
                    match = Match(place, (Part(keys[0]),), is_named=False)
                    plan._check_shape(match)
                    plan.matches.append(match)
                    plan.missing.remove(place.name)
                    plan.spare.remove(keys[0])

    def _is_equal(self, place: Place, key: str) -> bool:
        """Whether a tensor of several different numbers is what the model stores."""
        array = self.source.tensors[key]
        if array.size != _size(place) or bool((array == array.reshape(-1)[0]).all()):
            return False
        match = Match(place, (Part(key),))
        try:
            self._check_shape(match)
        except DataError:
            return False
        return self.is_stored(match)

    def is_unchanged(self, match: Match) -> bool:
        """Whether the model already stores exactly the new numbers of a weight."""
        return np.array_equal(self.stored(match).reshape(-1), self.weight(match).reshape(-1))

    def is_stored(self, match: Match) -> bool:
        """Whether the model stores the weight of a match, apart from the rounding of the type in which it does."""
        old, new = (np.asarray(a, np.float64).reshape(-1) for a in (self.stored(match), self.weight(match)))
        if old.size != new.size:
            return False
        slack = self._rounding(match).reshape(-1) + _SUMS * self._terms(match).reshape(-1)
        return bool((np.abs(old - new) <= slack).all())

    def _rounding(self, match: Match) -> Array:
        place = match.place
        if place.layer is not None:
            return canonical_rounding(place.layer)
        if place.node.op_type == TABLE:
            return table_rounding(place.node)
        return rounding_of(_read_from(place)) if is_integer(place) else rounding_of(place.value)

    def _terms(self, match: Match) -> Array:
        """Return the sizes of the terms that an exporter multiplied and added for a weight; 0 if it moved numbers."""
        place = match.place
        if match.norm is not None:
            array = self.weight(replace(match, norm=None))
            return match.norm.terms(array, place.layer is not None)
        is_computed = self._has_offset(place) or place.is_decay
        return np.abs(self.weight(match)) if is_computed else np.zeros(1)

    def drop(self, doubtful: Sequence[Match]) -> None:
        """Remove matches; a convolution and its bias, which contain one norm, are removed together."""
        values = {match.place.value for match in doubtful}
        nodes = {match.place.node for match in doubtful if match.norm is not None}
        left = [m for m in self.matches if m.place.value in values or (m.norm is not None and m.place.node in nodes)]
        self.matches = [match for match in self.matches if match not in left]
        used = {key for match in self.matches for key in match.keys}
        self.missing += [match.place.name for match in left]
        self.spare += list(dict.fromkeys(key for match in left for key in match.keys if key not in used))

    def check_computed(self) -> None:
        """Raise DataError if normalisation weights of the model seem to be 1 + weight, and no family says so."""
        distances = np.zeros(2)
        for match in [] if self.source.norm_offset else self.matches:
            if match.place.is_norm and match.place.layer is None and match.norm is None:
                old, new = as_read(match.place.value), self.weight(match)
                if old.size == new.size:
                    rest = old.astype(np.float64).reshape(-1) - new.reshape(-1)
                    distances += [float(rest @ rest), float((rest - 1) @ (rest - 1))]
        if distances[1] < 0.25 * distances[0]:
            raise DataError(
                f"the normalisation weights of the model seem to be 1 + those of '{shown(self.source.where)}', but no "
                f"{CONFIG} of a family that stores them so is next to the tensors; copy {CONFIG} there"
            )


def is_integer(place: Place) -> bool:
    """Whether a weight is stored as integers."""
    tensor = numbers_of(place.value)
    return tensor is not None and not tensor.dtype.is_floating_point()


def _is_neutral(value: ir.Value, name: str) -> bool:
    """Whether a vector is 1 or 0 everywhere, as for a normalisation without weights, or a layer without a bias."""
    tensor = numbers_of(value)
    is_bias = name.endswith("bias")
    if tensor is None or not tensor.dtype.is_floating_point() or (len(tensor.shape) != 1 and not is_bias):
        return False
    return bool((tensor.numpy() == (0 if is_bias else 1)).all())


def _is_lengthened(path: str, parts: Sequence[Part]) -> bool:
    """Whether a program put letters before the name of a parameter, as onnxruntime does where it computes a weight."""
    own, theirs = path.split("."), parts[0].key.split(".")
    while own and theirs and own[-1] == theirs[-1]:
        own, theirs = own[:-1], theirs[:-1]
    return bool(own and theirs) and own[-1].endswith(f"_{theirs[-1]}")


def _is_array(value: ir.Value) -> bool:
    """Whether a stored tensor contains several floating-point numbers."""
    tensor = numbers_of(value)
    return tensor is not None and tensor.size > 1 and tensor.dtype.is_floating_point()


def _read_from(place: Place) -> ir.Value:
    """Return the input of the reader that a stored tensor becomes."""
    found = [v for v in place.node.inputs if v is not None and rewritten(v)[0] is place.value]
    return found[0] if found else place.value


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


def _size(place: Place) -> int:
    if place.layer is not None:
        return int(np.prod(place.layer.shape))
    tensor = numbers_of(place.value)
    return 0 if tensor is None else tensor.size


def _same_but_ones(place: Place, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tensor has the shape of a weight, apart from axes of size 1."""
    tensor = numbers_of(place.value)
    own = () if tensor is None else tuple(tensor.shape.numpy())
    return len(shapes) > 1 or [n for n in own if n != 1] == [n for n in shapes[0] if n != 1]


def _has_one_layout(array: Array) -> bool:
    """Whether the shape of a tensor shows the order of its axes."""
    sizes = [size for size in array.shape if size != 1]
    return len({*sizes}) == len(sizes)


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


def _differ(one: Place, other: Place) -> bool:
    """Whether two weights belong to different modules, rather than being two copies of one."""
    if one.value is other.value:
        return False
    old = [numbers_of(place.value) for place in (one, other)]
    if not {*one.names} & {*other.names} or old[0] is None or old[1] is None:
        return meaning(one.name) != meaning(other.name)
    return not np.array_equal(old[0].numpy(), old[1].numpy())


def _statistics(work: ir.Model) -> set[str]:
    """Return the names of the running statistics of BatchNormalizations."""
    nodes = [node for node in work.graph if node.op_type == "BatchNormalization"]
    return {v.name or "" for node in nodes for v in node.inputs[1:5] if v is not None and v.is_initializer()}
