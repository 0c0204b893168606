"""Adversarial training: a step whose loss is that of inputs which an attack in its own graph has moved.

The attack is written on a copy of the model in evaluation mode: its gradients use the running statistics of
BatchNormalization, and no Dropout. The moved inputs are constants for the gradients of the weights. The loss at these
inputs is computed in training mode: it uses and updates the statistics of the moved batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.calls import Net, Points
from gradgraph.autodiff.path import carries, is_tensor
from gradgraph.autodiff.select import Names, find_path
from gradgraph.backends.engine import unrolls
from gradgraph.building.draft import Draft, Part
from gradgraph.building.objective_results import Written
from gradgraph.building.pgd import ATTACKS
from gradgraph.building.step_state import StepState
from gradgraph.errors import BuildError, UnknownNameError, listed, shown, suggestion
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.draws import draw_from
from gradgraph.passes.modes import evaluation_mode
from gradgraph.passes.normal.functions.inline import copied
from gradgraph.passes.randomness import RandomSource


class Attack:
    """The attack of a training step, on a copy of its model, which must not be in training mode yet.

    Raises:
        BuildError: if the model has no floating-point input to move, or the step scales its loss.
        UnknownNameError: if a name or glob matches no input.
    """

    def __init__(self, draft: Draft, part: Part) -> None:
        if draft.precision.scales:
            raise BuildError(
                "adversarial training does not support a loss scale",
                remedy="use precision='bfloat16', or remove adversarial",
                shell="use --precision bfloat16, or omit --adversarial",
            )
        self._settings, self._unroll = ATTACKS.given(part.options.adversarial), unrolls(draft.backend)
        self._reports = not draft.options.separate  # gradient.onnx has no columns of its own
        self._model = model = evaluation_mode(part.model.clone())
        names = {v.name for v in draft.inputs}
        given = [v for v in model.graph.inputs if v.name in names]
        self._own = {v.name for v in (*model.graph.inputs, *model.graph.initializers.values())}
        objective = part.objective_for(model.graph)
        self._own |= {spec.name for spec in objective.targets}
        op = builder_for(model, named_operators=True)
        loss = objective.emit(op, model.graph).loss
        self._rng = ir.Value(name=op.fresh("rng"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([3]))
        draw_from(RandomSource(op.wrap(self._rng)), model, op)
        op.finish(model.graph)
        chosen = _chosen(given, self._settings.inputs)
        path = find_path(model, [loss], chosen, allow_unused=self._settings.inputs is None)
        (self._loss,) = path.targets
        self._sites = [x for x in path.wrt if x in path.active]
        if not self._sites:
            raise BuildError(
                f"the loss does not depend smoothly on {listed(x.name for x in chosen)}, so an attack cannot "
                "move the inputs",
                remedy="remove adversarial",
                shell="omit --adversarial",
            )

    def apply(
        self,
        model: ir.Model,
        state: StepState,
        written: Written,
        statistics: Mapping[ir.Value, Var],
        source: RandomSource,
    ) -> tuple[ir.Value, Mapping[ir.Value, Var]]:
        """Feed the moved inputs to ``model``, which has its loss, and is in training mode.

        Returns:
            The value to minimise, and the new running statistics: those of the moved inputs and then, if the loss at
            the original inputs counts, those of the original ones.
        """
        op, graph, share = state.op, model.graph, self._settings.clean
        op.finish(graph)
        known = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
        sites = {x: known[x.name] for x in self._sites}
        readers = {x: list(x.uses()) for x in sites.values()}
        clean = None
        if share:
            after = {x: y.value for x, y in statistics.items()}
            copies, again = copied(list(graph), op.fresh, after)
            op.nodes.extend(copies)
            clean = op.wrap(again[written.loss])
            if self._reports:
                state.report("clean_loss", clean)
            statistics = {x: op.wrap(again.get(y.value, y.value)) for x, y in statistics.items()}
            op.finish(graph)
        for x, y in self._moved(op, known, sites, source).items():
            for node, place in readers[x]:
                node.replace_input_with(place, y.value)
        op.finish(graph, before=graph[0])
        if clean is None:
            return written.loss, statistics
        total = op.wrap(written.loss) * (1.0 - share) + clean * share
        op.finish(graph)
        return total.value, statistics

    def _moved(
        self,
        op: Builder,
        known: Mapping[str | None, ir.Value],
        sites: Mapping[ir.Value, ir.Value],
        source: RandomSource,
    ) -> dict[ir.Value, Var]:
        """Write the attack with the builder of the train graph, and return the moved value of each input."""
        op.scope = "attack"
        net = Net(self._model, list(sites), [self._loss], named_operators=True)
        stored, noise = {self._rng: source.state.value}, dict[ir.Value, Var]()
        for x, v in sites.items() if self._settings.random_start else ():
            place = ir.Value(name=net.op.fresh("noise"), type=x.type, shape=x.shape)
            noise[x], stored[place] = net.op.wrap(place), self._settings.ball.draw(op, source, op.wrap(v)).value

        def gradients(points: Points) -> Points:
            call = net.call(points)
            return call.gradients(call[self._loss], net.op.ones_like(call[self._loss]), net.sites)

        count = len(net.graph.inputs)
        last = self._settings.moved(net, gradients, noise, self._unroll)
        if len(net.graph.inputs) > count:
            raise BuildError("the bounds of an attack on a training step must be numbers or arrays, not 'input'")
        net.op.finish(net.graph)
        net.graph.sort()
        stored |= {v: known[v.name] for v in net.graph.inputs}
        for v in list(net.graph.initializers.values()):
            if v.name in self._own:
                stored[v] = known[v.name]
            else:
                del net.graph.initializers[v.name or ""]
                v.name = op.fresh(v.name or "")
                op.constants.append(v)
        copies, found = copied(list(net.graph), lambda name: op.fresh_in("attack", name), stored)
        op.nodes.extend(copies)
        return {v: self._fixed(op, found[last[x].value], v) for x, v in sites.items()}

    @staticmethod
    def _fixed(op: Builder, moved: ir.Value, like: ir.Value) -> Var:
        """Return the moved input, through which no gradient passes."""
        y = op.detached(op.wrap(moved))
        y.value.type, y.value.shape = like.type, like.shape
        return y


def _chosen(given: Sequence[ir.Value], names: Names) -> list[ir.Value]:
    """Return the inputs that ``names`` match; by default all floating-point tensors with a row per sample."""
    if names is None:
        found = [x for x in given if carries(x) and is_tensor(x) and _sizes(x)]
        if not found:
            kinds = ", ".join(f"'{shown(x.name)}' ({x.dtype.name.lower() if x.dtype else 'unknown'})" for x in given)
            raise BuildError(
                f"an attack moves floating-point inputs, and the model has {kinds}",
                remedy="remove adversarial, or cut the model so that it reads embeddings",
                shell="omit --adversarial",
            )
        open_batch = [x for x in found if isinstance(_sizes(x)[0], str)]
        return open_batch or found
    known = {x.name or "": x for x in given}
    found = []
    for pattern in as_names(names):
        matched = matching(pattern, list(known))
        if not matched:
            raise UnknownNameError(
                f"'{shown(pattern)}' in the inputs of the attack matches no input of the model"
                f"{suggestion(pattern, list(known))}"
            )
        for name in matched:
            if not carries(known[name]):
                raise BuildError(
                    f"an attack moves floating-point inputs, and '{shown(name)}' is not one; choose others with inputs"
                )
        found += [known[name] for name in matched]
    return list(dict.fromkeys(found))


def _sizes(x: ir.Value) -> Sequence[int | str | None]:
    """Return the sizes of a value; empty for a number, or if the rank is unknown."""
    return () if x.shape is None else as_dims(x.shape)
