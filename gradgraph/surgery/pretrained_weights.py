"""Weights that were trained elsewhere, matched with those of a finished model: plain, packed, fused or quantised.

Each weight of the model (``weight_places``) is matched with tensors of the file by its module (``weight_names``):

- A packed layer (queries, keys and values; gate and up projections) is joined from the tensors of its pieces, and a
  piece is a part of a packed tensor (``peft_names``).
- A layer whose BatchNormalization was merged into it is merged with the new one again (``folded_norms``).
- A last layer without a tensor is tied to the embedding.
- Normalisation layers of some families multiply by 1 + weight; a file contains this sum.

``pretrained_numbers`` brings tensors into the model's layout, ``pretrained_evidence`` checks that a match is what the
model stores, and ``pretrained_writing`` writes the weights, once everything is matched and checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, listed, shown
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.surgery.folded_norms import Candidate, contains_norm, epsilon_of, folded, norms_of
from gradgraph.surgery.naming import recorded_names
from gradgraph.surgery.operation import Array, numbers_of
from gradgraph.surgery.peft_names import PIECES, packs_of, pieces_of
from gradgraph.surgery.pretrained_files import CONFIG, Pretrained
from gradgraph.surgery.pretrained_matches import Match, Part, is_integer, rounding, size_of, stored
from gradgraph.surgery.pretrained_numbers import Numbers
from gradgraph.surgery.recurrent_weights import is_recurrent, numbered, parameters
from gradgraph.surgery.weight_names import TensorNames, meaning
from gradgraph.surgery.weight_places import (
    BUILDER,
    PYTORCH,
    TABLE,
    Place,
    computes_scores,
    is_computed,
    is_moved,
    is_path,
    places_of,
    scope_of,
    unknown_steps,
)
from gradgraph.surgery.weights import weights_of

# tensors that are not weights: counters, buffers that models compute themselves, and masks of training (wav2vec2)
_BUFFERS = ("num_batches_tracked", "inv_freq", "position_ids", "token_type_ids", "masked_bias", "attn.bias",
            "attention.bias", "relative_position_index", "rotary_emb.cos_cached", "rotary_emb.sin_cached",
            "masked_spec_embed")  # fmt: skip

_SHARED = re.compile(r"((en|de)coder\.)?embed_tokens\.weight$")  # T5 and BART: folders have it as shared.weight
_SINGLE = 1e-6  # relative: steps of quantisers are computed in float32
_OWN_ORDER = frozenset({"Attention", "GRU", "LSTM", "RNN"})  # of gates and heads, other than PyTorch's


class Plan:
    """The matches of a model's weights with the tensors of a file.

    Args:
        work: the model.
        source: the file.
        epsilon: the epsilon of BatchNormalizations that are merged into layers of the model.

    Attributes:
        numbers: the numbers of the tensors in the layout of the model.
        places: the weights of the model.
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
        self.places = places
        held = {match.place.value for match in self.matches}
        missing = {place.value: place.name for place in places if place.value not in held}
        required = {place.value for place in places if place.value.name in wanted or is_integer(place)}
        lost = {value: name for value, name in missing.items() if value in required and not _is_neutral(value, name)}
        self.missing = [*lost.values()]
        self.constants = [value.name or "" for value in missing if value not in lost and _is_array(value)]
        used = {key for match in self.matches for key in match.keys}
        rest = [key for key in source.tensors if key not in used]
        self.buffers = [key for key in rest if is_buffer(key) or self._is_copy(key, used)]
        self.spare = [key for key in rest if key not in self.buffers]
        self.numbers = Numbers(work, source, self.matches)
        self._check()

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
        if place.experts is not None and (each := self._each_expert(place.experts.count, module)):
            return each
        for pack in packs_of(module):
            if (key := self._names.find(f"{pack}.{role}")) is not None:
                return (self._piece(module, pack, key),)
        return ()

    def _each_expert(self, count: int, module: str) -> tuple[Part, ...]:
        """Return the matrices of experts that the file stores one by one, each with its pieces in order."""
        parent, _, last = module.rpartition(".")
        names = [f"{parent}.{i}.{piece}.weight" for i in range(count) for piece in PIECES.get(last, (last,))]
        keys = [self._names.find(name) for name in names]
        return tuple(Part(key) for key in keys if key) if all(keys) else ()

    def _is_computed(self, place: Place) -> bool:
        """Whether an exporter computed the tensor from a weight in an unknown way."""
        return is_computed(place.value, place.origin) and not (is_recurrent(place.node) or self._is_function(place))

    def _is_function(self, place: Place) -> bool:
        """Whether the tensor is a known function of the weight: 1 + weight of some families, or -exp(A_log)."""
        return place.is_decay or (place.is_norm and bool(self.source.norm_offset))

    def _is_named(self, place: Place, parts: tuple[Part, ...]) -> bool:
        """Whether the model's file says that a stored tensor is what the parts are.

        A BatchNormalization may be merged into a weight that keeps its name; PyTorch's exporter records this.
        """
        paths = place.written
        if self._is_function(place) and is_computed(place.value, place.origin):
            paths = tuple(recorded_names(place.value))
        is_stacked = place.experts is not None and not place.node.domain and len(parts) > 1
        in_unknown_order = is_stacked or (place.is_decay and is_moved(place.value, place.origin))
        if is_recurrent(place.node) or contains_norm(place.node) or in_unknown_order or place.is_square_product:
            return False
        if self._may_be_offset(place):
            return False
        return any(self._parts_of(place, (path,)) == parts and not _is_lengthened(path, parts) for path in paths) and (
            self._is_moved(place, parts)
        )

    def _may_be_offset(self, place: Place) -> bool:
        """Whether a norm's weight may be stored with 1 added or not, since the program that wrote it is unknown."""
        is_known = self.work.producer_name in (BUILDER, PYTORCH) or place.is_of_torch
        return place.is_norm and bool(self.source.norm_offset) and not is_known

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
        fits = place.layer is not None or sum(self.source.tensors[p.key].size for p in parts if p.key) == size_of(place)
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
        old = np.split(stored(place).reshape(-1), np.cumsum(outputs)[:-1])
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
        size = size_of(place)
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
            others = [m for m in others if self.source.is_tied or _are_one(place, m.place)]
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

    def _with_norms(self, places: Sequence[Place], matches: Sequence[Match]) -> list[Match]:
        """Add the BatchNormalizations of the file that the model's layers contain."""
        kept = {meaning(place.module) for place in places if place.node.op_type == "BatchNormalization"}
        kept |= {self._names.module_of(m.parts[0].key) for m in matches if m.place.node.op_type == "BatchNormalization"}
        norms = norms_of(self._names, self.source.tensors, kept)
        biases = {place.node: place for place in places if place.role == "bias"}
        biased = {match.place.node: match for match in matches if match.place.role == "bias"}
        kernels = [m for m in matches if m.place.node in biases and len(m.parts) == 1 and _may_contain_norm(m)]
        nodes = [match.place.node for match in kernels]
        given = [self._candidate(match, match.place.node in biased) for match in kernels]
        merged = folded(given, norms)
        chosen = {nodes[i]: replace(norm, epsilon=epsilon_of(nodes[i]) or self._epsilon)
                  for i, norm in merged.items()}  # fmt: skip
        for norm in chosen.values():
            norm.check_epsilon()
        sure = {nodes[i] for i, norm in merged.items()
                if epsilon_of(nodes[i]) is not None and given[i].scope == norm.module
                and self._says_layer(kernels[i], biased.get(nodes[i]))}  # fmt: skip
        found = [replace(m, norm=chosen[m.place.node], is_named=m.place.node in sure)
                 if m.place.node in chosen and (m.is_kernel or m.place.role == "bias") else m
                 for m in matches]  # fmt: skip
        return found + [Match(biases[node], (), norm=norm, is_named=node in sure)
                        for node, norm in chosen.items() if node not in biased]  # fmt: skip

    def _candidate(self, match: Match, has_bias: bool) -> Candidate:
        place = match.place
        sizes = known_sizes(shape_of(place.value)) if place.layer is None else [0, place.layer.sizes[1]]
        scope = self._names.module_called(scope_of(place.node))
        outputs = sizes[1] * max(match.groups, 1)
        return Candidate(self._names.module_of(match.parts[0].key), outputs, has_bias, scope, place.node.op_type)

    def _says_layer(self, kernel: Match, bias: Match | None) -> bool:
        """Whether the model names the weight and bias of a layer, apart from a norm that is merged into them.

        A Gemm that reads (inputs, outputs) may have had a factor for its bias, which exporters multiply, too.
        """
        layer = kernel.place.layer
        is_plain = layer is None or layer.kind != "Gemm" or layer.turned
        given = [kernel] if bias is None else [kernel, bias]
        return is_plain and all(
            any(self._parts_of(m.place, (path,)) == m.parts for path in m.place.written) for m in given
        )

    def _is_copy(self, key: str, used: Iterable[str]) -> bool:
        """Whether a tensor is equal to one that is used: the second name of a tied weight."""
        array = self.source.tensors[key]
        tied = {m.parts[0].key for m in self.matches if m.place.node.op_type in ("Gather", TABLE) or m.is_tied}
        same = [self.source.tensors[other] for other in tied & {*used}]
        return array.ndim == 2 and any(a.shape == array.shape and np.array_equal(a, array) for a in same)

    def _check(self) -> None:
        """Raise DataError if a shape differs, or weights that the model stores once have different tensors."""
        for match in self.matches:
            self.numbers.check_shape(match)
        if self.source.is_tied:
            self._check_ties()
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

    def _check_ties(self) -> None:
        """Raise DataError if an embedding and a last layer that the configuration ties have different tensors."""
        tables = [m for m in self.matches if m.place.node.op_type in ("Gather", TABLE)]
        for head in self.matches:
            is_head = head.is_kernel and head.place.node.op_type not in ("Conv", "Gather", TABLE)
            others = [m for m in tables if is_head and self._could_be_tied(head.place, m)]
            if not others or any(m.parts == head.parts or self._are_equal(m, head) for m in others):
                continue
            if computes_scores(head.place):
                keys = [shown(m.parts[0].key) for m in (others[0], head)]
                raise DataError(
                    f"'{keys[0]}' and '{keys[1]}' of '{shown(self.source.where)}' differ, but {CONFIG} says that they "
                    f"are tied; remove '{keys[1]}', or set tie_word_embeddings to false in {CONFIG}"
                )

    def _are_equal(self, one: Match, other: Match) -> bool:
        keys = [match.parts[0].key for match in (one, other) if len(match.parts) == 1 and match.parts[0].key]
        arrays = [self.source.tensors[key] for key in keys]
        return len(arrays) == 2 and np.array_equal(arrays[0], arrays[1])

    def drop(self, doubtful: Sequence[Match]) -> None:
        """Remove matches; a convolution and its bias, which contain one norm, are removed together."""
        values = {match.place.value for match in doubtful}
        nodes = {match.place.node for match in doubtful if match.norm is not None}
        left = [m for m in self.matches if m.place.value in values or (m.norm is not None and m.place.node in nodes)]
        self.matches = [match for match in self.matches if match not in left]
        used = {key for match in self.matches for key in match.keys}
        self.missing += [match.place.name for match in left]
        self.spare += list(dict.fromkeys(key for match in left for key in match.keys if key not in used))


def is_buffer(name: str) -> bool:
    """Whether a tensor of this name is no weight, which a model may lack."""
    return name.endswith(_BUFFERS)


def _may_contain_norm(match: Match) -> bool:
    layer = match.place.layer
    return match.place.is_transposed_kernel or (layer is not None and layer.kind in ("Conv", "Gemm"))


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


def _has_one_layout(array: Array) -> bool:
    """Whether the shape of a tensor shows the order of its axes."""
    sizes = [size for size in array.shape if size != 1]
    return len({*sizes}) == len(sizes)


def _are_one(one: Place, other: Place) -> bool:
    """Whether an embedding and a last layer of the model are one tensor, or copies apart from their rounding."""
    if one.value is other.value:
        return True
    old, slack = ([_of_outputs(place, numbers(place)) for place in (one, other)] for numbers in (stored, rounding))
    if old[0].shape != old[1].shape:
        return False
    return bool((np.abs(old[0] - old[1]) <= (slack[0] + slack[1]) * (1 + _SINGLE)).all())


def _of_outputs(place: Place, numbers: Array) -> Array:
    """Return the numbers of a layer or table with a row for each output or token."""
    return numbers.T if place.node.op_type == "Gather" else numbers


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
