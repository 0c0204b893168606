"""Losses that have a name: each is a function of traced tensors, the outputs it reads and the targets it compares with.

``gradgraph.losses`` and ``functional`` share one implementation: the files ``losses_*.py`` hold each loss as a function
under PyTorch's name, and say with ``named`` what ``gradgraph.losses`` calls it and what it compares with.
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
    """A target: element type and shape; of class numbers also how many classes there are, and which does not count.

    Attributes:
        axes: for each of its axes that axis of the first output which it is as long as; None for a length of its own.
        most: no number is negative or above it; a name stands for a size.
        counted_by: the name of the target that says how many of the numbers in a row count.
        padded: ``ignore_index`` fills up rows with fewer objects than others, and a batch may hold none.
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
        name: of all but the first, which has the name that the user gives it.
        words: what it is, for people.
        spec: what it is, for the outputs that the loss reads.
        is_labels: it holds class numbers.
        is_sign: it holds −1 and 1.
    """

    name: str
    words: str
    spec: Callable[[Sequence[Var]], Spec]
    is_labels: bool = False
    is_sign: bool = False


def like(words: str = "as the prediction", is_sign: bool = False) -> Target:
    """A target of the shape and type of the first output that the loss reads."""
    return Target(
        "target",
        words,
        lambda outputs: over(outputs[0], range(outputs[0].rank), outputs[0].dtype),
        is_sign=is_sign,
    )


def over(output: Var, axes: Sequence[int], dtype: ir.DataType) -> Spec:
    """A target as long as ``output`` along these ``axes`` of it."""
    sizes = output.shape or ()
    return Spec(dtype, tuple(sizes[axis] for axis in axes), tuple(axes))


LIKE_PREDICTION = (like(),)


@dataclass(frozen=True)
class Loss:
    """How outputs of a model and targets become a number.

    Calling it with traced tensors, the outputs and then the targets, writes it.

    Args:
        name: for the manifest.
        function: of the tensors, with ``arguments`` by name; ``reduction`` is one of them.
        arguments: for the manifest, too.
        targets: what it compares with.
        reads: what it takes of the model, an output each.
        shares: of the same tensors: what each element counts where its losses are averaged; 1 if there is none.
        binary: targets say yes (above 1/2) or no, and so does the side of ``middle`` on which a prediction lies.
        activation: it computes this operator of its first output, Softmax or Sigmoid, which are therefore logits.
        of_logs: its first output holds logarithms of probabilities.
        soft: targets are the share of each class along the axis; that with the largest is the label of metrics.
        spelt: of the same tensors: the sequences of labels that are found and that are true, for metrics; int64
            ``[rows, times]`` each, −1 where there is no label. None where each time has a label of its own.
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
        """Whether targets are class numbers (int64, the class axis left out); else they look like the prediction."""
        return bool(self.targets) and self.targets[0].is_labels

    @property
    def axis(self) -> int:
        """The class axis of the prediction, where targets are class numbers."""
        return int(self.arguments.get("axis", 1))

    @property
    def ignore_index(self) -> int | None:
        """The label that does not count."""
        return self.arguments.get("ignore_index")


# --- losses by name --------------------------------------------------------------------------------------

LOSSES: Makers[Loss] = Makers("loss", Loss, "gradgraph.losses", "mse()", entries.LOSSES)

REMEDIES: dict[str, Mapping[str, str]] = {}  # by loss: the way out of a value that is not finite, "inf" or "nan"

_WEIGHTS = Kind("a number or a list of numbers", lambda value: NUMBER.fits(value) or NUMBERS.fits(value)).or_none()
_ROWS = Kind("a list of rows of numbers", lambda value: hasattr(value, "__len__") and all(map(NUMBERS.fits, value)))
# by annotation; a tensor is given as numbers
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
    """Make ``function`` known to ``gradgraph.losses`` as ``name``.

    Args:
        name, function, reads, shares, binary, middle, of_logs, soft, spelt: as for ``Loss``.
        activation: likewise, or what gives it for the options.
        options: the arguments of ``function`` that users give, in their order; defaults and kinds are those of it.
        targets: as for ``Loss``, or what gives them for the options.
        check: raises BuildError for options that make no sense.
        reductions: those that it has.
        remedies: the way out where its value is ``"inf"`` or ``"nan"``, if that says something about the data.
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
    """Make the function that users call: ``name(options)``, with the defaults, kinds and docstring of ``function``.

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
    """Make a check that these options are finite numbers above zero."""

    def check(arguments: Mapping[str, Any]) -> None:
        for name in names:
            if not 0.0 < arguments[name] < math.inf:
                raise BuildError(f"{name} must be a finite number above zero, but is {arguments[name]}")

    return check


# --- words that all share --------------------------------------------------------------------------------


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Return ``losses`` as they are ("none"), their mean or their sum."""
    if reduction not in REDUCTIONS:
        raise ModelError(f"a loss has no reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else reductions.sum(losses)


def class_weights(weight: TensorLike, x: Tensor, axis: int) -> Tensor:
    """A factor for each class of ``x``, which lie on this axis.

    Raises:
        BuildError: the numbers are known, and are none of weights, or more or fewer than there are classes.
    """
    if (array := _known_weights("weight", weight)) is not None:
        shape = x.traced.shape
        classes = None if shape is None else shape[axis]
        if array.ndim != 1 or (isinstance(classes, int) and array.size != classes):
            has = "is a single number" if array.ndim == 0 else f"has the shape {list(array.shape)}"
            raise BuildError(f"weight {has}, and a loss takes one for each of the {classes or 'n'} classes")
    return numbers_like(weight, x)


def element_weights(name: str, weight: TensorLike, x: Tensor, signed: bool = False) -> Tensor:
    """Factors for the elements of ``x``, or for all that lie along its last axes.

    Raises:
        BuildError: the numbers are known, and are none of weights, or do not fit along these axes.
    """
    array, shape = _known_weights(name, weight, signed), x.traced.shape
    if array is not None and shape is not None:
        pairs = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.ndim > len(shape) or any(n not in (1, d) for n, d in pairs if isinstance(d, int)):
            raise BuildError(
                f"{name} has the shape {list(array.shape)}, which does not fit what the loss reads, of shape "
                f"{list(shape)}; give one number, or as many as its last axis is long"
            )
    return numbers_like(weight, x)


def _known_weights(name: str, weight: TensorLike, signed: bool = False) -> np.ndarray[Any, Any] | None:
    """The numbers of weights; None for a traced tensor, whose numbers are not known yet."""
    if isinstance(weight, Value):
        return None
    array = np.asarray(weight, np.float64)
    wrong = ~(np.isfinite(array) & (signed | (array >= 0)))
    if wrong.any():
        below = "" if signed else ", none of them below zero"
        raise BuildError(f"{name} holds {array[wrong][0]:g}; give finite numbers{below}")
    if not signed and not array.any():
        raise BuildError(f"{name} holds no number above zero, so that nothing would count; give one")
    return array


def rank_of(x: Tensor) -> int | None:
    """Return the number of axes of a tensor, if it is known."""
    shape = x.traced.shape
    return None if shape is None else len(shape)
