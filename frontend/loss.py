"""``Loss``: a function of traced tensors (model outputs and targets), and the table of losses by name.

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
    """The type, shape and valid values of a target.

    Attributes:
        dtype, shape: the element type and shape.
        axes: for each axis of the target, the axis of the first output that has equal length; None if there is none.
        classes: the number of classes, for class indices.
        ignore_index: the label that is ignored, for class indices.
        most: the maximum valid number, or the name of a symbolic size; valid numbers are in [0, most].
        counted_by: the name of the target that contains the number of valid entries in each row, if any.
        padded: whether rows with fewer objects are padded with ``ignore_index``; a batch may then have no object.
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
    """A target of a loss: an input of the step that the loss compares with model outputs.

    Attributes:
        name: the name of the target; for the first target, users can choose another one.
        words: the description of the target, for the documentation.
        spec: a function that returns the ``Spec`` of the target, called with the outputs that the loss reads.
        is_labels: whether the target contains class indices.
        is_sign: whether the target contains only −1 and 1.
    """

    name: str
    words: str
    spec: Callable[[Sequence[Var]], Spec]
    is_labels: bool = False
    is_sign: bool = False


def like(words: str = "as the prediction", is_sign: bool = False) -> Target:
    """Return a target with the shape and element type of the first output that the loss reads."""
    return Target(
        "target",
        words,
        lambda outputs: over(outputs[0], range(outputs[0].rank), outputs[0].dtype),
        is_sign=is_sign,
    )


def over(output: Var, axes: Sequence[int], dtype: ir.DataType) -> Spec:
    """Return the specification of a target whose axes have the lengths of the axes ``axes`` of ``output``."""
    sizes = output.shape or ()
    return Spec(dtype, tuple(sizes[axis] for axis in axes), tuple(axes))


LIKE_PREDICTION = (like(),)


@dataclass(frozen=True)
class Loss:
    """A loss: a function of outputs of a model and targets that returns a scalar.

    Call it with traced tensors, first the outputs, then the targets.

    Args:
        name: the name of the loss, for the manifest.
        function: the function of the tensors, called with ``arguments`` by name, which include ``reduction``.
        arguments: the options of the loss, which are also stored in the manifest.
        targets: the targets.
        reads: names for the model outputs that the loss reads.
        shares: a function of outputs and targets that returns the weight of each element in a mean; None if all are 1.
        binary: whether targets are binary: positive above 1/2. Predictions are positive above ``middle``.
        middle: the decision threshold of predictions, for binary targets.
        activation: the operator, Softmax or Sigmoid, that the loss applies to its first output, which must be logits;
            empty if there is none.
        of_logs: whether the first output must be log-probabilities.
        soft: whether targets are class probabilities along the class axis; metrics use the most probable class.
        spelt: a function of outputs and targets that returns predicted and true label sequences, for metrics:
            int64 ``[rows, times]`` each, padded with −1. None if each time has a separate label.
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
        """Return the loss of each element, before the reduction."""
        return self.function(*tensors, **{**self.arguments, "reduction": "none"})

    @property
    def labels(self) -> bool:
        """Whether targets are class indices (int64, without the class axis)."""
        return bool(self.targets) and self.targets[0].is_labels

    @property
    def axis(self) -> int:
        """The class axis of the prediction, if targets are class indices."""
        return int(self.arguments.get("axis", 1))

    @property
    def ignore_index(self) -> int | None:
        """The label that is ignored, or None if the loss ignores none."""
        return self.arguments.get("ignore_index")


# --- losses by name --------------------------------------------------------------------------------------

LOSSES: Makers[Loss] = Makers("loss", Loss, "gradgraph.losses", "mse()", entries.LOSSES)

REMEDIES: dict[str, Mapping[str, str]] = {}  # for each loss, the remedies if its value is "inf" or "nan"

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
        activation: as for ``Loss``, or a function of the options that returns it.
        options: the arguments of ``function`` that users may pass, in order, separated by spaces; their defaults and
            types are those of ``function``.
        targets: as for ``Loss``, or a function of the options that returns them.
        check: a function that raises BuildError for invalid options.
        reductions: the reductions that the loss supports.
        remedies: remedies in the error message after a non-finite loss, by value: ``"inf"`` or ``"nan"``.
    """

    def make(arguments: dict[str, Any]) -> Loss:
        if "reduction" in arguments and arguments["reduction"] not in reductions:
            words = ", ".join(f"'{r}'" for r in reductions[:-1])
            raise BuildError(
                f"the reduction of {name} is '{shown(arguments['reduction'])}'; use {words} or '{reductions[-1]}'"
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
    """Return a public function called ``name`` that accepts only options, such as ``mse(reduction="sum")``.

    Defaults, types and the docstring are those of ``function``.

    Args:
        name: the name of the public function.
        function: the function that has the options.
        options: the names of these options, in order, separated by spaces.
        make: a function of the options, as a dict, that returns the result.
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
    """Return a function that raises BuildError unless the options ``names`` are finite numbers above zero."""

    def check(arguments: Mapping[str, Any]) -> None:
        for name in names:
            if not 0.0 < arguments[name] < math.inf:
                raise BuildError(f"{name} must be a finite number above zero, but is {arguments[name]}")

    return check


# --- shared by all losses --------------------------------------------------------------------------------


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Return ``losses`` unchanged, their mean or their sum, for the reduction "none", "mean" or "sum"."""
    if reduction not in REDUCTIONS:
        raise ModelError(f"a loss has no reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else reductions.sum(losses)


def class_weights(weight: TensorLike, x: Tensor, axis: int) -> Tensor:
    """Return class weights in the element type of ``x``; ``axis`` is the class axis of ``x``.

    Raises:
        BuildError: if ``weight`` is an array or a list, and not a vector with one valid number per class.
    """
    if (array := _known_weights("weight", weight)) is not None:
        shape = x.traced.shape
        classes = None if shape is None else shape[axis]
        if array.ndim != 1 or (isinstance(classes, int) and array.size != classes):
            has = "is a single number" if array.ndim == 0 else f"has the shape {list(array.shape)}"
            raise BuildError(f"weight {has}, but must be a list with a number for each of the {classes or 'n'} classes")
    return numbers_like(weight, x)


def element_weights(name: str, weight: TensorLike, x: Tensor, signed: bool = False) -> Tensor:
    """Return weights for the elements of ``x``, or for its last axes, in the element type of ``x``.

    Args:
        name: the name of the option, for messages.
        weight: the weights.
        x: the prediction.
        signed: whether negative weights are valid.

    Raises:
        BuildError: if ``weight`` is an array or a list, and its numbers are invalid, or it does not broadcast to ``x``.
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
    """Return valid weights as an array, or None for a traced tensor, whose values are unknown; raises BuildError."""
    if isinstance(weight, Value):
        return None
    array = np.asarray(weight, np.float64)
    wrong = ~(np.isfinite(array) & (signed | (array >= 0)))
    if wrong.any():
        below = "" if signed else " that are not below zero"
        raise BuildError(f"{name} contains {array[wrong][0]:g}; use finite numbers{below}")
    if not signed and not array.any():
        raise BuildError(f"{name} contains only zeros, so everything would be ignored; use a number above zero")
    return array


def rank_of(x: Tensor) -> int | None:
    """Return the number of axes of a tensor; None if it is unknown."""
    shape = x.traced.shape
    return None if shape is None else len(shape)
