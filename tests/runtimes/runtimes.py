"""The runtimes of the matrix: for which backend each gets its steps, what starts it, and which Python has it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradgraph.step.step import Step
from tests.runtimes import browsing
from tests.runtimes.feeding import Tensors, write_batches
from tests.runtimes.four_networks import NETWORKS

HERE = Path(__file__).parent
NODE = HERE.parents[1] / "examples" / "node"
PAGE = HERE.parents[1] / "examples" / "web" / "page"
ENVIRONMENTS = HERE.parents[1] / ".venv-runtimes"  # `make runtimes` makes them
LONGEST_S = 600  # for one network; what takes longer is reported as such
SHOWN = 500  # characters of a refusal


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
        package: whose version is the runtime's, of the Python package index.
        version: says it for others.
        lacks: says what is not installed of what is no Python, and how it is; empty if all is there.
    """

    title: str
    backend: str
    environment: str = ""
    sizes: tuple[str, ...] = ("open", "fixed")
    target: str = "all-runtimes"
    package: str = ""
    version: Callable[[], str] = str
    lacks: Callable[[], str] = str

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.environment / "bin" / "python" if self.environment else Path(sys.executable)

    def missing(self) -> str:
        """How to install it, if it is not here."""
        return self.lacks() if self.python.exists() else f"{self.title} is not installed: make {self.target}"


def _pinned(folder: Path, package: str) -> Callable[[], str]:
    """The version that a package.json names."""
    return lambda: json.loads((folder / "package.json").read_text())["dependencies"][package]


def _lacks_node() -> str:
    return (
        "" if (NODE / "node_modules" / "onnxruntime-node").is_dir() else "onnxruntime-node is not installed: make node"
    )


def _in_browser(title: str, backend: str) -> Runtime:
    return Runtime(title, backend, version=_pinned(PAGE, "onnxruntime-web"), lacks=browsing.missing)


RUNTIMES = {
    "onnxruntime": Runtime("onnxruntime", "auto", package="onnxruntime"),
    "reference": Runtime("ReferenceEvaluator of onnx", "reference-evaluator", package="onnx"),
    "node": Runtime("onnxruntime-node", "auto", version=_pinned(NODE, "onnxruntime-node"), lacks=_lacks_node),
    "wasm": _in_browser("onnxruntime-web, wasm", "web"),
    "webgpu": _in_browser("onnxruntime-web, WebGPU", "web-gpu"),
    "openvino": Runtime("OpenVINO", "openvino", "openvino", target="runtimes", package="openvino"),
    "tract": Runtime("tract", "tract", "tract", ("fixed",), target="runtimes", package="tract"),
    "iree": Runtime("IREE", "iree", "iree", ("fixed",), package="iree-base-runtime"),
    "tvm": Runtime("TVM", "tvm", "tvm", ("fixed",), package="apache-tvm"),
    "tinygrad": Runtime("tinygrad", "tinygrad", "tinygrad", ("fixed",), package="tinygrad"),
}

# network and sizes that a runtime cannot train, and why; building for its backend says so
REFUSED = {
    ("openvino", "CNN", "open"): "it has no convolution of open sizes whose weights are computed",
    ("tvm", "LSTM", "fixed"): "it has no LSTM and no Scan",
    ("tinygrad", "LSTM", "fixed"): "it has no LSTM and no Scan",
}


def cases_of(name: str) -> list[tuple[str, str]]:
    """The networks and sizes that the runtime is tried with."""
    return [(network, sizes) for network in NETWORKS for sizes in RUNTIMES[name].sizes]


def losses_in(name: str, step: Step, batches: Sequence[Tensors], evaluate: bool = False) -> list[float]:
    """The loss of each step in that runtime, which runs in a process of its own; ``evaluate`` gives that of eval.onnx.

    Raises:
        RefusedError: with the last line of what it wrote.
    """
    runtime = RUNTIMES[name]
    with tempfile.TemporaryDirectory() as folder:
        step.save(Path(folder, "step"))
        write_batches(Path(folder, "batches.npz"), batches)
        command = [str(runtime.python), str(HERE / f"in_{name}.py"), str(Path(folder, "step")), f"{folder}/batches.npz"]
        command += [] if evaluate else ["--no-evaluation"]
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
