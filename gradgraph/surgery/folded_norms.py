"""BatchNormalizations that an exporter merged into convolutions, merged again with new statistics.

A convolution W, b followed by a BatchNormalization γ, β with statistics μ, σ² is one convolution

    W·γ/√(σ² + ε),  β + (b - μ)·γ/√(σ² + ε).

The file no longer contains the BatchNormalization, so its convolution is found in the tensors' module paths: in a
Sequential it is the one before it; otherwise the n-th BatchNormalization of a module follows its n-th convolution.
ε is in neither file, except that PyTorch's exporter records it with the name of the merged norm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, listed, shown
from gradgraph.surgery.weight_names import TensorNames, natural

Array = np.ndarray[Any, Any]
_EPSILON = re.compile(r"batch_norm_legit_no_training\.default\]\(args = \(.*, ([\d.e+-]+)\)")
_MEAN, _VARIANCE = "running_mean", "running_var"


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
                f"'{shown(self.module)}' of the file is a BatchNormalization that was merged into a convolution of the "
                "model, and its epsilon is in neither file",
                remedy="pass epsilon=1e-5, or 1e-3 for MobileNetV3, Inception and TensorFlow's weights",
                shell="add --epsilon 1e-5, or 1e-3 for MobileNetV3, Inception and TensorFlow's weights",
            )

    def merged(self, array: Array, is_weight: bool) -> Array:
        """Return the weight, outputs first, or the bias of the convolution with this BatchNormalization."""
        if is_weight:
            return np.asarray(array * self._factors(array.ndim)).astype(array.dtype)
        return np.asarray(self.bias + (array.reshape(-1) - self.mean) * self._factors(1)).astype(array.dtype)

    def terms(self, array: Array, is_weight: bool) -> Array:
        """Return the sum of the absolute terms that ``merged`` adds, by which its rounding errors are measured."""
        array = np.abs(array)
        if is_weight:
            return np.asarray(array * np.abs(self._factors(array.ndim)))
        return np.asarray(np.abs(self.bias) + (array.reshape(-1) + np.abs(self.mean)) * np.abs(self._factors(1)))

    def _factors(self, rank: int) -> Array:
        factors = self.scale / np.sqrt(self.variance + (self.epsilon or 0.0))
        return np.asarray(factors.reshape(-1, *[1] * (rank - 1)))


@dataclass(frozen=True)
class Conv:
    """A convolution of a model with a bias, which may contain a BatchNormalization.

    Attributes:
        module: its path in the file of weights.
        outputs: the number of output channels.
        has_bias: whether the file of weights has a bias for it.
        scope: the path of the module that the node belongs to; PyTorch's exporter writes that of the merged norm.
    """

    module: str
    outputs: int
    has_bias: bool = False
    scope: str = ""


def epsilon_of(conv: ir.Node) -> float | None:
    """Return the epsilon of the BatchNormalization that PyTorch's exporter merged into a convolution, as recorded."""
    found = _EPSILON.search(conv.metadata_props.get("pkg.torch.onnx.fx_node", ""))
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


def folded(convs: Sequence[Conv], norms: Sequence[Norm]) -> dict[int, Norm]:
    """Return the norm that follows each convolution, by the index of the convolution.

    Args:
        convs: the convolutions in order of computation.
        norms: BatchNormalizations that must each follow one of the convolutions.

    Raises:
        DataError: the convolution of a BatchNormalization is unknown, or has another number of channels.
    """
    rest = {norm.module: norm for norm in norms}
    found = {i: rest.pop(conv.scope) for i, conv in enumerate(convs) if conv.scope in rest}
    left = {i: conv for i, conv in enumerate(convs) if i not in found}
    parents = {_parent(module) for module in [*(conv.module for conv in left.values()), *rest]}
    every = {".".join(parent.split(".")[:n]) for parent in parents for n in range(len(parent.split(".")) + 1)}
    for parent in sorted(every, key=lambda path: -len(path.split(".")) if path else 1):
        inside = {i: conv for i, conv in left.items() if _is_in(conv.module, parent)}
        own = sorted((m for m in rest if _is_in(m, parent)), key=natural)
        for i, module in _pairs(parent, inside, own):
            found[i] = rest.pop(module)
            del left[i]
    if rest:
        raise DataError(
            f"it is unknown which convolutions of the model contain the BatchNormalizations {listed(rest, 3)} of the "
            "file; export the model without merging them, with training=TrainingMode.PRESERVE or optimize=False",
            shell="export the model from PyTorch without merging them",
        )
    for i, norm in found.items():
        if len(norm.mean) != convs[i].outputs:
            raise DataError(
                f"'{shown(norm.module)}' of the file has {len(norm.mean)} channels, but the convolution "
                f"'{shown(convs[i].module)}' before it has {convs[i].outputs}; use the file of this model"
            )
    return found


def _pairs(parent: str, convs: Mapping[int, Conv], norms: Sequence[str]) -> list[tuple[int, str]]:
    """Return the convolutions and norms of a module that belong together, as index and path."""
    pairs = _in_sequence(parent, convs, norms)
    free = [i for i in convs if i not in dict(pairs)]
    names = [module for module in norms if module not in {m for _, m in pairs}]
    for candidates in ([i for i in free if not convs[i].has_bias], free):
        if names and len(candidates) == len(names) and _are_numbered(names):
            return [*pairs, *zip(candidates, names, strict=True)]
    return pairs


def _in_sequence(parent: str, convs: Mapping[int, Conv], norms: Sequence[str]) -> list[tuple[int, str]]:
    """Return the pairs of a Sequential, whose children have numbers: a norm follows the last convolution before it."""
    begin = f"{parent}." if parent else ""
    places = {int(rest): i for i, conv in convs.items() if (rest := conv.module.removeprefix(begin)).isdigit()}
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
