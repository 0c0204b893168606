"""Selection of forms (implementations of an operator) by timing each form of each operator once on this machine.

By default, the tables of ``gradgraph.backends`` select forms that were fast on the machines of their authors. ``Tuner``
times every form that supports a node of the model, including the portable form, in a model of only that node. The
fastest form is stored in the user's cache, by processor, versions and threads, so no node is timed twice.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import Choose, lower, opened
from gradgraph.backends.forms import Call, Form
from gradgraph.backends.ort_native.native_precision import HIGHEST
from gradgraph.errors import GradgraphError
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.models import to_proto
from gradgraph.files.untrusted.documents import LARGEST, json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.graph.builder import Builder
from gradgraph.graph.shapes import IR_VERSION, OPSET, constant_of, is_static
from gradgraph.machine import processes
from gradgraph.machine.caches import FILE_MODE, cache_folder, check_ours, open_private
from gradgraph.machine.hardware import processor
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.rules.named_operators import operator_of
from gradgraph.rules.registry import Key, key_of
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session, explained
from gradgraph.step.manifest import package_version

log = logging.getLogger("gradgraph")

PORTABLE_FORM = "portable"
UNKNOWN_CARD = "unknown CUDA device"
BUDGET = 0.25  # seconds for each form of a node
MOST_RUNS = 30
PAUSE = 0.012  # seconds until onnxruntime's idle threads sleep; until then, their spinning slows other sessions


@dataclass
class Tuner:
    """A tuner that times the forms of a backend and remembers the fastest.

    Attributes:
        backend: the backend whose forms are timed.
        placement, options: the placement and settings of the timed sessions.
        cache: the file of earlier choices; ``None`` keeps them in memory only.
        report: called with one line of text for each timed node.
        chosen: the name of the fastest form by the key of a call (``Call.key``).

    Raises:
        RuntimeUnavailableError: if other users can write the cache file.
    """

    backend: Backend
    placement: Placement
    options: RuntimeOptions = field(default_factory=RuntimeOptions)
    cache: Path | None = None
    report: Callable[[str], None] = lambda line: None
    chosen: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chosen = {**_stored(self.cache).get(self._machine, {}), **self.chosen}

    def __call__(self, model: onnx.ModelProto, dims: Mapping[str, int]) -> Choose:
        """Time the forms of a model; return the argument ``choose`` of ``for_machine(model, backend, dims, choose)``.

        For operators of unknown sizes, or with computed integer inputs, the backend's table selects the form.
        """
        fresh = dict(self._timed(opened(model, dims)))
        if fresh:
            self.chosen.update(fresh)
            self._store()
        return self._choose

    def _choose(self, call: Call, forms: Sequence[Form]) -> Sequence[Form]:
        name = self.chosen.get(call.key)
        if name is None:
            return [f for f in forms if f.when(call)]
        return [f for f in forms if f.name == name]

    def _timed(self, model: ir.Model) -> Iterator[tuple[str, str]]:
        op = Builder()
        seen = set(self.chosen)
        for node in nodes_of(model):
            forms = self.backend.forms_of(node)
            key = Call.of(op, node).key if forms else ""
            if not forms or key in seen or not can_stand_alone(node):
                continue
            seen.add(key)
            times = self._race(node, forms)
            if len(times) > 1:
                best = min(times, key=lambda name: times[name])
                self.report(f"{key}: {', '.join(f'{n} {t * 1e3:.3g} ms' for n, t in times.items())} -> {best}")
                yield key, best

    def _race(self, node: ir.Node, forms: Sequence[Form]) -> dict[str, float]:
        """Return the median time in seconds of ``node`` in each form that supports it, by form name."""
        rng = np.random.default_rng(0)
        runs: dict[str, Callable[[], None]] = {}
        for candidate in (None, *(f for f in forms if serves(f, node))):
            model = model_of_node(node)
            lower(model, self.backend, choice_of(candidate, key_of(node)))
            try:
                runs[candidate.name if candidate else PORTABLE_FORM] = self._runner(to_proto(model), rng)
            except GradgraphError:
                continue  # this runtime does not support the form
        times: dict[str, list[float]] = {name: [] for name in runs}
        end = time.perf_counter() + BUDGET * len(runs)
        while runs and (time.perf_counter() < end or not times[next(iter(runs))][1:]):
            for name, run in runs.items():
                times[name] += _burst(run)
            if len(times[next(iter(runs))]) >= MOST_RUNS:
                break
        return {name: statistics.median(t) for name, t in times.items()}

    def _runner(self, model: onnx.ModelProto, rng: np.random.Generator) -> Callable[[], None]:
        session = create_session(model, self.placement, self.options)
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_cpu_input(value.name, rng.normal(size=value.shape).astype(np.float32))
        for value in session.get_outputs():
            binding.bind_output(value.name, self.placement.memory, self.placement.device_id)

        def run() -> None:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()  # a device may still compute after the call returns

        with explained("running a form failed"):
            run()
        return run

    # --- the cache ---

    @property
    def _machine(self) -> str:
        versions = f"onnxruntime {ort.__version__}, gradgraph {package_version()}"
        device = graphics_card(self.placement.device_id) if self.placement.memory == "cuda" else processor()
        precision = self.options.matmul_precision
        backend = self.backend.name if precision == HIGHEST else f"{self.backend.name} ({precision})"
        return f"{device}, {backend}, {self.options.threads or 'all'} threads, {versions}"

    def _store(self) -> None:
        if self.cache is None:
            return
        stored = _stored(self.cache)
        stored[self._machine] = {**stored.get(self._machine, {}), **self.chosen}
        try:
            with explain_errors(self.cache):
                open_private(self.cache.parent)
                write_atomically(self.cache, json.dumps(stored, indent=1, sort_keys=True).encode(), FILE_MODE)
        except GradgraphError as error:  # the only effect is that forms are timed again
            log.warning("%s; until then the measured times are not stored", error)


def default_cache() -> Path:
    """Return the path of the default cache file, ``gradgraph/tuned.json`` in the user's cache folder."""
    return cache_folder() / "tuned.json"


