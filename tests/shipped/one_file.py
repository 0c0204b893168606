"""One file that others made, put through every stage in a process of its own, which prints a line of JSON for each.

What a stage found, or the sentence with which gradgraph refused, is printed before the next one begins: a process that
crashes or runs out of time has told what came before.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import gradgraph as gg
from gradgraph.autodiff.probabilities import probabilities
from gradgraph.autodiff.select import trainable
from gradgraph.backends import checked_backends, step_backends
from gradgraph.errors import DivergedError, GradgraphError
from gradgraph.graph.shapes import sizes_or
from gradgraph.optim.transform import Optimizer
from gradgraph.passes.normal import normalise
from gradgraph.runtime.execution.frozen_weights import proto_and_weights
from gradgraph.runtime.execution.session import Placement, create_session, results
from gradgraph.verify.check_gradients import check_gradients
from gradgraph.verify.feeds import Feeds, candidates, given
from tests.shipped import explained_files as explanations

STEPS, FEWEST, TRAIN_S = 20, 5, 20.0  # steps; of slow models so many, and as many as fit in these seconds
RATES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10)
OWN = {"ort-cpu", "portable", "reference-evaluator"}  # it trains in one, and the others say what any runtime lacks
SEEDS = 3
TENSORS = 3  # that are checked at a time, drawn anew with each seed
LARGE = 200_000  # weights from which on not every tensor is checked
CHECK_S = 8.0  # after which no other seed is begun
MOVES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # parts of the loss by which a slope is measured
STEADY = 0.1  # by which two neighbours may differ
CLEAR = 30  # units in the last place of the loss that a difference must have

Found = dict[str, Any]
Array = np.ndarray[Any, Any]


class NothingToTrainError(Exception):
    """The model has no output that depends on a weight."""


@dataclass
class Task:
    """What the file is trained for: to say on a small batch what is made up for it."""

    path: Path
    data: Mapping[str, Any]

    @cached_property
    def model(self) -> ir.Model:
        return normalise(self.path)

    @cached_property
    def _ran(self) -> tuple[Feeds, dict[str, Array]]:
        """Inputs at which the outputs are finite, and these."""
        proto, outside = proto_and_weights(self.model)
        session = create_session(proto, Placement.choose("cpu"), weights=outside)
        names = [v.name or "" for v in self.model.graph.outputs]
        failure: Exception = NothingToTrainError("its outputs are empty or not finite at random inputs")
        for feeds in self.inputs(np.random.default_rng(0)):
            try:
                outputs = results(session, names, feeds)
            except Exception as error:  # another size may do
                failure = error
                continue
            if all(y.size and np.isfinite(y).all() for y in outputs.values() if y.dtype.kind == "f"):
                return feeds, outputs
        raise failure

    def inputs(self, rng: np.random.Generator) -> Iterator[Feeds]:
        """Sets of random inputs to try; where the table of packages says what fits, the one that does."""
        graph = self.model.graph
        drawn = candidates(graph, rng)
        if not self.data:
            yield from drawn
            return
        feeds: dict[str, Any] = next(drawn)
        for name, said in self.data.items():
            if not isinstance(said, dict):
                feeds[name] = np.asarray(said)
            elif "below" in said:
                feeds[name] = rng.integers(said["from"], said["below"], said["shape"])
            else:
                feeds[name] = rng.normal(size=said["shape"]) * said["scale"]
        yield given(graph, feeds)

    @cached_property
    def _chosen(self) -> tuple[ir.Value, Array]:
        """The first output that depends on a weight, and its numbers."""
        for value in self.model.graph.outputs:
            if trainable(self.model.graph, [value]) and self._ran[1][value.name or ""].dtype.kind == "f":
                return value, self._ran[1][value.name or ""]
        raise NothingToTrainError("no output depends on a weight that could train")

    @cached_property
    def loss(self) -> tuple[str, str, Array]:
        """A loss, the value that it reads, and random targets: classes where the model says probabilities."""
        value, numbers = self._chosen
        rng, name = np.random.default_rng(1), value.name or ""
        found = probabilities(value)
        logits = None if found is None or found.logits is None else found.logits.name
        if found is not None and found.axis is not None and logits:
            sizes = [n for axis, n in enumerate(numbers.shape) if axis != found.axis]
            return f"cross_entropy(axis={found.axis})", logits, rng.integers(0, numbers.shape[found.axis], sizes)
        if found is not None and found.kind == "Sigmoid" and logits:
            return "bce_with_logits", logits, rng.integers(0, 2, numbers.shape).astype(numbers.dtype)
        spread = float(numbers.std()) or 1.0
        return "mse", name, (numbers + spread * rng.normal(size=numbers.shape)).astype(numbers.dtype)

    @property
    def numbers(self) -> Array:
        """What the model says on the batch before it is trained."""
        return self._chosen[1]

    @property
    def feeds(self) -> Feeds:
        """Inputs at which the outputs are finite."""
        return self._ran[0]

    @property
    def batch(self) -> Feeds:
        return {**self.feeds, "target": self.loss[2]}

    def step(self, optimizer: Optimizer, **options: Any) -> gg.Step:
        """A step; weights in float16 get copies in float32."""
        loss, output, _ = self.loss
        halves = any(v.dtype == ir.DataType.FLOAT16 for v in self.model.graph.initializers.values())
        chosen = gg.optim.master_weights(optimizer) if halves else optimizer
        return gg.build(self.path, loss, chosen, output=output, **options)


# --- the stages --------------------------------------------------------------------------------------------


def described(task: Task) -> Found:
    """Who wrote the file, and what it consists of."""
    proto = onnx.load(task.path)
    nodes = list(_nodes(proto.graph))
    stored = [*proto.graph.initializer, *(a.t for n in nodes if n.op_type == "Constant" for a in n.attribute)]
    return {
        "size": task.path.stat().st_size,
        "exporter": f"{proto.producer_name} {proto.producer_version}".strip(),
        "nodes": len(nodes),
        "operators": sorted({f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in nodes} - {"Constant"}),
        "weights": sum(math.prod(t.dims) for t in stored if t.data_type in (1, 10, 11, 16)),
    }


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def trained(task: Task) -> Found:
    """Some steps on one small batch: does the loss fall, how long does a step take, in how much memory?"""
    for rate in RATES:
        began = time.perf_counter()
        step = task.step(gg.optim.adam(rate))
        build_s = time.perf_counter() - began
        trainer = gg.Trainer(step, device="cpu", seed=0)
        losses, times = list[float](), list[float]()
        try:
            while len(losses) < STEPS and (len(losses) < FEWEST or sum(times) < TRAIN_S):
                began = time.perf_counter()
                losses.append(float(trainer.step(task.batch)["loss"]))
                times.append(time.perf_counter() - began)
        except DivergedError:
            if rate == RATES[-1]:
                raise
            continue
        if losses[-1] < losses[0]:
            break
    return {
        "loss": task.loss[0], "rate": rate, "first": losses[0], "last": losses[-1], "build_s": build_s,
        "step_s": float(np.median(times)), "trained": len(step.manifest.trainable),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def sloped(task: Task) -> Found:
    """Does the loss change along the gradient of all weights as the gradient says? In onnxruntime, in float32.

    A step of SGD gives the gradient: a long one, as little of a short one would be left in float32. Along the gradient
    the slope is its squared norm, which is held against the difference of the losses on both sides. Long moves leave
    the tangent, short ones drown in rounding: of neighbours that agree, the two shortest count. Where none agree,
    nothing is told.
    """
    if task.numbers.dtype != np.float32:
        return {}  # nothing is seen of it in float16
    trainer = gg.Trainer(task.step(gg.optim.sgd(1.0)), device="cpu", seed=0)
    start = trainer.state_dict()

    def gradient(rate: float) -> tuple[float, dict[str, Array]]:
        trainer.load_state_dict(start)
        loss = float(trainer.step(task.batch, learning_rate=rate)["loss"])
        moved = trainer.state_dict()
        return loss, {n: (start[n].astype(np.float64) - moved[n]) / rate for n in trainer.manifest.trainable}

    def at(length: float) -> float:
        weights = {name: (start[name] + length * g).astype(start[name].dtype) for name, g in along.items()}
        trainer.load_state_dict({**start, **weights})
        return float(trainer.step(task.batch)["loss"])

    rough = _norm(gradient(1.0)[1])
    loss, along = gradient(_norm({n: start[n] for n in trainer.manifest.trainable}) / rough if rough else 1.0)
    squared = _norm(along) ** 2
    # a logarithm of a sum, less one of its terms, is as exact as these are, however small it is
    exact = np.finfo(np.float32).eps * (abs(loss) if task.loss[0] == "mse" else max(abs(loss), 1.0))
    slopes = list[float]()
    for length in [move * (abs(loss) or 1.0) / squared for move in MOVES if squared > 0]:
        try:
            difference = at(length) - at(-length)
        except DivergedError:  # so far away
            continue
        if abs(difference) > CLEAR * exact:
            slopes.append(difference / (2 * length) / squared)
    steady = [(a + b) / 2 for a, b in pairwise(slopes) if abs(a - b) <= STEADY * max(abs(a), abs(b))]
    return {"error": abs(steady[-1] - 1)} if steady else {}


def _norm(tensors: Mapping[str, Array]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in tensors.values()))


def taken(task: Task) -> Found:
    """Which runtimes take the step, as their tables say; the sizes are those of the batch."""
    sizes = {name: array.shape for name, array in task.batch.items() if name != "target"}
    said: dict[str, str] = {}
    for backend in sorted(set(step_backends()) & set(checked_backends()) - OWN):
        try:
            task.step(gg.optim.adam(1e-4), backend=backend, sizes=sizes)
            said[backend] = ""
        except GradgraphError as error:
            said[backend] = str(error)
    return {"said": said}


def checked(task: Task) -> Found:
    """Are the gradients right? Tensors drawn anew with each seed, until there are many or the time is over."""
    began = time.perf_counter()
    graph = task.model.graph
    names = [v.name or "" for v in trainable(graph, list(graph.outputs))]
    size = sum(math.prod(sizes_or(list(v.shape or ()), 1)) for v in graph.initializers.values())
    tried: set[str] = set()
    counts: Counter[str] = Counter()
    wrong, largest, precision, seed = list[str](), 0.0, "", 0
    while seed < SEEDS and (seed == 0 or time.perf_counter() - began < CHECK_S):
        rng = np.random.default_rng(seed)
        few = [] if size < LARGE and seed == 0 else [names[i] for i in rng.permutation(len(names))[:TENSORS]]
        feeds = next(task.inputs(rng)) if task.data else None
        report = check_gradients(task.path, feeds, wrt=few or None, seed=seed)
        for tensor in report.tensors:
            tried.add(tensor.name)
            counts["wrong" if not tensor.ok else "right" if tensor.resolved else "too small to tell"] += 1
            if not tensor.ok:
                wrong.append(f"{tensor.name} at seed {seed}: {tensor.analytic:.6g} for {tensor.numeric:.6g}")
            elif tensor.resolved:
                largest = max(largest, tensor.error)
        precision, seed = report.precision, seed + 1
    return {"counts": counts, "wrong": wrong, "largest": largest, "precision": precision, "seeds": seed,
            "tensors": len(tried)}  # fmt: skip


def explained(task: Task) -> Found:
    """Do the methods of ``gradgraph.explain`` agree with plain loops?"""
    return explanations.explained(task.path, task.feeds, task.model)


STAGES: dict[str, Callable[[Task], Found]] = {
    "described": described, "trained": trained, "sloped": sloped, "taken": taken, "checked": checked,
    "explained": explained,
}  # fmt: skip


def main() -> None:
    """Put the file through the stages; the arguments are its path, what is known of its data, and the stages."""
    path, data, *stages = sys.argv[1:]
    task = Task(Path(path), json.loads(data))
    for name in stages or STAGES:
        began = time.perf_counter()
        try:
            found = STAGES[name](task)
        except GradgraphError as error:
            found = {"refused": str(error)}
        except (NothingToTrainError, explanations.NothingToExplainError) as error:
            found = {"refused": str(error)}
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({"stage": name, **found, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
