"""The tensors in memory at the peak of a step, each with its producer and its last reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradgraph.errors import readable_bytes, shown
from gradgraph.runtime.execution.memory import Memory, Prediction
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.execution.walk import Walk
from gradgraph.runtime.saved.printed import text_table
from gradgraph.step.origins import Origins
from gradgraph.step.step import Step

MOST = 12  # maximum rows of a table


@dataclass(frozen=True)
class Held:
    """A tensor in memory at the peak.

    Attributes:
        name: name of the tensor.
        bytes: its size in bytes.
        kind: "activations", "gradients" or "update".
        made_by: operator and name of the node that computes it.
        kept_by: operator and name of the last node that reads it.
        module: the module of the model to which the node in ``made_by`` belongs.
    """

    name: str
    bytes: int
    kind: str
    made_by: str
    kept_by: str
    module: str


@dataclass(frozen=True)
class Peak:
    """The estimated memory peak of a step, printed as tables.

    Attributes:
        memory: the memory of the step by kind, as estimated by :func:`gradgraph.memory`.
        modules: bytes of activations at the peak, by module.
        operators: bytes at the peak, by kind and the operator that created them, such as "activations, Softmax".
        held: the tensors in memory at the peak, largest first.
        batches: total bytes by batch size; empty if the batch size is fixed.
    """

    memory: Memory
    modules: Mapping[str, int]
    operators: Mapping[str, int]
    held: tuple[Held, ...]
    batches: Mapping[int, int]

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        held = [vars(h) for h in self.held]
        by = {"modules": dict(self.modules), "operators": dict(self.operators), "batches": dict(self.batches)}
        return self.memory.as_data() | by | {"held": held}

    def __str__(self) -> str:
        tables = {
            "total, by batch size": [(str(n), size) for n, size in self.batches.items()],
            "activations at the peak, by module": [
                (shown(n) or "(none)", s) for n, s in [*self.modules.items()][:MOST]
            ],
            "at the peak, by operator": [(shown(n), s) for n, s in [*self.operators.items()][:MOST]],
            "largest tensors at the peak": [
                (f"{shown(h.name)}, kept by {shown(h.kept_by)}", h.bytes) for h in self.held[:MOST]
            ],
        }
        parts = [str(self.memory)]
        for title, rows in tables.items():
            if rows or "peak" in title:
                lines = text_table([(f"  {name}", f"{readable_bytes(size):>10}") for name, size in rows])
                parts.append("\n".join([title, *lines]))
        return "\n\n".join(parts)


def peak(step: Step | str, *, options: RuntimeOptions | None = None, **sizes: int) -> Peak:
    """Estimate which tensors are in memory at the peak of a step on this machine's CPU, without running anything.

    Args:
        step, options, sizes: as for ``gradgraph.memory``. If the step folder has several steps, the result describes
            the step with the highest peak.

    Raises:
        UnknownNameError: if the step does not have one of the dimensions in ``sizes``.
    """
    prediction = Prediction.here(step, options, sizes)
    worst, definition = prediction.worst, prediction.session.definition
    origins = Origins.of_step(definition.manifest, definition.eval, definition.trains[worst])
    held = _held(prediction.walks[worst], origins)
    modules, operators = Counter[str](), Counter[str]()
    for tensor in held:
        operators[f"{tensor.kind}, {tensor.made_by.partition(' ')[0]}"] += tensor.bytes
        if tensor.kind == "activations":
            modules[tensor.module] += tensor.bytes
    by_module, by_operator = dict(modules.most_common()), dict(operators.most_common())
    found = prediction.memory
    return Peak(found, by_module, by_operator, held, _by_batch(prediction, found.total))


def _held(walk: Walk, origins: Origins) -> tuple[Held, ...]:
    found = []
    for tensor in sorted(walk.at_peak, key=lambda tensor: -tensor.bytes):
        if tensor.bytes:
            maker, reader = walk.nodes[tensor.first], walk.nodes[tensor.last] if tensor.last < len(walk.nodes) else None
            made = f"{maker.op_type} ({maker.name})"
            kept = f"{reader.op_type} ({reader.name})" if reader is not None else ""
            module = origins(maker.name or "").module
            found.append(Held(tensor.value.name or "", tensor.bytes, tensor.kind, made, kept, module))
    return tuple(found)


def _by_batch(prediction: Prediction, once: int) -> dict[int, int]:
    """Return the total bytes for one, two and four times the predicted batch size, by batch size.

    ``once`` is the total for the predicted batch size; the total for four times is extrapolated linearly. The dict is
    empty if the batch size is fixed.
    """
    inputs = prediction.session.manifest.inputs
    first = next((d for s in inputs for d in s.shape[:1] if isinstance(d, str)), None)
    if first is None:
        return {}
    batch = prediction.sizes[first]
    twice = Prediction(prediction.session, {**prediction.given, first: 2 * batch}).memory.total
    return {batch: once, 2 * batch: twice, 4 * batch: once + 3 * (twice - once)}
