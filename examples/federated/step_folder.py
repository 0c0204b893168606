"""A client's share of federated training, in numpy and onnxruntime alone: a step folder, weights in, weights out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

Arrays = dict[str, np.ndarray]
TRAVELS = ("parameter", "statistic")  # kinds of state that clients and server exchange; the rest begins anew
ROWS = 256  # of a batch that is evaluated


class UnusableError(Exception):
    """The step or the data cannot be used: one sentence on what to do."""


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # clients share this machine
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Arrays:
    outputs = [o.name for o in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))


class StepFolder:
    """What ``step.save(folder)`` wrote, as a client of federated training uses it.

    Weights are all state that is a parameter or a running statistic, by name: of a step with adapters, the adapters
    alone. What the optimizer remembers begins anew with every round.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "manifest.json").is_file():
            raise UnusableError(f"{folder} has no manifest.json; name the folder that step.save wrote")
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        if self.manifest.get("steps"):
            raise UnusableError(f"{folder} has several named steps; build one of them alone")
        self._train, self._eval = session(folder / "train.onnx"), session(folder / "eval.onnx")
        self.initial = run(session(folder / "init.onnx"), {})
        self._refuse_copies()

    def _refuse_copies(self) -> None:
        """Weights that the optimizer keeps a second time would stay those of init.onnx, without a word."""
        state = self.manifest["state"]
        weights = [self.initial[s["name"]] for s in state if s["kind"] == "parameter"]
        for kept in (s["name"] for s in state if s["kind"] not in TRAVELS):
            value = self.initial[kept]
            same = (w.shape == value.shape and np.ptp(w) > 0 and np.allclose(w, value, rtol=1e-2) for w in weights)
            if any(same):
                raise UnusableError(
                    f"'{kept}' is a copy of weights in the optimizer, which does not travel; "
                    "build the step with an optimizer that keeps none"
                )

    def weights(self) -> Arrays:
        """Those that init.onnx begins with, by name."""
        return {s["name"]: self.initial[s["name"]] for s in self.manifest["state"] if s["kind"] in TRAVELS}

    def state_of(self, weights: Mapping[str, np.ndarray]) -> Arrays:
        """The state of a round's beginning, which has these weights."""
        own = self.weights()
        if set(own) != set(weights):
            raise UnusableError(
                f"the weights that came are not those of {self.folder}; give all clients the same step folder"
            )
        for name, value in own.items():
            if weights[name].shape != value.shape:
                raise UnusableError(
                    f"'{name}' came as {weights[name].shape}; the step of {self.folder} has {value.shape}"
                )
        return {**self.initial, **{name: np.array(weights[name], value.dtype) for name, value in own.items()}}

    def train(
        self, weights: Mapping[str, np.ndarray], data: Arrays, batches: Iterable[np.ndarray], proximal: float = 0.0
    ) -> tuple[Arrays, float]:
        """Train on rows of ``data``, a batch of their numbers a step.

        Args:
            proximal: FedProx's mu. Each step also moves parameters by ``-rate * mu * (w - w_received)``, the gradient
                of ``mu / 2 * |w - w_received|**2`` under SGD (Li et al. 2020, Federated Optimization in Heterogeneous
                Networks, eq. 2).

        Returns:
            the weights after it, and the mean of the losses.
        """
        rates = {name: np.array(value, np.float32) for name, value in self.manifest["hyperparameters"].items()}
        pulls = [s["name"] for s in self.manifest["state"] if s["kind"] == "parameter"] if proximal else []
        state, losses = self.state_of(weights), []
        for rows in batches:
            batch = {name: values[rows] for name, values in data.items()}
            found = run(self._train, {**batch, **rates, **{n: v.copy() for n, v in state.items()}})
            after = {s["name"]: found[s["next"]] for s in self.manifest["state"]}
            for name in pulls:
                after[name] = after[name] - rates["learning_rate"] * np.float32(proximal) * (
                    state[name] - weights[name]
                )
            state = after
            losses.append(float(found[self.manifest["loss_output"]]))
        if not np.isfinite(losses).all():
            raise UnusableError("the loss is not a number; lower the learning rate of the step")
        return {name: state[name] for name in self.weights()}, float(np.mean(losses))

    def evaluate(self, weights: Mapping[str, np.ndarray], data: Arrays) -> dict[str, float]:
        """Loss and metrics over all rows."""
        names = [self.manifest["loss_output"], *self.manifest["metrics"]]
        state, rows = self.state_of(weights), len(next(iter(data.values())))
        sums = dict.fromkeys(names, 0.0)
        for begin in range(0, rows, ROWS):
            batch = {name: values[begin : begin + ROWS] for name, values in data.items()}
            found = run(self._eval, {**state, **batch})
            size = len(next(iter(batch.values())))
            sums = {name: total + size * float(found[name]) for name, total in sums.items()}
        return {name: total / rows for name, total in sums.items()}

    def data(self, folder: Path) -> Arrays:
        """The arrays that a client trains on: ``<name>.npy`` for each input and target, a row a sample."""
        arrays = {}
        for spec in self.manifest["inputs"] + self.manifest["targets"]:
            path = folder / f"{spec['name']}.npy"
            if not path.is_file():
                raise UnusableError(f"{path} is missing; each client has a file for each input and target of the step")
            try:
                values = np.load(path, allow_pickle=False)
            except (ValueError, EOFError):
                raise UnusableError(f"{path} is no array of numpy; write it with numpy.save") from None
            if values.dtype != spec["dtype"] or not _fits(values.shape, spec["shape"]):
                wanted = f"{spec['dtype']}{spec['shape']}"
                raise UnusableError(f"{path} has {values.dtype}{list(values.shape)}; the step takes {wanted}")
            arrays[spec["name"]] = values
        if len({len(values) for values in arrays.values()}) != 1 or not len(next(iter(arrays.values()))):
            raise UnusableError(f"the files in {folder} differ in their rows, or have none; write one row a sample")
        return arrays


def _fits(shape: tuple[int, ...], wanted: list[Any]) -> bool:
    """Whether sizes are those of the manifest, where it says numbers."""
    return len(shape) == len(wanted) and all(
        size == want for size, want in zip(shape, wanted, strict=True) if isinstance(want, int)
    )


def batches_of(rows: int, size: int, epochs: int, seed: tuple[int, ...]) -> list[np.ndarray]:
    """The numbers of the rows of each batch; another order for each client and round, the same in every run."""
    rng = np.random.default_rng(seed)
    orders = (rng.permutation(rows) for _ in range(epochs))
    return [order[begin : begin + size] for order in orders for begin in range(0, rows, size)]
