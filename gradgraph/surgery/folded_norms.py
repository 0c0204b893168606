"""BatchNormalizations that an exporter merged into convolutions and linear layers, merged again with new statistics.

A layer W, b (Conv, ConvTranspose or Gemm) followed by a BatchNormalization γ, β with statistics μ, σ² is one layer

    W·γ/√(σ² + ε),  β + (b - μ)·γ/√(σ² + ε).

The file no longer contains the BatchNormalization, so its layer is found in the tensors' module paths: in a Sequential
it is the one before it; otherwise the n-th BatchNormalization of a module follows its n-th layer. ε is in neither file,
except that PyTorch's exporter records it with the name of the merged norm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, listed, shown
from gradgraph.surgery.operation import Array
from gradgraph.surgery.weight_names import TensorNames, natural

_EPSILON = re.compile(r"batch_norm_legit_no_training\.default\]\(args = \(.*, ([\d.e+-]+)\)")
_MEAN, _VARIANCE = "running_mean", "running_var"
# operators of layers that are assumed to precede the norms of a module, the likeliest first
_KINDS = (("Conv",), ("Conv", "ConvTranspose"), ("Conv", "ConvTranspose", "Gemm"))


@dataclass(frozen=True)
class Norm:
    """A BatchNormalization of a file of weights.

    Attributes:
        module: its path.
        keys: the names of its tensors.
        scale, bias, mean, variance: γ, β, μ and σ².
        epsilon: ε; None if it is unknown.
    """

    module: str
    keys: tuple[str, ...]
    scale: Array
    bias: Array
    mean: Array
    variance: Array
    epsilon: float | None = None

    def check_epsilon(self) -> None:
        """Raise DataError if the epsilon is unknown."""
        if self.epsilon is None:
            raise DataError(
                f"'{shown(self.module)}' of the file is a BatchNormalization that was merged into a layer of the "
                "model, and its epsilon is in neither file",
                remedy="pass epsilon=1e-5, or 1e-3 for MobileNetV3, Inception and TensorFlow's weights",
                shell="add --epsilon 1e-5, or 1e-3 for MobileNetV3, Inception and TensorFlow's weights",
            )

    def merged(self, array: Array, is_weight: bool, groups: int = 0) -> Array:
        """Return the weight or the bias of the layer with this BatchNormalization.

        The weight has outputs first, or, with ``groups``, the axes of a ConvTranspose with so many groups: (inputs,
        outputs of a group, kernel).
        """
        if is_weight:
            return np.asarray(array * self._factors(array, groups)).astype(array.dtype)
        array = array.reshape(-1)
        return np.asarray(self.bias + (array - self.mean) * self._factors(array)).astype(array.dtype)

    def terms(self, array: Array, is_weight: bool, groups: int = 0) -> Array:
        """Return the sum of the absolute terms that ``merged`` adds, by which its rounding errors are measured."""
        array = np.abs(array)
        if is_weight:
            return np.asarray(array * np.abs(self._factors(array, groups)))
        array = array.reshape(-1)
        return np.asarray(np.abs(self.bias) + (array + np.abs(self.mean)) * np.abs(self._factors(array)))

    def _factors(self, array: Array, groups: int = 0) -> Array:
        """Return γ/√(σ² + ε) in a shape that broadcasts against a weight or bias."""
        factors = np.asarray(self.scale / np.sqrt(self.variance + (self.epsilon or 0.0)))
        if groups:
            factors = factors.reshape(groups, -1).repeat(len(array) // groups, axis=0)
        return factors.reshape(*factors.shape, *[1] * (array.ndim - factors.ndim))


@dataclass(frozen=True)
class Candidate:
    """A layer of a model with a bias, which may contain a BatchNormalization.

    Attributes:
        module: its path in the file of weights.
        outputs: the number of output channels.
        has_bias: whether the file of weights has a bias for it.
        scope: the path of the module that the node belongs to; PyTorch's exporter writes that of the merged norm.
        kind: the operator.
    """

    module: str
    outputs: int
    has_bias: bool = False
    scope: str = ""
    kind: str = "Conv"


def epsilon_of(node: ir.Node) -> float | None:
    """Return the epsilon of the BatchNormalization that PyTorch's exporter merged into a layer, as recorded."""
    found = _EPSILON.search(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
    return float(found[1]) if found else None


def contains_norm(node: ir.Node) -> bool:
    """Whether PyTorch's exporter merged a BatchNormalization into the weights of a node, which keep their names."""
    return node.op_type != "BatchNormalization" and epsilon_of(node) is not None


def norms_of(names: TensorNames, tensors: Mapping[str, Array], kept: Collection[str]) -> list[Norm]:
    """Return the BatchNormalizations of a file except those that the model still contains (``kept``)."""
    modules = {names.module_of(key): key.rpartition(".")[0] for key in tensors if key.endswith(f".{_MEAN}")}
    found = []
    for module, path in modules.items():
        keys = [key for role in ("weight", "bias", _MEAN, _VARIANCE) if (key := f"{path}.{role}") in tensors]
        arrays = {key.rpartition(".")[2]: np.asarray(tensors[key], np.float64) for key in keys}
        if module in kept or _VARIANCE not in arrays:
            continue
        ones = np.ones_like(arrays[_MEAN])
        scale, bias = arrays.get("weight", ones), arrays.get("bias", 0 * ones)
        found.append(Norm(module, tuple(keys), scale, bias, arrays[_MEAN], arrays[_VARIANCE]))
    return found


def folded(layers: Sequence[Candidate], norms: Sequence[Norm]) -> dict[int, Norm]:
    """Return the norm that follows each layer, by the index of the layer.

    Args:
        layers: the layers in order of computation.
        norms: BatchNormalizations that must each follow one of the layers.

    Raises:
        DataError: the layer before a BatchNormalization is unknown, or has another number of channels.
    """
    rest = {norm.module: norm for norm in norms}
    found = {i: rest.pop(layer.scope) for i, layer in enumerate(layers) if layer.scope in rest}
    left = {i: layer for i, layer in enumerate(layers) if i not in found}
    parents = {_parent(module) for module in [*(layer.module for layer in left.values()), *rest]}
    every = {".".join(parent.split(".")[:n]) for parent in parents for n in range(len(parent.split(".")) + 1)}
    for parent in sorted(every, key=lambda path: -len(path.split(".")) if path else 1):
        inside = {i: layer for i, layer in left.items() if _is_in(layer.module, parent)}
        own = sorted((m for m in rest if _is_in(m, parent)), key=natural)
        for i, module in _pairs(parent, inside, [rest[m] for m in own]):
            found[i] = rest.pop(module)
            del left[i]
    if rest:
        raise DataError(
            f"it is unknown which layers of the model contain the BatchNormalizations {listed(rest, 3)} of the file; "
            "export the model without merging them, with training=TrainingMode.PRESERVE or optimize=False",
            shell="export the model from PyTorch without merging them",
        )
    for i, norm in found.items():
        if len(norm.mean) != layers[i].outputs:
            raise DataError(
                f"'{shown(norm.module)}' of the file has {len(norm.mean)} channels, but the layer "
                f"'{shown(layers[i].module)}' before it has {layers[i].outputs}; use the file of this model"
            )
    return found


def _pairs(parent: str, layers: Mapping[int, Candidate], norms: Sequence[Norm]) -> list[tuple[int, str]]:
    """Return the layers and norms of a module that belong together, as index and path."""
    pairs = _in_sequence(parent, layers, [norm.module for norm in norms])
    free = {i: layer for i, layer in layers.items() if i not in dict(pairs)}
    others = [norm for norm in norms if norm.module not in {module for _, module in pairs}]
    if not others or not _are_numbered([norm.module for norm in others]):
        return pairs
    choices = [chosen for chosen in _choices(free) if len(chosen) == len(others)]
    sizes = [len(norm.mean) for norm in others]
    fitting = [chosen for chosen in choices if [free[i].outputs for i in chosen] == sizes]
    chosen = next(iter([*fitting, *choices]), [])
    return [*pairs, *((i, norm.module) for i, norm in zip(chosen, others, strict=bool(chosen)))]


def _choices(layers: Mapping[int, Candidate]) -> Iterator[list[int]]:
    """Yield the layers that the norms of a module may follow, the likeliest choice first."""
    for kinds in _KINDS:
        of_kind = [i for i, layer in layers.items() if layer.kind in kinds]
        yield [i for i in of_kind if not layers[i].has_bias]
        yield of_kind


def _in_sequence(parent: str, layers: Mapping[int, Candidate], norms: Sequence[str]) -> list[tuple[int, str]]:
    """Return the pairs of a Sequential, whose children have numbers: a norm follows the last layer before it."""
    begin = f"{parent}." if parent else ""
    places = {int(rest): i for i, layer in layers.items() if (rest := layer.module.removeprefix(begin)).isdigit()}
    found: dict[int, str] = {}
    for module in norms:
        rest = module.removeprefix(begin)
        before = [n for n in places if rest.isdigit() and n < int(rest)]
        if before:
            found.setdefault(places[max(before)], module)
    return [*found.items()]


def _are_numbered(names: Sequence[str]) -> bool:
    """Whether names have an order: they differ in numbers only."""
    return len({tuple(text for number, text in natural(name) if number < 0) for name in names}) == 1


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _is_in(module: str, parent: str) -> bool:
    return not parent or module.startswith(f"{parent}.")
