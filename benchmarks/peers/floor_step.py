"""The floor instead of a library: a step's products and convolutions alone, and a pass over the memory that it must
touch.

Each product is computed in the form that is fastest here, warm, from memory shared with the other products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from benchmarks.job import Job, now
from benchmarks.unavoidable import NUMBER, Form, Work, traffic, work
from gradgraph.files.models import load_model, to_proto
from gradgraph.passes.normal import normalise

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
LEAST_TRAFFIC, MOST_TRAFFIC = 1 << 16, 1 << 29  # bytes of one pass
TRIES = 3
MEMORY = "memory"

Run = Callable[[], Any]


class Peer:
    versions = f"onnxruntime {ort.__version__}"

    def __init__(self, job: Job) -> None:
        model = to_proto(normalise(load_model(job.path("model.onnx"))))
        ort.set_global_thread_pool_sizes(job.threads, 1)
        wanted = work(model)
        self.memory = Memory(largest(form for item in wanted for form in item.forms))
        self.known: dict[Form, tuple[float, Run]] = {}
        self.runs = [(item.kind, times, self.fastest(item)) for item, times in wanted.items()]
        self.runs.append((MEMORY, *self.passes(traffic(model, job.optimizer))))
        self.known.clear()

    def fastest(self, item: Work) -> Run:
        """Return a function that computes the fastest form of ``item``."""
        return min((self.tried(form) for form in item.forms), key=lambda pair: pair[0])[1]

    def tried(self, form: Form) -> tuple[float, Run]:
        """Return the seconds of a form, and a function that computes it."""
        if form not in self.known:
            run = self.run_of(form)
            run()
            self.known[form] = min(seconds(run) for _ in range(TRIES)), run
        return self.known[form]

    def run_of(self, form: Form) -> Run:
        options = ort.SessionOptions()
        options.use_per_session_threads = False  # idle pools of other sessions would spin
        session = ort.InferenceSession(model_of(form), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for name, shape in zip("ab"[: 1 if form.constant else 2], form.shapes, strict=False):
            binding.bind_ortvalue_input(name, self.memory.tensor(name, shape))
        binding.bind_ortvalue_output("y", self.memory.tensor("y", form.shapes[-1]))
        return lambda: session.run_with_iobinding(binding)

    def passes(self, count: int) -> tuple[int, Run]:
        """Return how often to add two vectors to read and write ``count`` bytes, and a function that adds them."""
        times = max(1, round(count / MOST_TRAFFIC))
        length = max(LEAST_TRAFFIC, count // times) // (3 * NUMBER)
        self.memory.grow(dict.fromkeys("aby", length))
        return times, self.run_of(Form("y = Add(a, b)", ((length,),) * 3))

    def step(self) -> float:
        for _, times, run in self.runs:
            for _ in range(times):
                run()
        return 0.0

    def profile(self, steps: int) -> dict[str, float]:
        """Return the seconds of each kind of work, the medians of ``steps`` steps."""
        found: dict[str, list[float]] = {}
        for _ in range(steps):
            one: dict[str, float] = {}
            for kind, times, run in self.runs:
                one[kind] = one.get(kind, 0.0) + sum(seconds(run) for _ in range(times))
            for kind, spent in one.items():
                found.setdefault(kind, []).append(spent)
        return {kind: float(np.median(spent)) for kind, spent in found.items()}


class Memory:
    """Arrays of random numbers that all operands and results share."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.pools: dict[str, np.ndarray] = {}
        self.grow(sizes)

    def grow(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            if name not in self.pools or self.pools[name].size < size:
                self.pools[name] = np.random.default_rng(0).random(size, np.float32)

    def tensor(self, name: str, shape: tuple[int, ...]) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(self.pools[name][: math.prod(shape)].reshape(shape))


def largest(forms: Iterable[Form]) -> dict[str, int]:
    sizes = dict.fromkeys("aby", 1)
    for form in forms:
        for name, shape in zip("aby", form.shapes, strict=True):
            sizes[name] = max(sizes[name], math.prod(shape))
    return sizes


def model_of(form: Form) -> bytes:
    declared = {name: f"float[{', '.join(map(str, s))}] {name}" for name, s in zip("aby", form.shapes, strict=True)}
    inputs = ", ".join(declared[name] for name in "ab"[: 1 if form.constant else 2])
    model = onnx.parser.parse_model(f"{HEAD} alone ({inputs}) => ({declared['y']}) {{ {form.body} }}")
    if form.constant:
        values = np.random.default_rng(0).random(form.shapes[1], np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, "b"))
    return bytes(model.SerializeToString())


def seconds(run: Run) -> float:
    start = now()
    run()
    return now() - start
