"""Several losses with their weights, and losses whose samples or elements have weights.

Each loss is a column of the history, from sums over all samples, and so is their weighted sum, which is minimised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import onnx_ir as ir

from gradgraph.arguments import NUMBER, described
from gradgraph.building.measured import Written, measured
from gradgraph.building.objective import (
    adds_up,
    check_scalar,
    chosen_loss,
    compared_with,
    output_of,
    outputs_read,
    renamed,
    targets_of,
    value_names,
    weight_of,
)
from gradgraph.building.same_sizes import named_sizes, same_sizes
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.frontend.loss import Loss
from gradgraph.frontend.pointwise import cast, real, where
from gradgraph.frontend.reductions import sum
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, op, tracing, wrap
from gradgraph.graph.builder import Builder, Var
from gradgraph.step.manifest import TargetSpec, numpy_dtype

SAMPLE_WEIGHT, MASK = "sample_weight", "mask"
MaskSpec: TypeAlias = bool | Sequence[int | str | None] | Mapping[str, bool | int | Sequence[int | str | None]]


@dataclass(frozen=True)
class Term:
    """A loss, what it reads and compares with, its weight in the sum, and its column; "loss" if it is the only one."""

    loss: Loss
    outputs: tuple[str, ...]
    targets: tuple[TargetSpec, ...]
    weight: float = 1.0
    column: str = "loss"


@dataclass(frozen=True)
class WeightedLosses:
    """The weighted sum of ``terms``; ``factors`` are inputs that weigh samples or elements, ``masks`` those of one
    output alone.
    """

    terms: tuple[Term, ...]
    factors: tuple[TargetSpec, ...] = ()
    masks: Mapping[str, TargetSpec] = field(default_factory=dict)
    kept: Sequence[str] = ()

    @property
    def name(self) -> str:
        return "several" if len(self.terms) > 1 else self.terms[0].loss.name

    @property
    def arguments(self) -> Mapping[str, Any]:
        if len(self.terms) == 1:
            return dict(self.terms[0].loss.arguments)
        keys = [", ".join(t.outputs) for t in self.terms]
        return {
            key if keys.count(key) == 1 else f"{key}: {t.loss.name}": {
                "name": t.loss.name, "arguments": dict(t.loss.arguments), "weight": t.weight,
            }
            for key, t in zip(keys, self.terms, strict=True)
        }  # fmt: skip

    @property
    def outputs(self) -> Sequence[str]:
        return list(dict.fromkeys(name for term in self.terms for name in term.outputs))

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        return tuple(
            dict.fromkeys(
                [*(spec for term in self.terms for spec in term.targets), *self.factors, *self.masks.values()]
            )
        )

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        return [output_of(graph, name) for name in self.outputs]

    def emit(self, op: Builder, graph: ir.Graph) -> Written:
        return self._write(op, graph)

    def _write(self, builder: Builder, graph: ir.Graph) -> Written:
        checked = named_sizes(graph)
        fed: dict[str, Var] = {}
        builder.scope = "loss"
        tensors = [self._tensors(builder, graph, term, checked, fed) for term in self.terms]
        factors = [factor_input(spec) for spec in self.factors]
        masks = {output: factor_input(spec) for output, spec in self.masks.items()}
        graph.inputs.extend([*factors, *masks.values()])
        for spec in self.targets:
            builder.reserve(spec.name)
        with tracing(Trace({}, builder=builder)):
            parts = [
                _parts(term.loss, given, [wrap(builder.wrap(f)) for f in _of(term, factors, masks)], checked)
                for term, given in zip(self.terms, tensors, strict=True)
            ]
            total = None
            for term, (value, _, _) in zip(self.terms, parts, strict=True):
                part = value if term.weight == 1.0 else value * term.weight
                total = part if total is None else total + part
            assert total is not None
            loss = renamed(builder, op.Identity(total).traced, "loss")
            rows = [stack([cast(above, "float32"), cast(below, "float32")]) for _, above, below in parts]
            weights = [term.weight for term in self.terms]
            named = [(t.column, row) for t, row in zip(self.terms, rows, strict=True) if t.column != "loss"]
            measures = [measured(builder, column, row, (2,), "ratio", {}) for column, row in named]
            every = stack(rows)
            measures.append(measured(builder, "loss", every, (len(rows), 2), "weighted_ratios", {"weights": weights}))
        one = parts[0][2].traced if len(self.terms) == 1 else None
        sums = [adds_up(term.loss) for term in self.terms]

        def weight() -> Var:
            """Of several losses it is the number of samples."""
            if any(sums):
                raise BuildError("losses that sum and losses that average cannot be accumulated together; use one kind")
            if one is not None:
                return builder.cast(one, ir.DataType.FLOAT)
            first = builder.wrap(output_of(graph, self.terms[0].outputs[0]))
            return builder.cast(builder.Squeeze(builder.dim(first, 0)), ir.DataType.FLOAT)

        return Written(loss, (), measures, weight, all(sums))

    def _tensors(
        self, builder: Builder, graph: ir.Graph, term: Term, checked: Collection[str], fed: dict[str, Var]
    ) -> list[Tensor]:
        """What the loss of a term reads."""
        predictions = [builder.wrap(output_of(graph, name)) for name in term.outputs]
        targets = compared_with(builder, graph, term.loss, predictions, term.targets, checked, fed)
        return [wrap(x) for x in (*predictions, *targets)]


def factor_input(spec: TargetSpec) -> ir.Value:
    """The input that weighs samples or positions."""
    dtype = ir.DataType.from_numpy(numpy_dtype(spec.dtype))
    return ir.Value(name=spec.name, type=ir.TensorType(dtype), shape=ir.Shape(spec.shape))


def _of(term: Term, factors: Sequence[ir.Value], masks: Mapping[str, ir.Value]) -> list[ir.Value]:
    return [*factors, *(mask for output, mask in masks.items() if output == term.outputs[0])]


def _parts(
    loss: Loss, tensors: Sequence[Tensor], factors: Sequence[Tensor], checked: Collection[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a batch, and the two sums that its mean over all samples is the quotient of."""
    if not factors:
        value = cast(loss(*tensors), ir.DataType.FLOAT) if _is_half(tensors) else loss(*tensors)
        below = weight_of(loss, tensors)
        return value, value * cast(below, value.dtype), below
    each = cast(loss.each(*tensors), ir.DataType.FLOAT) if _is_half(tensors) else loss.each(*tensors)
    share = loss.shares(*tensors, **loss.arguments) if loss.shares else None
    for factor in factors:
        weight = aligned(factor, each, checked)
        each = op.Where(weight == 0.0, 0.0, each * weight)  # not times 0: what does not count may be infinite
        share = weight if share is None else cast(share, weight.dtype) * weight
    assert share is not None
    above, below = sum(each), sum(op.Expand(share, op.Shape(each)))
    if loss.arguments.get("reduction") == "sum":
        return above, above, below
    return above / where(below == 0.0, 1.0, below), above, below


