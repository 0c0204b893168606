"""gradgraph's step captured as CUDA graphs: everything bound once on the device, one graph for each set of state.

On the CPU it is the same bound call without capture.
"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

import gradgraph as gg
from benchmarks.job import Job
from benchmarks.peers.gradgraph_step import built
from gradgraph.passes.lower import for_machine
from gradgraph.runtime.session import CPU, CUDA, Placement, Provider, RuntimeOptions, create_session

Values = dict[str, ort.OrtValue]


class Peer:
    versions = f"onnxruntime {ort.__version__}"

    def __init__(self, job: Job) -> None:
        step = built(job)
        captured: list[Provider] = [(CUDA, {"enable_cuda_graph": "1"}), CPU]
        placement = Placement.choose(providers=captured if job.device == "cuda" else [CPU])
        model, self.device = for_machine(step.train, placement.target), placement.memory
        self.session = create_session(model, placement, RuntimeOptions(threads=job.threads))
        rates = {name: np.array(value, np.float32) for name, value in step.manifest.hyperparameters.items()}
        inputs = self._on_device({**job.batch(), **rates})
        self.loss = self._on_device({"loss": np.zeros((), np.float32)})["loss"]
        state = initial_state(step)
        sides = [self._on_device(state), self._on_device(state)]
        self.bindings = [self._bound(step, inputs, sides[i], sides[1 - i]) for i in (0, 1)]
        self.runs = [_numbered(i + 1) if job.device == "cuda" else ort.RunOptions() for i in (0, 1)]
        self.side = 0

    def _on_device(self, arrays: dict[str, np.ndarray]) -> Values:
        return {name: ort.OrtValue.ortvalue_from_numpy(value.copy(), self.device, 0) for name, value in arrays.items()}

    def _bound(self, step: gg.Step, inputs: Values, now: Values, after: Values) -> ort.IOBinding:
        binding = self.session.io_binding()
        for name, value in {**inputs, **now}.items():
            binding.bind_ortvalue_input(name, value)
        for spec in step.manifest.state:
            binding.bind_ortvalue_output(spec.next, after[spec.name])
        binding.bind_ortvalue_output(step.manifest.loss_output, self.loss)
        return binding

    def step(self) -> float:
        self.session.run_with_iobinding(self.bindings[self.side], self.runs[self.side])
        self.side = 1 - self.side
        return float(self.loss.numpy())


def initial_state(step: gg.Step) -> dict[str, np.ndarray]:
    session = create_session(step.init, Placement.choose("cpu"))
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, {}), strict=True))


def _numbered(graph: int) -> ort.RunOptions:
    """Capture, then replay, as this graph."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
