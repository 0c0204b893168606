"""Named losses: each is a function of traced tensors, the outputs that it reads and its targets.

``gradgraph.losses`` and ``functional`` share one implementation: the files ``losses_*.py`` define each loss as a
function under PyTorch's name, and ``named`` registers it in ``gradgraph.losses`` with its targets.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NUMBER, NUMBERS, TEXT, WHOLE, Kind, Makers, checked
from gradgraph.errors import BuildError, ModelError, shown
from gradgraph.frontend import reductions
from gradgraph.frontend.pointwise import numbers_like
from gradgraph.frontend.reductions import mean
from gradgraph.frontend.trace import TensorLike, Value
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import Shape
from gradgraph.rivals import entries

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

Formula = Callable[..., "Tensor"]
T = TypeVar("T")
REDUCTIONS = ("mean", "sum", "none")


class Spec(NamedTuple):
    """A target: element type and shape; for class indices also their number, and the ignored one.

    Attributes:
        axes: for each of its axes, the axis of the first output with the same length; None for a length of its own.
        most: numbers are in [0, most]; a name is a symbolic size.
        counted_by: the name of the target with the count of valid numbers in each row.
        padded: ``ignore_index`` pads rows with fewer objects, and a batch may have none.
    """

    dtype: ir.DataType
    shape: Shape
    axes: Sequence[int | None]
    classes: int | None = None
    ignore_index: int | None = None
    most: int | str | None = None
    counted_by: str | None = None
    padded: bool = False


@dataclass(frozen=True)
class Target:
    """An input that a loss compares with.

    Attributes:
        name: except for the first, whose name is chosen by the user.
        words: its description.
        spec: its specification, for the outputs that the loss reads.
        is_labels: it has class indices.
        is_sign: it has −1 and 1.
    """

    name: str
    words: str
    spec: Callable[[Sequence[Var]], Spec]
    is_labels: bool = False
    is_sign: bool = False


def like(words: str = "as the prediction", is_sign: bool = False) -> Target:
    """Return a target of the shape and type of the first output that the loss reads."""
    return Target(
        "target",
        words,
        lambda outputs: over(outputs[0], range(outputs[0].rank), outputs[0].dtype),
        is_sign=is_sign,
    )


def over(output: Var, axes: Sequence[int], dtype: ir.DataType) -> Spec:
    """Return a target with the lengths of these ``axes`` of ``output``."""
    sizes = output.shape or ()
    return Spec(dtype, tuple(sizes[axis] for axis in axes), tuple(axes))


LIKE_PREDICTION = (like(),)


@dataclass(frozen=True)
class Loss:
    """A loss: a function from outputs of a model and targets to a number.

    Call it with traced tensors, the outputs and then the targets.

    Args:
        name: for the manifest.
        function: of the tensors, with ``arguments`` by name; ``reduction`` is one of them.
        arguments: for the manifest, too.
        targets: that it compares with.
        reads: names for the outputs of the model that it reads.
        shares: of the same tensors: the weight of each element in an average; 1 by default.
        binary: targets are yes (above 1/2) or no, and predictions likewise, above or below ``middle``.
        activation: it applies this operator, Softmax or Sigmoid, to its first output, which therefore holds logits.
        of_logs: its first output holds log-probabilities.
        soft: targets are class probabilities along the axis; metrics use the largest as label.
        spelt: of the same tensors: predicted and true label sequences, for metrics; int64 ``[rows, times]`` each,
            padded with −1. None if each time has a label of its own.
    """

    name: str
    function: Formula
    arguments: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Target, ...] = LIKE_PREDICTION
    reads: tuple[str, ...] = ("prediction",)
    shares: Formula | None = None
    binary: bool = False
    middle: float = 0.0
    activation: str = ""
    of_logs: bool = False
    soft: bool = False
    spelt: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, **self.arguments)

    def each(self, *tensors: Tensor) -> Tensor:
        """Write the losses before they are reduced."""
        return self.function(*tensors, **{**self.arguments, "reduction": "none"})

    @property
    def labels(self) -> bool:
        """Whether targets are class indices (int64, without the class axis); else they have the prediction's form."""
        return bool(self.targets) and self.targets[0].is_labels

    @property
    def axis(self) -> int:
        """The class axis of the prediction, if targets are class indices."""
        return int(self.arguments.get("axis", 1))

    @property
    def ignore_index(self) -> int | None:
        """The label that is ignored."""
        return self.arguments.get("ignore_index")


# --- losses by name --------------------------------------------------------------------------------------

LOSSES: Makers[Loss] = Makers("loss", Loss, "gradgraph.losses", "mse()", entries.LOSSES)

REMEDIES: dict[str, Mapping[str, str]] = {}  # by loss: the remedy for a non-finite value, "inf" or "nan"

_WEIGHTS = Kind("a number or a list of numbers", lambda value: NUMBER.fits(value) or NUMBERS.fits(value)).or_none()
_ROWS = Kind("a list of rows of numbers", lambda value: hasattr(value, "__len__") and all(map(NUMBERS.fits, value)))
# by annotation; tensors are passed as numbers
_KINDS = {"int": WHOLE, "int | None": WHOLE.or_none(), "float": NUMBER, "str": TEXT, "str | None": TEXT.or_none(),
          "bool": FLAG, "bool | None": FLAG.or_none(),
          "Sequence[Sequence[float]] | None": _ROWS.or_none()}  # fmt: skip


