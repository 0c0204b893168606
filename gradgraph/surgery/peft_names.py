"""Matching of PEFT's modules with a model's layers whose names differ.

Hugging Face calls a layer ``model.layers.0.self_attn.q_proj``; onnxruntime-genai's builder calls it
``model.layers.0.attn.q_proj``, or packs it into ``…attn.qkv_proj``. Some families (Phi 3) are packed in PyTorch, too,
and have separate gate and up projections in the file. The outputs of a packed layer are the outputs of its pieces in
order. If a packed layer has the weight W = [W₁; W₂] (outputs first), adapters Wᵢ + s·Bᵢ·Aᵢ of its pieces are equivalent
to one adapter of the packed layer,

    A = [A₁; A₂],  B = diag(B₁, B₂),

whose rank is the sum of their ranks. The zeros of B stay zero in training (``Adapter.blocks``). Conversely, an adapter
of a packed layer splits into adapters of its pieces that share A.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import Table
from gradgraph.errors import ArgumentError, BuildError, DataError, shown
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operation import Array, numbers_of

PIECES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_MIXERS = {f".linear_attn.in_proj_{name}": f".linear_attn.{name}_proj" for name in ("qkv", "z", "b", "a")}  # Qwen3.5
_OF_LFM2 = {".feed_forward.w1": ".mlp.gate_proj", ".feed_forward.w3": ".mlp.up_proj",
            ".feed_forward.w2": ".mlp.down_proj"}  # fmt: skip
_OF_GRANITE = {".shared_mlp.input_linear": ".mlp.gate_up_proj", ".shared_mlp.output_linear": ".mlp.down_proj"}
OURS = {".self_attn.": ".attn.", ".attn.dense": ".attn.o_proj", ".attn.out_proj": ".attn.o_proj",
        ".mlp.router": ".moe.router", **_OF_MIXERS, **_OF_LFM2, **_OF_GRANITE}  # by Hugging Face's part  # fmt: skip
_OF_A_BUILDER = re.compile(r"(.*\.)?layers\.\d+\.(attn|self_attn|mlp|moe)\..+")  # other layers have PyTorch's names
_NUMBERED = re.compile(r"(.*\.)?(layers\.\d+\..+)")
_PASSED = frozenset({"Add", "Mul", "Cast", "Identity", "Split", "Reshape"})  # from a projection to its attention
_FARTHEST = 12  # maximum number of nodes between a projection and its attention


@dataclass(frozen=True)
class Family:
    """The differences between Hugging Face's layer names for a family of models and the builder's names.

    Attributes:
        packed: layers that are packed in Hugging Face's models, and may be separate in the builder's.
        output: Hugging Face's name of the projection after an attention.
        others: other ends of Hugging Face's names, and the builder's.
        root: Hugging Face's name of the module with the layers.
    """

    packed: tuple[str, ...] = ()
    output: str = "o_proj"
    others: Mapping[str, str] = field(default_factory=dict)
    root: str = "model"


FAMILIES: Table[Family] = Table("family of language models")
FAMILIES.add("llama", Family())  # also for other families with the same names of projections
FAMILIES.add("phi3", Family(packed=tuple(PIECES)))
FAMILIES.add("phi", Family(output="dense"))
FAMILIES.add("granitemoehybrid", Family(packed=("gate_up_proj",), others=_OF_GRANITE))
FAMILIES.add("qwen3_5", Family(others=_OF_MIXERS, root="model.language_model"))
FAMILIES.add("lfm2", Family(output="out_proj", others={**_OF_LFM2, ".feed_forward.experts": ".moe.experts"}))


@dataclass(frozen=True)
class Factors:
    """The tensors of a low-rank adapter as stored by PEFT: A (rank, inputs), B (outputs, rank), s, and magnitudes.

    Attributes:
        blocks: for an adapter joined from pieces, the number of outputs and the rank of each; B is zero elsewhere.
        shares: the scale of each piece, relative to ``scale``; empty if they are equal.
    """

    a: Array
    b: Array
    scale: float
    magnitude: Array | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def plain(self) -> Factors:
        """The same adapter with one scale and without blocks: the shares are multiplied into B."""
        if not self.shares:
            return replace(self, blocks=())
        each = np.repeat(self.shares, [rank for _, rank in self.blocks]).astype(self.b.dtype)
        return replace(self, b=self.b * each, blocks=(), shares=())

    @property
    def tensors(self) -> list[Array]:
        """Return A and B, and the magnitudes if there are any."""
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]

    def rows(self, begin: int, end: int) -> Factors:
        """Return the part of the adapter for outputs ``begin`` to ``end``: all of A, and rows of B."""
        magnitude = None if self.magnitude is None else self.magnitude[begin:end]
        return Factors(self.a, self.b[begin:end], self.scale, magnitude)

    def ranks(self, begin: int, end: int) -> Factors:
        """Return the part of the adapter for ranks ``begin`` to ``end``: rows of A, and columns of B."""
        return Factors(self.a[begin:end], self.b[:, begin:end], self.scale, self.magnitude)


def as_ours(module: str) -> str:
    """Convert Hugging Face's name of a module to the builder's."""
    for theirs, ours in OURS.items():
        module = module.replace(theirs, ours)
    return module


def as_theirs(layer: str, family: Family) -> str:
    """Convert a layer name of the builder to Hugging Face's; other names are unchanged."""
    if not _OF_A_BUILDER.fullmatch(layer) and ".linear_attn." not in layer:
        return layer
    name = family.root + layer.removeprefix("model") if layer.startswith("model.layers.") else layer
    for theirs, ours in family.others.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    name = re.sub(r"\.moe\.(router|experts)", r".mlp.\1", name.replace(".attn.", ".self_attn."))
    return re.sub(r"\.self_attn\.o_proj$", f".self_attn.{family.output}", name)


