"""onnxruntime sessions of a step's models, lowered for one machine, if possible from the cache ``openings``."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.backends import BACKENDS
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import for_machine
from gradgraph.backends.machine_requirements import check_runs_here
from gradgraph.backends.ort_cuda.cuda_kernels import without_kernel
from gradgraph.errors import GradgraphError, listed
from gradgraph.files.external import external_entry, is_external, location_of
from gradgraph.runtime.execution import openings
from gradgraph.runtime.execution.frozen_weights import FrozenWeights, computes_with_weights, external_weights
from gradgraph.runtime.execution.node_order import computed_as_written, in_good_order
from gradgraph.runtime.execution.regions import LEAST_STATE, in_one_region
from gradgraph.runtime.execution.session import (
    CPU,
    CUDA,
    Memory,
    Placement,
    RuntimeOptions,
    copies_weights,
    create_session,
)
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.execution.tuner import Tuner, default_cache
from gradgraph.runtime.execution.walk import most_alive
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")


class Opener:
    """An object that lowers a step's models for one machine, and opens onnxruntime sessions of them.

    Args:
        tune: as for ``Trainer``.

    Raises:
        RuntimeUnavailableError: if the step was lowered for another runtime or machine, or native kernels are requested
            and not available.
    """

    def __init__(self, definition: Step, placement: Placement, options: RuntimeOptions, tune: bool | Tuner) -> None:
        self._definition, self._manifest = definition, definition.manifest
        self.placement, self.options = placement, options
        if self._manifest.backend in BACKENDS:
            check_runs_here(BACKENDS[self._manifest.backend], self._manifest.machine, placement.backend)
        self._backend = placement.trains_for(options)
        self._tuner = Tuner(self._backend, placement, options, default_cache()) if tune is True else tune or None
        self._has_warned = False  # of mixed precision

    @functools.cached_property
    def weights(self) -> FrozenWeights:
        """Frozen weights in external files, mapped once for all sessions."""
        return external_weights(self._definition, self._definition.eval, *self._definition.trains.values())

    @functools.cached_property
    def frozen_bytes(self) -> int:
        """The bytes of frozen weights in external files; a part of a file that several initializers share counts once.

        The files are not mapped.
        """
        models = self._definition.eval, *self._definition.trains.values()
        tensors = (t for model in models for t in model.graph.initializer if is_external(t))
        return sum(entry.length for entry in set(map(external_entry, tensors)))

    def lowered(self, model: onnx.ModelProto, sizes: Sizes) -> onnx.ModelProto:
        """Return a train graph, or a part of it, lowered for these sizes, with its nodes sorted to save memory."""
        choose = self._tuner(model, sizes) if self._tuner is not None else None
        return self._in_order(for_machine(model, self._backend, sizes, choose))

    def warn_of_precision(self, model: onnx.ModelProto) -> None:
        """Warn once if the step uses mixed precision, but the provider lacks kernels for its lowered train graph."""
        name = self._manifest.precision.get("name")
        if name is None or self._has_warned:
            return
        self._has_warned = True
        strays = "" if self.placement.memory == "cpu" else on_the_cpu(model)
        for sentence in filter(None, (lacks(name, self.placement.backend.provider), strays)):
            log.warning("%s", sentence)

    def lowered_half(self, model: onnx.ModelProto, sizes: Sizes) -> onnx.ModelProto:
        """Return a half of the step (gradients or update) lowered for these sizes, to be split further.

        The lowered half is cached.
        """
        name = self._training_key(model, sizes)
        found = openings.read(name, model)
        made = self.lowered(model, sizes) if found is None else found.model
        if self._tuner is not None:
            name = self._training_key(model, sizes)
        if found is None and name is not None and openings.is_worth_it(made):
            kept = onnx.ModelProto()
            kept.CopyFrom(made)
            openings.keep(name, model, kept, None)
        return made

    def to_train(
        self,
        model: onnx.ModelProto,
        sizes: Sizes,
        settings: tuple[object, ...],
        changed: Callable[[onnx.ModelProto], onnx.ModelProto],
        tells: bool,
        packs: bool,
    ) -> tuple[ort.InferenceSession, onnx.ModelProto | None]:
        """Open a session of a train graph, or a part of it, for batches of these sizes.

        Args:
            settings: everything else that affects the result of ``changed``, as part of the cache key.
            changed: changes the lowered model.
            tells: whether the model that onnxruntime executes is needed.
            packs: whether the session may keep a copy of frozen weights.

        Returns:
            The session, and the model that it executes; None unless ``tells``, or if it is not known.
        """
        key = functools.partial(self._training_key, model, sizes, *settings)
        return self._executing(model, key, lambda: changed(self.lowered(model, sizes)), tells, packs)

    def to_compute(self, model: onnx.ModelProto, packs: bool = True) -> ort.InferenceSession:
        """Open a session of ``model`` for evaluation or prediction."""
        key = functools.partial(self._key, model, self.placement.computes_for(self.options))
        return self._executing(model, key, lambda: self.lowered_to_compute(model), packs=packs)[0]

    def lowered_to_compute(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return ``model`` lowered for evaluation or prediction of batches of any size."""
        return self._in_order(for_machine(model, self.placement.computes_for(self.options)))

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
        # otherwise the optimized model might contain large constants computed from external weights
        is_small = has_all or not (self._copies_many(model, packs) and computes_with_weights(model))
        if tells or (name is not None and is_small):
            session, executed = self._session_and_model(model, tells, packs)
        else:
            session, executed = self.session(model, packs=packs), None
        if name is not None:
            is_whole = executed is not None and (has_all or self._is_whole(executed, model))
            openings.keep(name, source, model, executed if is_whole else None)
        return session, executed if tells else None

    def _copies_many(self, model: onnx.ModelProto, packs: bool) -> bool:
        """Whether a session copies large external weights, and would thus write them into its optimized model."""
        is_large = self.frozen_bytes > openings.LARGEST_WRITTEN
        return is_large and copies_weights(model, self.placement, self.options, self.frozen_bytes, packs)

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
                    self.session(model, path, runs=False)
                    executed = computed_as_written(onnx.load(path, load_external_data=False))
                    if self._is_whole(executed, model):
                        return self._of_executed(executed, packs), executed
                session = self.session(model, path, packs)
                return session, computed_as_written(onnx.load(path, load_external_data=False))
        except (GradgraphError, OSError):
            if tells and self.options.in_place is True:
                raise
            return self.session(model, packs=packs), None

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
        names = [spec.name for spec in self._manifest.batch], [s.next for s in self._manifest.state]
        files = {location_of(t): t for t in model.graph.initializer if is_external(t)}
        # onnxruntime folds constants of external weights, whose bytes are not in the model
        contents = sorted((location, self._definition.content_of(t)) for location, t in files.items())
        return openings.key_of(model, backend, self.placement, self.options, names, contents, *further)

    def _training_key(self, model: onnx.ModelProto, sizes: Sizes, *settings: object) -> str | None:
        chosen = self._tuner and sorted(self._tuner.chosen.items())
        return self._key(model, self._backend, sorted(sizes.items()), chosen, *settings)

    def _in_order(self, model: onnx.ModelProto) -> onnx.ModelProto:
        m = self._manifest
        return in_good_order(model, [spec.name for spec in m.batch], [s.next for s in m.state])

    def session(
        self, model: onnx.ModelProto, optimized: Path | None = None, packs: bool = True, runs: bool = True
    ) -> ort.InferenceSession:
        """Open a session of a lowered model, or a part of one; arguments as for ``create_session``."""
        own = self._memory(model) if runs else contextlib.nullcontext
        return create_session(
            model, self.placement, self.options, self.weights, optimized, packs=packs, memory=own, runs=runs
        )

    def _memory(self, model: onnx.ModelProto) -> Memory:
        is_large = sum(s.nbytes for s in self._manifest.state) >= LEAST_STATE
        if not is_large or self.placement.memory != "cpu":
            return contextlib.nullcontext
        return functools.partial(in_one_region, most_alive(model))