def graphics_card(number: int) -> str:
    """Return the name of a CUDA device as printed by nvidia-smi, or ``UNKNOWN_CARD``."""
    tool = processes.program("nvidia-smi")
    if tool is None:
        return UNKNOWN_CARD
    command = [tool, f"--id={number}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = processes.run(command, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        name = ""
    return name or UNKNOWN_CARD


def _stored(cache: Path | None) -> dict[str, dict[str, str]]:
    """Return the fastest form's name by machine and key of a call, from the cache file; empty if unreadable."""
    if cache is not None:
        check_ours(cache)
    try:
        found = json_of(regular_bytes(cache, LARGEST)) if cache is not None else {}
    except UnreadableError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        machine: {k: v for k, v in choices.items() if isinstance(v, str)}
        for machine, choices in found.items()
        if isinstance(choices, dict)
    }


def _burst(run: Callable[[], None], count: int = 2) -> list[float]:
    """Return the time in seconds of each of ``count`` calls of ``run``, after a pause and an untimed call.

    The pause lets threads of the previous session stop spinning; the untimed call wakes up the threads of this session.
    """
    time.sleep(PAUSE)
    run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


# --- a single node -------------------------------------------------------------------------------------


def can_stand_alone(node: ir.Node) -> bool:
    """Whether a node can be timed on random inputs: each input is constant, or float32 of known size."""
    return all(
        v is None or constant_of(v) is not None or (v.dtype == ir.DataType.FLOAT and is_static(v.shape))
        for v in node.inputs
    ) and (operator_of(node) is not None or all(y.shape is not None for y in node.outputs[:1]))


def choice_of(candidate: Form | None, key: Key) -> Choose:
    """Return a function ``choose`` that selects ``candidate`` (None: the portable form) for calls with this key.

    Other calls, such as nodes that the candidate itself emits, are lowered as usual.
    """

    def choose(call: Call, forms: Sequence[Form]) -> Sequence[Form]:
        if key_of(call.node) != key:
            return [f for f in forms if f.when(call)]
        return [] if candidate is None else [candidate]

    return choose


def serves(candidate: Form, node: ir.Node) -> bool:
    op = Builder()
    call = Call.of(op, next(iter(model_of_node(node).graph)))
    return candidate.write(op, *call.inputs, **call.attrs) is not None


def model_of_node(node: ir.Node) -> ir.Model:
    """Return a model that contains only a copy of ``node``; constant inputs of the node become initializers."""
    copies: dict[ir.Value, ir.Value] = {}
    weights = []
    for i, v in enumerate(node.inputs):
        if v is None or v in copies:
            continue
        copies[v] = ir.Value(name=f"x{i}", type=v.type, shape=v.shape)
        array = constant_of(v)
        if array is not None:
            copies[v].const_value = ir.Tensor(array, name=f"x{i}")
            copies[v].shape = ir.Shape(array.shape)
            weights.append(copies[v])
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else copies[v] for v in node.inputs],
        node.attributes.values(),
        num_outputs=len(node.outputs),
        name="node",
    )
    for i, (old, new) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
        new.name, new.type, new.shape = (f"y{i}" if old.name else ""), old.type, old.shape
    inputs = [v for v in copies.values() if v not in weights]
    outputs = [y for y in copy.outputs if y.name]
    graph = ir.Graph(inputs, outputs, nodes=[copy], initializers=weights, name="alone", opset_imports={"": OPSET})
    return ir.Model(graph, ir_version=IR_VERSION)