def pieces_of(name: str) -> tuple[str, ...]:
    """Return the names of the pieces of a packed layer; for another layer, only its own."""
    parent, point, last = name.rpartition(".")
    return tuple(f"{parent}{point}{piece}" for piece in PIECES.get(last, (last,)))


# --- names given by the caller -------------------------------------------------------------------------------------


class Renamed:
    """A mapping between layer names in the model and in the folder, passed by the user.

    Args:
        names: the name in the folder by name in the model, such as
            ``{"model.layers.*.attn.o_proj": "transformer.h.*.attn.out"}``; a ``*`` on both sides stands for the same
            text.

    Raises:
        ArgumentError: only one of a pair of names has a ``*``, or one has several.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        for ours, theirs in names.items():
            if ours.count("*") != theirs.count("*") or ours.count("*") > 1:
                raise ArgumentError(
                    f"the names '{shown(ours)}' and '{shown(theirs)}' do not have one * each; write one in both or "
                    "neither"
                )
        self._names = dict(names)

    def theirs(self, layer: str) -> str | None:
        """Return the name in the folder of a layer of the model; None if the mapping has none."""
        return _moved(layer, self._names.items())

    def ours(self, module: str) -> str | None:
        """Return the name in the model of a module of the folder; None if the mapping has none."""
        return _moved(module, [(theirs, ours) for ours, theirs in self._names.items()])


def _moved(name: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    """Return ``name`` renamed by the first matching pair (pattern, new name); ``*`` copies its text.

    None if no pattern matches.
    """
    for source, target in pairs:
        begin, star, end = source.partition("*")
        if name == source or (star and len(name) >= len(begin + end) and name.startswith(begin) and name.endswith(end)):
            return target.replace("*", name[len(begin) : len(name) - len(end)])
    return None


def wrapper_of(layers: Sequence[str], modules: Iterable[str]) -> str:
    """Return the beginning of all layer names, such as ``network.``, that the modules of a folder lack; or "".

    Layers have it if the exported module has the language model as an attribute, for instance to return only its
    logits.
    """
    theirs = {as_ours(module) for module in modules}
    beginnings = [layers[0][: point.end()] for point in re.finditer(r"\.", layers[0])] if layers else []
    starts = ["", *(start for start in beginnings if all(name.startswith(start) for name in layers))]
    return max(starts, key=lambda start: sum(as_ours(name.removeprefix(start)) in theirs for name in layers))


# --- the tensors of packed layers ----------------------------------------------------------------------------------


def joined(pieces: Sequence[Factors | None], sizes: Sequence[int]) -> Factors:
    """Return one adapter of a packed layer, joined from the adapters of its pieces.

    ``sizes`` is the number of outputs of each piece. A piece without an adapter (None) gets zeros in B.

    Raises:
        ValueError: only some pieces have magnitudes.
    """
    held = [piece for piece in pieces if piece is not None]
    magnitudes = [piece.magnitude for piece in held if piece.magnitude is not None]
    if magnitudes and len(magnitudes) < len(pieces):
        raise ValueError("only some pieces have magnitudes")
    scale = next((piece.scale for piece in held if piece.scale), 0.0)
    b = np.zeros((sum(sizes), sum(len(piece.a) for piece in held)), held[0].b.dtype)
    row = column = 0
    for piece, size in zip(pieces, sizes, strict=True):
        if piece is not None:
            b[row : row + size, column : column + len(piece.a)] = piece.b
            column += len(piece.a)
        row += size
    blocks = tuple((size, 0 if p is None else len(p.a)) for p, size in zip(pieces, sizes, strict=True))
    magnitude = np.concatenate(magnitudes) if magnitudes else None
    shares = tuple(1.0 if p is None or not scale else p.scale / scale for p in pieces)
    return Factors(
        np.concatenate([p.a for p in held]), b, scale, magnitude, blocks, () if set(shares) == {1.0} else shares
    )


def split(whole: Factors, sizes: Sequence[int]) -> list[Factors | None]:
    """Return one adapter per piece of a packed layer; ``sizes`` is the number of outputs of each piece.

    A piece that had no adapter when the pieces were joined becomes None.
    """
    ends = list(accumulate(sizes))
    if [size for size, _ in whole.blocks] != list(sizes):
        return [whole.plain.rows(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    ranks = [rank for _, rank in whole.blocks]
    scales = [whole.scale * share for share in whole.shares or [1.0] * len(ranks)]
    parts = [
        replace(whole.rows(end - size, end), scale=scale) for end, size, scale in zip(ends, sizes, scales, strict=True)
    ]
    return [part.ranks(end - rank, end) if rank else None
            for part, end, rank in zip(parts, accumulate(ranks), ranks, strict=True)]  # fmt: skip


def _sizes_of_pieces(total: int, known: Mapping[int, int], count: int) -> list[int] | None:
    """Return the number of outputs of each of ``count`` pieces; None if it is unknown or contradicts ``known``.

    If ``count`` is 2, the pieces are the gate and up projections, which have equal sizes. If it is 3, they are queries,
    keys and values, and keys and values have equal sizes. ``total`` is the packed layer's number of outputs, and
    ``known`` maps the index of a piece to its number of outputs.
    """
    if count == 2:
        return [total // 2] * 2
    values = known.get(1, known.get(2))
    if values is None and 0 in known:
        values = (total - known[0]) // 2
    sizes = None if values is None else [total - 2 * values, values, values]
    return sizes if sizes is not None and all(sizes[i] == size for i, size in known.items()) else None


# --- from PEFT's modules to the model's layers ----------------------------------------------------------------------


def for_layers(given: Mapping[str, Factors], layers: Iterable[Layer]) -> dict[str, Factors]:
    """Return the adapters of PEFT's modules under the names of the model's layers, joined or split for packed layers.

    A module without a layer keeps its name.

    Raises:
        DataError: two modules map to one layer, or the sizes of a packed layer's pieces do not fit.
    """
    theirs = by_meaning({as_ours(module): module for module in given})
    found: dict[str, Factors] = {}
    used: set[str] = set()
    apart = {as_ours(layer.name): layer for layer in layers}
    for key, layer in apart.items():
        names = [found_by_meaning(theirs, piece) for piece in pieces_of(key)]
        whole = found_by_meaning(theirs, key)
        packed = next((p for p in packs_of(key) if found_by_meaning(theirs, p)), None)
        if whole is not None:
            found[layer.name] = given[whole]
            used.add(whole)
        elif len(names) > 1 and any(names):
            found[layer.name] = _packed(layer, [None if n is None else given[n] for n in names])
            used.update(n for n in names if n)
        elif packed is not None:
            module = found_by_meaning(theirs, packed) or ""
            piece = _piece(given[module], key, packed, apart, module)
            found |= {} if piece is None else {layer.name: piece}
            used.add(module)
    return found | {module: factors for module, factors in given.items() if module not in used}


def by_meaning(whole: Mapping[str, str]) -> dict[str, str]:
    """Return PEFT's module by builder's name: by the full name, and by its unique ending from the layer number on.

    ``whole`` are the modules by full name.
    """
    short: dict[str, list[str]] = {}
    for name, module in whole.items():
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            short.setdefault(numbered[2], []).append(module)
    return {name: of_one[0] for name, of_one in short.items() if len(of_one) == 1} | dict(whole)


def found_by_meaning(theirs: Mapping[str, str], name: str) -> str | None:
    """Return the module of a name in the result of ``by_meaning``: by the full name, or its ending."""
    numbered = _NUMBERED.fullmatch(name)
    return theirs.get(name, theirs.get(numbered[2]) if numbered else None)


def packs_of(name: str) -> list[str]:
    """Return the names of packed layers that may contain the layer ``name`` as a piece."""
    parent, point, last = name.rpartition(".")
    return [f"{parent}{point}{pack}" for pack, pieces in PIECES.items() if last in pieces]


def _packed(layer: Layer, pieces: Sequence[Factors | None]) -> Factors:
    known = {i: len(piece.b) for i, piece in enumerate(pieces) if piece is not None}
    sizes = _sizes_of_pieces(layer.sizes[1], known, len(pieces))
    if sizes is None:
        raise DataError(
            f"the layer '{shown(layer.name)}' has {layer.sizes[1]} outputs, which do not match pieces "
            f"of {sorted(known.values())}; use the model that the adapter was trained on"
        )
    try:
        return joined(pieces, sizes)
    except ValueError:
        raise DataError(
            f"the layer '{shown(layer.name)}' packs several modules of PEFT, but the folder has DoRA adapters for only "
            "some of them; load it into a model with separate layers"
        ) from None


def _piece(whole: Factors, key: str, packed: str, layers: Mapping[str, Layer], module: str) -> Factors | None:
    names = pieces_of(packed)
    held = [layers[n].sizes[1] if n in layers else None for n in names]
    sizes = [size for size in held if size is not None]
    if len(sizes) != len(names) or sum(sizes) != len(whole.b):
        raise DataError(
            f"'{shown(module)}' has {len(whole.b)} outputs, but the model's layers of it have {sizes}; use the model "
            "that the adapter was trained on"
        )
    return split(whole, sizes)[names.index(key)]


# --- from the model's layers to PEFT's modules ----------------------------------------------------------------------


def for_modules(given: Mapping[str, Factors], family: Family, layers: Mapping[str, Layer]) -> dict[str, Factors]:
    """Return the adapters of the model's layers under Hugging Face's module names, joined or split if packed.

    Raises:
        BuildError: the boundaries of the pieces of a packed layer are unknown.
    """
    found: dict[str, Factors] = {}
    for name, factors in given.items():
        last = name.rpartition(".")[2] if _OF_A_BUILDER.fullmatch(name) else ""
        if last in PIECES and last not in family.packed:
            parts = split(factors, _sizes_in_the_model(layers[name]))
            named = zip(pieces_of(name), parts, strict=True)
            found |= {as_theirs(n, family): part for n, part in named if part is not None}
            continue
        packed = next((p for p in packs_of(name) if last and p.rpartition(".")[2] in family.packed), None)
        if packed is None:
            found[as_theirs(name, family)] = factors
        elif as_theirs(packed, family) not in found:
            names = pieces_of(packed)
            sizes = [layers[n].sizes[1] for n in names if n in layers]
            if len(sizes) != len(names):
                raise BuildError(f"the model lacks layers of '{shown(packed)}'; remove the family")
            found[as_theirs(packed, family)] = joined([given.get(n) for n in names], sizes)
    return found


def known_pieces(layer: Any) -> tuple[int, ...]:
    """Return the outputs of each piece of a packed layer, if the model defines them; empty for other layers."""
    is_packed = isinstance(layer, Layer) and len(pieces_of(layer.name)) > 1
    return tuple(_sizes_from_attention(layer) or ()) if is_packed else ()


def _sizes_in_the_model(layer: Layer) -> list[int]:
    sizes = _sizes_from_attention(layer)
    if sizes is None:
        raise BuildError(
            f"the boundaries of queries, keys and values in '{shown(layer.name)}' are unknown; remove the family"
        )
    return sizes


def _sizes_from_attention(layer: Layer) -> list[int] | None:
    """Return the number of outputs of each piece of a packed layer; None if it is unknown.

    Sizes of queries, keys and values are read from the attention after the layer; gate and up projections are equal.
    """
    total, count = layer.sizes[1], len(pieces_of(layer.name))
    if count == 2:
        return [total // 2] * 2
    seen: set[ir.Node] = set()
    values = [layer.node.outputs[0]]
    for _ in range(_FARTHEST):
        readers = [node for value in values for node, _ in value.uses() if node not in seen]
        for node in readers:
            sizes = _sizes_read_by(node, total)
            if sizes is not None:
                return sizes
        seen.update(readers)
        values = [v for node in readers if node.op_type in _PASSED for v in node.outputs]
    return None


def _sizes_read_by(node: ir.Node, total: int) -> list[int] | None:
    if node.op_type in ("GroupQueryAttention", "PagedAttention"):
        heads = (node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int())
        size = total // (heads[0] + 2 * heads[1])
        return [heads[0] * size, heads[1] * size, heads[1] * size]
    if node.op_type != "Split" or len(node.outputs) != 3:
        return None
    sizes = numbers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return [total // 3] * 3 if sizes is None else [int(size) for size in sizes.numpy()]
