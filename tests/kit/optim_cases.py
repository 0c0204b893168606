"""Test cases of every optimizer: its arguments, and the class of torch.optim or the NumPy function to compare it with.

A NumPy reference follows the paper: ``reference(t, gradient, weight, memory) -> new weight``, for one tensor at a time,
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import optim

STEPS = 50
Reference = Callable[[int, np.ndarray, np.ndarray, dict[str, Any]], np.ndarray]


@dataclass(frozen=True)
class OptimizerCase:
    """A test case of the optimizer ``recipe(**arguments)``.

    It is compared with ``torch_class``, called with these arguments and ``torch_arguments``, or with ``reference``.
    """

    recipe: str
    arguments: dict[str, Any] = field(default_factory=dict)
    torch_class: str | None = None
    reference: Reference | None = None
    torch_arguments: dict[str, Any] = field(default_factory=dict)
    only_matrices: bool = False
    full_batch: bool = False
    fits_float16: bool = False  # whether it works in float16, as it does not square gradients
    rtol: float = 1e-4

    def optimizer(self) -> optim.Optimizer:
        return optim.by_name(self.recipe, **self.arguments)


def lion_by_hand(t: int, g: np.ndarray, w: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    m = memory.get("m", np.zeros_like(w))
    memory["m"] = 0.99 * m + 0.01 * g
    return w - 1e-2 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * w)


def lamb_by_hand(t: int, g: np.ndarray, w: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.1 * w
    return w - 0.01 * np.linalg.norm(w) / np.linalg.norm(step) * step


def lars_by_hand(t: int, g: np.ndarray, w: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    rate = 0.02 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.1 * np.linalg.norm(w))
    memory["v"] = 0.9 * memory.get("v", 0) + 0.5 * rate * (g + 0.1 * w)
    return w - memory["v"]


def muon_by_hand(t: int, g: np.ndarray, w: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    m = memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
    x = 0.05 * g + 0.95 * m
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    inputs, outputs = w.shape  # of a MatMul
    return w - 0.02 * (max(1, outputs / inputs) ** 0.5 * x + 0.1 * w)


def schedule_free_adamw_by_hand(t: int, g: np.ndarray, y: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    """Compute schedule-free AdamW as the authors' code does, whose state is y, z and v, but not x."""
    z = memory.get("z", y)
    rate = 0.05 * min(t / 10, 1)
    memory["largest"] = max(memory.get("largest", 0), rate)
    weight = memory["largest"] ** 2
    memory["sum"] = memory.get("sum", 0) + weight
    share = weight / memory["sum"]
    v = memory["v"] = 0.9 * memory.get("v", 0) + 0.1 * g * g
    d = g / (np.sqrt(v / (1 - 0.9**t)) + 1e-8) + 0.1 * y
    memory["z"] = z - rate * d
    return y + share * (z - y) + rate * (0.8 * (1 - share) - 1) * d


