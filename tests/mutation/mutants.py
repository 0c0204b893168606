"""What is mutated, and what reads it: small models of every operator with a rule, a step folder, a checkpoint, data."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from gradgraph.building.pipeline import build
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.files.models import load_model
from gradgraph.rules import registry
from gradgraph.runtime.saved.checkpoint import load_checkpoint
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from gradgraph.transforms import vjp
from gradgraph.verify import cases
from tests.kit import handmade

from . import mutators

KINDS = ("model",) * 14 + ("step",) * 3 + ("checkpoint", "npz", "npy")


@dataclass(frozen=True)
class Mutant:
    """A file as ``name`` in a folder, and what is done with the folder."""

    kind: str
    name: str
    content: bytes
    use: Callable[[Path], object]


def mutant(seed: int, number: int, folder: Path) -> Mutant:
    """The mutant of that number; ``folder`` holds what stays whole beside it."""
    rng = random.Random(f"{seed}/{number}")
    return _MAKERS[rng.choice(KINDS)](rng, folder)


def whole_model(path: Path) -> Mutant:
    """That model, unchanged."""
    return Mutant("model", "model.onnx", path.read_bytes(), _differentiate)


# --- models -------------------------------------------------------------------------------------------


def _of_model(rng: random.Random, folder: Path) -> Mutant:
    message, donor = onnx.ModelProto(), _seed(rng)
    message.CopyFrom(_seed(rng))
    mutators.mutated_message(message, donor, rng)
    content = message.SerializeToString()
    if rng.random() < 0.2:
        content = mutators.mutated_bytes(content, rng)
    use = rng.choice((_read, _differentiate, _differentiate, _inspect, _build))
    return Mutant(f"model, {use.__name__[1:]}", "model.onnx", content, use)


@functools.cache
def _all_cases() -> list[tuple[registry.Rule, registry.Case]]:
    rules = sorted(registry.RULES.items(), key=lambda item: item[0])
    return [(rule, case) for _, rule in rules for case in rule.cases if not rule.domain]


def _seed(rng: random.Random) -> onnx.ModelProto:
    """A model of one case of one rule, or the body of a step."""
    if rng.random() < 0.05:
        return _step().eval
    return _of_case(rng.randrange(len(_all_cases())), rng.choice(("known", "unknown", "trained")))


@functools.cache
def _of_case(number: int, how: str) -> onnx.ModelProto:
    """With shapes known or unknown, or what is differentiated but the first input as weights."""
    rule, case = _all_cases()[number]
    trial = cases.trial(rule, case, dtype=np.float32, unknown=how == "unknown")
    graph = trial.model.graph
    weights = trial.wrt[1:] if how == "trained" else ()
    for value in [v for v in graph.input if v.name in weights]:
        graph.initializer.append(onnx.numpy_helper.from_array(trial.feeds[value.name], value.name))
        graph.input.remove(value)
    return trial.model


def _read(folder: Path) -> object:
    return load_model(folder / "model.onnx")


def _differentiate(folder: Path) -> object:
    return vjp(folder / "model.onnx", wrt="*", allow_unused=True)


def _inspect(folder: Path) -> object:
    from gradgraph.cli.describe import Selection, describe

    return describe(folder / "model.onnx", Selection())


def _build(folder: Path) -> object:
    return build(folder / "model.onnx", loss="mse", optimizer="sgd")


# --- steps, checkpoints, data -------------------------------------------------------------------------


@functools.cache
def _step() -> Step:
    return handmade.classifier()


def _of_step(rng: random.Random, folder: Path) -> Mutant:
    if not (folder / "step").exists():
        _step().save(folder / "step")
    name = rng.choice(("manifest.json", "manifest.json", "train.onnx", "init.onnx", "eval.onnx"))
    whole = _whole(folder / "step" / name)
    if name == "manifest.json":
        content = mutators.mutated_json(whole.decode(), rng).encode("utf-8", "surrogatepass")
    else:
        message = onnx.ModelProto.FromString(whole)
        mutators.mutated_message(message, message, rng)
        content = message.SerializeToString()
    return Mutant(name, f"step/{name}", content, lambda folder: Step.load(folder / "step"))


@functools.cache
def _whole(path: Path) -> bytes:
    """As it was when it was first read: before the first mutant of it was written."""
    return path.read_bytes()


def _of_checkpoint(rng: random.Random, folder: Path) -> Mutant:
    if not (folder / "whole.ckpt").exists():
        Trainer(_step(), device="cpu").save(folder / "whole.ckpt")
    content = mutators.mutated_safetensors(_whole(folder / "whole.ckpt"), rng)
    state = _step().manifest.state
    return Mutant("checkpoint", "run.ckpt", content, lambda folder: load_checkpoint(folder / "run.ckpt", state))


def _of_npz(rng: random.Random, folder: Path) -> Mutant:
    return Mutant("npz", "data.npz", mutators.mutated_npz(_archive(), rng), lambda f: load_arrays(f / "data.npz"))


@functools.cache
def _archive() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **handmade.points(20))
    return out.getvalue()


def _of_npy(rng: random.Random, folder: Path) -> Mutant:
    content = mutators.mutated_npy(mutators.array_bytes(handmade.points(20)["x"]), rng)
    (folder / "arrays").mkdir(exist_ok=True)
    return Mutant("npy", "arrays/x.npy", content, lambda folder: load_arrays(folder / "arrays"))


_MAKERS: dict[str, Callable[[random.Random, Path], Mutant]] = {
    "model": _of_model,
    "step": _of_step,
    "checkpoint": _of_checkpoint,
    "npz": _of_npz,
    "npy": _of_npy,
}
