"""Runs of several ranks that must come to what one process comes to, and the program that does them.

    mpiexec -n 4 python tests/parallel/ranks_cases.py FOLDER KIND [CASE ...]

trains each case on all ranks of a KIND and writes state and history of each to ``FOLDER/<case>.npz``. The
float64 cases are those whose weights must agree to 1e-6 of their size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))


import numpy as np  # noqa: E402
import onnx  # noqa: E402

import gradgraph as gg  # noqa: E402
from gradgraph import optim  # noqa: E402
from gradgraph.frontend import functional as F  # noqa: E402
from gradgraph.frontend import nn  # noqa: E402
from tests.backends.test_other_runtimes import small_cnn  # noqa: E402
from tests.kit.command_line import mlp  # noqa: E402
from tests.kit.optim_cases import OPTIMIZERS  # noqa: E402
from tests.parallel import far_memory  # noqa: E402

ROWS = 37  # in batches of 10, the last one has 7; in batches of 9, one


def wide(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` in float64."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    del model.graph.value_info[:]
    for tensor in (t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT):
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )
    return model


def data(dtype: Any = np.float64, ignored: bool = False, rows: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(rows, 4)).astype(dtype)
    target = x[:, :3].argmax(axis=1)
    if ignored:
        target[::2] = -100
        target[3:6] = -100
    return {"x": x, "target": target}


def values(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    found = data(dtype)
    return {"x": found["x"], "target": np.sin(found["x"][:, :3])}


@dataclass(frozen=True)
class Case:
    """A step, what it is trained on, and how."""

    options: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = data
    fit: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], onnx.ModelProto] = lambda: wide(mlp())
    tolerance: float = 1e-6
    equal: bool = True  # to one process
    sharded: bool = True  # may be
    normed: bool = False  # runs where norms are joint, and not elsewhere

    def trained(self, parallel: Any) -> tuple[dict[str, np.ndarray], dict[str, list[float]]]:
        step = gg.build(self.model(), **{"optimizer": "adamw(lr=0.01)", **self.options})
        trainer = gg.Trainer(step, device="cpu", seed=3, options=gg.RuntimeOptions(threads=1), parallel=parallel)
        history = trainer.fit(self.data(), **{"epochs": 2, "batch_size": 10, "progress": False, **self.fit})
        return trainer.state_dict(), dict(history)


class Dataset:
    def __init__(self) -> None:
        self.arrays = data()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {name: array[i] for name, array in self.arrays.items()}


def batches() -> list[dict[str, np.ndarray]]:
    found = data()
    return [{name: a[i : i + 9] for name, a in found.items()} for i in range(0, ROWS, 9)]


def traced(out: Any, batch: Any) -> dict[str, Any]:
    return {"classes": F.cross_entropy(out["logits"], batch["y"]), "size": 0.1 * out["first.weight"].square().mean()}


def with_y() -> dict[str, np.ndarray]:
    found = data()
    return {"x": found["x"], "y": found["target"]}


def pictures(rows: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 1, 4, 4)).astype(np.float32)
    return {"x": x, "target": np.arange(rows) % 3}


def doubled(ignored: bool = False, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Pictures in float64, of a mean that is far from 0."""
    x = np.random.default_rng(0).normal(size=(rows, 1, 4, 4)) * 0.5 + 3
    return {"x": x, "target": data(ignored=ignored, rows=rows)["target"]}


