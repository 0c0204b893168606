"""Terms of the objective: losses with the outputs that they read, their targets, and their sample weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import onnx_ir as ir

from gradgraph.arguments import NUMBER, as_names, described
from gradgraph.building.outputs import default_outputs, output_name, output_of, value_names
from gradgraph.building.same_sizes import same_sizes
from gradgraph.data.record.column_assignment import MASK, SAMPLE_WEIGHT
from gradgraph.data.record.specs import TargetSpec, dtype_name, numpy_dtype
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.frontend import reductions
from gradgraph.frontend.loss import Loss, Spec
from gradgraph.frontend.pointwise import cast, real, where
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import op, tensor, wrap
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.losses import LOSSES

OWN_LOSS = "none"  # the name, in manifests and on the command line, of loss=None: the model computes its own loss
OWN = Loss(OWN_LOSS, lambda output: output, targets=(), reads=("loss",))
Axes: TypeAlias = bool | Sequence[int | str | None]
MaskSpec: TypeAlias = Axes | Mapping[str, bool | int | Sequence[int | str | None]]


@dataclass(frozen=True)
class Term:
    """A loss on outputs of the model, as a term of the objective.

    Attributes:
        loss: the loss.
        outputs: the names of the outputs that it reads.
        targets: the targets that it compares them with.
        weight: its weight in the sum of losses.
        column: its column in the history, if there are several terms.
        factors: the inputs that weight its samples or elements.
    """

    loss: Loss
    outputs: tuple[str, ...]
    targets: tuple[TargetSpec, ...] = ()
    weight: float = 1.0
    column: str = "loss"
    factors: tuple[TargetSpec, ...] = ()

    @property
    def adds_up(self) -> bool:
        """Whether the loss is a sum over the batch, not a mean."""
        return self.loss.arguments.get("reduction") == "sum"

    @property
    def mask(self) -> str | None:
        """The name of the input that masks elements, or None if the term has no mask."""
        return next((f.name for f in reversed(self.factors) if f.dtype == "bool"), None)

    def tensors(self, builder: Builder, graph: ir.Graph, checked: Collection[str], fed: dict[str, Var]) -> list[Tensor]:
        """Return the tensors of the loss: its outputs, then its targets.

        Targets that are not in ``fed`` become inputs of ``graph``, and are added to ``fed``. Symbolic sizes in
        ``checked`` need no check (see ``same_sizes``).
        """
        predictions = [builder.wrap(output_of(graph, name)) for name in self.outputs]
        for spec, given in zip(_specs(self.loss, predictions), self.targets, strict=True):
            if given.name not in fed:
                builder.reserve(given.name)
                value = ir.Value(name=given.name, type=ir.TensorType(spec.dtype), shape=ir.Shape(spec.shape))
                graph.inputs.append(value)
                fed[given.name] = same_sizes(builder.wrap(value), predictions[0], spec.axes, checked)
        return [wrap(x) for x in (*predictions, *(fed[given.name] for given in self.targets))]

    def value(self, tensors: Sequence[Tensor], factors: Sequence[Tensor], checked: Collection[str]) -> Tensor:
        """Return the scalar loss of a batch."""
        loss = self.loss
        is_half = tensors[0].dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)  # a float16 count overflows at 65,504
        each = (loss.each if factors else loss)(*tensors)
        each = cast(each, ir.DataType.FLOAT) if is_half else each
        if not factors:
            return each
        share = loss.shares(*tensors, **loss.arguments) if loss.shares else None
        for factor in factors:
            weight = aligned(factor, each, checked)
            each = op.Where(weight == 0.0, 0.0, each * weight)  # not times 0: ignored entries may be infinite
            share = weight if share is None else cast(share, weight.dtype) * weight
        assert share is not None
        above, below = reductions.sum(each), reductions.sum(op.Expand(share, op.Shape(each)))
        return above if self.adds_up else above / where(below == 0.0, 1.0, below)

    def samples(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the number of samples of a batch: the length of the targets, or of the outputs."""
        first = tensors[len(self.outputs)] if self.targets else tensors[0]
        return tensor(first.shape[0], ir.DataType.FLOAT) if first.ndim else tensor(1.0)


def aligned(factor: Tensor, losses: Tensor, checked: Collection[str]) -> Tensor:
    """Return ``factor`` with axes of length 1 appended, so that its axes correspond to the leading axes of ``losses``.

    ``factor`` are sample weights or a mask. Symbolic sizes in ``checked`` need no check (see ``same_sizes``).
    """
    if factor.ndim > losses.ndim:
        raise BuildError(
            f"'{shown(factor.traced.value.name)}' has {factor.ndim} axes, but the losses that it weights have only "
            f"{losses.ndim}; give it at most as many axes"
        )
    factor = wrap(same_sizes(factor.traced, losses.traced, range(factor.ndim), checked))
    weight = cast(real(factor) if factor.is_bool() else factor, losses.dtype)
    extra = list(range(weight.ndim, losses.ndim))
    return op.Unsqueeze(weight, extra) if extra else weight