def named(
    name: str,
    function: Formula,
    options: str,
    targets: Sequence[Target] | Callable[[Mapping[str, Any]], Sequence[Target]] = LIKE_PREDICTION,
    *,
    reads: Sequence[str] = ("prediction",),
    shares: Formula | None = None,
    binary: bool = False,
    middle: float = 0.0,
    activation: str | Callable[[Mapping[str, Any]], str] = "",
    of_logs: bool = False,
    soft: bool = False,
    spelt: Callable[..., tuple[Tensor, Tensor]] | None = None,
    check: Callable[[Mapping[str, Any]], object] = lambda arguments: None,
    reductions: Sequence[str] = REDUCTIONS,
    remedies: Mapping[str, str] = {},
) -> None:
    """Register ``function`` in ``gradgraph.losses`` as ``name``.

    Args:
        name, function, reads, shares, binary, middle, of_logs, soft, spelt: as for ``Loss``.
        activation: likewise, or a function of the options that returns it.
        options: the arguments of ``function`` that users may pass, in order; it defines their defaults and types.
        targets: as for ``Loss``, or a function of the options that returns them.
        check: raises BuildError for invalid options.
        reductions: that it supports.
        remedies: for a value of ``"inf"`` or ``"nan"``, if that has a cause in the data.
    """

    def make(arguments: dict[str, Any]) -> Loss:
        if "reduction" in arguments and arguments["reduction"] not in reductions:
            words = ", ".join(f"'{r}'" for r in reductions[:-1])
            raise BuildError(
                f"a loss reduces by {words} or '{reductions[-1]}', not by '{shown(arguments['reduction'])}'"
            )
        check(arguments)
        chosen = targets(arguments) if callable(targets) else targets
        computed = activation(arguments) if callable(activation) else activation
        made = Loss(name, function, arguments, tuple(chosen), tuple(reads), shares, binary, middle, computed, of_logs)
        return replace(made, soft=soft, spelt=spelt)

    if remedies:
        REMEDIES[name] = remedies
    LOSSES.add(name, recipe(name, function, options, make))


def recipe(
    name: str, function: Callable[..., Any], options: str, make: Callable[[dict[str, Any]], T]
) -> Callable[..., T]:
    """Return the public function ``name(options)``, with the defaults, types and docstring of ``function``.

    ``make`` gets the options as a dict.
    """
    known = inspect.signature(function).parameters
    given = [known[option].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for option in options.split()]
    signature = inspect.Signature(given)

    def called(*args: Any, **kwargs: Any) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return make(dict(bound.arguments))

    called.__name__ = called.__qualname__ = name
    called.__doc__ = function.__doc__
    called.__signature__ = signature  # type: ignore[attr-defined]
    return checked(**{p.name: _kind(p) for p in given})(called)


def _kind(option: inspect.Parameter) -> Kind:
    annotation = getattr(option.annotation, "__name__", str(option.annotation))
    return _KINDS.get(annotation) or (NUMBER if isinstance(option.default, float) else _WEIGHTS)


def positive(*names: str) -> Callable[[Mapping[str, Any]], None]:
    """Return a check that these options are finite numbers above zero."""

    def check(arguments: Mapping[str, Any]) -> None:
        for name in names:
            if not 0.0 < arguments[name] < math.inf:
                raise BuildError(f"{name} must be a finite number above zero, but is {arguments[name]}")

    return check


# --- shared by all losses --------------------------------------------------------------------------------


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Return ``losses`` unchanged ("none"), their mean or their sum."""
    if reduction not in REDUCTIONS:
        raise ModelError(f"a loss has no reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else reductions.sum(losses)


def class_weights(weight: TensorLike, x: Tensor, axis: int) -> Tensor:
    """Return a factor for each class of ``x``, along this axis.

    Raises:
        BuildError: the numbers are known, and are not valid weights, or not as many as there are classes.
    """
    if (array := _known_weights("weight", weight)) is not None:
        shape = x.traced.shape
        classes = None if shape is None else shape[axis]
        if array.ndim != 1 or (isinstance(classes, int) and array.size != classes):
            has = "is a single number" if array.ndim == 0 else f"has the shape {list(array.shape)}"
            raise BuildError(f"weight {has}, but a loss takes one for each of the {classes or 'n'} classes")
    return numbers_like(weight, x)


def element_weights(name: str, weight: TensorLike, x: Tensor, signed: bool = False) -> Tensor:
    """Return factors for the elements of ``x``, or for its last axes.

    Raises:
        BuildError: the numbers are known, and are not valid weights, or do not fit these axes.
    """
    array, shape = _known_weights(name, weight, signed), x.traced.shape
    if array is not None and shape is not None:
        pairs = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.ndim > len(shape) or any(n not in (1, d) for n, d in pairs if isinstance(d, int)):
            raise BuildError(
                f"{name} has the shape {list(array.shape)}, which does not fit the prediction of shape {list(shape)}; "
                "pass one number, or one for each entry of its last axis"
            )
    return numbers_like(weight, x)


def _known_weights(name: str, weight: TensorLike, signed: bool = False) -> np.ndarray[Any, Any] | None:
    """Return the numbers of weights; None for a traced tensor, whose numbers are unknown."""
    if isinstance(weight, Value):
        return None
    array = np.asarray(weight, np.float64)
    wrong = ~(np.isfinite(array) & (signed | (array >= 0)))
    if wrong.any():
        below = "" if signed else ", none of them below zero"
        raise BuildError(f"{name} has {array[wrong][0]:g}; use finite numbers{below}")
    if not signed and not array.any():
        raise BuildError(f"{name} has no number above zero, so everything would be ignored; use at least one")
    return array


def rank_of(x: Tensor) -> int | None:
    """Return the number of axes of a tensor, if it is known."""
    shape = x.traced.shape
    return None if shape is None else len(shape)