def schedule_free_sgd_by_hand(t: int, g: np.ndarray, y: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    z, share = memory.get("z", y), 1 / t
    memory["z"] = z - 0.5 * g
    return y + share * (z - y) + 0.5 * (0.9 * (1 - share) - 1) * g


OPTIMIZERS: dict[str, OptimizerCase] = {
    "sgd": OptimizerCase("sgd", {"lr": 0.1}, "SGD", fits_float16=True),
    "sgd-momentum": OptimizerCase("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, "SGD"),
    "sgd-dampening": OptimizerCase("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "SGD"),
    "adam": OptimizerCase("adam", {"lr": 0.02, "weight_decay": 0.1}, "Adam"),
    "adam-amsgrad": OptimizerCase("adam", {"lr": 0.05, "betas": (0.8, 0.7), "amsgrad": True}, "Adam"),
    "adamw": OptimizerCase("adamw", {"lr": 0.02, "weight_decay": 0.1}, "AdamW"),
    "adamw-amsgrad": OptimizerCase("adamw", {"lr": 0.05, "betas": (0.8, 0.7), "amsgrad": True}, "AdamW"),
    "nadam": OptimizerCase("nadam", {"lr": 0.02, "weight_decay": 0.1}, "NAdam"),
    "nadam-decoupled": OptimizerCase(
        "nadam", {"lr": 0.02, "weight_decay": 0.1, "momentum_decay": 0.1, "decoupled_weight_decay": True}, "NAdam"
    ),
    "radam": OptimizerCase("radam", {"lr": 0.02, "weight_decay": 0.1}, "RAdam"),
    "radam-decoupled": OptimizerCase(
        "radam", {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}, "RAdam"
    ),
    "adamax": OptimizerCase("adamax", {"lr": 0.02, "weight_decay": 0.1}, "Adamax"),
    "rmsprop": OptimizerCase("rmsprop", {"lr": 0.005, "weight_decay": 0.1, "momentum": 0.5}, "RMSprop"),
    "rmsprop-centered": OptimizerCase("rmsprop", {"lr": 0.005, "centered": True}, "RMSprop"),
    "adagrad": OptimizerCase("adagrad", {"lr": 0.1}, "Adagrad"),
    "adagrad-options": OptimizerCase(
        "adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}, "Adagrad"
    ),
    "adadelta": OptimizerCase("adadelta", {"lr": 1.0, "weight_decay": 0.01}, "Adadelta"),
    "rprop": OptimizerCase("rprop", {"lr": 0.01, "step_sizes": (1e-5, 0.1)}, "Rprop", full_batch=True,
                           fits_float16=True),
    "lion": OptimizerCase("lion", {"lr": 1e-2, "weight_decay": 0.1}, reference=lion_by_hand,
                          fits_float16=True),
    "lamb": OptimizerCase("lamb", {"lr": 0.01, "weight_decay": 0.1}, reference=lamb_by_hand),
    "lars": OptimizerCase(
        "lars", {"lr": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.02}, reference=lars_by_hand, fits_float16=True
    ),
    "adafactor": OptimizerCase("adafactor", {"lr": 0.05, "weight_decay": 0.1}, "Adafactor"),
    "adafactor-options": OptimizerCase(
        "adafactor", {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-6, 0.05), "d": 2.0}, "Adafactor"
    ),
    # torch orthogonalises in bfloat16, with about three digits, and gradgraph in float32
    "muon": OptimizerCase("muon", {"lr": 0.02}, "Muon", only_matrices=True, rtol=2e-2,
                          fits_float16=True),
    "muon-float32": OptimizerCase("muon", {"lr": 0.02}, reference=muon_by_hand, only_matrices=True),
    "muon-options": OptimizerCase(
        "muon", {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, "Muon",
        only_matrices=True, rtol=2e-2,
    ),
    "schedule_free_adamw": OptimizerCase(
        "schedule_free_adamw", {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1, "warmup_steps": 10},
        reference=schedule_free_adamw_by_hand,
    ),
    "lbfgs": OptimizerCase(
        "lbfgs", {"lr": 0.3, "history_size": 5}, "LBFGS", torch_arguments={"max_iter": 1}, full_batch=True
    ),
    "schedule_free_sgd": OptimizerCase("schedule_free_sgd", {"lr": 0.5}, reference=schedule_free_sgd_by_hand,
                                       fits_float16=True),
}  # fmt: skip

_draw = np.random.default_rng(7)
WEIGHTS = {
    "w1": _draw.normal(0, 0.5, (4, 8)).astype(np.float32),
    "b1": _draw.normal(0, 0.1, 8).astype(np.float32),
    "w2": _draw.normal(0, 0.5, (8, 3)).astype(np.float32),
    "b2": _draw.normal(0, 0.1, 3).astype(np.float32),
}
X = _draw.normal(size=(STEPS, 16, 4)).astype(np.float32)
Y = np.sin(X @ _draw.normal(size=(4, 3)).astype(np.float32)).astype(np.float32)
BATCHES = [{"x": x, "target": y} for x, y in zip(X, Y, strict=True)]


def network() -> onnx.ModelProto:
    """Return the model ``tanh(x·w1 + b1)·w2 + b2``."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"]),
        helper.make_node("Add", ["h1", "b1"], ["h2"]),
        helper.make_node("Tanh", ["h2"], ["h3"]),
        helper.make_node("MatMul", ["h3", "w2"], ["h4"]),
        helper.make_node("Add", ["h4", "b2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def gradients_by_hand(w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss (mse) and its gradients in float64."""
    h = np.tanh(x @ w["w1"] + w["b1"])
    difference = h @ w["w2"] + w["b2"] - y
    dy = 2 * difference / difference.size
    dh = dy @ w["w2"].T * (1 - h * h)
    grads = {"w1": x.T @ dh, "b1": dh.sum(0), "w2": h.T @ dy, "b2": dy.sum(0)}
    return float((difference**2).mean()), grads


def batches(full: bool = False) -> list[dict[str, np.ndarray]]:
    """Return a batch for each step; with ``full``, all batches are the same."""
    return [{"x": X[0 if full else i], "target": Y[0 if full else i]} for i in range(STEPS)]


def losses(optimizer: optim.Optimizer, only_matrices: bool = False, full: bool = False, **build: Any) -> np.ndarray:
    """Return the loss of each step of a Trainer."""
    freeze = ["b1", "b2"] if only_matrices else []
    trainer = gg.Trainer(gg.build(network(), "mse", optimizer, freeze=freeze, **build), device="cpu")
    return np.array([float(trainer.step(batch)["loss"]) for batch in batches(full)])
