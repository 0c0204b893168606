"""Loss columns computed from sums over all samples, and the weight of each batch when gradients are accumulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from gradgraph.building.loss_quotients import Quotient, counts, joint_divisor, quotients
from gradgraph.building.objective_results import Measure, Written, measured
from gradgraph.errors import BuildError
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, op, tracing, wrap
from gradgraph.graph.builder import Builder, Var

# reasons why accumulated gradients may differ from the gradient of one large batch; they follow the name of the loss
NO_QUOTIENT = "is neither a mean nor a sum over the batch"
COMPARES = "compares the samples of a batch with each other, and each rank has only some of them"
DIVISORS = "has terms with different divisors"


def parts_of(builder: Builder, graph: ir.Graph, value: Var, samples: Var) -> list[Quotient]:
    """Return a loss as quotients of sums, or if that is impossible, as a mean over the ``samples`` of the batch."""
    found = quotients(builder, graph, value.value)
    if found is not None:
        return found
    wide, count = builder.cast(value, ir.DataType.FLOAT), builder.cast(samples, ir.DataType.FLOAT)
    return [Quotient(wide * count, count)]


def column_of(builder: Builder, name: str, terms: Sequence[tuple[Sequence[Quotient], float]]) -> Measure:
    """Return the history column ``name``, a weighted sum of losses; ``terms`` has the quotients and weight of each."""
    with tracing(Trace({}, builder=builder)):
        rows = [stack([_number(q.above), _number(q.below or builder.const(0.0))]) for part, _ in terms for q in part]
        weights = [weight for part, weight in terms for _ in part]
        if len(rows) == 1 and name != "loss" and terms[0][0][0].below is not None:
            return measured(builder, name, rows[0], (2,), "ratio", {})
        return measured(builder, name, stack(rows), (len(rows), 2), "weighted_ratios", {"weights": weights})


def _number(x: Var) -> Tensor:
    return op.Reshape(cast(wrap(x), ir.DataType.FLOAT), [])


def added_up(
    builder: Builder,
    graph: ir.Graph,
    written: Written,
    samples: Callable[[], Var] | None,
    counts_labels: bool,
    counts_samples: bool,
) -> Written:
    """Complete ``written``: the weight of a batch, whether losses add up, and the effect of accumulation on results.

    A column "loss" computed from sums is added if the caller cannot weight the losses of batches itself.

    Args:
        samples: a function that writes the number of samples of a batch; None if only the caller knows it.
        counts_labels: whether the loss is a mean over labels that are not ignored, which the caller can count.
        counts_samples: whether the caller can count samples.
    """
    builder.scope = "loss"
    parts = quotients(builder, graph, written.loss)
    if parts is None:
        return written._replace(weight=samples, differs=NO_QUOTIENT)
    varying = [part for part in parts if part.varies]
    if any(part.compares for part in varying):
        written = written._replace(differs=COMPARES)
    counted = all(part.counts_elements for part in varying)
    divisor = joint_divisor(varying)
    is_known = counts_samples if counted else counts_labels and divisor is not None
    if not is_known and all(m.name != "loss" for m, _ in written.measures):
        written = written._replace(measures=[column_of(builder, "loss", [(parts, 1.0)]), *written.measures])
    sums = [part.below is None for part in varying]
    if varying and all(sums):
        return written._replace(
            adds_up=True, differs=written.differs or ("" if len(varying) == len(parts) else DIVISORS)
        )
    if counted:
        return written._replace(weight=samples)
    if divisor is not None:
        return written._replace(weight=lambda: builder.cast(builder.Reshape(divisor, []), ir.DataType.FLOAT))
    written = written._replace(weight=_refusal if any(sums) else samples, every_label=True)
    return written if all(counts(part) for part in varying) else written._replace(differs=written.differs or DIVISORS)


def _refusal() -> Var:
    raise BuildError(
        "gradients cannot be accumulated if some losses have the reduction 'sum' and others 'mean'; use one reduction "
        "for all"
    )
