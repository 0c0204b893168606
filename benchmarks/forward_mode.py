"""Times forward mode against the forward pass: how many forwards does a Jacobian-vector product cost?

    python benchmarks/forward_mode.py [workload ...] [--widths 256 1024] [--rows 1 512]
    python benchmarks/forward_mode.py --operators [--widths 256] [--rows 512]
    python benchmarks/forward_mode.py --backend ort-cpu        # or ort-cpu-native, after `gradgraph native build`

Each row is one model with ``gg.jvp`` by its inputs or by its weights, beside the model as it is ("forward", whose
weights onnxruntime may reorder when the session is created) and the model with its weights as inputs ("fed", which
reads weights as ``jvp`` must read their tangents). All run in turns on two threads. Prints medians in milliseconds and
medians of the ratios within a turn, so that a machine that is slow for a while is slow for both; only these mean
anything. Every tangent is compared with a central difference first. The last lines say which ratio is the largest.
With ``--fastest``, ratios of the fastest turn of each, which others on the same host disturb less.
With ``--operators``, each element-wise operator alone, by all inputs. With ``--backend``, ``gg.jvp`` writes for it, and
the models have the sizes of the row instead of an open batch.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

import gradgraph as gg
from gradgraph.backends.ort_native import library as native
from gradgraph.frontend import nn
from gradgraph.runtime.execution.session import CPU, RuntimeOptions

THREADS = 2
LIMIT = 3.0  # forwards that a tangent should cost at most
Feeds = dict[str, np.ndarray]
Times = np.ndarray
Row = tuple[int, str, list[Times]]  # rows of the batch, what moves, and times: forward, with weights fed, jvp


@dataclass(frozen=True)
class Workload:
    """Args:
    make: builds the network for a width.
    tokens: rows of each example; an input of rank 3 if there are more than one.
    """

    make: Callable[[int], nn.Module]
    tokens: int = 1

    def shape(self, width: int, rows: Any) -> tuple[Any, ...]:
        return (rows, width) if self.tokens == 1 else (rows, self.tokens, width)


def mlp(activation: type[nn.Module], layer: Callable[..., nn.Module] | None = None) -> Callable[[int], nn.Module]:
    linear = layer or (lambda width: nn.Linear(width, width))

    def make(width: int) -> nn.Module:
        return nn.Sequential(linear(width), activation(), linear(width), activation(), linear(width))

    return make


class ElementWise(nn.Module):
    """Functions of each element, with broadcast parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(np.full(width, 0.9, np.float32))
        self.shift = nn.Parameter(np.full(width, 0.1, np.float32))

    def forward(self, x: Any) -> Any:
        y = (x * self.scale + self.shift).tanh()
        return y.sigmoid() * (y * y + 1.0).sqrt()


class Product(nn.Module):
    """A linear layer as other frameworks write it: MatMul and Add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.random.default_rng(0).normal(0, width**-0.5, (width, width)).astype(np.float32))
        self.bias = nn.Parameter(np.full(width, 0.1, np.float32))

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


WORKLOADS: dict[str, Workload] = {
    "relu": Workload(mlp(nn.ReLU)),
    "gelu": Workload(mlp(nn.GELU)),
    "tanh": Workload(mlp(nn.Tanh)),
    "matmul": Workload(mlp(nn.Tanh, Product)),
    "tokens": Workload(mlp(nn.GELU), tokens=8),
    "elementwise": Workload(ElementWise),
}


OPERATORS = (
    "Abs Celu Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Mish Neg Relu Selu Sigmoid Softplus Softsign Tanh"
)
ALONE = {name: f"y = {name}(x)" for name in OPERATORS.split()} | {
    "ThresholdedRelu": "y = ThresholdedRelu<alpha = 0.0>(x)",  # elsewhere it jumps, and a difference is no derivative
    "Sqrt": "y = Sqrt(p)",
    "Reciprocal": "y = Reciprocal(p)",
    "SiLU": "s = Sigmoid(x)  y = Mul(x, s)",
    "Clip": "c = Constant<value_float = 0.5>()  d = Neg(c)  y = Clip(x, d, c)",
    "Add": "y = Add(x, z)",
    "Mul": "y = Mul(x, z)",
    "Div": "y = Div(x, p)",
    "Pow": "y = Pow(p, z)",
    "PRelu": "y = PRelu(x, z)",
    "Max": "y = Max(x, z)",
    "Min": "y = Min(x, z)",
    "chain of products": "a = Mul(x, z)  b = Mul(a, x)  c = Mul(b, z)  y = Mul(a, c)",
}


def alone(text: str, shape: tuple[int, int]) -> onnx.ModelProto:
    """A few nodes from those of ``x``, ``z`` and ``p``, which is positive, that they read, to ``y``."""
    dims = "[{}, {}]".format(*shape)
    inputs = ", ".join(f"float{dims} {x}" for x in "xzp" if f"({x}" in text or f"{x})" in text)
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float{dims} y) {{ {text} }}'
    )


def interleaved(functions: Sequence[Callable[[], object]], rounds: int) -> list[Times]:
    """Milliseconds of each, turn by turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, record in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            record.append((time.perf_counter() - start) * 1e3)
    return [np.array(t) for t in times]


def typical(times: Times, base: Times) -> float:
    return float(np.median(times / base))


def fastest(times: Times, base: Times) -> float:
    return float(times.min() / base.min())


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    has_kernels = any(imported.domain == native.DOMAIN for imported in model.opset_import)
    options = RuntimeOptions(threads=THREADS, native_kernels=has_kernels).session_options()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or the threads of one disturb the next
    return ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])