def factor_input(spec: TargetSpec) -> ir.Value:
    """Return the input that weights samples or positions."""
    dtype = ir.DataType.from_numpy(numpy_dtype(spec.dtype))
    return ir.Value(name=spec.name, type=ir.TensorType(dtype), shape=ir.Shape(spec.shape))


# --- user input -------------------------------------------------------------------------------------------


def chosen_loss(loss: Any) -> Loss:
    """Return the loss for a user's value: a ``Loss``, a name, or None for the loss that the model computes itself."""
    return OWN if loss is None else LOSSES.given(loss)


def terms_of(graph: ir.Graph, loss: Loss | Mapping[Any, Any], output: Any, target: str) -> tuple[Term, ...]:
    """Return the terms of the objective.

    Args:
        loss: a loss; or a dict by output of losses, pairs ``(loss, weight)`` or lists of these, with targets called
            like the outputs.
        output: the names of the outputs that a single loss reads; by default the first floating-point outputs.
        target: the name of the target of a single loss.
    """
    free = Builder(value_names(graph))
    if isinstance(loss, Loss):
        if loss is OWN and output is not None and len(as_names(output)) != 1:
            raise BuildError(
                f"a loss that the model computes itself is a single output, but {len(as_names(output))} outputs are "
                "named; name one"
            )
        return (_term(graph, loss, output, target, free),)
    if not loss:
        raise BuildError("loss is an empty dict; pass a loss for an output, such as {'logits': 'cross_entropy'}")
    terms: list[Term] = []
    for outputs, given in loss.items():
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        if isinstance(given, list) and given:
            terms += _on_one_target(graph, names, given, free)
        else:
            terms.append(_weighted_term(graph, names, given, free))
    return tuple(terms)


def _term(graph: ir.Graph, loss: Loss, output: Any, target: str, free: Builder, prefix: str = "", **more: Any) -> Term:
    """Return the term of ``loss``, with free names for its targets.

    The first target is called ``target``, further targets ``<prefix><name>``; ``free`` replaces names in use.
    """
    if loss.arguments.get("reduction") == "none":
        raise BuildError(
            f"{loss.name} with reduction 'none' returns a number per element, but a step needs a scalar loss; use "
            "'mean' or 'sum'"
        )
    read = _outputs_read(graph, loss, output)
    specs = _specs(loss, [free.wrap(output_of(graph, name)) for name in read])
    names = [free.fresh(target if i == 0 else prefix + t.name) for i, t in enumerate(loss.targets)]
    renamed = {t.name: name for t, name in zip(loss.targets, names, strict=True)}
    targets = tuple(
        TargetSpec(
            name,
            dtype_name(int(s.dtype)),
            tuple(s.shape),
            s.classes,
            s.ignore_index,
            s.most,
            renamed.get(s.counted_by or ""),
            s.padded,
        )
        for name, s in zip(names, specs, strict=True)
    )
    return Term(loss, read, targets, **more)


def _specs(loss: Loss, predictions: Sequence[Var]) -> list[Spec]:
    return [target.spec(predictions) for target in loss.targets]


def _outputs_read(graph: ir.Graph, loss: Loss, output: str | Sequence[str] | None) -> tuple[str, ...]:
    count = len(loss.reads)
    if output is None and count > 1:
        names = default_outputs(graph)[:count]
    else:
        names = [output_name(graph, name) for name in ([None] if output is None else as_names(output))]
    if len(names) != count:
        raise BuildError(
            f"the loss {loss.name} reads {count} {'output' if count == 1 else 'outputs'} ({', '.join(loss.reads)}), "
            f"but {len(names)} {'is' if len(names) == 1 else 'are'} given",
            remedy=f"name them in this order: output={list(loss.reads)}" if count > 1 else "pass output='NAME'",
            shell="repeat --output, once for each in this order" if count > 1 else "give one --output",
        )
    return tuple(names)


def _weighted_term(graph: ir.Graph, names: Sequence[str], given: Any, free: Builder) -> Term:
    """Return the term of ``given``, a loss or a pair ``(loss, weight)``, on the outputs ``names``."""
    chosen, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if not NUMBER.fits(weight):
        raise BuildError(f"the weight of the loss on '{shown(names[0])}' is {described(weight)}; pass a number")
    if chosen is None:
        raise BuildError(f"the loss for '{shown(names[0])}' is None; pass one, such as 'mse'")
    return _term(graph, chosen_loss(chosen), names, f"{names[0]}_target", free, f"{names[0]}_", weight=float(weight),
                 column=f"{names[0]}_loss")  # fmt: skip


