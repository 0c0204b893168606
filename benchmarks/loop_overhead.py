"""The cost of the loop on top of onnxruntime, per step: ``Trainer`` beside bare bound calls and loops written by hand.

    python benchmarks/loop_overhead.py [--models tiny mlp] [--ways fit step] [--rounds 24] [--native]

A bare call is onnxruntime's own, of the very session that the trainer runs, with all that it reads and writes bound
beforehand. Each other way is compared with the bare call that does the same work:

    bound call          a step on batches that lie bound already, one after the other
    Trainer.step        gets new arrays each time, as in a real loop: checks and binds them, reads the loss
    bound call, rows    a step that gathers the rows of its batch: those numbers are bound already
    Trainer.fit         draws an order for each epoch (of 64 batches), reads and adds up the losses, keeps the history
    by hand             what a user would write around the bare call with NumPy: permutation, take, loss
    PyTorch             eager, the same network, rows taken by index (where torch is installed)
    bound evaluation    loss and metrics of batches that lie bound already; Trainer.evaluate is the same on whole arrays
    bound prediction    outputs of such batches; Trainer.predict is the same on a whole array

They take turns, each after a pause in which the threads of the one before come to rest, and some steps to warm up.
Prints medians over the rounds: times, and differences and ratios to the bare call of the same round.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

import gradgraph as gg
from gradgraph.runtime.execution.binding import BoundSession, result_buffer
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.session import RuntimeOptions

nn = gg.frontend.nn
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Way = Callable[[int], None]
MODELS: dict[str, tuple[str, tuple[int, ...], int, int]] = {  # title, layer widths, classes, batch
    "tiny": ("tiny: 4-8-3, batch 8", (4, 8), 3, 8),
    "mlp": ("MLP 784-512-512-10, batch 128", (784, 512, 512), 10, 128),
    "wide": ("MLP 784-1024-1024-10, batch 128", (784, 1024, 1024), 10, 128),
    "large": ("MLP 784-2048-2048-10, batch 256", (784, 2048, 2048), 10, 256),
}
EPOCH = 64  # batches
WARM = 8  # steps before each turn
PAUSE = 0.03  # seconds: longer than threads of onnxruntime wait for work
RATE = 0.001
LIKE = {  # the bare call that does the same work
    "Trainer.step": "bound call",
    "Trainer.fit": "bound call, rows",
    "by hand": "bound call, rows",
    "PyTorch": "bound call, rows",
    "Trainer.evaluate": "bound evaluation",
    "Trainer.predict": "bound prediction",
}


class Case:
    """A network, data of one epoch, and the ways to train it."""

    def __init__(self, widths: tuple[int, ...], classes: int, batch: int, options: RuntimeOptions) -> None:
        random = np.random.default_rng(0)
        self.widths, self.classes, self.batch, self.rows = widths, classes, batch, EPOCH * batch
        self.options = options
        self.data: Arrays = {
            "x": random.normal(size=(self.rows, widths[0])).astype(np.float32),
            "target": random.integers(0, classes, self.rows),
        }
        self.batches = [{k: v[i : i + batch] for k, v in self.data.items()} for i in range(0, self.rows, batch)]

    def trainer(self) -> gg.Trainer:
        layers: list[Any] = []
        for a, b in itertools.pairwise(self.widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Linear(self.widths[-1], self.classes))
        model = gg.frontend.export(network, {"x": ("batch", self.widths[0])})
        step = gg.build(model, "cross_entropy", gg.optim.sgd(RATE), metrics=["accuracy"])
        return gg.Trainer(step, device="cpu", options=self.options)

    def ways(self) -> dict[str, Way]:
        return {**self._stepping(), **self._fitting(), **self._torch(), **self._evaluating()}

    def _stepping(self) -> dict[str, Way]:
        trainer = self.trainer()
        trainer.step(self.batches[0])
        bound = trainer._executor.part.training.of(self.batches[0])
        call = bare(bound, [bind(trainer, bound, batch, i) for i, batch in enumerate(self.batches)])

        def step(steps: int) -> None:
            for _, given in zip(range(steps), itertools.cycle(self.batches), strict=False):
                trainer.step(given)

        return {"bound call": call, "Trainer.step": step}

    def _fitting(self) -> dict[str, Way]:
        trainer, other = self.trainer(), self.trainer()

        def fit(steps: int) -> None:
            epochs, each = split(steps)
            trainer.fit(self.data, epochs=epochs, limit=each, batch_size=self.batch, progress=False)

        fit(WARM)
        bound = trainer._executor.part.training.for_usual()
        columns = {f"gradgraph.column.{name}": array for name, array in self.data.items()}
        order = np.random.default_rng(1).permutation(self.rows).reshape(EPOCH, self.batch)
        bindings = [bind(trainer, bound, {**columns, "gradgraph.rows": r}, i) for i, r in enumerate(order)]
        return {"bound call, rows": bare(bound, bindings), "Trainer.fit": fit, "by hand": self._by_hand(other)}

    def _by_hand(self, trainer: gg.Trainer) -> Way:
        trainer.step(self.batches[0])
        bound = trainer._executor.part.training.of(self.batches[0])
        buffers = {name: np.empty_like(array) for name, array in self.batches[0].items()}
        loss = np.zeros((), np.float32)
        bindings = [bind(trainer, bound, buffers, side, loss) for side in range(2)]
        random = np.random.default_rng(2)

        def by_hand(steps: int) -> None:
            run, total = ort.InferenceSession.run_with_iobinding, 0.0
            epochs, each = split(steps)
            for epoch in range(epochs):
                order = random.permutation(self.rows)
                for i in range(each):
                    rows = order[i * self.batch : (i + 1) * self.batch]
                    for name, array in self.data.items():
                        array.take(rows, 0, buffers[name], "clip")
                    run(bound.session, bindings[(epoch * each + i) % 2])
                    total += loss.item()

        return by_hand

    def _evaluating(self) -> dict[str, Way]:
        trainer = self.trainer()

        def evaluate(steps: int) -> None:
            epochs, each = split(steps)
            for _ in range(epochs):
                trainer.evaluate(self.data, self.batch, limit=each)

        def predict(steps: int) -> None:
            epochs, each = split(steps)
            for _ in range(epochs):
                trainer.predict(self.data["x"][: each * self.batch], self.batch)

        evaluate(WARM)
        predict(WARM)
        calls = {}
        opened = trainer._executor.opened
        for name, bound in (("evaluation", opened.evaluation), ("prediction", opened.prediction)):
            read = [{k: v for k, v in b.items() if k in bound.inputs} for b in self.batches]
            calls[f"bound {name}"] = bare(bound, [bind(trainer, bound, batch, 0) for batch in read])
        return {
            "bound evaluation": calls["bound evaluation"],
            "Trainer.evaluate": evaluate,
            "bound prediction": calls["bound prediction"],
            "Trainer.predict": predict,
        }

    def _torch(self) -> dict[str, Way]:
        if importlib.util.find_spec("torch") is None:
            return {}
        import torch

        torch.set_num_threads(self.options.threads or torch.get_num_threads())
        layers: list[Any] = []
        for a, b in itertools.pairwise(self.widths):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        network = torch.nn.Sequential(*layers, torch.nn.Linear(self.widths[-1], self.classes))
        optimizer = torch.optim.SGD(network.parameters(), RATE)
        x, target = torch.from_numpy(self.data["x"]), torch.from_numpy(self.data["target"])

        def train(steps: int) -> None:
            total = 0.0
            epochs, each = split(steps)
            for _ in range(epochs):
                order = torch.randperm(self.rows)
                for i in range(each):
                    rows = order[i * self.batch : (i + 1) * self.batch]
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(network(x[rows]), target[rows])
                    loss.backward()
                    optimizer.step()
                    total += loss.item()

        return {"PyTorch": train}


def split(steps: int) -> tuple[int, int]:
    """Epochs, and the batches of each."""
    return max(1, steps // EPOCH), min(steps, EPOCH)


def bare(bound: BoundSession, bindings: Iterable[Any]) -> Way:
    prepared = list(bindings)

    def call(steps: int) -> None:
        run = ort.InferenceSession.run_with_iobinding
        for _, binding in zip(range(steps), itertools.cycle(prepared), strict=False):
            run(bound.session, binding)

    return call


def bind(
    trainer: gg.Trainer, bound: BoundSession, feeds: Mapping[str, Array], number: int, loss: Array | None = None
) -> Any:
    """A binding over the state as it is after ``number`` steps, with memory for all outputs."""
    before, after = trainer.state.values(number % 2), trainer.state.values(1 - number % 2)
    fed = {**feeds, "learning_rate": np.array(RATE, np.float32)}
    rows = next(iter(feeds.values())).shape[0]
    following = {s.next: after[s.name] for s in trainer.manifest.state}
    binding = bound.session.io_binding()
    for given in bound.session.get_inputs():
        value = before[given.name] if given.name in before else to_ortvalue(fed[given.name])
        binding.bind_ortvalue_input(given.name, value)
    for output in bound.session.get_outputs():
        value = following.get(output.name)
        if value is None and output.shape:  # what a model predicts
            value = to_ortvalue(np.empty((rows, *output.shape[1:]), np.float32))
        elif value is None:
            is_loss = loss is not None and output.name == trainer.manifest.loss_output
            value = to_ortvalue(loss if is_loss else result_buffer(output))
        binding.bind_ortvalue_output(output.name, value)
    return binding


def per_step(run: Way, steps: int) -> float:
    """Microseconds per step of a function that does ``steps`` of them."""
    start = time.perf_counter()
    run(steps)
    return (time.perf_counter() - start) * 1e6 / steps


def measure(ways: Mapping[str, Way], rounds: int, steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            time.sleep(PAUSE)
            run(WARM)
            times[name].append(per_step(run, steps))
    return times


def chosen(ways: Mapping[str, Way], words: Sequence[str]) -> dict[str, Way]:
    """The ways whose names end with one of ``words``, and the bare calls that they are compared with."""
    names = {name for name in ways if any(name.endswith(word) for word in words)}
    names |= {LIKE[name] for name in names & LIKE.keys()} | {"bound call"}
    return {name: run for name, run in ways.items() if name in names}


def report(times: Mapping[str, list[float]]) -> None:
    for name, found in times.items():
        line = f"  {name:18}{statistics.median(found):10.1f} us"
        if name in LIKE:
            base = times[LIKE[name]]
            more = statistics.median(a - b for a, b in zip(found, base, strict=True))
            line += f"  {more:+8.1f} us {_percent(found, base)} to {LIKE[name]}"
        print(line)
    if "Trainer.fit" in times:
        print(f"  Trainer.fit is {_percent(times['Trainer.fit'], times['bound call'])} to the bound call (no gather)")


def _percent(found: list[float], base: list[float]) -> str:
    return f"{100 * (statistics.median(a / b for a, b in zip(found, base, strict=True)) - 1):+7.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["tiny", "mlp"])
    parser.add_argument("--ways", nargs="+", default=[""], help="ends of names, such as fit, step, hand, evaluate")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=2 * EPOCH, help=f"steps in turn, a multiple of {EPOCH}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--native", action="store_true", help="with native kernels")
    arguments = parser.parse_args()
    options = RuntimeOptions(threads=arguments.threads, native_kernels=arguments.native)
    for title, widths, classes, batch in (MODELS[name] for name in arguments.models):
        print(title)
        ways = chosen(Case(widths, classes, batch, options).ways(), arguments.ways)
        report(measure(ways, arguments.rounds, arguments.chunk))


if __name__ == "__main__":
    main()
