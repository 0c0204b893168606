"""Exports a dynamics model and its Jacobian as C, calls both from CasADi, and times the Jacobian beside onnxruntime.

Run with ``python -m examples.solvers``. It needs a C compiler; with ``pip install casadi`` it also solves an optimal
control problem.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn

HERE = Path(__file__).parent
STATES, CONTROLS, WIDTH = 6, 2, 32
CALLS = 50_000


class Dynamics(nn.Module):
    """The state after one time step, x + 0.1 · network(x, u)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(STATES + CONTROLS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, STATES)
        )

    def forward(self, x: frontend.Tensor, u: frontend.Tensor) -> frontend.Tensor:
        return x + 0.1 * self.network(F.cat([x, u], -1))


def dynamics_model() -> onnx.ModelProto:
    frontend.manual_seed(0)
    return frontend.export(Dynamics(), {"x": (STATES,), "u": (CONTROLS,)}, outputs=["next"])


def write_c(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Write the C of a model and of its Jacobian into ``folder``; return the Jacobian."""
    jacobian = gg.jacobian(model, output="next", wrt=["x", "u"])
    for name, source in (("net", model), ("net_jac", jacobian)):
        gg.export.c(source, folder / name, name=name, force=True)
    return jacobian


def compiled(folder: Path, main: str, output: str, *flags: str) -> Path:
    """Compile the C file ``main`` of this folder together with the exported files."""
    names = ("net", "net_jac")
    sources = [HERE / main, *(folder / n / f"{n}.c" for n in names)]
    includes = [f"-I{folder / n}" for n in names]
    options = ["-std=c99", "-O3", "-march=native", *flags, *includes]
    subprocess.run(["cc", *options, *map(str, sources), "-lm", "-o", str(folder / output)], check=True)
    return folder / output


class Jacobian:
    """The exported Jacobian, called by ctypes with arrays that are allocated once."""

    def __init__(self, library: Path, working_memory: int) -> None:
        self.x, self.u = np.zeros(STATES, np.float32), np.zeros(CONTROLS, np.float32)
        self.next = np.zeros(STATES, np.float32)
        self.dx, self.du = np.zeros((STATES, STATES), np.float32), np.zeros((STATES, CONTROLS), np.float32)
        self._memory = np.zeros(working_memory // 8 + 1, np.int64)
        self._run = ctypes.CDLL(str(library)).net_jac_run
        arrays = (self._memory, self.x, self.u, self.next, self.dx, self.du)
        self._arguments = [ctypes.c_void_p(a.ctypes.data) for a in arrays]

    def __call__(self) -> list[np.ndarray]:
        if self._run(*self._arguments) != 0:
            raise RuntimeError("net_jac_run failed")
        return [self.next, self.dx, self.du]


def microseconds(call: Callable[[], object], count: int) -> float:
    """Return the time of one call: the best of five rounds."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count // 5):
            call()
        rounds.append((time.perf_counter() - start) / (count // 5))
    return 1e6 * min(rounds)


def compare(folder: Path, jacobian: onnx.ModelProto) -> None:
    """Print the largest difference to onnxruntime, and the time of a call from C, from Python and of onnxruntime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(jacobian.SerializeToString(), options, providers=["CPUExecutionProvider"])
    sizes = gg.export.c(jacobian, folder / "net_jac", name="net_jac", force=True)
    call = Jacobian(compiled(folder, "casadi_dynamics.c", "libdynamics.so", "-shared", "-fPIC"), sizes.ram)
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(100):
        call.x[:], call.u[:] = rng.normal(size=STATES), rng.normal(size=CONTROLS)
        expected = session.run(None, {"x": call.x, "u": call.u})
        worst = max(worst, *(float(abs(a - b).max()) for a, b in zip(call(), expected, strict=True)))
    program = compiled(folder, "timing.c", "timing")
    times = {
        "onnxruntime": microseconds(lambda: session.run(None, {"x": call.x, "u": call.u}), CALLS // 10),
        "C, called by ctypes": microseconds(call, CALLS),
        "C, called from C": min(float(subprocess.check_output([program, str(CALLS)])) for _ in range(3)),
    }
    print(f"largest difference to onnxruntime: {worst:.1e}")
    for name, spent in times.items():
        print(f"{name}: {spent:.2f} µs, {times['onnxruntime'] / spent:.1f} times as fast as onnxruntime")


def solve(library: Path) -> np.ndarray:
    """Drive the state to 0 within ten time steps, by direct multiple shooting with CasADi and Ipopt."""
    import casadi

    dynamics = casadi.external("dynamics", str(library))
    problem = casadi.Opti()
    x, u = problem.variable(STATES, 11), problem.variable(CONTROLS, 10)
    problem.minimize(casadi.sumsqr(x[:, -1]) + 1e-3 * casadi.sumsqr(u))
    problem.subject_to(x[:, 0] == casadi.linspace(-1, 1, STATES) / 4)
    for k in range(10):
        problem.subject_to(x[:, k + 1] == dynamics(x[:, k], u[:, k]))
    problem.solver(
        "ipopt", {"print_time": False}, {"print_level": 0, "tol": 1e-4, "hessian_approximation": "limited-memory"}
    )
    found = problem.solve()
    print(f"optimal control: {found.stats()['iter_count']} iterations, cost {found.value(problem.f):.4f}")
    return np.asarray(found.value(x))


if __name__ == "__main__":
    into = Path("build") / "solvers"
    into.mkdir(parents=True, exist_ok=True)
    compare(into, write_c(dynamics_model(), into))
    if importlib.util.find_spec("casadi") is not None:
        solve((into / "libdynamics.so").absolute())