def _is_half(tensors: Sequence[Tensor]) -> bool:
    """float16 ends at 65,504: a sum over that many samples."""
    return tensors[0].dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def aligned(factor: Tensor, losses: Tensor, checked: Collection[str]) -> Tensor:
    """``factor`` with axes of 1 behind its own, so that it belongs to the first axes of ``losses``.

    Args:
        checked: as for ``same_sizes``.
    """
    if factor.ndim > losses.ndim:
        raise BuildError(
            f"'{shown(factor.traced.value.name)}' has {factor.ndim} axes, and the losses that it weighs have "
            f"{losses.ndim}; give it at most as many"
        )
    factor = wrap(same_sizes(factor.traced, losses.traced, range(factor.ndim), checked))
    weight = cast(real(factor) if factor.is_bool() else factor, losses.dtype)
    extra = list(range(weight.ndim, losses.ndim))
    return op.Unsqueeze(weight, extra) if extra else weight


# --- what users give -------------------------------------------------------------------------------------


def weighted(
    graph: ir.Graph,
    loss: Any,
    output: str | Sequence[str] | None,
    target: str,
    sample_weight: bool | Sequence[int | str | None],
    mask: MaskSpec,
) -> WeightedLosses:
    """Several losses by output, or one whose samples have weights."""
    if isinstance(loss, Mapping):
        terms = several_losses(graph, loss)
    elif isinstance(loss, Loss):
        check_scalar(loss)
        read = outputs_read(graph, loss, output)
        terms = (Term(loss, read, targets_of(graph, loss, read, target, Builder(value_names(graph)))),)
    else:
        raise BuildError("a loss that the model computes itself weighs its samples itself; leave the weights out")
    masks = masks_of(graph, terms, mask) if isinstance(mask, Mapping) else {}
    return WeightedLosses(terms, factors_of(graph, terms, sample_weight, not masks and mask), masks=masks)