# --- warnings about mixed precision --------------------------------------------------------------------------


def lacks(precision: str | None, provider: str | None) -> str:
    """Return a warning that a step in low ``precision`` is not faster than in float32, or "".

    ``provider`` is the backend's onnxruntime provider; None if unknown.
    """
    if precision is None or (precision == "float16" and provider == CUDA):
        return ""
    if precision == "bfloat16":
        where = {CPU: "its CPU provider", CUDA: "its CUDA provider"}.get(provider or "", "this provider")
        return (
            f"onnxruntime has few bfloat16 kernels, so {where} computes in float32 and rounds: the results have the "
            "precision of bfloat16, but a step takes longer than in float32"
        )
    if provider == CPU:
        return (
            "onnxruntime's CPU provider has no kernels for float16 matrix products, so it computes in float32 and "
            "rounds: the results have the precision of float16, but a step takes longer than in float32"
        )
    return "gradgraph does not know which float16 kernels this provider has; nodes without a kernel run on the CPU"


def on_the_cpu(model: onnx.ModelProto) -> str:
    """Return a warning about nodes of a lowered step that run on the CPU for lack of a CUDA kernel; "" if none do."""
    strays = without_kernel(ir.from_proto(model))
    if not strays:
        return ""
    operators = listed(dict.fromkeys(stray.operator for stray in strays))
    return (
        f"onnxruntime's CUDA provider has no kernel for {len(strays)} nodes of the step ({operators}), which run on "
        "the CPU, with one transfer each; Precision(float32=[...]) keeps operators in float32"
    )