def fed(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with its weights as inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
    del graph.initializer[:]
    return copy


def call(model: onnx.ModelProto, feeds: Feeds) -> Callable[[], list[np.ndarray]]:
    running = session(model)
    needed = {i.name: feeds[i.name] for i in model.graph.input}
    return lambda: running.run(None, needed)


def check(model: onnx.ModelProto, wrt: list[str], feeds: Feeds, y: np.ndarray, dy: np.ndarray) -> None:
    """``dy`` against a central difference of ``y`` in float32, which is worth two or three digits."""
    h = 3e-4
    away = [
        call(fed(model), feeds | {x: feeds[x] + sign * h * feeds[f"{x}.tangent"] for x in wrt})()[0] for sign in (1, -1)
    ]
    error = float(np.linalg.norm((away[0] - away[1]) / (2 * h) - dy) / np.linalg.norm(dy))
    if error > 0.05:
        raise SystemExit(f"the tangent by {', '.join(wrt)} is off by {error:.1%}; a ratio would mean nothing")


def rows(workload: str, width: int, sizes: list[int], rounds: int, backend: str) -> Iterator[Row]:
    kind = WORKLOADS[workload]
    batches = dict.fromkeys(max(size // kind.tokens, 1) for size in sizes)
    if backend == "portable":
        yield from timed(kind, width, "batch", batches, rounds, backend)
        return
    for batch in batches:
        yield from timed(kind, width, batch, [batch], rounds, backend)


def timed(
    kind: Workload, width: int, given: int | str, batches: Iterable[int], rounds: int, backend: str
) -> Iterator[Row]:
    """For each of ``batches``, one model whose batch is ``given``."""
    rng = np.random.default_rng(0)
    gg.frontend.manual_seed(0)
    model = gg.frontend.export(kind.make(width), {"x": kind.shape(width, given)})
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.dims}
    tangents = {f"{k}.tangent": rng.normal(0, w.std() + 0.1, w.shape).astype(np.float32) for k, w in weights.items()}
    chosen = {"input": ["x"], "weights": list(weights), "both": ["x", *weights]}
    pushed = {label: gg.jvp(model, wrt=wrt, backend=backend) for label, wrt in chosen.items()}
    for batch in batches:
        x, dx = rng.normal(0, 1, (2, *kind.shape(width, batch))).astype(np.float32)
        feeds = {"x": x, "x.tangent": dx, **weights, **tangents}
        forward, with_weights = call(model, feeds), call(fed(model), feeds)
        calls = {label: call(pushed[label], feeds) for label in chosen}
        for label, function in calls.items():
            check(model, chosen[label], feeds, *function())
        times = interleaved((forward, with_weights, *calls.values()), rounds)
        yield from ((batch * kind.tokens, label, [*times[:2], t]) for label, t in zip(chosen, times[2:], strict=True))


def operators(shape: tuple[int, int], rounds: int, backend: str) -> Iterator[tuple[str, list[Times]]]:
    """Each of ``ALONE``: forward and tangent."""
    rng = np.random.default_rng(0)
    feeds = {x + t: rng.normal(0, 1, shape).astype(np.float32) for x in "xzp" for t in ("", ".tangent")}
    feeds["p"] = (np.abs(feeds["p"]) + 0.5).astype(np.float32)
    for name, text in ALONE.items():
        model = alone(text, shape)
        wrt = [x.name for x in model.graph.input]
        pushed = call(gg.jvp(model, wrt=wrt, backend=backend), feeds)
        check(model, wrt, feeds, *pushed())
        yield name, interleaved((call(model, feeds), pushed), rounds)


class Largest:
    """The largest ratio of each kind, and the row it is in."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, str]]] = {}

    def add(self, kind: str, ratio: float, title: str) -> None:
        self._found.setdefault(kind, []).append((ratio, title))

    def report(self) -> None:
        for kind, found in self._found.items():
            ratio, title = max(found)
            within = sum(r <= LIMIT for r, _ in found)
            print(f"largest {kind}: {ratio:.2f} ({title}); {within} of {len(found)} are at most {LIMIT:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--operators", action="store_true", help="each element-wise operator alone")
    parser.add_argument("--fastest", action="store_true", help="ratios of the fastest turns, for a busy host")
    parser.add_argument("--backend", choices=("portable", "ort-cpu", "ort-cpu-native"), default="portable")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there is {', '.join(WORKLOADS)}")
    largest, ratio = Largest(), fastest if arguments.fastest else typical
    if arguments.operators:
        for shape in itertools.product(arguments.rows, arguments.widths):
            for name, (forward, t) in operators(shape, arguments.rounds, arguments.backend):
                title = f"{name} {shape[0]}x{shape[1]}"
                print(f"{title:34}{np.median(forward):9.3f}{np.median(t):9.3f}{ratio(t, forward):7.2f}", flush=True)
                largest.add("/forward", ratio(t, forward), title)
        largest.report()
        return
    print(f"{'jvp, ' + str(THREADS) + ' threads':34}{'forward':>9}{'fed':>9}{'jvp ms':>9}{'/forward':>10}{'/fed':>7}")
    for workload in arguments.workloads or WORKLOADS:
        for width in arguments.widths:
            found = rows(workload, width, arguments.rows, arguments.rounds, arguments.backend)
            for count, label, (forward, with_weights, t) in found:
                title = f"{workload} {width}, {count} rows, by {label}"
                medians = "".join(f"{np.median(column):9.3f}" for column in (forward, with_weights, t))
                print(f"{title:34}{medians}{ratio(t, forward):10.2f}{ratio(t, with_weights):7.2f}", flush=True)
                for kind, base in (("/fed", with_weights), ("/forward", forward)):
                    largest.add(f"{kind} by {label}", ratio(t, base), title)
    largest.report()


if __name__ == "__main__":
    main()