class Pointwise(nn.Module):
    """A convolution of one pixel, which onnxruntime has in float64."""

    def __init__(self, inputs: int, outputs: int, _kernel: int = 1, **_: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Normed(nn.Module):
    """Convolutions with norms one behind the other, beside each other (whose sums travel together), and one that is
    applied twice.
    """

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.left = nn.Sequential(conv(4, 5, 3, padding=1), nn.BatchNorm2d(5, momentum=0.3))
        self.right = nn.Sequential(conv(4, 5, 1), nn.BatchNorm2d(5))
        self.twice = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        x = self.twice(F.relu(self.left(x) + self.right(x)).mean((2, 3)))
        return self.last(self.twice(F.tanh(x)))


def normed(narrow: bool = False) -> onnx.ModelProto:
    gg.frontend.manual_seed(1)
    model = gg.frontend.export(Normed(nn.Conv2d if narrow else Pointwise), {"x": ("batch", 1, 4, 4)})
    return model if narrow else wide(model)


def weighed() -> dict[str, np.ndarray]:
    return {**data(), "sample_weight": np.linspace(0, 1, ROWS, dtype=np.float32)}


def weightless() -> dict[str, np.ndarray]:
    """Of the second batch, nothing has a weight, and of the third all that one or two ranks take."""
    weights = np.ones(ROWS, np.float32)
    weights[10:20] = weights[20:30:2] = 0.0
    return {**data(), "sample_weight": weights}


def fixed() -> onnx.ModelProto:
    """The network for batches of three."""
    model = wide(mlp())
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 12 // RANKS
    return model


RANKS = 1  # of the program that runs here, for what is fixed to its part of a batch


def _optimizers() -> Iterator[tuple[str, Case]]:
    for name, case in OPTIMIZERS.items():
        options = {"loss": "mse", "optimizer": case.optimizer()}
        if case.only_matrices:
            options["freeze"] = ["*bias"]
        yield f"optimizer {name}", Case(options, values)


IGNORING = functools.partial(data, ignored=True)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.05))
GROUPED = optim.adamw(0.01, groups={"*bias": {"weight_decay": 0}})
JOINT: dict[str, Case] = {
    name: dataclasses.replace(case, model=case.model if case.tolerance > 1e-6 else normed, normed=True)
    for name, case in {
        "norms": Case({"optimizer": CLIPPED, "grad_norm": True}, doubled, fit={"validation": doubled(rows=9)}),
        "norms, one sample is left": Case(data=doubled, fit={"batch_size": 9}),
        "norms, ignored labels": Case(data=functools.partial(doubled, True)),
        "norms, ranks of no weight": Case({"loss": "focal(gamma=2)", "optimizer": "sgd(lr=0.1)"},
                                          functools.partial(doubled, True),
                                          {"batch_size": 4, "shuffle": False, "drop_last": True}),
        "norms, sums": Case({"loss": gg.losses.mse("sum"), "optimizer": "sgd(lr=0.003)"},
                            lambda: {**doubled(), "target": np.sin(doubled()["x"][:, 0, 0, :3])}),
        "norms, accumulated": Case({"accumulate": True}, doubled, {"accumulate": 3}),
        "norms, recomputed": Case({"recompute": "sqrt"}, doubled),
        "norms, one frozen": Case({"freeze": ["left.1.*"]}, doubled),
        "norms, attacked": Case({"adversarial": gg.PGD(0.3, n=2, clean=0.3)}, doubled),
        "norms, float32": Case(
            {"optimizer": "sgd(lr=0.05)"}, pictures, model=functools.partial(normed, True), tolerance=2e-6
        ),
        "norms, float16": Case(
            {"precision": "float16"}, pictures, model=functools.partial(normed, True), tolerance=1e-2, equal=False
        ),
    }.items()
}  # fmt: skip
CASES: dict[str, Case] = {
    **JOINT,
    **dict(_optimizers()),
    "ignored labels": Case(data=IGNORING),
    "one sample is left": Case(fit={"batch_size": 9, "validation": data(rows=5)}),
    "in order": Case(fit={"shuffle": False, "drop_last": True}),
    "class weights": Case({"loss": gg.losses.cross_entropy(weight=[0.2, 1.0, 3.0])}, IGNORING),
    "label smoothing": Case({"loss": "cross_entropy(label_smoothing=0.1)"}, IGNORING),
    "focal": Case({"loss": "focal(gamma=2)"}),
    "sums": Case({"loss": gg.losses.mse("sum"), "optimizer": "sgd(lr=0.01)"}, values),
    "huber": Case({"loss": "huber"}, values),
    "sample weights": Case({"sample_weight": True}, weighed),
    "no weight": Case({"sample_weight": True, "optimizer": "sgd"}, weightless, {"shuffle": False}),
    "a function": Case({"loss": traced, "targets": {"y": gg.frontend.Input(("N",), "int64")}}, with_y),
    "clipped": Case({"optimizer": CLIPPED, "grad_norm": True}, IGNORING),
    "schedule and average": Case({"optimizer": optim.adamw(optim.cosine(0.05, 8)), "ema": 0.9}),
    "fed rate": Case(fit={"learning_rate": lambda step: 0.1 / (1 + step)}),
    "accumulated": Case({"accumulate": True, "grad_norm": True}, IGNORING, {"accumulate": 3}, sharded=False),
    "accumulated function": Case(
        {"loss": traced, "targets": {"y": gg.frontend.Input(("N",), "int64")}, "accumulate": True},
        with_y, {"accumulate": 2},
    ),
    "accumulated, in parts": Case({"accumulate": True}, IGNORING, {"accumulate": 3, "max_steps": 5}),
    "accumulated sums": Case(
        {"accumulate": True, "loss": gg.losses.mse("sum"), "optimizer": "sgd(lr=0.01)"}, values, {"accumulate": 3}
    ),
    "metrics": Case({"metrics": ["accuracy", "f1", "confusion_matrix"]}, IGNORING, {"validation": data(ignored=True)}),
    "patience": Case(fit={"validation": data(rows=11), "patience": 1, "epochs": 6, "learning_rate": 3.0}),
    "evaluated between": Case(fit={"validation": data(rows=11), "eval_every": 3, "max_steps": 7}),
    "a dataset": Case(data=Dataset),
    "ready batches": Case(data=batches),
    "groups and frozen": Case({"optimizer": GROUPED, "freeze": "first.bias"}),
    "fixed size": Case(model=fixed, fit={"batch_size": 12, "drop_last": True}, data=functools.partial(data, rows=50)),
    "recomputed": Case({"recompute": "sqrt"}),
    "attacked": Case({"adversarial": gg.PGD(0.3, n=2, norm="l2", clean=0.3)}, IGNORING),
    "float32": Case(model=mlp, data=functools.partial(data, np.float32), tolerance=1e-5),
    "float32, ignored labels": Case(model=mlp, data=functools.partial(data, np.float32, True), tolerance=1e-5),
    "float16": Case({"precision": "float16"}, functools.partial(data, np.float32), model=mlp, equal=False),
    "pruned": Case({"optimizer": optim.magnitude_pruning(optim.adam(0.01), 0.5, end=6, every=2), "ema": 0.9}),
    "adapters": Case(
        model=lambda: gg.lora(mlp(), target="*", rank=2), data=functools.partial(data, np.float32), tolerance=1e-5
    ),
    "norms and masks": Case(model=small_cnn, data=pictures, equal=False),
    "uphill": Case({"optimizer": optim.sam(optim.sgd(0.2, momentum=0.9), 0.05)}, equal=False),
}  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {  # of ranks
    "plain": {},
    "sharded": {"shard_state": True},
    "joint": {"sync_batch_norm": True},
    "joint, sharded": {"sync_batch_norm": True, "shard_state": True},
    "far": {},  # their state is elsewhere than in the processor's memory: stand-ins of GPUs
}
FAR = ["ignored labels", "one sample is left", "sums", "no weight", "a function", "clipped", "schedule and average",
       "accumulated", "accumulated, in parts", "metrics", "fixed size", "float32", "float16",
       "norms and masks"]  # fmt: skip


# optimizers see summed gradients where each rank has all weights, however many ranks there are; and parts of weights
_OPTIMIZED = {(2, "plain"), (4, "sharded")}


def of_kind(kind: str, ranks: int) -> list[str]:
    """The cases that so many ranks of this kind train."""
    ways = KINDS[kind]
    if kind == "far":
        return FAR
    if len(ways) > 1:
        return ["norms", "norms, one sample is left", "norms, accumulated"]
    return [
        name
        for name, case in CASES.items()
        if case.normed == ("sync_batch_norm" in ways)
        and (case.sharded or "shard_state" not in ways)
        and (not name.startswith("optimizer ") or (ranks, kind) in _OPTIMIZED)
    ]


def main(folder: Path, kind: str, *names: str) -> None:
    global RANKS
    if kind == "far":
        far_memory.use()
    parallel = gg.DataParallel(check_every=1, **KINDS[kind])
    RANKS = parallel.ranks
    for name in names or of_kind(kind, RANKS):
        state, history = CASES[name].trained(parallel)
        if parallel.is_first:
            np.savez(folder / f"{name}.npz", **{f"state {n}": value for n, value in state.items()},
                     history=json.dumps(history))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
