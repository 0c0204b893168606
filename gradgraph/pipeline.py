"""The one pipeline: normal form → modes → loss → gradients → optimizer → passes → step.

``build`` turns a model into a ``Step``: train.onnx, init.onnx, eval.onnx and their manifest.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph import losses, optim
from gradgraph.arguments import NAMES, TEXT, WHOLE, checked, described
from gradgraph.autodiff.path import carries, is_tensor
from gradgraph.autodiff.reverse import backward
from gradgraph.autodiff.review import left_out, log_findings, review
from gradgraph.autodiff.select import find_path, running_statistics, trainable
from gradgraph.autodiff.transforms import builder_for
from gradgraph.backends import named, step_backends
from gradgraph.backends.engine import write_for
from gradgraph.builder import Builder, Var
from gradgraph.collector import paused_collection
from gradgraph.errors import BuildError, DifferentiationError, UnknownNameError, shown, suggestion
from gradgraph.files import Source, to_proto
from gradgraph.losses import Loss
from gradgraph.marks import is_marked_constant
from gradgraph.normal import blaming, normalise, pass_quantization
from gradgraph.normal.canonical import simplify
from gradgraph.normal.clean import clean_up
from gradgraph.normal.cse import merge_equal
from gradgraph.optim import Optimizer
from gradgraph.optim.transform import Slots, Transform, Vars, joined
from gradgraph.passes import randomness
from gradgraph.passes.draws import draw_from
from gradgraph.passes.modes import evaluation_mode, moves_statistics, training_mode
from gradgraph.prune import prune
from gradgraph.shapes import IR_VERSION, OPSET
from gradgraph.step import WRITTEN_KEY, Manifest, StateSpec, Step, TargetSpec, TensorSpec, dtype_name

T = TypeVar("T")
OWN_OUTPUT = "output"  # loss="output": the model computes its own scalar loss


@checked(train=NAMES, freeze=NAMES, output=TEXT.or_none(), target_name=TEXT, metrics=NAMES.or_none(), seed=WHOLE,
         backend=TEXT)  # fmt: skip
@paused_collection()
def build(
    model: Source,
    loss: str | Loss = "cross_entropy",
    optimizer: str | Optimizer = "adamw",
    *,
    train: str | Sequence[str] = "*",
    freeze: str | Sequence[str] = (),
    output: str | None = None,
    target_name: str = "target",
    metrics: str | Sequence[str] | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Step:
    """A training step for ``model``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        loss: a name or a ``Loss`` from ``gradgraph.losses``; ``"output"`` if the model computes its own scalar loss.
        optimizer: a name or an ``Optimizer`` from ``gradgraph.optim``.
        train, freeze: names and globs of initializers; what ``train`` selects and ``freeze`` does not is trained.
            ``"*"`` means every trainable initializer: floating, on the way to the loss, neither running statistic
            nor buffer.
        output: what the loss reads: an output of the model, or an inner value such as the logits behind a Softmax;
            the first floating output by default.
        target_name: of the input that the loss compares with (another free name is found if it is taken).
        metrics: a name, or several, from ``gradgraph.losses.METRICS``; accuracy for losses on class numbers by default.
        seed: of what is drawn in training: the masks of Dropout, and the numbers of random operators.
        backend: what the step is written for: ``"auto"`` (gradient operators are functions, which every onnxruntime
            runs and a Trainer replaces by the best form of its machine), ``"portable"`` (standard nodes only),
            or another one of ``gradgraph.backends.step_backends()``.

    Raises:
        ArgumentError: an argument is of the wrong kind.
        ModelError: the model is damaged.
        BuildError: loss, optimizer or options do not fit the model.
        UnknownNameError: a name or glob matches nothing.
        DifferentiationError, UnsupportedOperatorError: no gradient reaches a parameter.
    """
    chosen_backend = named(backend, step_backends())
    if not target_name:
        raise BuildError(
            "the input that the loss compares with needs a name",
            remedy="pass one, such as target_name='target'",
            shell="give one, such as --target-name target",
        )
    with blaming(model):
        normal = _forward(model, [*_listed(train), *_listed(freeze)])
        plain = normal.clone()
        pass_quantization(normal)  # for training; what is evaluated and exported quantizes as the model did
        chosen_optimizer = _named("optimizer", optimizer, optim.by_name, Optimizer, "gradgraph.optim.adamw(1e-3)")
        objective = _Objective.of(normal.graph, loss, output, target_name, metrics)
        names = parameters(normal.graph, objective.output, train, freeze)
        found = review(normal.graph, [_value(normal.graph, objective.output)], names, is_default(train, freeze))
        log_findings(found)
        targets = objective.target_specs(normal.graph)
        evaluation = _evaluation(plain, objective, names)
        training = _Training(normal, objective, names, chosen_optimizer, seed)
        manifest = Manifest(
            inputs=tuple(_spec(v) for v in evaluation.inputs),
            targets=targets,
            outputs=tuple(dict.fromkeys(evaluation.outputs)),
            loss={"name": objective.name, "arguments": objective.arguments},
            loss_output=evaluation.loss,
            metrics=evaluation.metrics,
            optimizer={"name": chosen_optimizer.name, "arguments": dict(chosen_optimizer.arguments)},
            hyperparameters=training.hyperparameters,
            state=tuple(training.states),
            trainable=tuple(names),
            frozen=_frozen(evaluation.model.graph, training.states),
            backend=backend,
            machine=chosen_backend.machine(),
        )
        for written in (training.model, evaluation.model):
            write_for(written, chosen_backend)
        trained, initial, evaluated = map(_proto, (training.model, training.initial, evaluation.model))
        return Step(trained, initial, evaluated, manifest, findings=tuple(found))


def _forward(model: Source, parameters: Sequence[str]) -> ir.Model:
    """The forward pass, where nothing is computed twice: of equal nodes each would get a backward pass of its own."""
    return simplify(merge_equal(normalise(model, parameters=parameters, keep_quantization=True)))


def _named(kind: str, given: Any, by_name: Callable[[str], T], wanted: type[T], example: str) -> T:
    """``given`` itself, or what it names; a function that was passed instead of its result is a common slip."""
    if isinstance(given, str):
        return by_name(given)
    if not isinstance(given, wanted):
        raise BuildError(f"the {kind} is {described(given)}; give a name, or call what makes one: {example}")
    return given


# --- the loss ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Objective:
    """What is minimised: a loss on one of the model's outputs, or that output itself (``loss`` is None)."""

    loss: Loss | None
    output: str
    target: str
    metrics: tuple[str, ...]

    @classmethod
    def of(
        cls, graph: ir.Graph, loss: str | Loss, output: str | None, target: str, metrics: str | Sequence[str] | None
    ) -> _Objective:
        chosen = None
        if not (isinstance(loss, str) and loss == OWN_OUTPUT):
            chosen = _named("loss", loss, losses.by_name, Loss, "gradgraph.losses.mse()")
        name = output_name(graph, output)
        wanted = (["accuracy"] if chosen is not None and chosen.labels else []) if metrics is None else _listed(metrics)
        for metric in wanted:
            if metric not in losses.METRICS:
                raise BuildError(f"there is no metric '{shown(metric)}'{suggestion(metric, losses.METRICS)}")
            if chosen is None or not chosen.labels:
                raise BuildError(f"the metric '{metric}' needs a loss on class numbers, such as cross_entropy")
        return cls(chosen, name, Builder(_value_names(graph)).fresh(target), tuple(wanted))

    @property
    def name(self) -> str:
        return OWN_OUTPUT if self.loss is None else self.loss.name

    @property
    def arguments(self) -> dict[str, Any]:
        return {} if self.loss is None else dict(self.loss.arguments)

    def emit(self, op: Builder, graph: ir.Graph) -> tuple[ir.Value, list[ir.Value]]:
        """Write loss and metrics into ``graph``; the target becomes an input of it."""
        prediction = op.wrap(_value(graph, self.output))
        if self.loss is None:
            _check_own_loss(prediction)
            return prediction.value, []
        dtype, shape = self.loss.target_type(prediction)
        target = ir.Value(name=self.target, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        graph.inputs.append(target)
        op.scope = "loss"
        scalar = _renamed(op, self.loss.emit(op, prediction, op.wrap(target)), "loss")
        results = [_renamed(op, losses.METRICS[m](op, prediction, op.wrap(target), self.loss), m) for m in self.metrics]
        return scalar, results

    def target_specs(self, graph: ir.Graph) -> tuple[TargetSpec, ...]:
        if self.loss is None:
            return ()
        prediction = Builder().wrap(_value(graph, self.output))
        dtype, shape = self.loss.target_type(prediction)
        classes = self.loss.classes(prediction)
        return (TargetSpec(self.target, dtype_name(int(dtype)), tuple(shape or ()), classes, self.loss.ignore_index),)


def output_name(graph: ir.Graph, output: str | None) -> str:
    """The output that the loss reads; an inner value (logits behind a Softmax, say) becomes an output."""
    floating = [v.name for v in graph.outputs if carries(v) and is_tensor(v) and v.name]
    if output is None:
        if not floating:
            raise BuildError("the model has no floating output that a loss could read")
        return floating[0]
    if output not in floating:
        inner = next((v for n in graph for v in n.outputs if v.name == output and carries(v) and is_tensor(v)), None)
        if inner is None:
            raise UnknownNameError(f"the model has no floating output '{shown(output)}'{suggestion(output, floating)}")
        graph.outputs.append(inner)
    return output


def _value_names(graph: ir.Graph) -> set[str]:
    """Of all values, those in bodies included."""
    named = (
        (*g.inputs, *g.initializers.values(), *(y for node in g for y in node.outputs))
        for g in (graph, *graph.subgraphs())
    )
    return {v.name for values in named for v in values if v.name}


def _value(graph: ir.Graph, name: str) -> ir.Value:
    return next(v for v in graph.outputs if v.name == name)


def _check_own_loss(prediction: Var) -> None:
    shape = prediction.shape
    if shape is not None and any(isinstance(d, int) and d != 1 for d in shape):
        raise BuildError(
            f"the loss 'output' needs a scalar output, but '{shown(prediction.value.name)}' has shape {list(shape)}; "
            "name a loss such as 'cross_entropy', or another output"
        )


def _renamed(op: Builder, var: Var, name: str) -> ir.Value:
    """A scalar result under its public name."""
    var.value.name = op.fresh(name)
    var.value.shape = ir.Shape(())
    return var.value


# --- which weights -------------------------------------------------------------------------------------


def parameters(graph: ir.Graph, output: str, train: str | Sequence[str], freeze: str | Sequence[str]) -> list[str]:
    """Names of the initializers to train, in the model's order."""
    usual = [v.name for v in trainable(graph, [_value(graph, output)]) if v.name]
    statistics = {v.name for v in running_statistics(graph)}
    weights = [
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in statistics
    ]
    selected: set[str] = set()
    for pattern in _listed(train):
        found = usual if pattern == "*" else _matching(pattern, weights)
        if pattern in statistics:
            raise BuildError(f"'{shown(pattern)}' is a running statistic or a buffer, which is never trained")
        if not found and pattern != "*":
            raise UnknownNameError(
                f"'{shown(pattern)}', which is to be trained, matches no weight of the model"
                f"{suggestion(pattern, weights)}"
            )
        selected.update(found)
    for pattern in _listed(freeze):
        found = _matching(pattern, weights)
        if not found:
            raise UnknownNameError(
                f"'{shown(pattern)}', which is to be frozen, matches no weight of the model"
                f"{suggestion(pattern, weights)}"
            )
        selected.difference_update(found)
    if not selected:
        others = left_out(graph, [_value(graph, output)], ()) if is_default(train, freeze) else ""
        raise BuildError(
            "nothing is left to train: no floating initializer on the way to the loss is selected and not frozen"
            + (f"; left out: {others}" if others else ""),
            **_hint_at_constants(graph),
        )
    _check_precision(graph, selected)
    return [n for n in weights if n in selected]


def is_default(train: str | Sequence[str], freeze: str | Sequence[str]) -> bool:
    """Has nobody chosen what is trained?"""
    return _listed(train) == ["*"] and not _listed(freeze)


def _hint_at_constants(graph: ir.Graph) -> dict[str, Any]:
    """Some tools write all numbers as Constant nodes, weights as well."""
    constants = (
        n for n, v in graph.initializers.items() if is_marked_constant(v) and carries(v) and len(v.shape or ()) > 1
    )
    name = next(constants, None)
    if name is None:
        return {}
    would = "would train that constant"
    return {"remedy": f"train='{shown(name)}' {would}", "shell": f"--train '{shown(name)}' {would}"}


def _check_precision(graph: ir.Graph, names: Iterable[str]) -> None:
    short = [n for n in names if graph.initializers[n].dtype == ir.DataType.BFLOAT16]
    if short:
        raise BuildError(
            f"'{shown(min(short))}' holds bfloat16 numbers, in which small updates round to nothing and runtimes have "
            "no arithmetic; store the weights in float32 to train them"
        )


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """A name stands for itself, even if it holds brackets; anything else is a glob."""
    return [pattern] if pattern in names else fnmatch.filter(names, pattern)


def _listed(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _frozen(graph: ir.Graph, states: Sequence[StateSpec]) -> tuple[str, ...]:
    moving = {s.name for s in states}
    return tuple(
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in moving
    )


# --- eval.onnx -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Evaluation:
    model: ir.Model
    inputs: list[ir.Value]
    outputs: list[str]
    loss: str
    metrics: tuple[str, ...]


def _evaluation(model: ir.Model, objective: _Objective, trained: Sequence[str]) -> _Evaluation:
    graph = model.graph
    output_name(graph, objective.output)  # an inner value becomes an output here, too
    inputs, outputs = list(graph.inputs), [v.name or "" for v in graph.outputs]
    statistics = _moving_statistics(graph, trained)
    evaluation_mode(model)
    op = builder_for(model)
    loss, metrics = objective.emit(op, graph)
    op.finish(graph)
    graph.outputs[:] = list(dict.fromkeys([loss, *metrics, *graph.outputs]))
    for name in (*trained, *statistics):
        if name in graph.initializers:
            _as_input(graph, name)
    clean_up(model)
    return _Evaluation(model, inputs, outputs, loss.name or "loss", tuple(m.name or "" for m in metrics))


def _moving_statistics(graph: ir.Graph, trained: Sequence[str]) -> list[str]:
    """Running statistics that a training step updates: of layers that are not wholly frozen (see passes.modes)."""
    frozen = _frozen_values(graph, trained)
    names = [v.name for n in graph if moves_statistics(n, frozen) for v in n.inputs[3:5] if v is not None]
    return list(dict.fromkeys(n for n in names if n))


def _frozen_values(graph: ir.Graph, trained: Sequence[str]) -> set[ir.Value]:
    """Weights that stay as they are. Constants are none: a layer without affine parameters has nothing to freeze."""
    kept = set(trained)
    return {v for n, v in graph.initializers.items() if n not in kept and not is_marked_constant(v)}


def _as_input(graph: ir.Graph, name: str) -> ir.Value:
    """Turn an initializer into a required input (a default value would be ignored silently by some runtimes)."""
    value = graph.initializers.pop(name)
    value.const_value = None
    graph.inputs.append(value)
    return value


# --- train.onnx and init.onnx --------------------------------------------------------------------------


class _Training:
    """Writes train.onnx (``model``) and init.onnx (``initial``) side by side."""

    def __init__(
        self, model: ir.Model, objective: _Objective, trained: Sequence[str], optimizer: Optimizer, seed: int
    ) -> None:
        self.model, self.objective, self.trained, self.optimizer, self.seed = model, objective, trained, optimizer, seed
        self.states: list[StateSpec] = []
        self.hyperparameters: dict[str, float] = {}
        self.op = builder_for(model, named_operators=True)  # writes train.onnx
        self.start = Builder(scope="init")  # writes init.onnx
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._starts: list[ir.Value] = []
        self._copies: dict[str, ir.Value] = {}
        self._slots: list[tuple[ir.Value, Var, Var]] = []
        self._rates: dict[str, Var] = {}
        self._step: Var | None = None
        self._write(model.graph)
        self._finish(model.graph)

    def _write(self, graph: ir.Graph) -> None:
        frozen = _frozen_values(graph, self.trained)
        rng = self._free_input("rng", ir.DataType.INT64, ())
        source = randomness.RandomSource(rng)
        statistics = training_mode(self.model, self.op, source.keep, frozen)
        draw_from(source, self.model, self.op)
        loss, metrics = self.objective.emit(self.op, graph)
        self.op.finish(graph)
        self._weights = {v: v.const_value for v in graph.initializers.values()}
        params = [graph.initializers[n] for n in self.trained]
        path = find_path(self.model, [loss], params)
        (loss,) = path.targets
        seed, transforms = self._seed(self.op.wrap(loss), params)
        gradients = backward(self.op, path, {loss: seed})
        _check_reached(params, gradients)
        self._results = [loss, *metrics]
        updated = self._update(params, [gradients[p] for p in params], transforms)
        for value, new in zip(params, updated, strict=True):
            self._carry(value, new, "parameter", self._weight(value))
        for value, new in statistics.items():
            self._carry(value, new, "statistic", self._weight(value))
        for value, new, begin in self._slots:
            self._carry(value, new, "optimizer", begin)
        if source.places:
            self._carry(
                rng.value, randomness.advance(rng), "counter", self.start.const(randomness.initial_state(self.seed))
            )
        if self._step is not None:
            self._carry(self._step.value, self._step + 1, "counter", self.start.const(np.int64(0)))

    def _seed(self, loss: Var, params: Sequence[ir.Value]) -> tuple[Var, Sequence[Transform]]:
        """The loss's cotangent, with the factors of the optimizer's first transforms in it, and the other transforms.

        Not in half precision, where gradients that are scaled early would vanish.
        """
        seed, transforms = self.op.ones_like(loss), list(self.optimizer.transforms)
        self.op.scope = "update"
        wide = all(v.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) for v in (loss.value, *params))
        while wide and transforms and (factor := transforms[0].factor) is not None:
            number = self.op.cast(factor(self.op, self), loss.dtype)
            seed = number if loss.shape == () and len(transforms) == len(self.optimizer.transforms) else seed * number
            del transforms[0]
        return seed, transforms

    def _update(
        self, params: Sequence[ir.Value], gradients: Sequence[Var], transforms: Sequence[Transform]
    ) -> list[Var]:
        """Pass the gradients through what is left of the optimizer's chain; return the new parameters."""
        self.op.scope = "update"
        begin = [self._master_start(p) for p in params]
        old = [self._master(p, first) for p, first in zip(params, begin, strict=True)]
        gradients = [self.op.cast(g, p.dtype) for g, p in zip(gradients, old, strict=True)]
        in_float32 = all(p.dtype == ir.DataType.FLOAT for p in old)  # numbers of updates written at once are
        links, last = joined(transforms) if in_float32 else (transforms, None)
        for transform in links:
            gradients = self._through(transform, params, begin, old, gradients)
        if last is not None:
            new = self._through(last, params, begin, old, gradients)
        else:
            new = [p + g for p, g in zip(old, gradients, strict=True)]
        updates = zip(params, old, new, begin, strict=True)
        self._slots += [(was.value, now, first) for p, was, now, first in updates if was.value is not p]
        return [self.op.cast(now, p.dtype or now.dtype) for p, now in zip(params, new, strict=True)]

    def _through(
        self, transform: Transform, params: Sequence[ir.Value], begin: Vars, old: Vars, gradients: Vars
    ) -> list[Var]:
        """What one transform gives; its slots, named after ``params``, become state."""
        starts = transform.init(self.start, begin)
        slots = self._slot_inputs(params, starts)
        given, after = transform.update(self.op, gradients, slots, old, self)
        for slot, values in after.items():
            rows = zip(slots[slot], values, starts[slot], strict=True)
            self._slots += [(v.value, new, first) for v, new, first in rows]
        return list(given)

    def _master_start(self, param: ir.Value) -> Var:
        """What the optimizer's first step starts from: the weight, in float32 if it keeps that of narrow ones."""
        is_narrow = self.optimizer.keeps_master and param.dtype == ir.DataType.FLOAT16
        weight = self._weight(param)
        return self.start.cast(weight, ir.DataType.FLOAT) if is_narrow else weight

    def _master(self, param: ir.Value, start: Var) -> Var:
        """What the optimizer updates: the parameter, or its float32 copy, which the parameter is rounded from."""
        if start.dtype == param.dtype:
            return self.op.wrap(param)
        return self._free_input(f"{param.name}.master", start.dtype, start.shape or ())

    def _slot_inputs(self, params: Sequence[ir.Value], starts: Slots) -> dict[str, list[Var]]:
        return {
            slot: [
                self._free_input(f"{p.name}.{slot}", s.dtype, s.shape or ())
                for p, s in zip(params, values, strict=True)
            ]
            for slot, values in starts.items()
        }

    # what transforms ask for (optim.transform.Context)

    def step(self) -> Var:
        if self._step is None:
            self._step = self._free_input("step", ir.DataType.INT64, ())
        return self._step

    def hyperparameter(self, name: str, default: float) -> Var:
        if name not in self._rates:
            self._rates[name] = self._free_input(name, ir.DataType.FLOAT, ())
        known = self.hyperparameters.setdefault(self._rates[name].value.name or name, float(default))
        if known != default:
            raise BuildError(
                f"two parts of the optimizer ask for '{name}', one with {known} and one with {float(default)}",
                remedy="chain one of them only, or give one a schedule such as gradgraph.optim.constant(...)",
            )
        return self._rates[name]

    # state

    def _free_input(self, name: str, dtype: ir.DataType, shape: Sequence[Any]) -> Var:
        return self.op.wrap(ir.Value(name=self.op.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape)))

    def _weight(self, value: ir.Value) -> Var:
        """The starting value of a weight, as an initializer of init.onnx."""
        name = value.name or ""
        if name not in self._copies:
            self._copies[name] = ir.Value(
                name=name, type=value.type, shape=value.shape, const_value=self._weights[value]
            )
        return self.start.wrap(self._copies[name])

    def _carry(self, value: ir.Value, new: Var, kind: str, begin: Var) -> None:
        """Make ``value`` a state tensor: read as an input, written as ``<name>.next``, started from ``begin``."""
        after = self._own(self.op, new, f"{value.name}.next", value)
        self._inputs.append(value)
        self._outputs.append(after)
        first = (
            begin.value if begin.value.name in self._copies else self._own(self.start, begin, value.name or "", value)
        )
        self._starts.append(first)
        spec = _spec(value)
        self.states.append(StateSpec(spec.name, spec.dtype, spec.shape, next=after.name or "", kind=kind))  # type: ignore[arg-type]

    def _own(self, op: Builder, var: Var, name: str, like: ir.Value) -> ir.Value:
        """``var`` as a value of its own called ``name``."""
        node = var.value.producer()
        if node is None or node.graph is not None or var.value in self._outputs or var.value in self._starts:
            var = op.Identity(var, name=name)
        else:
            var.value.name = op.fresh(name)
        var.value.type, var.value.shape = like.type, like.shape
        return var.value

    def _finish(self, graph: ir.Graph) -> None:
        self.op.finish(graph)
        for spec in self.states:
            if spec.name in graph.initializers:
                graph.initializers.pop(spec.name).const_value = None
        rates = [r.value for r in self._rates.values()]
        graph.inputs.extend([*rates, *self._inputs])
        graph.outputs[:] = [*self._results, *self._outputs]
        self.model.metadata_props[WRITTEN_KEY] = str(graph.num_nodes())
        clean_up(self.model)
        self.initial = self._initial()

    def _initial(self) -> ir.Model:
        graph = ir.Graph((), self._starts, nodes=(), name="init", opset_imports={"": OPSET})
        for weight in self._copies.values():
            graph.register_initializer(weight)
        self.start.finish(graph)
        return prune(ir.Model(graph, ir_version=IR_VERSION, producer_name="gradgraph"))


def _check_reached(params: Sequence[ir.Value], gradients: Mapping[ir.Value, Var]) -> None:
    lost = [shown(p.name) for p in params if p not in gradients]
    if lost:
        raise DifferentiationError(
            f"no gradient reaches '{lost[0]}': it is read only through inputs that have no derivative, or whose type "
            f"is unknown; freeze it{f' and {len(lost) - 1} more' if lost[1:] else ''}"
        )


def _spec(value: ir.Value) -> TensorSpec:
    assert value.dtype is not None
    shape = Builder().wrap(value).shape
    return TensorSpec(value.name or "", dtype_name(int(value.dtype)), tuple(shape or ()))


def _proto(model: ir.Model) -> onnx.ModelProto:
    model.producer_name = "gradgraph"
    return to_proto(model)