def _on_one_target(graph: ir.Graph, names: Sequence[str], every: Sequence[Any], free: Builder) -> list[Term]:
    """Return the terms of several losses on the same outputs, with a shared target, and columns ``<output>_<loss>``."""
    terms: list[Term] = []
    shared: TargetSpec | None = None
    for given in every:
        term = _weighted_term(graph, names, given, free)
        if any(t.loss.name == term.loss.name for t in terms):
            raise BuildError(f"the loss {term.loss.name} is listed twice for '{shown(names[0])}'; list it once")
        if term.targets and shared is not None:
            if replace(term.targets[0], name=shared.name) != shared:
                mine, other = (f"{t.dtype}[{', '.join(str(d) for d in t.shape)}]" for t in (term.targets[0], shared))
                raise BuildError(
                    f"the losses on '{shown(names[0])}' need different targets: {term.loss.name} needs {mine}, an "
                    f"earlier one {other}; write them as one loss function"
                )
            term = replace(term, targets=(shared, *term.targets[1:]))
        elif term.targets:
            shared = term.targets[0]
        terms.append(replace(term, column=f"{names[0]}_{term.loss.name}"))
    return terms


def weighed(
    graph: ir.Graph, terms: Sequence[Term], sample_weight: Axes, mask: MaskSpec
) -> tuple[tuple[Term, ...], tuple[TargetSpec, ...]]:
    """Return the terms with the inputs that weight them, and a list of these inputs.

    Args:
        sample_weight: ``True`` for one weight per sample, or the shape of the weights.
        mask: ``True`` for the shape of the first target, or a shape; or a dict by output, whose values are ``True`` for
            the shape of the target, a number of its leading axes, or a shape.
    """
    free = Builder([*value_names(graph), *(spec.name for term in terms for spec in term.targets)])
    by_output = mask if isinstance(mask, Mapping) else {}
    masks = {o: _mask_of(graph, terms, o, axes, free) for o, axes in by_output.items() if axes is not False}
    every: Axes = False if isinstance(mask, Mapping) else mask
    usual = _usual_shape(graph, terms[0])
    factors = factors_of(sample_weight, every, usual[:1], usual, free)
    found = []
    for term in terms:
        own = masks.get(term.outputs[0])
        mine = (*factors, *([own] if own else []))
        if mine and term.loss.arguments.get("reduction") not in ("mean", "sum"):
            raise BuildError(
                "sample weights require a loss that is a mean or a sum, but the reduction of "
                f"{term.loss.name} is '{shown(term.loss.arguments.get('reduction'))}'; use 'mean' or 'sum'"
            )
        found.append(replace(term, factors=mine))
    return tuple(found), (*factors, *masks.values())


def factors_of(
    sample_weight: Axes, mask: Axes, one_a_sample: Sequence[Any], one_an_element: Sequence[Any], free: Builder
) -> tuple[TargetSpec, ...]:
    """Return the requested inputs ``sample_weight`` and ``mask``.

    Args:
        sample_weight, mask: the shape, or ``True`` for the default shape; False or None if not requested.
        one_a_sample, one_an_element: the default shapes of sample weights and of a mask.
        free: finds free names.
    """
    given = ((SAMPLE_WEIGHT, sample_weight, "float32", one_a_sample), (MASK, mask, "bool", one_an_element))
    return tuple(
        TargetSpec(free.fresh(name), dtype, tuple(usual) if axes is True else tuple(axes))
        for name, axes, dtype, usual in given
        if axes is not False and axes is not None
    )


def _mask_of(
    graph: ir.Graph, terms: Sequence[Term], output: str, axes: bool | int | Sequence[Any], free: Builder
) -> TargetSpec:
    by_output = {term.outputs[0]: term for term in terms}
    if output not in by_output:
        raise UnknownNameError(f"no loss has '{shown(output)}' as its first output{suggestion(output, by_output)}")
    shape = _usual_shape(graph, by_output[output])
    if isinstance(axes, Sequence):
        shape = tuple(axes)
    elif not isinstance(axes, bool):
        shape = shape[:axes]
    return TargetSpec(free.fresh(f"{output}_mask"), "bool", shape)


def _usual_shape(graph: ir.Graph, term: Term) -> tuple[Any, ...]:
    """Return the shape of the term's first target, or of its first output for a loss without targets."""
    return tuple(term.targets[0].shape) if term.targets else tuple(shape_of(output_of(graph, term.outputs[0])) or ())
