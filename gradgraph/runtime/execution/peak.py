"""The tensors in memory at the peak of a step, with the nodes that create them and the last nodes that read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradgraph.errors import readable_bytes, shown
from gradgraph.runtime.execution.memory import Memory, Walk, all_sizes_of, as_run, estimate, opened_here, walked
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.saved.printed import text_table
from gradgraph.step.origins import Origins
from gradgraph.step.step import Step

MOST = 12  # rows of a table


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
    definition = step if isinstance(step, Step) else Step.load(step)
    whole = all_sizes_of(definition.manifest, sizes)
    opened = opened_here(definition, options)
    state = sum(s.nbytes for s in definition.manifest.state)
    walks = {name: walked(as_run(opened, part, whole)[0], state) for name, part in opened.parts.items()}
    worst = max(walks, key=lambda name: walks[name].taken)
    held = _held(walks[worst], Origins.of_step(definition.manifest, definition.eval, definition.trains[worst]))
    modules, operators = Counter[str](), Counter[str]()
    for tensor in held:
        operators[f"{tensor.kind}, {tensor.made_by.partition(' ')[0]}"] += tensor.bytes
        if tensor.kind == "activations":
            modules[tensor.module] += tensor.bytes
    found = estimate(opened, whole)
    by_module, by_operator = dict(modules.most_common()), dict(operators.most_common())
    return Peak(found, by_module, by_operator, held, _by_batch(definition, options, sizes, found))


def _held(walk: Walk, origins: Origins) -> tuple[Held, ...]:
    found = []
    for value, (size, kind) in sorted(walk.worst.items(), key=lambda item: -item[1][0]):
        maker, reader = value.producer(), walk.last.get(value)
        if maker is not None and size:
            made = f"{maker.op_type} ({maker.name})"
            kept = f"{reader.op_type} ({reader.name})" if reader is not None else ""
            found.append(Held(value.name or "", size, kind, made, kept, origins(maker.name or "").module))
    return tuple(found)


def _by_batch(step: Step, options: RuntimeOptions | None, sizes: Mapping[str, int], found: Memory) -> dict[int, int]:
    """Return the total bytes for one, two and four times the batch size of the estimate ``found``, by batch size.

    The last number is extrapolated linearly. The dict is empty if the batch size is fixed.
    """
    first = next((d for s in step.manifest.inputs for d in s.shape[:1] if isinstance(d, str)), None)
    if first is None:
        return {}
    batch = found.sizes[first]
    twice = estimate(opened_here(step, options), all_sizes_of(step.manifest, {**sizes, first: 2 * batch})).total
    return {batch: found.total, 2 * batch: twice, 4 * batch: found.total + 3 * (twice - found.total)}
