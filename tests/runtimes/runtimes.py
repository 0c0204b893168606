"""The runtimes of the matrix: for which backend each gets its steps, what starts it, and which Python has it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradgraph.step import Step
from runtimes import browsing
from runtimes.feeding import Tensors, write_batches

HERE = Path(__file__).parent
NODE = HERE.parents[1] / "examples" / "node" / "node_modules"
ENVIRONMENTS = HERE.parents[1] / ".venv-runtimes"  # `make runtimes` makes them
LONGEST_S = 280
SHOWN = 300  # characters of a refusal


class RefusedError(Exception):
    """The runtime did not run the step; says why, in its own words."""


@dataclass(frozen=True)
class Runtime:
    """One runtime.

    Attributes:
        title: as the table has it.
        backend: what steps are built for.
        environment: the folder of its virtual environment; empty for the Python that runs the tests.
        sizes: those that it is tried with.
        target: what of the Makefile installs it.
        lacks: says what is not installed of what is no Python, and how it is; empty if all is there.
    """

    title: str
    backend: str
    environment: str = ""
    sizes: tuple[str, ...] = ("open", "fixed")
    target: str = "all-runtimes"
    lacks: Callable[[], str] = str

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.environment / "bin" / "python" if self.environment else Path(sys.executable)

    def missing(self) -> str:
        """How to install it, if it is not here."""
        return self.lacks() if self.python.exists() else f"{self.title} is not installed: make {self.target}"


def _lacks_node() -> str:
    return "" if (NODE / "onnxruntime-node").is_dir() else "onnxruntime-node is not installed: make node"


RUNTIMES = {
    "onnxruntime": Runtime("onnxruntime", "auto"),
    "reference": Runtime("ReferenceEvaluator", "auto"),
    "node": Runtime("onnxruntime-node", "auto", lacks=_lacks_node),
    "wasm": Runtime("onnxruntime-web, wasm", "web", lacks=browsing.missing),
    "webgpu": Runtime("onnxruntime-web, WebGPU", "web", lacks=browsing.missing),
    "jsep": Runtime("onnxruntime-web, WebGPU in JavaScript", "web", lacks=browsing.missing),
    "openvino": Runtime("OpenVINO", "openvino", "openvino", target="runtimes"),
    "tract": Runtime("tract", "tract", "tract", ("fixed",), target="runtimes"),
    "iree": Runtime("IREE", "iree", "iree", ("fixed",)),
    "tvm": Runtime("TVM", "tvm", "tvm", ("fixed",)),
    "tinygrad": Runtime("tinygrad", "tinygrad", "tinygrad", ("fixed",)),
}


def losses_in(name: str, step: Step, batches: Sequence[Tensors]) -> list[float]:
    """The loss of each step in that runtime, which runs in a process of its own.

    Raises:
        RefusedError: with the last line of what it wrote.
    """
    runtime = RUNTIMES[name]
    with tempfile.TemporaryDirectory() as folder:
        step.save(Path(folder, "step"))
        write_batches(Path(folder, "batches.npz"), batches)
        command = [str(runtime.python), str(HERE / f"in_{name}.py"), str(Path(folder, "step")), f"{folder}/batches.npz"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        except subprocess.TimeoutExpired:
            raise RefusedError(f"not done in {LONGEST_S} s") from None
    if done.returncode:
        raise RefusedError(_last_words(done.stderr) or f"ended with {done.returncode}")
    return [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith('{"loss"')]


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:SHOWN] if lines else ""
