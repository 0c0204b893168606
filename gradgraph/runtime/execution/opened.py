"""An opened step: its state, and the sessions of its models, each created on first use."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.backends import BACKENDS
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import for_machine
from gradgraph.backends.machine_requirements import check_runs_here
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import GradgraphError
from gradgraph.files.external import is_external, is_packed
from gradgraph.files.float16_weights import widened
from gradgraph.graph.prune import needed
from gradgraph.passes.draws import fixed
from gradgraph.runtime.execution import openings
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.capture import CapturedSession, can_capture, capturing
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.frozen_weights import FrozenWeights, computes_with_weights, external_weights
from gradgraph.runtime.execution.gathering import ROWS, GatheringSession, Shapes, gather
from gradgraph.runtime.execution.inplace import with_updates_last
from gradgraph.runtime.execution.joining import Layout, layouts
from gradgraph.runtime.execution.low_precision import lacks, on_the_cpu
from gradgraph.runtime.execution.node_order import computed_as_written, in_good_order
from gradgraph.runtime.execution.nonfinite import NonFinite, NonFiniteSearch
from gradgraph.runtime.execution.ort_values import fetched, to_ortvalue
from gradgraph.runtime.execution.overwrites import may_overwrite, prepared, proven
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.regions import LEAST_STATE, in_one_region
from gradgraph.runtime.execution.session import (
    LEAST_PASSED,
    Memory,
    Placement,
    RuntimeOptions,
    copies_weights,
    create_session,
    explained,
)
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.execution.state import State
from gradgraph.runtime.execution.team import ALONE, Team
from gradgraph.runtime.execution.tuner import Tuner, default_cache
from gradgraph.runtime.execution.walk import most_alive
from gradgraph.step.inference import without_loss
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")

Bound = TypeVar("Bound", bound=BoundSession)


class OpenedStep:
    """The sessions of a step, which share its state, hyperparameters and external weights.

    Args:
        tune: as for ``Trainer``.

    Attributes:
        parts: the steps by name; a single step has the name "".
        kernels: the kernels that train: the native library's name, or ``STOCK``; "" on providers other than the CPU.
        gathered: shapes of the inputs whose rows training sessions created later gather.
        checks_loss: whether training sessions created later must leave the state unchanged if the loss is not finite.

    Raises:
        RuntimeUnavailableError: if the step was lowered for another runtime or machine, or native kernels are requested
            and not available.
    """

    def __init__(
        self,
        definition: Step,
        placement: Placement,
        options: RuntimeOptions,
        tune: bool | Tuner,
        team: Team = ALONE,
    ) -> None:
        definition, options = team.opened(definition, placement, placement.settled(options))
        self.definition, self.placement, self.options, self.team = definition, placement, options, team
        backend = self.manifest.backend
        if backend in BACKENDS:
            check_runs_here(BACKENDS[backend], self.manifest.machine, placement.backend)
        self._backend = placement.trains_for(self.options)
        self.kernels = placement.kernels(self.options)
        self._tuner = Tuner(self._backend, placement, self.options, default_cache()) if tune is True else tune or None
        self.gathered: Shapes = {}
        self.checks_loss = True
        self.parts = {
            name: Part(name, self.manifest, model, self._training_session) for name, model in definition.trains.items()
        }
        self._bound: dict[tuple[str, bool], Any] = {}
        self._said = False  # whether the warning about mixed precision was logged

    @property
    def manifest(self) -> Manifest:
        return self.definition.manifest

    @functools.cached_property
    def state(self) -> State:
        """The state tensors, initialized by running init.onnx."""
        moved = {name: set(part.writes) for name, part in self.manifest.parts.items()}
        movers = {s.name: [name for name, tensors in moved.items() if s.name in tensors] for s in self.manifest.state}
        state = State(self.manifest.state, self.placement, movers)
        model = self.definition.init
        read = self._read_straight(state, model)
        if computed := [name for name in state.specs if name not in read]:
            part = _cut_out(model, computed, ()) if read else model
            # no optimization: folding constants would compute the zeros of optimizer slots a second time
            options = replace(self.options, optimization="none")
            session = create_session(part, self.placement, options, external_weights(self.definition, part))
            binding = session.io_binding()
            for name, value in state.values(state.side).items():
                if name not in read:
                    binding.bind_ortvalue_output(name, value)
            with explained("running init.onnx failed"):
                session.run_with_iobinding(binding)
        self.definition.release_init()  # otherwise a second copy of the weights would stay in memory
        return state

    def _read_straight(self, state: State, model: onnx.ModelProto) -> set[str]:
        """Read the state tensors that init.onnx only copies from a weight file, unmapped; return their names."""
        if not state.on_cpu:
            return set()
        stored = {t.name: t for t in model.graph.initializer if is_external(t) and not is_packed(t)}
        straight = {o.name: o.name for o in model.graph.output}
        straight |= {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity" and not n.domain}
        read = {name for name in state.specs if straight.get(name) in stored}
        for name in read:
            state.read_in(name, self.definition.pieces(stored[straight[name]]))
        return read

    def follow(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return, by name, state tensors that init.onnx computes from new weights, such as an optimizer's copies."""
        model = widened(self.definition.init)
        made = {name for node in model.graph.node for name in node.output}
        of_weights = set(weights) - made
        for node in model.graph.node:
            if not of_weights.isdisjoint(node.input):
                of_weights.update(node.output)
        names = [o.name for o in model.graph.output if o.name in of_weights & made]
        if not names:
            self.definition.release_init()
            return {}
        part = _cut_out(model, names, weights)
        session = create_session(part, self.placement, self.options, external_weights(self.definition, part))
        feeds = {i.name: to_ortvalue(np.ascontiguousarray(weights[i.name])) for i in part.graph.input}
        with explained("running init.onnx failed"):
            found = session.run_with_ort_values(names, feeds)
        self.definition.release_init()
        specs = {s.name: s for s in self.manifest.state}
        return {n: fetched(v, numpy_dtype(specs[n].dtype)) for n, v in zip(names, found, strict=True)}

    def find_nonfinite(self, part: Part, feeds: Mapping[str, ort.OrtValue], batch: Collection[str]) -> NonFinite | None:
        """Return the node of the saved step that first produces NaN or infinity in the loss or the next state.

        ``feeds`` contains all inputs; ``batch`` names the inputs that belong to the batch. None if loss and next state
        are finite.
        """
        options, ports = replace(self.options, optimization="none"), part.ports
        open_session = functools.partial(
            create_session, placement=self.placement, options=options, weights=self.weights
        )
        sums = (measure.sums for measure in ports.measures if measure.name == "loss")
        results = [ports.results["loss"], *sums, *ports.next_of.values()]
        return NonFiniteSearch(part.model, feeds, batch, open_session)(results)

    def evaluation(self, averaged: bool = True) -> BoundSession:
        """Return the session that computes loss and metrics, with averaged weights if ``averaged`` and available."""
        ports = Ports(self.manifest.results, measures=self.manifest.columns_of_sums)
        make = functools.partial(BoundSession, self._evaluating, self.state, ports)
        return self._once("evaluation", averaged, make)

    def prediction(self, averaged: bool = True) -> ComputingSession:
        """Return the session of the model's outputs; ``averaged`` as for :meth:`evaluation`."""
        session = self._predicting[0]
        names = [o.name for o in session.get_outputs()]
        return self._once("prediction", averaged, functools.partial(ComputingSession, session, self.state, names))

    def close_sessions(self) -> None:
        """Close all sessions to free their memory; they are created again on use."""
        for part in self.parts.values():
            part.close_sessions()
        self._bound.clear()
        for name in ("_evaluating", "_predicting"):
            self.__dict__.pop(name, None)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The sample axes of the model's outputs."""
        return self._predicting[1]

    def _once(self, what: str, averaged: bool, make: Callable[..., Bound]) -> Bound:
        """Return the session for ``what`` ("evaluation" or "prediction"), created by ``make`` on first use.

        With ``averaged``, it is bound to the averaged weights, if the step has them.
        """
        stand_ins = self.manifest.averages if averaged else {}
        key = what, bool(stand_ins)
        if key not in self._bound:
            self._bound[key] = make(stand_ins=stand_ins)
        bound: Bound = self._bound[key]
        return bound

    @functools.cached_property
    def _evaluating(self) -> ort.InferenceSession:
        return self._to_compute(fixed(self.definition.eval), packs=self._packs_twice)

    @property
    def _packs_twice(self) -> bool:
        """Whether sessions other than the training session may have their own copy of frozen weights.

        For BERT-base, a copy takes 0.4 GB, and makes products of 4 to 64 rows 1.3 to 2.7 times as fast, of 128 to 512
        rows 1.04 to 1.3 times (2048 x 2048, one thread of an AMD EPYC). The decision depends only on the size, so
        evaluations of a step always return the same bits.
        """
        return self.options.pack_weights is True or self.weights.size < LEAST_PASSED

    @functools.cached_property
    def _predicting(self) -> tuple[ort.InferenceSession, dict[str, Layout]]:
        model = without_loss(self.definition.eval, self.manifest)
        found = layouts(model, [s.name for s in self.manifest.inputs])
        return self._to_compute(model), found

    def alone(self, part: Part, sizes: Sizes, profile: Path | None = None) -> BoundSession:
        """Create a training session for batches of these sizes, neither cached nor shared.

        ``profile`` is the prefix of the file to which onnxruntime writes a profile; None for no profile.
        """
        model = self.lowered(part.model, sizes)
        session = create_session(model, self.placement, self.options, self.weights, profile=profile)
        return BoundSession(session, self.state, part.ports)

    def lowered(self, model: onnx.ModelProto, sizes: Sizes) -> onnx.ModelProto:
        """Return a train graph, or a part of it, lowered for these sizes, with its nodes sorted to save memory."""
        choose = self._tuner(model, sizes) if self._tuner is not None else None
        return self._in_order(for_machine(model, self._backend, sizes, choose))

    def _warn_of_precision(self, model: onnx.ModelProto) -> None:
        """Warn once if the step uses mixed precision, but the provider lacks kernels for its lowered train graph."""
        name = self.manifest.precision.get("name")
        if name is None or self._said:
            return
        self._said = True
        strays = "" if self.state.on_cpu else on_the_cpu(model)
        for sentence in filter(None, (lacks(name, self.placement.backend.provider), strays)):
            log.warning("%s", sentence)

    def _training_session(self, part: Part, sizes: Sizes) -> BoundSession:
        if (shared := self.team.session(self, part, sizes)) is not None:
            return shared
        ports, state = part.ports, self.state
        if state.on_cpu:
            self._warn_of_precision(part.model)
        if self.options.cuda_graph and not ports.measures:
            model = self.lowered(part.model, sizes)
            if can_capture(model, self.placement, self.options.cuda_graph):
                self._warn_of_precision(model)
                session = create_session(model, capturing(self.placement), self.options, self.weights)
                return CapturedSession(session, state, ports, self.placement)
        in_place = state.on_cpu and may_overwrite(part.model, ports.next_of, self.options)

        def lowered() -> onnx.ModelProto:
            model = self.lowered(part.model, sizes)
            self._warn_of_precision(model)
            if state.on_cpu:
                gather(model, self.gathered)
            return prepared(model, ports, self.options, self.checks_loss) if in_place else model

        key = functools.partial(self._training_key, part.model, sizes, ports.next_of)
        packs = self.packs_for(part, sizes)
        session, executed = self._executing(part.model, key, lowered, tells=in_place, packs=packs)
        safe = self._shared(executed, ports.next_of)
        keeps = self.checks_loss if self.options.in_place == "auto" and state.shared else None
        if any(i.name == ROWS for i in session.get_inputs()):
            return GatheringSession(session, self.gathered, state, ports, safe, keeps)
        return BoundSession(session, state, ports, safe, keeps=keeps)

    def packs_for(self, part: Part, sizes: Sizes) -> bool:
        """Whether a session of ``part`` may keep a copy of frozen weights, if the options allow it.

        The session for the usual sizes may; the general session for other batches (empty ``sizes``) needs
        ``_packs_twice``.
        """
        return bool(sizes) or not part.has_sizes or self._packs_twice

    def half(
        self, model: onnx.ModelProto, sizes: Sizes, next_of: Mapping[str, str], packs: bool = True
    ) -> tuple[ort.InferenceSession, frozenset[str]]:
        """Create a session for a half of the step (gradients or update); return it with the tensors it overwrites.

        ``next_of`` maps the state tensors that the half updates to the outputs with their next values. ``packs``:
        whether the session may keep a copy of frozen weights.
        """
        # the update half contains no loss to wait for, so in_place="auto" does not apply
        in_place = bool(next_of) and self.options.in_place is True and self.state.on_cpu

        def lowered() -> onnx.ModelProto:
            made = self.lowered(model, sizes)
            if self.state.on_cpu:
                gather(made, self.gathered)
            return with_updates_last(made, next_of) if in_place else made

        key = functools.partial(self._training_key, model, sizes, next_of)
        session, executed = self._executing(model, key, lowered, tells=in_place, packs=packs)
        return session, self._shared(executed, next_of) if in_place else frozenset()

    def lowered_half(self, model: onnx.ModelProto, sizes: Sizes) -> onnx.ModelProto:
        """Return a half of the step (gradients or update) lowered for these sizes, to be split further.

        The lowered half is cached.
        """
        name = self._training_key(model, sizes, {})
        found = openings.read(name, model)
        made = self.lowered(model, sizes) if found is None else found.model
        if self._tuner is not None:
            name = self._training_key(model, sizes, {})
        if found is None and name is not None and openings.is_worth_it(made):
            kept = onnx.ModelProto()
            kept.CopyFrom(made)
            openings.keep(name, model, kept, None)
        return made

    def _shared(self, executed: onnx.ModelProto | None, next_of: Mapping[str, str]) -> frozenset[str]:
        """Return the state tensors that a session may overwrite; both sets of the state then share their memory.

        If ``executed``, the model as onnxruntime executes it, is None, no session may overwrite tensors in ``next_of``.
        """
        safe = frozenset[str]() if executed is None else proven(executed, next_of, self.options)
        if self.options.in_place:
            self.state.share(safe, next_of)
        return safe

    def _executing(
        self,
        source: onnx.ModelProto,
        key: Callable[[], str | None],
        lowered: Callable[[], onnx.ModelProto],
        tells: bool = False,
        packs: bool = True,
    ) -> tuple[ort.InferenceSession, onnx.ModelProto | None]:
        """Return a session of ``source`` and the model that it executes, if possible from the ``openings`` cache.

        ``key`` returns the cache key, or None if the model cannot be cached; ``lowered`` returns the lowered model. The
        executed model is None unless ``tells``.
        """
        name = key()
        found = openings.read(name, source)
        if found is not None and found.executed:
            return self._of_executed(found.model, packs), found.model if tells else None
        model = lowered() if found is None else found.model
        if self._tuner is not None:
            name = key()  # the key contains the tuner's choices, which may be new
        if found is not None or not openings.is_worth_it(model):
            name = None
        has_all = not any(map(is_external, model.graph.initializer))
        if tells or (name is not None and (has_all or not self._writes_much(model, packs))):
            session, executed = self._session_and_model(model, tells, packs)
        else:
            session, executed = self._session(model, packs=packs), None
        if name is not None:
            is_whole = executed is not None and (has_all or self._is_whole(executed, model))
            openings.keep(name, source, model, executed if is_whole else None)
        return session, executed if tells else None

    def _writes_much(self, model: onnx.ModelProto, packs: bool) -> bool:
        """Whether a session's optimized model would contain large constants computed from external weights."""
        return self._copies_many(model, packs) and computes_with_weights(model)

    def _copies_many(self, model: onnx.ModelProto, packs: bool) -> bool:
        """Whether a session copies large external weights, and would thus write them into its optimized model."""
        is_large = self.weights.size > openings.LARGEST_WRITTEN
        return is_large and copies_weights(model, self.placement, self.options, self.weights, packs)

    def _session_and_model(
        self, model: onnx.ModelProto, tells: bool, packs: bool = True
    ) -> tuple[ort.InferenceSession, onnx.ModelProto | None]:
        """Return a session and the model that it executes (None if that cannot be written to a temporary file).

        With ``tells`` and ``in_place=True``, the error is raised instead.
        """
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "executed.onnx"
                if self._copies_many(model, packs):  # a session that does not run leaves the weights in their files
                    self._session(model, path, runs=False)
                    executed = computed_as_written(onnx.load(path, load_external_data=False))
                    if self._is_whole(executed, model):
                        return self._of_executed(executed, packs), executed
                session = self._session(model, path, packs)
                return session, computed_as_written(onnx.load(path, load_external_data=False))
        except (GradgraphError, OSError):
            if tells and self.options.in_place is True:
                raise
            return self._session(model, packs=packs), None

    def _is_whole(self, executed: onnx.ModelProto, model: onnx.ModelProto) -> bool:
        """Make weights of ``executed``, the optimized ``model``, refer to the files of ``model``, in place.

        Return whether all its external weights are weights of ``model``.
        """
        return openings.lies_beside(executed, model, self.weights.holds)

    def _of_executed(self, model: onnx.ModelProto, packs: bool) -> ort.InferenceSession:
        """Create a session of ``model``, which onnxruntime has already optimized, without optimizing it again."""
        options = replace(self.options, optimization="none")
        return create_session(model, self.placement, options, self.weights, packs=packs, memory=self._memory(model))

    def _key(self, model: onnx.ModelProto, backend: Backend, *further: object) -> str | None:
        names = [spec.name for spec in self.manifest.batch], [s.next for s in self.manifest.state]
        return openings.key_of(model, backend, self.placement, self.options, names, *further)

    def _training_key(self, model: onnx.ModelProto, sizes: Sizes, next_of: Mapping[str, str]) -> str | None:
        chosen = self._tuner and sorted(self._tuner.chosen.items())
        further = sorted(sizes.items()), sorted(self.gathered.items()), sorted(next_of.items()), chosen
        return self._key(model, self._backend, *further, self.checks_loss)

    def _to_compute(self, model: onnx.ModelProto, packs: bool = True) -> ort.InferenceSession:
        """Create a session of ``model`` for evaluation or prediction."""
        backend = self.placement.computes_for(self.options)
        key = functools.partial(self._key, model, backend)
        return self._executing(model, key, lambda: self._in_order(for_machine(model, backend)), packs=packs)[0]

    def _in_order(self, model: onnx.ModelProto) -> onnx.ModelProto:
        m = self.manifest
        return in_good_order(model, [spec.name for spec in m.batch], [s.next for s in m.state])

    def _session(
        self, model: onnx.ModelProto, optimized: Path | None = None, packs: bool = True, runs: bool = True
    ) -> ort.InferenceSession:
        own = self._memory(model) if runs else contextlib.nullcontext
        return create_session(
            model, self.placement, self.options, self.weights, optimized, packs=packs, memory=own, runs=runs
        )

    def _memory(self, model: onnx.ModelProto) -> Memory:
        is_large = sum(s.nbytes for s in self.manifest.state) >= LEAST_STATE
        if not is_large or self.placement.memory != "cpu":
            return contextlib.nullcontext
        return functools.partial(in_one_region, most_alive(model))

    @functools.cached_property
    def weights(self) -> FrozenWeights:
        """Frozen weights in external files, mapped once for all sessions."""
        return external_weights(self.definition, self.definition.eval, *self.definition.trains.values())


def _cut_out(model: onnx.ModelProto, outputs: list[str], fed: Collection[str]) -> onnx.ModelProto:
    """Return the part of init.onnx that computes ``outputs``, with the initializers in ``fed`` as inputs."""
    nodes, names = needed(model.graph.node, outputs, lambda node: node.output, lambda node: node.input)
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = part.graph
    graph.name = model.graph.name
    graph.node.extend(nodes)
    graph.output.extend(o for o in model.graph.output if o.name in outputs)
    for tensor in model.graph.initializer:
        if tensor.name in fed and tensor.name in names:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif tensor.name in names:
            graph.initializer.append(tensor)
    return part