def several_losses(graph: ir.Graph, losses: Mapping[Any, Any]) -> tuple[Term, ...]:
    """The terms of ``{output: loss, (loss, weight) or a list of these}``; an output's target is called after it."""
    if not losses:
        raise BuildError("there is no loss; give one for at least one output, such as {'logits': 'cross_entropy'}")
    free = Builder(value_names(graph))
    terms: list[Term] = []
    for outputs, given in losses.items():
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        if isinstance(given, list) and given:
            terms += _on_one_target(graph, names, given, free)
        else:
            terms.append(_term(graph, names, given, free))
    return tuple(terms)


def _term(graph: ir.Graph, names: Sequence[str], given: Any, free: Builder) -> Term:
    chosen, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if not NUMBER.fits(weight):
        raise BuildError(f"the weight of the loss on '{shown(names[0])}' is {described(weight)}; give a number")
    loss = chosen_loss(chosen)
    if loss is None:
        raise BuildError(f"there is no loss for '{shown(names[0])}'; name one, such as 'mse'")
    check_scalar(loss)
    read = outputs_read(graph, loss, names)
    targets = targets_of(graph, loss, read, f"{names[0]}_target", free, f"{names[0]}_")
    return Term(loss, read, targets, float(weight), f"{names[0]}_loss")


def _on_one_target(graph: ir.Graph, names: Sequence[str], every: Sequence[Any], free: Builder) -> list[Term]:
    """Several losses on the same outputs: they compare with the same target, and each is a column by its own name."""
    terms: list[Term] = []
    shared: TargetSpec | None = None
    for given in every:
        term = _term(graph, names, given, free)
        if any(t.loss.name == term.loss.name for t in terms):
            raise BuildError(f"'{shown(names[0])}' has the loss {term.loss.name} twice; give it once")
        if term.targets and shared is not None:
            if replace(term.targets[0], name=shared.name) != shared:
                raise BuildError(
                    f"the losses on '{shown(names[0])}' do not compare with the same target: {term.loss.name} takes "
                    f"{_told(term.targets[0])}, and one before it {_told(shared)}; write them as one function"
                )
            term = replace(term, targets=(shared, *term.targets[1:]))
        elif term.targets:
            shared = term.targets[0]
        terms.append(replace(term, column=f"{names[0]}_{term.loss.name}"))
    return terms


def _told(target: TargetSpec) -> str:
    return f"{target.dtype}[{', '.join(str(d) for d in target.shape)}]"


def factors_of(graph: ir.Graph, terms: Sequence[Term], sample_weight: Any, mask: Any) -> tuple[TargetSpec, ...]:
    """The inputs that weigh samples, or elements; ``True`` stands for the shape that they mostly have."""
    free = Builder([*value_names(graph), *(spec.name for term in terms for spec in term.targets)])
    first = free.wrap(output_of(graph, terms[0].outputs[0]))
    factors = []
    for name, given, dtype in ((SAMPLE_WEIGHT, sample_weight, "float32"), (MASK, mask, "bool")):
        if given is False or given is None:
            continue
        shape = _usual(first, terms[0], name) if given is True else tuple(given)
        for term in terms:
            _check_weighable(term.loss)
        factors.append(TargetSpec(free.fresh(name), dtype, shape))
    return tuple(factors)


def masks_of(graph: ir.Graph, terms: Sequence[Term], given: Mapping[str, Any]) -> dict[str, TargetSpec]:
    """The input ``<output>_mask`` for each of these outputs: ``True`` for the shape of its target, or so many axes."""
    free = Builder([*value_names(graph), *(spec.name for term in terms for spec in term.targets)])
    by_output = {term.outputs[0]: term for term in terms}
    masks = {}
    for output, axes in given.items():
        if axes is False:
            continue
        if output not in by_output:
            raise UnknownNameError(f"no loss reads '{shown(output)}' first{suggestion(output, by_output)}")
        for term in (t for t in terms if t.outputs[0] == output):
            _check_weighable(term.loss)
        shape = _usual(free.wrap(output_of(graph, output)), by_output[output], MASK)
        if isinstance(axes, Sequence):
            shape = tuple(axes)
        elif not isinstance(axes, bool):
            shape = shape[:axes]
        masks[output] = TargetSpec(free.fresh(f"{output}_mask"), "bool", shape)
    return masks


def _usual(prediction: Var, term: Term, name: str) -> tuple[int | str | None, ...]:
    shape = tuple(term.targets[0].shape) if term.targets else tuple(prediction.shape or ())
    return shape[:1] if name == SAMPLE_WEIGHT else shape


def _check_weighable(loss: Loss) -> None:
    if loss.arguments.get("reduction") not in ("mean", "sum"):
        raise BuildError(
            f"samples have weights where a loss is a mean or a sum, and {loss.name} reduces by "
            f"'{shown(loss.arguments.get('reduction'))}'"
        )
