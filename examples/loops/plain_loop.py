"""Trains a step folder in onnxruntime alone: python plain_loop.py run/step run/ (see docs/how-to/loops.md)."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

BATCH, EPOCHS = 16, 5
folder, data = map(Path, sys.argv[1:])
manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
train, init, evaluate = (ort.InferenceSession(folder / f"{name}.onnx") for name in ("train", "init", "eval"))


def run(session, feeds):
    outputs = [o.name for o in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))


columns = {
    s["name"]: np.fromfile(data / f"{s['name']}.bin", np.dtype(s["dtype"]).newbyteorder("<")).reshape(
        -1, *s["shape"][1:]
    )
    for s in manifest["inputs"] + manifest["targets"]
}
rows = len(next(iter(columns.values())))
if any(len(values) != rows for values in columns.values()):
    sys.exit("the inputs and targets differ in their rows")
rates = {name: np.array(value, np.float32) for name, value in manifest["hyperparameters"].items()}
state = run(init, {})

for _ in range(EPOCHS):
    for begin in range(0, rows, BATCH):
        batch = {name: values[begin : begin + BATCH] for name, values in columns.items()}
        found = run(train, {**batch, **rates, **state})
        state = {s["name"]: found[s["next"]] for s in manifest["state"]}
        print(f"{found[manifest['loss_output']]:.6f}")

first = {name: values[:BATCH] for name, values in columns.items()}
used = {**state, **{name: state[average] for name, average in manifest.get("averages", {}).items()}}
print(f"eval {run(evaluate, {**first, **used})[manifest['loss_output']]:.6f}")

weights = [used[s["name"]] for s in manifest["state"] if s["kind"] == "parameter"]
np.concatenate([w.ravel() for w in weights]).astype("<f4").tofile(data / "weights.bin")
